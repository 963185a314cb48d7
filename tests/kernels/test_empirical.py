from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from metabridge.errors import InputError
from metabridge.kernels import empirical, gram, jacobian, survey
from metabridge.kernels.empirical import Empirical, with_group_norm
from metabridge.kernels.plan import Plan, Problem
from metabridge.models import conv4, estimate_statistics, mlp, resnet12


class Odd(nn.Module):
    """A layer used twice, tied weights, a grouped convolution, and parameters that no known layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Conv2d(2, 4, 3, stride=2, padding="valid", dilation=2, groups=2)
        self.mirror = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.twice, self.tied, self.loose = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.tied.weight = self.twice.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.unused = nn.Parameter(torch.ones(2))
        self.norm, self.rectifier, self.last = nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rectifier(self.mirror(self.spread(x)))
        x = self.twice(self.norm(x.flatten(2).mT)).tanh()  # a linear layer at several positions
        x = self.tied(self.twice(x).tanh()).mean(1) * self.scale
        return self.last(F.linear(x.tanh() + self.loose(x), self.loose.weight))


class Branching(nn.Module):
    """Two first convolutions whose normed maps are pooled, one with windows that overlap, one rectified in between."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(2, 6, 3, stride=2, padding=1, padding_mode="circular")
        self.plain = nn.Sequential(first, nn.GroupNorm(3, 6), nn.MaxPool2d(3, 2, padding=1), nn.ReLU(inplace=True))
        norm = nn.BatchNorm2d(4).eval()
        self.rectified = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Linear(6 + 4, 3)
        for value in self.parameters():
            nn.init.normal_(value)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.plain(x), self.rectified(x)
        return self.head(torch.cat([part.square().mean((2, 3)) for part in parts], 1))  # type: ignore[no-any-return]


def running(net: nn.Module, x: Tensor) -> nn.Module:
    estimate_statistics(net, [x])
    return net.eval()


def seen(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def conv4_of(statistics: str) -> nn.Module:
    return conv4(2, 16, 3, filters=4, statistics=statistics).double()  # type: ignore[arg-type]


def resnet12_of() -> nn.Module:
    return resnet12(2, 16, 3, widths=(4, 6, 6, 8)).double()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(5, 3, width=7).double(), (5,)),
    "mlp without bias": (lambda: mlp(5, 3, width=7, depth=1, activation="tanh", bias=False).double(), (5,)),
    "conv4, evaluation mode": (lambda: running(conv4_of("running"), seen(9, 8, 2, 16, 16)), (2, 16, 16)),
    "conv4, group norm": (lambda: with_group_norm(conv4_of("batch"), groups=2), (2, 16, 16)),
    "resnet12, evaluation mode": (lambda: running(resnet12_of(), seen(9, 8, 2, 16, 16)), (2, 16, 16)),
    "resnet12, group norm": (lambda: with_group_norm(resnet12_of()).eval(), (2, 16, 16)),
    "odd": (lambda: seeded(Odd), (2, 9, 9)),
    "branching": (lambda: seeded(Branching), (2, 11, 11)),
}
OUTPUTS = ("mean", "sum", "full")
WAYS = ("gradients", "products")


def explicit(net: nn.Module, x: Tensor, z: Tensor, outputs: str, keep: Callable[[str], bool]) -> Tensor:
    """Θ from whole Jacobians, one sample and one output after another."""
    params = {name: value.detach() for name, value in net.named_parameters() if keep(name)}

    def jacobian(points: Tensor) -> Tensor:
        rows = [jacrev(lambda p: functional_call(net, p, (point[None],))[0])(params) for point in points]  # noqa: B023
        return torch.stack([torch.cat([value.flatten(1) for value in row.values()], 1) for row in rows])

    full = torch.einsum("iop,jup->ijou", jacobian(x), jacobian(z))
    if outputs == "mean":
        return full.diagonal(dim1=2, dim2=3).mean(-1)
    return full.sum((2, 3)) if outputs == "sum" else full


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be computed here as it is on a GPU."""
    for module in (jacobian, gram, survey, empirical):
        monkeypatch.setattr(module, "cached", lambda x: False)


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found - exact.detach()).norm() / exact.detach().norm())


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
            kernel = Empirical(net, part=part, outputs=outputs, way=way)  # type: ignore[arg-type]
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
    kernel = Empirical(net, outputs=outputs, way="gradients")  # type: ignore[arg-type]
    for memory in (2**30, least(kernel, x)):
        kernel = replace(kernel, memory=memory)
        assert error(kernel.ntk(x, z), exact[:4, 4:]) < 1e-9
        assert error(kernel.ntk(x), exact[:4, :4]) < 1e-9


@pytest.mark.parametrize("name", NETS)
def test_body_and_head_make_up_the_whole(name: str) -> None:
    make, shape = NETS[name]
    x, kernel = seen(1, 5, *shape), Empirical(make(), outputs="full")
    ntk, nngp = kernel.both(x)
    assert error(replace(kernel, part="body").ntk(x) + nngp, ntk) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
def test_nngp_is_the_gram_matrix_of_the_features(bias: bool) -> None:
    net, x = mlp(5, 3, width=7, bias=bias).double(), seen(1, 6, 5)
    exact = net.features(x) @ net.features(x).mT + bias
    assert error(Empirical(net).nngp(x), exact) < 1e-12
    assert error(Empirical(net, outputs="sum").nngp(x), 3 * exact) < 1e-12
    full = Empirical(net, outputs="full").nngp(x)
    assert error(full, exact[..., None, None] * torch.eye(3, dtype=torch.double)) < 1e-12


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", NETS)
def test_the_memory_bound_changes_no_result(name: str, outputs: str) -> None:
    make, shape = NETS[name]
    x, z = seen(1, 7, *shape), seen(2, 5, *shape)
    ample = Empirical(make(), outputs=outputs)  # type: ignore[arg-type]
    for way in WAYS:
        tight = replace(ample, way=way, memory=least(replace(ample, way=way), x))
        assert error(tight.ntk(x), ample.ntk(x)) < 1e-12
        assert error(tight.ntk(x, z), ample.ntk(x, z)) < 1e-12


def plan_of(kernel: Empirical, x: Tensor, samples: int) -> Plan:
    """How the kernel of some samples like x's would be computed."""
    survey = kernel._survey(kernel.part, x, None)[1].survey
    return kernel._plan(Problem(survey, kernel.outputs, kernel.memory, samples, samples, True, jacobian.cached(x)))


def least(kernel: Empirical, x: Tensor) -> int:
    """The least memory, to a few per cent, that the kernel does not refuse."""
    survey, memory = kernel._survey(kernel.part, x, None)[1].survey, 2**10
    while True:
        try:
            kernel._plan(Problem(survey, kernel.outputs, memory, len(x), len(x), True, jacobian.cached(x)))
        except InputError:
            memory += memory // 16
        else:
            return memory


@pytest.mark.parametrize("outputs", ["sum", "full"])
def test_memory_stays_within_the_bound_as_computed_on_a_gpu(outputs: str, as_on_gpu: None) -> None:
    test_memory_stays_within_the_bound(outputs, "gradients")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outputs", ["sum", "full"])
def test_memory_stays_within_the_bound(outputs: str, way: str) -> None:
    net, x = with_group_norm(conv4(3, 16, 5, filters=16, statistics="batch")), seen(1, 12, 3, 16, 16).float()
    kernel = Empirical(net, outputs=outputs, way=way)  # type: ignore[arg-type]
    for memory in (least(kernel, x), 2 * least(kernel, x), 2**24):
        kernel = replace(kernel, memory=memory)
        kernel.ntk(x)
        assert peak(lambda: kernel.ntk(x)) < memory + 2 * 4 * (12 * 5) ** 2  # noqa: B023


def peak(work: Callable[[], object]) -> int:
    """The most bytes that PyTorch's allocator gives out at a time during `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    assert most > 0
    return most


@pytest.mark.parametrize("name", NETS)
def test_single_precision_agrees_with_double(name: str) -> None:
    make, shape = NETS[name]
    net, x = make(), seen(1, 5, *shape)
    exact = Empirical(net, outputs="full").ntk(x)
    for way in WAYS:
        found = Empirical(net.float(), outputs="full", way=way).ntk(x.float())  # type: ignore[arg-type]
        assert found.dtype == torch.float32
        assert error(found.double(), exact) < 1e-4


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_jacobian_chunks_multiply_to_the_kernel(name: str, outputs: str) -> None:
    make, shape = NETS[name]
    net, x = make(), seen(1, 5, *shape)
    kernel = Empirical(net, outputs=outputs)  # type: ignore[arg-type]
    chunks = list(replace(kernel, memory=4 * least(replace(kernel, way="gradients"), x)).jacobian(x))
    j = torch.cat(chunks)
    product = torch.einsum("iop,jup->ijou", j, j) if outputs == "full" else j @ j.mT
    assert error(product, kernel.ntk(x)) < 1e-12
    if outputs == "full":
        size = sum(value.numel() for value in net.parameters())
        assert j.shape == (5, 3, size)


class Gated(nn.Module):
    """A weight used by no layer, whose gradient is zero as long as its gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.loose, self.last, self.drop = nn.Linear(40, 40), nn.Linear(40, 3), nn.Dropout(0.5)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(x + self.gate * F.linear(x, self.loose.weight)))  # type: ignore[no-any-return]


def test_a_network_is_looked_at_once_and_again_when_it_has_changed() -> None:
    net, x = seeded(Gated).eval(), seen(1, 4, 40)
    passes: list[nn.Module] = []
    net.register_forward_hook(lambda layer, inputs, output: passes.append(layer))
    kernel = Empirical(net, outputs="full", way="gradients")
    kernel.ntk(x)
    looks = len(passes)
    kernel.ntk(x)
    assert len(passes) - looks == 2 < looks  # one for what layers own, and one for the others
    with torch.no_grad():
        net.gate.fill_(2.0)
    assert error(kernel.ntk(x), explicit(net, x, x, "full", lambda name: True)) < 1e-9
    net.last = nn.Linear(40, 2).double()
    assert error(kernel.ntk(x), explicit(net, x, x, "full", lambda name: True)) < 1e-9
    net.train()
    with pytest.raises(InputError, match="or on chance"):
        kernel.ntk(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["mlp", "conv4, group norm", "resnet12, evaluation mode"])
def test_a_recorded_kernel_follows_samples_and_parameters(name: str) -> None:
    make, shape = NETS[name]
    net, x, z = make().cuda(), seen(1, 4, *shape).cuda(), seen(2, 4, *shape).cuda()
    kernel = Empirical(net, outputs="full")
    first = [kernel.ntk(x) for _ in range(3)][-1]
    assert error(first, explicit(net, x, x, "full", lambda name: True)) < 1e-9
    assert error(kernel.ntk(z), explicit(net, z, z, "full", lambda name: True)) < 1e-9
    assert error(first, explicit(net, x, x, "full", lambda name: True)) < 1e-9
    with torch.no_grad():
        next(net.parameters()).mul_(2.0)
    for _ in range(3):
        assert error(kernel.ntk(x), explicit(net, x, x, "full", lambda name: True)) < 1e-9
        assert error(kernel.ntk(x, z), explicit(net, x, z, "full", lambda name: True)) < 1e-9


def test_a_computation_asked_for_again_is_replayed_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorded] = []

    class Recorded:
        def __init__(self, compute: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, z: Tensor | None) -> None:
            self.compute, self.replays = compute, 0
            made.append(self)

        def __call__(self, x: Tensor, z: Tensor | None) -> Tensor:
            self.replays += 1
            return self.compute(x, z)

    monkeypatch.setattr(empirical, "_Replayed", Recorded)
    net, x, z = mlp(5, 3).double(), seen(1, 4, 5), seen(2, 4, 5)
    kernel = Empirical(net)
    for points in (x, x, z):
        kernel._survey("all", points, None)[1].recordable = True  # as on a GPU
        assert error(kernel.ntk(points), Empirical(net).ntk(points)) < 1e-12
    assert [recording.replays for recording in made] == [2]
    assert error(kernel.ntk(x[:3]), Empirical(net).ntk(x[:3])) < 1e-12  # other sizes
    assert [recording.replays for recording in made] == [2]
    with torch.no_grad():
        net.head.weight.mul_(2.0)
    assert error(kernel.ntk(x), Empirical(net).ntk(x)) < 1e-12
    assert [recording.replays for recording in made] == [2]


def test_parameters_given_take_the_place_of_the_networks_own() -> None:
    net, other, x = mlp(5, 3).double(), mlp(5, 3, seed=1).double(), seen(1, 4, 5)
    params = {name: value.detach() for name, value in other.named_parameters()}
    assert error(Empirical(net, params).ntk(x), Empirical(other).ntk(x)) < 1e-12


def test_linear_layers_are_factored_and_early_convolutions_formed() -> None:
    net, x = with_group_norm(conv4(3, 84, 5, statistics="batch")), seen(1, 2, 3, 84, 84).float()
    kernel = Empirical(net, outputs="full")
    plan = plan_of(kernel, x, 100)
    assert plan.way == "gradients"
    assert plan.tile == 100
    assert [block.name for block in plan.factored] == ["head.weight"]


def test_a_gpu_takes_all_samples_at_once_where_memory_allows(as_on_gpu: None) -> None:
    net, x = with_group_norm(conv4(3, 84, 5, statistics="batch")), seen(1, 2, 3, 84, 84).float()
    ample = Empirical(net, outputs="full")
    plan = plan_of(ample, x, 100)
    assert (plan.tile, plan.chunk) == (100, 100)
    plan = plan_of(replace(ample, memory=2**28), x, 100)
    assert plan.tile == 100
    assert 1 < plan.chunk < 50


@pytest.mark.parametrize("name", ["conv4, evaluation mode", "conv4, group norm", "branching"])
def test_first_convolutions_are_taken_together_with_their_norms_and_pools(name: str) -> None:
    make, shape = NETS[name]
    gradients, found = Empirical(make())._survey("all", seen(1, 2, *shape), None)
    picks = [call.picks for call in gradients.trace(seen(1, 2, *shape))[2] if call.picks]
    assert len(picks) == (2 if name == "branching" else 1)
    assert not found.survey.others


def test_a_wide_net_of_many_outputs_on_few_samples_is_taken_by_the_cheaper_way() -> None:
    net, x = Wide(), seen(1, 2, 8).float()
    kernel = Empirical(net, outputs="full")
    assert plan_of(kernel, x, 2).way == "products"


def test_ties_in_overlapping_windows_of_a_pool_go_where_automatic_differentiation_sends_them() -> None:
    pool = nn.MaxPool2d((3, 2), stride=(2, 1), padding=1, ceil_mode=True)
    norm = nn.BatchNorm2d(4).eval()
    net = nn.Sequential(nn.Conv2d(2, 4, 3), norm, pool, nn.Flatten(), nn.Linear(4 * 4 * 7, 3)).double()
    with torch.no_grad():
        net[0].weight.copy_(seen(3, 4, 2, 3, 3).round())
    x = seen(1, 4, 2, 8, 8).round()
    assert error(Empirical(net, outputs="full").ntk(x), explicit(net, x, x, "full", lambda name: True)) < 1e-9


def test_a_network_is_left_as_it_was_by_success_and_by_failure() -> None:
    net = with_group_norm(conv4_of("batch"))
    before = [dict(vars(layer)) for layer in net.modules()]
    Empirical(net).ntk(seen(1, 2, 2, 16, 16))
    with pytest.raises(InputError, match="does not take"):
        Empirical(net).ntk(seen(1, 2, 2, 8, 8))
    assert [dict(vars(layer)) for layer in net.modules()] == before
    assert not any(layer._forward_hooks for layer in net.modules())


class Wide(nn.Module):
    """Many outputs, from parameters of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 200) / math.sqrt(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


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
        (lambda: Empirical(conv4(2, 16, 3)), "with_group_norm"),
        (lambda: Empirical(conv4(2, 16, 3, statistics="running")), "evaluation mode with statistics='running'"),
        (lambda: Empirical(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))), "normalises by the batch"),
        (lambda: Empirical(with_group_norm(resnet12(2, 16, 3))), "drops at random"),
        (lambda: Empirical(nn.Flatten()), "no parameters"),
        (lambda: Empirical(mlp(5, 3).half()), "must all be float32 or all float64"),
        (lambda: Empirical(mlp(5, 3), part="tail"), "part is 'tail'"),  # type: ignore[arg-type]
        (lambda: Empirical(mlp(5, 3), {"head": torch.ones(2)}), "no such parameter"),
        (lambda: Empirical(mlp(5, 3), memory=0), "memory is 0"),
        (lambda: Empirical(mlp(5, 3), memory=100).ntk(torch.ones(2, 5)), "too few for one sample"),
        (lambda: Empirical(mlp(5, 3), memory=100).jacobian(torch.ones(2, 5)).__next__(), "too few for one sample"),
        (lambda: Empirical(mlp(5, 3)).ntk(torch.full((2, 5), math.nan)), "x holds values that are NaN"),
        (lambda: Empirical(mlp(5, 3)).ntk(torch.ones(2, 5), torch.full((2, 5), math.inf)), "z holds values"),
        (lambda: Empirical(mlp(5, 3)).ntk(torch.ones(2, 5).double()), "Convert one of them"),
        (lambda: Empirical(mlp(5, 3)).ntk(torch.ones(2, 4)), "which the network does not take"),
        (lambda: Empirical(mlp(5, 3)).ntk(torch.ones(2, 5), torch.ones(2, 4)), "must have x's shape"),
        (lambda: Empirical(mlp(5, 3)).ntk(torch.ones(0, 5)), "at least one sample"),
        (lambda: Empirical(nn.Sequential(nn.Linear(5, 3), nn.Tanh())).nngp(torch.ones(2, 5)), "no head"),
        (lambda: Empirical(nn.Conv2d(2, 3, 3)).ntk(torch.ones(2, 2, 4, 4)), "must give"),
        (lambda: Empirical(Mixing()).ntk(torch.randn(2, 5)), "depends on the other samples"),
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
    kernel, x = Empirical(Product(), outputs="sum"), seen(1, 4, 3)
    x[0] = 0
    kernel.ntk(torch.zeros(2, 3, dtype=torch.double))
    assert error(kernel.ntk(x), 2 * x @ x.mT) < 1e-12


def test_one_sample_does_not_settle_that_samples_do_not_mix() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0) / 2)  # type: ignore[no-any-return]

    kernel, x = Empirical(Centred()), seen(1, 4, 3)
    kernel.ntk(x[:1])
    with pytest.raises(InputError, match="depends on the other samples"):
        kernel.ntk(x)
