"""Empirical kernels of networks that do with samples and parameters what most do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finite_nets import WAYS, error, explicit, seeded, seen
from metabridge import InputError
from metabridge.kernels.empirical import Empirical


class Odd(nn.Module):
    """Layers by name, and what becomes of `x`."""

    def __init__(self, forward: Callable[[Odd, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.way = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def normed(*after: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), *after, nn.Flatten(), head(64))


def head(size: int) -> nn.Module:
    return nn.Linear(size, 3)


def residual(net: Odd, x: Tensor) -> Tensor:
    x = net.first(x)
    y = net.norm(net.second(x))
    y += x
    return net.head(F.relu(y).mean((2, 3)))  # type: ignore[no-any-return]


def shared_pool() -> nn.Module:
    pool = nn.MaxPool2d(2)
    first = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), pool, nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(4, 4, 2), nn.ReLU(), pool, nn.Flatten(), head(4))


def tied(last: Callable[[Tensor], Tensor]) -> nn.Module:
    """A layer whose weight is also used beside it, and outputs whose sum may have no gradient."""

    def forward(net: Odd, x: Tensor) -> Tensor:
        return last(net.head(torch.tanh(net.a(x.flatten(1))) @ net.a.weight[:, :6]))

    return Odd(forward, a=nn.Linear(128, 5), head=head(6))


def tied_norm() -> nn.Module:
    net = normed(nn.Tanh())
    net[2].bias = net[2].weight
    return net


def more_parameters() -> nn.Module:
    layer = nn.Linear(128, 5)
    layer.slope = nn.Parameter(torch.ones(1))
    return Odd(lambda net, x: net.head(torch.tanh(net.a(x.flatten(1)) * net.a.slope)), a=layer, head=head(5))


def folded(net: Odd, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.a(x.reshape(-1, 64))).view(len(x), -1))  # type: ignore[no-any-return]


def turned_round(net: Odd, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.a(x.flip(0).flatten(1))).flip(0))  # type: ignore[no-any-return]


def routed(net: Odd, x: Tensor) -> Tensor:
    x = x.flatten(1)
    first = x[:, 0] > 0
    y = x.new_zeros(len(x), 5)
    for places, layer in ((first, net.a), (~first, net.b)):
        y = y.index_put((places.nonzero()[:, 0],), layer(x[places]))
    return net.head(torch.tanh(y))  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "a norm rectified in place": lambda: normed(nn.ReLU(inplace=True)),
    "a norm added to in place": lambda: Odd(
        residual, first=nn.Conv2d(2, 4, 3), second=nn.Conv2d(4, 4, 3, padding=1), norm=nn.GroupNorm(2, 4), head=head(4)
    ),
    "a norm without bias": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4, bias=False), nn.Flatten(), head(144)
    ),
    "a norm whose bias is its weight": tied_norm,
    "one pool used twice": shared_pool,
    "tied, softmax": lambda: tied(lambda y: y.softmax(1)),
    "tied, centred": lambda: tied(lambda y: y - y.mean(1, keepdim=True)),
    "rows of several samples": lambda: Odd(folded, a=nn.Linear(64, 3), head=head(6)),
    "samples in another order": lambda: Odd(turned_round, a=nn.Linear(128, 4), head=head(4)),
    "an activation that vmap does not know": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(128, 5), nn.PReLU(), head(5)
    ),
    "a layer with more parameters": more_parameters,
    "positive samples only": lambda: Odd(
        lambda net, x: net.head(torch.tanh(net.a(x.square().sub(1e-9).sqrt().flatten(1)))),
        a=nn.Linear(128, 4),
        head=head(4),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_kernel_equals_the_product_of_explicit_jacobians(name: str, gpu: bool) -> None:
    net, x = seeded(NETWORKS[name]), seen(1, 5, 2, 8, 8)
    before = x.clone()
    exact = explicit(net, x.clone(), x.clone(), "full", lambda name: True)
    with torch.no_grad():
        assert error(Empirical(net, outputs="full", way="gradients").ntk(x), exact) < 1e-9
    assert torch.equal(x, before)


@pytest.mark.parametrize("way", WAYS)
def test_a_network_that_changes_its_input_leaves_the_callers_alone(way: str) -> None:
    x, layers = seen(1, 4, 2, 8, 8), (nn.Flatten(), head(128).double())
    before = x.clone()
    inside, outside = (
        Empirical(nn.Sequential(nn.ReLU(inplace=inplace), *layers), outputs="full", way=way).ntk(x)  # type: ignore[arg-type]
        for inplace in (True, False)
    )
    assert torch.equal(x, before)
    assert error(inside, outside) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_channels_may_be_last(way: str) -> None:
    net, x = seeded(lambda: normed(nn.Tanh())), seen(1, 4, 2, 8, 8)
    last = x.contiguous(memory_format=torch.channels_last)
    kernel = Empirical(net, outputs="full", way=way)  # type: ignore[arg-type]
    assert error(kernel.ntk(last, last), kernel.ntk(x, x)) < 1e-12


def test_a_layer_that_sees_some_samples_only_is_refused() -> None:
    net, x = seeded(lambda: Odd(routed, a=nn.Linear(128, 5), b=nn.Linear(128, 5), head=head(5))), seen(1, 4, 2, 8, 8)
    x[:, 0, 0, 0] = torch.tensor([9.0, 9.0, 9.0, -9.0])
    with pytest.raises(InputError, match=r"of 4 samples Linear\(.*\) sees 3 rows.* needs layers that see every sample"):
        Empirical(net).ntk(x)


def test_outputs_that_are_not_finite_are_refused() -> None:
    net = Odd(lambda net, x: net.head(x.sqrt()), head=head(4))
    with pytest.raises(InputError, match="output for the first sample of x is not finite"):
        Empirical(net).ntk(torch.full((2, 4), -9.0))


def test_inference_mode_is_refused() -> None:
    kernel = Empirical(nn.Linear(3, 2))
    with torch.inference_mode(), pytest.raises(InputError, match=r"under torch.inference_mode\(\). Use torch.no_grad"):
        kernel.ntk(torch.ones(2, 3))
