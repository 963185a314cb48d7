"""Empirical kernels of networks that use samples and parameters in unusual ways."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finite_nets import STRATEGIES, build_seeded, explicit_kernel, random_normal, relative_error
from metabridge import InputError
from metabridge.kernels.empirical import EmpiricalKernel


class CustomNet(nn.Module):
    """A network given by named layers and a forward function."""

    def __init__(self, forward: Callable[[CustomNet, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.forward_function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_function(self, x)


def conv_with_norm(*after: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), *after, nn.Flatten(), linear_head(64)
    )


def linear_head(size: int) -> nn.Module:
    return nn.Linear(size, 3)


def without_bias(norm: nn.GroupNorm) -> nn.GroupNorm:
    norm.register_parameter("bias", None)
    return norm


def residual_block(net: CustomNet, x: Tensor) -> Tensor:
    x = net.first(x)
    y = net.norm(net.second(x))
    y += x
    return net.head(F.relu(y).mean((2, 3)))  # type: ignore[no-any-return]


def shared_pool_net() -> nn.Module:
    pool = nn.MaxPool2d(2)
    first = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), pool, nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(4, 4, 2), nn.ReLU(), pool, nn.Flatten(), linear_head(4))


def tied_net(output_function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a network that uses the weight of its layer `a` a second time, outside this layer.

    With the output functions below, the sum of the outputs is constant, so its gradient is zero.
    """

    def forward(net: CustomNet, x: Tensor) -> Tensor:
        return output_function(net.head(torch.tanh(net.a(x.flatten(1))) @ net.a.weight[:, :6]))

    return CustomNet(forward, a=nn.Linear(128, 5), head=linear_head(6))


def tied_norm_net() -> nn.Module:
    net = conv_with_norm(nn.Tanh())
    net[2].bias = net[2].weight
    return net


def layer_with_extra_parameter() -> nn.Module:
    layer = nn.Linear(128, 5)
    layer.factor = nn.Parameter(torch.ones(1))
    return CustomNet(
        lambda net, x: net.head(torch.tanh(net.a(x.flatten(1)) * net.a.factor)), a=layer, head=linear_head(5)
    )


def several_rows_per_sample(net: CustomNet, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.a(x.reshape(-1, 64))).view(len(x), -1))  # type: ignore[no-any-return]


def reversed_samples(net: CustomNet, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.a(x.flip(0).flatten(1))).flip(0))  # type: ignore[no-any-return]


def routed(net: CustomNet, x: Tensor) -> Tensor:
    """Send each sample through one of two layers, depending on the sign of its first value."""
    x = x.flatten(1)
    positive = x[:, 0] > 0
    y = x.new_zeros(len(x), 5)
    for selected, layer in ((positive, net.a), (~positive, net.b)):
        y = y.index_put((selected.nonzero()[:, 0],), layer(x[selected]))
    return net.head(torch.tanh(y))  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "a norm followed by an in-place ReLU": lambda: conv_with_norm(nn.ReLU(inplace=True)),
    "an in-place addition to a norm": lambda: CustomNet(
        residual_block,
        first=nn.Conv2d(2, 4, 3),
        second=nn.Conv2d(4, 4, 3, padding=1),
        norm=nn.GroupNorm(2, 4),
        head=linear_head(4),
    ),
    "a norm without bias": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), without_bias(nn.GroupNorm(2, 4)), nn.Flatten(), linear_head(144)
    ),
    "a norm whose bias is its weight": tied_norm_net,
    "one pool used twice": shared_pool_net,
    "tied weights, softmax": lambda: tied_net(lambda y: y.softmax(1)),
    "tied weights, centered outputs": lambda: tied_net(lambda y: y - y.mean(1, keepdim=True)),
    "several rows per sample": lambda: CustomNet(several_rows_per_sample, a=nn.Linear(64, 3), head=linear_head(6)),
    "samples in another order": lambda: CustomNet(reversed_samples, a=nn.Linear(128, 4), head=linear_head(4)),
    "an activation without a vmap rule": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(128, 5), nn.PReLU(), linear_head(5)
    ),
    "a layer with an additional parameter": layer_with_extra_parameter,
    "no finite output at zero": lambda: CustomNet(
        lambda net, x: net.head(torch.tanh(net.a(x.square().sub(1e-9).sqrt().flatten(1)))),
        a=nn.Linear(128, 4),
        head=linear_head(4),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_kernel_equals_the_product_of_explicit_jacobians(name: str, gpu_path: bool) -> None:
    net, x = build_seeded(NETWORKS[name]), random_normal(1, 5, 2, 8, 8)
    before = x.clone()
    exact = explicit_kernel(net, x.clone(), x.clone(), "full", lambda name: True)
    with torch.no_grad():
        assert relative_error(EmpiricalKernel(net, outputs="full", strategy="gradients").ntk(x), exact) < 1e-9
    assert torch.equal(x, before)


def recurrent_net(kind: type[nn.Module]) -> nn.Module:
    return CustomNet(lambda net, x: net.head(net.a(x)[0][:, -1]), a=kind(6, 4, batch_first=True), head=linear_head(4))


def attention_net(need_weights: bool) -> nn.Module:
    def forward(net: CustomNet, x: Tensor) -> Tensor:
        return net.head(net.a(x, x, x, need_weights=need_weights)[0].mean(1))  # type: ignore[no-any-return]

    return CustomNet(forward, a=nn.MultiheadAttention(6, 2, batch_first=True), head=linear_head(6))


def transformer_net() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 4, dropout=0.0, batch_first=True)
    return CustomNet(lambda net, x: net.head(net.a(x).mean(1)), a=layer, head=linear_head(6))


def weight_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(30, 4)), nn.Tanh(), linear_head(4)
    )


SEQUENCE_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: recurrent_net(nn.GRU),
    "LSTM": lambda: recurrent_net(nn.LSTM),
    "RNN": lambda: recurrent_net(nn.RNN),
    "attention": lambda: attention_net(need_weights=False),
    "attention that also returns its weights": lambda: attention_net(need_weights=True),
    "transformer": transformer_net,
    "weight norm": weight_norm_net,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SEQUENCE_NETWORKS)
def test_networks_without_forward_mode_derivatives_use_gradients(name: str, training: bool) -> None:
    net, x = build_seeded(SEQUENCE_NETWORKS[name]).train(training), random_normal(1, 3, 5, 6)
    for outputs in ("full", "sum"):
        exact = explicit_kernel(net, x[:2], x, outputs, lambda name: True)
        for strategy in ("auto", "gradients"):
            kernel = EmpiricalKernel(net, outputs=outputs, strategy=strategy)  # type: ignore[arg-type]
            for _ in range(2):
                assert relative_error(kernel.ntk(x[:2], x), exact) < 1e-9


@pytest.mark.parametrize("name", ["GRU", "weight norm"])
def test_products_that_pytorch_cannot_compute_are_reported(name: str) -> None:
    with pytest.raises(InputError, match=r"strategy is 'products', but .*Use strategy='gradients' or strategy='auto'"):
        EmpiricalKernel(build_seeded(SEQUENCE_NETWORKS[name]), strategy="products").ntk(random_normal(1, 2, 5, 6))


def embedding_net(kind: type[nn.Module]) -> nn.Module:
    def forward(net: CustomNet, x: Tensor) -> Tensor:
        return net.head(torch.tanh(net.a(x.long())).flatten(1))  # type: ignore[no-any-return]

    return CustomNet(forward, a=kind(9, 3), head=linear_head(15 if kind is nn.Embedding else 3))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_networks_of_tokens_need_not_accept_noise(kind: type[nn.Module]) -> None:
    net, x = (
        build_seeded(lambda: embedding_net(kind)),
        torch.tensor([[0, 8, 0, 8, 8], [1, 2, 3, 4, 5], [5, 5, 0, 7, 2]]).double(),
    )
    exact = explicit_kernel(net, x, x, "full", lambda name: True)
    assert relative_error(EmpiricalKernel(net, outputs="full").ntk(x), exact) < 1e-9


def test_a_network_that_changes_its_buffers_is_reported_and_restored() -> None:
    spectral = nn.utils.parametrizations.spectral_norm
    net, x = (
        build_seeded(lambda: nn.Sequential(spectral(nn.Linear(6, 4)), nn.Tanh(), linear_head(4))),
        random_normal(1, 3, 6),
    )
    before = {name: value.clone() for name, value in net.named_buffers()}
    for _ in range(2):
        with pytest.raises(InputError, match=r"changes its buffer '0\.parametrizations.* Use net\.eval\(\)"):
            EmpiricalKernel(net).ntk(x)
    assert all(torch.equal(value, before[name]) for name, value in net.named_buffers())
    exact = explicit_kernel(net.eval(), x, x, "full", lambda name: True)
    assert relative_error(EmpiricalKernel(net, outputs="full").ntk(x), exact) < 1e-9


def conv_with_pool() -> nn.Module:
    first = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.ReLU()
    return nn.Sequential(nn.Sequential(*first), nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), linear_head(4))


def jacobian(kernel: EmpiricalKernel, x: Tensor) -> Tensor:
    return torch.cat(list(kernel.jacobian(x)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("frozen", ["0.0.weight", "0.1.weight", "0.0", "0.1", "0", "2.bias", "4.weight"])
def test_parameters_without_requires_grad_are_left_out(frozen: str, strategy: str, gpu_path: bool) -> None:
    net, x = build_seeded(conv_with_pool), random_normal(1, 3, 2, 8, 8)
    kernel = EmpiricalKernel(net, outputs="full", strategy=strategy)  # type: ignore[arg-type]
    all_parameters = kernel.ntk(x)
    for name, value in net.named_parameters():
        value.requires_grad_(not f"{name}.".startswith(f"{frozen}."))
    exact = explicit_kernel(net, x, x, "full", lambda name: net.get_parameter(name).requires_grad)
    assert relative_error(kernel.ntk(x), exact) < 1e-9
    assert relative_error(all_parameters, exact) > 1e-3
    rows = jacobian(kernel, x)
    assert rows.shape[2] == sum(value.numel() for value in net.parameters() if value.requires_grad)
    assert relative_error(torch.einsum("iop,jup->ijou", rows, rows), exact) < 1e-9
    body = EmpiricalKernel(net, outputs="full", part="body", strategy=strategy).ntk(x)  # type: ignore[arg-type]
    assert relative_error(body + kernel.nngp(x), exact) < 1e-9


def test_a_network_without_trainable_parameters_is_reported() -> None:
    net, x = build_seeded(conv_with_pool), random_normal(1, 2, 2, 8, 8)
    net[4].requires_grad_(False)
    with pytest.raises(InputError, match="no parameters in its head with requires_grad=True"):
        EmpiricalKernel(net).nngp(x)
    net.requires_grad_(False)
    with pytest.raises(InputError, match="has no parameters with requires_grad=True"):
        EmpiricalKernel(net).ntk(x)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layer_with_two_names_keeps_its_parameters(strategy: str) -> None:
    net, x = (
        build_seeded(
            lambda: CustomNet(lambda net, x: net.head(net.a(net.b(x).tanh())), a=nn.Linear(4, 4), head=linear_head(4))
        ),
        random_normal(1, 3, 4),
    )
    net.b = net.a
    net.add_module("c", nn.Module())
    net.c.weight = net.a.weight
    before = list(net.parameters())
    exact = explicit_kernel(copy.deepcopy(net), x, x, "full", lambda name: True)
    for _ in range(2):
        assert relative_error(EmpiricalKernel(net, outputs="full", strategy=strategy).ntk(x), exact) < 1e-9  # type: ignore[arg-type]
    assert all(value is original for value, original in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_network_that_changes_its_input_does_not_change_the_input_of_the_caller(strategy: str) -> None:
    x, layers = random_normal(1, 4, 2, 8, 8), (nn.Flatten(), linear_head(128).double())
    before = x.clone()
    with_inplace, without_inplace = (
        EmpiricalKernel(nn.Sequential(nn.ReLU(inplace=inplace), *layers), outputs="full", strategy=strategy).ntk(x)  # type: ignore[arg-type]
        for inplace in (True, False)
    )
    assert torch.equal(x, before)
    assert relative_error(with_inplace, without_inplace) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_channels_last_inputs_are_supported(strategy: str) -> None:
    net, x = build_seeded(lambda: conv_with_norm(nn.Tanh())), random_normal(1, 4, 2, 8, 8)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    kernel = EmpiricalKernel(net, outputs="full", strategy=strategy)  # type: ignore[arg-type]
    assert relative_error(kernel.ntk(channels_last, channels_last), kernel.ntk(x, x)) < 1e-12


def test_a_layer_that_processes_only_some_samples_is_reported() -> None:
    net, x = (
        build_seeded(lambda: CustomNet(routed, a=nn.Linear(128, 5), b=nn.Linear(128, 5), head=linear_head(5))),
        random_normal(1, 4, 2, 8, 8),
    )
    x[:, 0, 0, 0] = torch.tensor([9.0, 9.0, 9.0, -9.0])
    with pytest.raises(InputError, match=r"Linear\(.*\) received 3 rows for a batch of 4 samples, but one"):
        EmpiricalKernel(net).ntk(x)


def test_non_finite_outputs_are_reported() -> None:
    net = CustomNet(lambda net, x: net.head(x.sqrt()), head=linear_head(4))
    with pytest.raises(InputError, match="output for the first sample of x is not finite"):
        EmpiricalKernel(net).ntk(torch.full((2, 4), -9.0))


def test_inference_mode_is_reported() -> None:
    kernel = EmpiricalKernel(nn.Linear(3, 2))
    with torch.inference_mode(), pytest.raises(InputError, match=r"under torch.inference_mode\(\). Use torch.no_grad"):
        kernel.ntk(torch.ones(2, 3))
