"""Values of empirical kernels, compared with explicit Jacobians."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finite_nets import (
    NETS,
    OUTPUTS,
    STRATEGIES,
    build_seeded,
    explicit_kernel,
    minimum_memory,
    random_normal,
    relative_error,
    small_conv4,
)
from metabridge.errors import InputError
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.models import conv4, mlp, resnet12
from metabridge.models.network import with_group_norm


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_kernel_of_every_part_equals_the_product_of_explicit_jacobians(name: str, outputs: str) -> None:
    make, shape = NETS[name]
    net, x, z = make(), random_normal(1, 4, *shape), random_normal(2, 3, *shape)
    head = "last." if name == "unusual" else "head."  # start of the names of the last layer's parameters
    parts: dict[str, Callable[[str], bool]] = {
        "all": lambda name: True,
        "head": lambda name: name.startswith(head),
        "body": lambda name: not name.startswith(head),
    }
    for part, keep in parts.items():
        exact = explicit_kernel(net, torch.cat([x, z]), torch.cat([x, z]), outputs, keep)
        for strategy in STRATEGIES:
            kernel = EmpiricalKernel(net, part=part, outputs=outputs, strategy=strategy)  # type: ignore[arg-type]
            assert relative_error(kernel.ntk(x, z), exact[:4, 4:]) < 1e-9, (part, strategy)
            symmetric = kernel.ntk(x)
            assert relative_error(symmetric, exact[:4, :4]) < 1e-9, (part, strategy)
            assert torch.equal(symmetric, symmetric.transpose(0, 1).mT if outputs == "full" else symmetric.mT), (
                part,
                strategy,
            )


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_gpu_path_equals_the_product_of_explicit_jacobians(name: str, outputs: str, simulate_gpu_path: None) -> None:
    make, shape = NETS[name]
    net, x, z = make(), random_normal(1, 4, *shape), random_normal(2, 3, *shape)
    exact = explicit_kernel(net, torch.cat([x, z]), torch.cat([x, z]), outputs, lambda name: True)
    kernel = EmpiricalKernel(net, outputs=outputs, strategy="gradients")  # type: ignore[arg-type]
    for memory in (2**30, minimum_memory(kernel, x)):
        kernel = replace(kernel, memory=memory)
        assert relative_error(kernel.ntk(x, z), exact[:4, 4:]) < 1e-9
        assert relative_error(kernel.ntk(x), exact[:4, :4]) < 1e-9


@pytest.mark.parametrize("name", NETS)
def test_only_parameters_used_outside_supported_layers_need_vmap_of_jacrev(name: str, gpu_path: bool) -> None:
    make, shape = NETS[name]
    profile = EmpiricalKernel(make(), outputs="full")._prepare("all", random_normal(1, 4, *shape), None)[1].profile
    # In the network "unusual", the weight of the layer `loose` is also used outside this layer.
    assert profile.generic_names == ({"scale", "loose.weight"} if name == "unusual" else set())
    assert profile.batched_backward == gpu_path


@pytest.mark.parametrize("name", NETS)
def test_kernels_of_body_and_head_add_up(name: str) -> None:
    make, shape = NETS[name]
    x, kernel = random_normal(1, 5, *shape), EmpiricalKernel(make(), outputs="full")
    ntk, nngp = kernel.both(x)
    assert relative_error(replace(kernel, part="body").ntk(x) + nngp, ntk) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
def test_nngp_is_the_gram_matrix_of_the_features(bias: bool) -> None:
    net, x = mlp(5, 3, width=7, bias=bias).double(), random_normal(1, 6, 5)
    exact = net.features(x) @ net.features(x).mT + bias
    assert relative_error(EmpiricalKernel(net).nngp(x), exact) < 1e-12
    assert relative_error(EmpiricalKernel(net, outputs="sum").nngp(x), 3 * exact) < 1e-12
    full = EmpiricalKernel(net, outputs="full").nngp(x)
    assert relative_error(full, exact[..., None, None] * torch.eye(3, dtype=torch.double)) < 1e-12


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", NETS)
def test_results_do_not_depend_on_the_memory_limit(name: str, outputs: str) -> None:
    make, shape = NETS[name]
    x, z = random_normal(1, 7, *shape), random_normal(2, 5, *shape)
    kernel = EmpiricalKernel(make(), outputs=outputs)  # type: ignore[arg-type]
    symmetric, rectangular = kernel.ntk(x), kernel.ntk(x, z)
    for strategy in STRATEGIES:
        memory = minimum_memory(replace(kernel, strategy=strategy), x)
        tiled_kernel = replace(kernel, strategy=strategy, memory=memory)
        assert relative_error(tiled_kernel.ntk(x), symmetric) < 1e-12
        assert relative_error(tiled_kernel.ntk(x, z), rectangular) < 1e-12


@pytest.mark.parametrize("name", NETS)
def test_single_precision_agrees_with_double(name: str) -> None:
    make, shape = NETS[name]
    net, x = make(), random_normal(1, 5, *shape)
    exact = EmpiricalKernel(net, outputs="full").ntk(x)
    for strategy in STRATEGIES:
        result = EmpiricalKernel(net.float(), outputs="full", strategy=strategy).ntk(x.float())  # type: ignore[arg-type]
        assert result.dtype == torch.float32
        assert relative_error(result.double(), exact) < 1e-4


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_product_of_the_jacobian_with_its_transpose_is_the_kernel(name: str, outputs: str) -> None:
    make, shape = NETS[name]
    net, x = make(), random_normal(1, 5, *shape)
    kernel = EmpiricalKernel(net, outputs=outputs)  # type: ignore[arg-type]
    chunks = list(replace(kernel, memory=4 * minimum_memory(replace(kernel, strategy="gradients"), x)).jacobian(x))
    rows = torch.cat(chunks)
    product = torch.einsum("iop,jup->ijou", rows, rows) if outputs == "full" else rows @ rows.mT
    assert relative_error(product, kernel.ntk(x)) < 1e-12
    if outputs == "full":
        size = sum(value.numel() for value in net.parameters())
        assert rows.shape == (5, 3, size)


def test_params_replace_the_parameters_of_the_network() -> None:
    net, other, x = mlp(5, 3).double(), mlp(5, 3, seed=1).double(), random_normal(1, 4, 5)
    params = {name: value.detach() for name, value in other.named_parameters()}
    assert relative_error(EmpiricalKernel(net, params).ntk(x), EmpiricalKernel(other).ntk(x)) < 1e-12


def test_ties_in_overlapping_pooling_windows_have_the_same_gradient_as_autograd() -> None:
    pool = nn.MaxPool2d((3, 2), stride=(2, 1), padding=1, ceil_mode=True)
    norm = nn.BatchNorm2d(4).eval()
    net = nn.Sequential(nn.Conv2d(2, 4, 3), norm, pool, nn.Flatten(), nn.Linear(4 * 4 * 7, 3)).double()
    with torch.no_grad():
        net[0].weight.copy_(random_normal(3, 4, 2, 3, 3).round())
    x = random_normal(1, 4, 2, 8, 8).round()
    assert (
        relative_error(
            EmpiricalKernel(net, outputs="full").ntk(x), explicit_kernel(net, x, x, "full", lambda name: True)
        )
        < 1e-9
    )


def test_computing_a_kernel_does_not_change_the_network_even_if_it_fails() -> None:
    net = with_group_norm(small_conv4("batch"))
    before = [dict(vars(layer)) for layer in net.modules()]
    EmpiricalKernel(net).ntk(random_normal(1, 2, 2, 16, 16))
    with pytest.raises(InputError, match="does not accept"):
        EmpiricalKernel(net).ntk(random_normal(1, 2, 2, 8, 8))
    assert [dict(vars(layer)) for layer in net.modules()] == before
    assert not any(layer._forward_hooks for layer in net.modules())


def test_with_group_norm_returns_a_copy_with_the_same_scales_and_leaves_the_original_unchanged() -> None:
    net = resnet12(2, 16, 3, widths=(4, 6, 24, 32))
    with torch.no_grad():
        net.features[0].main[1].weight.fill_(2.0)
    copy = with_group_norm(net)
    groups = [layer.num_groups for layer in copy.modules() if isinstance(layer, nn.GroupNorm)]
    assert sorted(set(groups)) == [4, 6, 12, 16]  # the largest divisors of the widths up to 16
    assert copy.features[0].main[1].weight.eq(2).all()
    assert dict(copy.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert copy.recipe is None
    assert not any(isinstance(layer, nn.GroupNorm) for layer in net.modules())


class SampleMixing(nn.Module):
    """A linear layer of the samples minus their mean, if there is more than one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x - x.mean(0)) if len(x) > 1 else self.last(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EmpiricalKernel(conv4(2, 16, 3)), "with_group_norm"),
        (lambda: EmpiricalKernel(conv4(2, 16, 3, statistics="running")), "Use running statistics"),
        (lambda: EmpiricalKernel(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))), "normalizes by the batch"),
        (lambda: EmpiricalKernel(with_group_norm(resnet12(2, 16, 3))), "drops values at random"),
        (lambda: EmpiricalKernel(nn.Flatten()), "no parameters"),
        (lambda: EmpiricalKernel(mlp(5, 3).half()), "must all be float32 or all float64"),
        (lambda: EmpiricalKernel(mlp(5, 3), part="tail"), "part is 'tail'"),  # type: ignore[arg-type]
        (lambda: EmpiricalKernel(mlp(5, 3), {"head": torch.ones(2)}), "no such parameter"),
        (lambda: EmpiricalKernel(mlp(5, 3), memory=0), "memory is 0"),
        (lambda: EmpiricalKernel(mlp(5, 3), memory=100).ntk(torch.ones(2, 5)), "one sample of this network needs more"),
        (
            lambda: EmpiricalKernel(mlp(5, 3), memory=100).jacobian(torch.ones(2, 5)).__next__(),
            "one sample of this network needs more",
        ),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.full((2, 5), math.nan)), "x contains values that are NaN"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(2, 5), torch.full((2, 5), math.inf)), "z contains values"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(2, 5).double()), "Convert one of them"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(2, 4)), "which the network does not accept"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(2, 5), torch.ones(2, 4)), "must have the shape of those"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(0, 5)), "at least one sample"),
        (lambda: EmpiricalKernel(nn.Sequential(nn.Linear(5, 3), nn.Tanh())).nngp(torch.ones(2, 5)), "no head"),
        (lambda: EmpiricalKernel(nn.Conv2d(2, 3, 3)).ntk(torch.ones(2, 2, 4, 4)), "must return"),
        (lambda: EmpiricalKernel(SampleMixing()).ntk(torch.randn(2, 5)), "depends on the other samples"),
    ],
)
def test_invalid_input_is_reported(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


class Product(nn.Module):
    """x @ w with a weight that does not belong to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(random_normal(3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_weight_outside_layers_is_included_even_if_its_gradient_is_zero_at_the_first_sample() -> None:
    kernel, x = EmpiricalKernel(Product(), outputs="sum"), random_normal(1, 4, 3)
    x[0] = 0
    kernel.ntk(torch.zeros(2, 3, dtype=torch.double))  # profiles the network
    assert relative_error(kernel.ntk(x), 2 * x @ x.mT) < 1e-12


def test_one_sample_is_enough_to_detect_that_samples_mix() -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0) / 2)  # type: ignore[no-any-return]

    with pytest.raises(InputError, match="depends on the other samples"):
        EmpiricalKernel(Centered()).ntk(random_normal(1, 1, 3))


class TiedAutoencoder(nn.Module):
    """An autoencoder with tied weights, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 4, bias=False), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(F.relu(self.encoder(x)), self.encoder.weight.T))  # type: ignore[no-any-return]


def test_tied_weights_are_detected_even_if_the_first_sample_is_zero() -> None:
    net, x = build_seeded(TiedAutoencoder).double(), random_normal(1, 4, 6)
    x[0] = 0  # the decoder's use of the weights has no gradient here
    kernel = EmpiricalKernel(net, outputs="full")
    exact = explicit_kernel(net, x, x, "full", lambda name: True)
    assert relative_error(kernel.ntk(x), exact) < 1e-9
    assert relative_error(kernel.ntk(x[1:]), exact[1:, 1:]) < 1e-9
