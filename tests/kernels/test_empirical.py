"""What the empirical kernels are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finite_nets import NETS, OUTPUTS, WAYS, conv4_of, error, explicit, least, seeded, seen
from metabridge.errors import InputError
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.models import conv4, mlp, resnet12
from metabridge.models.network import with_group_norm


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_every_form_part_and_way_equals_the_product_of_explicit_jacobians(name: str, outputs: str) -> None:
    make, shape = NETS[name]
    net, x, z = make(), seen(1, 4, *shape), seen(2, 3, *shape)
    head = "last." if name == "odd" else "head."
    parts: dict[str, Callable[[str], bool]] = {
        "all": lambda name: True,
        "head": lambda name: name.startswith(head),
        "body": lambda name: not name.startswith(head),
    }
    for part, keep in parts.items():
        exact = explicit(net, torch.cat([x, z]), torch.cat([x, z]), outputs, keep)
        for way in WAYS:
            kernel = EmpiricalKernel(net, part=part, outputs=outputs, way=way)  # type: ignore[arg-type]
            assert error(kernel.ntk(x, z), exact[:4, 4:]) < 1e-9, (part, way)
            own = kernel.ntk(x)
            assert error(own, exact[:4, :4]) < 1e-9, (part, way)
            assert torch.equal(own, own.transpose(0, 1).mT if outputs == "full" else own.mT), (part, way)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_the_kernel_as_computed_on_a_gpu_equals_the_product_of_explicit_jacobians(
    name: str, outputs: str, as_on_gpu: None
) -> None:
    make, shape = NETS[name]
    net, x, z = make(), seen(1, 4, *shape), seen(2, 3, *shape)
    exact = explicit(net, torch.cat([x, z]), torch.cat([x, z]), outputs, lambda name: True)
    kernel = EmpiricalKernel(net, outputs=outputs, way="gradients")  # type: ignore[arg-type]
    for memory in (2**30, least(kernel, x)):
        kernel = replace(kernel, memory=memory)
        assert error(kernel.ntk(x, z), exact[:4, 4:]) < 1e-9
        assert error(kernel.ntk(x), exact[:4, :4]) < 1e-9


@pytest.mark.parametrize("name", NETS)
def test_only_what_no_layer_owns_is_left_to_automatic_differentiation(name: str, gpu: bool) -> None:
    make, shape = NETS[name]
    survey = EmpiricalKernel(make(), outputs="full")._survey("all", seen(1, 4, *shape), None)[1].survey
    assert survey.others == ({"scale", "loose.weight"} if name == "odd" else set())
    assert survey.batched == gpu


@pytest.mark.parametrize("name", NETS)
def test_body_and_head_make_up_the_whole(name: str) -> None:
    make, shape = NETS[name]
    x, kernel = seen(1, 5, *shape), EmpiricalKernel(make(), outputs="full")
    ntk, nngp = kernel.both(x)
    assert error(replace(kernel, part="body").ntk(x) + nngp, ntk) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
def test_nngp_is_the_gram_matrix_of_the_features(bias: bool) -> None:
    net, x = mlp(5, 3, width=7, bias=bias).double(), seen(1, 6, 5)
    exact = net.features(x) @ net.features(x).mT + bias
    assert error(EmpiricalKernel(net).nngp(x), exact) < 1e-12
    assert error(EmpiricalKernel(net, outputs="sum").nngp(x), 3 * exact) < 1e-12
    full = EmpiricalKernel(net, outputs="full").nngp(x)
    assert error(full, exact[..., None, None] * torch.eye(3, dtype=torch.double)) < 1e-12


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", NETS)
def test_the_memory_bound_changes_no_result(name: str, outputs: str) -> None:
    make, shape = NETS[name]
    x, z = seen(1, 7, *shape), seen(2, 5, *shape)
    ample = EmpiricalKernel(make(), outputs=outputs)  # type: ignore[arg-type]
    for way in WAYS:
        tight = replace(ample, way=way, memory=least(replace(ample, way=way), x))
        assert error(tight.ntk(x), ample.ntk(x)) < 1e-12
        assert error(tight.ntk(x, z), ample.ntk(x, z)) < 1e-12


@pytest.mark.parametrize("name", NETS)
def test_single_precision_agrees_with_double(name: str) -> None:
    make, shape = NETS[name]
    net, x = make(), seen(1, 5, *shape)
    exact = EmpiricalKernel(net, outputs="full").ntk(x)
    for way in WAYS:
        found = EmpiricalKernel(net.float(), outputs="full", way=way).ntk(x.float())  # type: ignore[arg-type]
        assert found.dtype == torch.float32
        assert error(found.double(), exact) < 1e-4


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_jacobian_chunks_multiply_to_the_kernel(name: str, outputs: str) -> None:
    make, shape = NETS[name]
    net, x = make(), seen(1, 5, *shape)
    kernel = EmpiricalKernel(net, outputs=outputs)  # type: ignore[arg-type]
    chunks = list(replace(kernel, memory=4 * least(replace(kernel, way="gradients"), x)).jacobian(x))
    j = torch.cat(chunks)
    product = torch.einsum("iop,jup->ijou", j, j) if outputs == "full" else j @ j.mT
    assert error(product, kernel.ntk(x)) < 1e-12
    if outputs == "full":
        size = sum(value.numel() for value in net.parameters())
        assert j.shape == (5, 3, size)


def test_parameters_given_take_the_place_of_the_networks_own() -> None:
    net, other, x = mlp(5, 3).double(), mlp(5, 3, seed=1).double(), seen(1, 4, 5)
    params = {name: value.detach() for name, value in other.named_parameters()}
    assert error(EmpiricalKernel(net, params).ntk(x), EmpiricalKernel(other).ntk(x)) < 1e-12


def test_ties_in_overlapping_windows_of_a_pool_go_where_automatic_differentiation_sends_them() -> None:
    pool = nn.MaxPool2d((3, 2), stride=(2, 1), padding=1, ceil_mode=True)
    norm = nn.BatchNorm2d(4).eval()
    net = nn.Sequential(nn.Conv2d(2, 4, 3), norm, pool, nn.Flatten(), nn.Linear(4 * 4 * 7, 3)).double()
    with torch.no_grad():
        net[0].weight.copy_(seen(3, 4, 2, 3, 3).round())
    x = seen(1, 4, 2, 8, 8).round()
    assert error(EmpiricalKernel(net, outputs="full").ntk(x), explicit(net, x, x, "full", lambda name: True)) < 1e-9


def test_a_network_is_left_as_it_was_by_success_and_by_failure() -> None:
    net = with_group_norm(conv4_of("batch"))
    before = [dict(vars(layer)) for layer in net.modules()]
    EmpiricalKernel(net).ntk(seen(1, 2, 2, 16, 16))
    with pytest.raises(InputError, match="does not take"):
        EmpiricalKernel(net).ntk(seen(1, 2, 2, 8, 8))
    assert [dict(vars(layer)) for layer in net.modules()] == before
    assert not any(layer._forward_hooks for layer in net.modules())


def test_group_norm_keeps_scales_and_leaves_the_original_as_it_was() -> None:
    net = resnet12(2, 16, 3, widths=(4, 6, 24, 32))
    with torch.no_grad():
        net.features[0].main[1].weight.fill_(2.0)
    copy = with_group_norm(net)
    groups = [layer.num_groups for layer in copy.modules() if isinstance(layer, nn.GroupNorm)]
    assert sorted(set(groups)) == [4, 6, 12, 16]
    assert copy.features[0].main[1].weight.eq(2).all()
    assert dict(copy.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert copy.recipe is None
    assert not any(isinstance(layer, nn.GroupNorm) for layer in net.modules())


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x - x.mean(0)) if len(x) > 1 else self.last(x)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: EmpiricalKernel(conv4(2, 16, 3)), "with_group_norm"),
        (lambda: EmpiricalKernel(conv4(2, 16, 3, statistics="running")), "evaluation mode with statistics='running'"),
        (lambda: EmpiricalKernel(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))), "normalises by the batch"),
        (lambda: EmpiricalKernel(with_group_norm(resnet12(2, 16, 3))), "drops at random"),
        (lambda: EmpiricalKernel(nn.Flatten()), "no parameters"),
        (lambda: EmpiricalKernel(mlp(5, 3).half()), "must all be float32 or all float64"),
        (lambda: EmpiricalKernel(mlp(5, 3), part="tail"), "part is 'tail'"),  # type: ignore[arg-type]
        (lambda: EmpiricalKernel(mlp(5, 3), {"head": torch.ones(2)}), "no such parameter"),
        (lambda: EmpiricalKernel(mlp(5, 3), memory=0), "memory is 0"),
        (lambda: EmpiricalKernel(mlp(5, 3), memory=100).ntk(torch.ones(2, 5)), "too few for one sample"),
        (
            lambda: EmpiricalKernel(mlp(5, 3), memory=100).jacobian(torch.ones(2, 5)).__next__(),
            "too few for one sample",
        ),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.full((2, 5), math.nan)), "x holds values that are NaN"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(2, 5), torch.full((2, 5), math.inf)), "z holds values"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(2, 5).double()), "Convert one of them"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(2, 4)), "which the network does not take"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(2, 5), torch.ones(2, 4)), "must have x's shape"),
        (lambda: EmpiricalKernel(mlp(5, 3)).ntk(torch.ones(0, 5)), "at least one sample"),
        (lambda: EmpiricalKernel(nn.Sequential(nn.Linear(5, 3), nn.Tanh())).nngp(torch.ones(2, 5)), "no head"),
        (lambda: EmpiricalKernel(nn.Conv2d(2, 3, 3)).ntk(torch.ones(2, 2, 4, 4)), "must give"),
        (lambda: EmpiricalKernel(Mixing()).ntk(torch.randn(2, 5)), "depends on the other samples"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()


class Product(nn.Module):
    """x @ w, of a weight that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(seen(3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_a_weight_that_no_layer_owns_counts_though_its_gradient_be_zero_at_the_first_sample() -> None:
    kernel, x = EmpiricalKernel(Product(), outputs="sum"), seen(1, 4, 3)
    x[0] = 0
    kernel.ntk(torch.zeros(2, 3, dtype=torch.double))
    assert error(kernel.ntk(x), 2 * x @ x.mT) < 1e-12


def test_one_sample_shows_already_that_samples_mix() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0) / 2)  # type: ignore[no-any-return]

    with pytest.raises(InputError, match="depends on the other samples"):
        EmpiricalKernel(Centred()).ntk(seen(1, 1, 3))


class Tied(nn.Module):
    """An autoencoder with tied weights, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 4, bias=False), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(F.relu(self.encoder(x)), self.encoder.weight.T))  # type: ignore[no-any-return]


def test_a_blank_sample_does_not_hide_that_weights_are_tied() -> None:
    net, x = seeded(Tied).double(), seen(1, 4, 6)
    x[0] = 0  # where the decoder's use of the weights has no gradient
    kernel = EmpiricalKernel(net, outputs="full")
    exact = explicit(net, x, x, "full", lambda name: True)
    assert error(kernel.ntk(x), exact) < 1e-9
    assert error(kernel.ntk(x[1:]), exact[1:, 1:]) < 1e-9
