"""Empirical kernels of networks that do with samples and parameters what most do not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finite_nets import WAYS, error, explicit, seeded, seen
from metabridge import InputError
from metabridge.kernels.empirical import EmpiricalKernel


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


def without_bias(norm: nn.GroupNorm) -> nn.GroupNorm:
    norm.register_parameter("bias", None)
    return norm


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
        nn.Conv2d(2, 4, 3), without_bias(nn.GroupNorm(2, 4)), nn.Flatten(), head(144)
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
        assert error(EmpiricalKernel(net, outputs="full", way="gradients").ntk(x), exact) < 1e-9
    assert torch.equal(x, before)


def recurrent(kind: type[nn.Module]) -> nn.Module:
    return Odd(lambda net, x: net.head(net.a(x)[0][:, -1]), a=kind(6, 4, batch_first=True), head=head(4))


def attending(weights: bool) -> nn.Module:
    def forward(net: Odd, x: Tensor) -> Tensor:
        return net.head(net.a(x, x, x, need_weights=weights)[0].mean(1))  # type: ignore[no-any-return]

    return Odd(forward, a=nn.MultiheadAttention(6, 2, batch_first=True), head=head(6))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 4, dropout=0.0, batch_first=True)
    return Odd(lambda net, x: net.head(net.a(x).mean(1)), a=layer, head=head(6))


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(30, 4)), nn.Tanh(), head(4))


SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: recurrent(nn.GRU),
    "LSTM": lambda: recurrent(nn.LSTM),
    "RNN": lambda: recurrent(nn.RNN),
    "attention": lambda: attending(weights=False),
    "attention with its weights": lambda: attending(weights=True),
    "transformer": transformer,
    "weight norm": weight_normed,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SEQUENCES)
def test_operations_that_cannot_be_pushed_forward_are_pulled_back(name: str, training: bool) -> None:
    net, x = seeded(SEQUENCES[name]).train(training), seen(1, 3, 5, 6)
    for outputs in ("full", "sum"):
        exact = explicit(net, x[:2], x, outputs, lambda name: True)
        for way in ("auto", "gradients"):
            kernel = EmpiricalKernel(net, outputs=outputs, way=way)  # type: ignore[arg-type]
            for _ in range(2):
                assert error(kernel.ntk(x[:2], x), exact) < 1e-9


@pytest.mark.parametrize("name", ["GRU", "weight norm"])
def test_products_that_pytorch_cannot_compute_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(InputError, match=r"way is 'products', but .*Use way='gradients' or way='auto'"):
        EmpiricalKernel(seeded(SEQUENCES[name]), way="products").ntk(seen(1, 2, 5, 6))


def embedded(kind: type[nn.Module]) -> nn.Module:
    def forward(net: Odd, x: Tensor) -> Tensor:
        return net.head(torch.tanh(net.a(x.long())).flatten(1))  # type: ignore[no-any-return]

    return Odd(forward, a=kind(9, 3), head=head(15 if kind is nn.Embedding else 3))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tokens_need_not_take_noise(kind: type[nn.Module]) -> None:
    net, x = seeded(lambda: embedded(kind)), torch.tensor([[0, 8, 0, 8, 8], [1, 2, 3, 4, 5], [5, 5, 0, 7, 2]]).double()
    exact = explicit(net, x, x, "full", lambda name: True)
    assert error(EmpiricalKernel(net, outputs="full").ntk(x), exact) < 1e-9


def test_a_network_that_moves_its_buffers_is_refused_and_left_as_it_was() -> None:
    spectral = nn.utils.parametrizations.spectral_norm
    net, x = seeded(lambda: nn.Sequential(spectral(nn.Linear(6, 4)), nn.Tanh(), head(4))), seen(1, 3, 6)
    before = {name: value.clone() for name, value in net.named_buffers()}
    for _ in range(2):
        with pytest.raises(InputError, match=r"changes its buffer '0\.parametrizations.* Use net\.eval\(\)"):
            EmpiricalKernel(net).ntk(x)
    assert all(torch.equal(value, before[name]) for name, value in net.named_buffers())
    exact = explicit(net.eval(), x, x, "full", lambda name: True)
    assert error(EmpiricalKernel(net, outputs="full").ntk(x), exact) < 1e-9


def pooled() -> nn.Module:
    first = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.ReLU()
    return nn.Sequential(nn.Sequential(*first), nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), head(4))


def jacobian(kernel: EmpiricalKernel, x: Tensor) -> Tensor:
    return torch.cat(list(kernel.jacobian(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", ["0.0.weight", "0.1.weight", "0.0", "0.1", "0", "2.bias", "4.weight"])
def test_parameters_that_need_no_gradient_do_not_count(frozen: str, way: str, gpu: bool) -> None:
    net, x = seeded(pooled), seen(1, 3, 2, 8, 8)
    kernel = EmpiricalKernel(net, outputs="full", way=way)  # type: ignore[arg-type]
    every = kernel.ntk(x)
    for name, value in net.named_parameters():
        value.requires_grad_(not f"{name}.".startswith(f"{frozen}."))
    exact = explicit(net, x, x, "full", lambda name: net.get_parameter(name).requires_grad)
    assert error(kernel.ntk(x), exact) < 1e-9
    assert error(every, exact) > 1e-3
    rows = jacobian(kernel, x)
    assert rows.shape[2] == sum(value.numel() for value in net.parameters() if value.requires_grad)
    assert error(torch.einsum("iop,jup->ijou", rows, rows), exact) < 1e-9
    body = EmpiricalKernel(net, outputs="full", part="body", way=way).ntk(x)  # type: ignore[arg-type]
    assert error(body + kernel.nngp(x), exact) < 1e-9


def test_a_network_without_parameters_that_count_is_refused() -> None:
    net, x = seeded(pooled), seen(1, 2, 2, 8, 8)
    net[4].requires_grad_(False)
    with pytest.raises(InputError, match="no parameters in its head that count: those with requires_grad=False do not"):
        EmpiricalKernel(net).nngp(x)
    net.requires_grad_(False)
    with pytest.raises(InputError, match="has no parameters that count"):
        EmpiricalKernel(net).ntk(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_with_two_names_keeps_its_parameters(way: str) -> None:
    net, x = (
        seeded(lambda: Odd(lambda net, x: net.head(net.a(net.b(x).tanh())), a=nn.Linear(4, 4), head=head(4))),
        seen(1, 3, 4),
    )
    net.b = net.a
    net.add_module("c", nn.Module())
    net.c.weight = net.a.weight
    own = list(net.parameters())
    exact = explicit(copy.deepcopy(net), x, x, "full", lambda name: True)
    for _ in range(2):
        assert error(EmpiricalKernel(net, outputs="full", way=way).ntk(x), exact) < 1e-9  # type: ignore[arg-type]
    assert all(value is before for value, before in zip(net.parameters(), own, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_network_that_changes_its_input_leaves_the_callers_alone(way: str) -> None:
    x, layers = seen(1, 4, 2, 8, 8), (nn.Flatten(), head(128).double())
    before = x.clone()
    inside, outside = (
        EmpiricalKernel(nn.Sequential(nn.ReLU(inplace=inplace), *layers), outputs="full", way=way).ntk(x)  # type: ignore[arg-type]
        for inplace in (True, False)
    )
    assert torch.equal(x, before)
    assert error(inside, outside) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_channels_may_be_last(way: str) -> None:
    net, x = seeded(lambda: normed(nn.Tanh())), seen(1, 4, 2, 8, 8)
    last = x.contiguous(memory_format=torch.channels_last)
    kernel = EmpiricalKernel(net, outputs="full", way=way)  # type: ignore[arg-type]
    assert error(kernel.ntk(last, last), kernel.ntk(x, x)) < 1e-12


def test_a_layer_that_sees_some_samples_only_is_refused() -> None:
    net, x = seeded(lambda: Odd(routed, a=nn.Linear(128, 5), b=nn.Linear(128, 5), head=head(5))), seen(1, 4, 2, 8, 8)
    x[:, 0, 0, 0] = torch.tensor([9.0, 9.0, 9.0, -9.0])
    with pytest.raises(InputError, match=r"of 4 samples Linear\(.*\) sees 3 rows.* needs layers that see every sample"):
        EmpiricalKernel(net).ntk(x)


def test_outputs_that_are_not_finite_are_refused() -> None:
    net = Odd(lambda net, x: net.head(x.sqrt()), head=head(4))
    with pytest.raises(InputError, match="output for the first sample of x is not finite"):
        EmpiricalKernel(net).ntk(torch.full((2, 4), -9.0))


def test_inference_mode_is_refused() -> None:
    kernel = EmpiricalKernel(nn.Linear(3, 2))
    with torch.inference_mode(), pytest.raises(InputError, match=r"under torch.inference_mode\(\). Use torch.no_grad"):
        kernel.ntk(torch.ones(2, 3))
