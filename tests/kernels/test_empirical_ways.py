"""How the empirical kernels are computed: by which plan, in how much memory, and what is not computed twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from finite_nets import NETS, WAYS, error, explicit, least, seeded, seen
from metabridge.errors import InputError
from metabridge.kernels import empirical, layer_overrides
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.strategy import Plan, Problem
from metabridge.models import conv4, mlp
from metabridge.models.network import with_group_norm


def plan_of(kernel: EmpiricalKernel, x: Tensor, samples: int) -> Plan:
    """How the kernel of some samples like x's would be computed."""
    survey = kernel._survey(kernel.part, x, None)[1].survey
    problem = Problem(survey, kernel.outputs, kernel.memory, samples, samples, True, layer_overrides.cached(x))
    return kernel._plan(problem, kernel.way)


@pytest.mark.parametrize("outputs", ["sum", "full"])
def test_memory_stays_within_the_bound_as_computed_on_a_gpu(outputs: str, as_on_gpu: None) -> None:
    test_memory_stays_within_the_bound(outputs, "gradients")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outputs", ["sum", "full"])
def test_memory_stays_within_the_bound(outputs: str, way: str) -> None:
    net, x = with_group_norm(conv4(3, 16, 4, filters=16, statistics="batch")), seen(1, 8, 3, 16, 16).float()
    kernel = EmpiricalKernel(net, outputs=outputs, way=way)  # type: ignore[arg-type]
    for memory in (least(kernel, x), 2 * least(kernel, x), 2**24):
        kernel = replace(kernel, memory=memory)
        kernel.ntk(x)
        assert peak(lambda: kernel.ntk(x)) < memory + 2 * 4 * (8 * 4) ** 2  # noqa: B023


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
    kernel = EmpiricalKernel(net, outputs="full", way="gradients")
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
    kernel = EmpiricalKernel(net, outputs="full")
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
    kernel = EmpiricalKernel(net)
    for points in (x, x, z):
        kernel._survey("all", points, None)[1].recordable = True  # as on a GPU
        assert error(kernel.ntk(points), EmpiricalKernel(net).ntk(points)) < 1e-12
    assert [recording.replays for recording in made] == [2]
    assert error(kernel.ntk(x[:3]), EmpiricalKernel(net).ntk(x[:3])) < 1e-12  # other sizes
    assert [recording.replays for recording in made] == [2]
    with torch.no_grad():
        net.head.weight.mul_(2.0)
    assert error(kernel.ntk(x), EmpiricalKernel(net).ntk(x)) < 1e-12
    assert [recording.replays for recording in made] == [2]


def test_linear_layers_are_factored_and_early_convolutions_formed() -> None:
    net, x = with_group_norm(conv4(3, 84, 5, statistics="batch")), seen(1, 2, 3, 84, 84).float()
    kernel = EmpiricalKernel(net, outputs="full")
    plan = plan_of(kernel, x, 100)
    assert plan.way == "gradients"
    assert plan.tile == 100
    assert [block.name for block in plan.factored] == ["head.weight"]


def test_a_gpu_takes_all_samples_at_once_where_memory_allows(as_on_gpu: None) -> None:
    net, x = with_group_norm(conv4(3, 84, 5, statistics="batch")), seen(1, 2, 3, 84, 84).float()
    ample = EmpiricalKernel(net, outputs="full")
    plan = plan_of(ample, x, 100)
    assert (plan.tile, plan.chunk) == (100, 100)
    plan = plan_of(replace(ample, memory=2**28), x, 100)
    assert plan.tile == 100
    assert 1 < plan.chunk < 50


@pytest.mark.parametrize("name", ["conv4, evaluation mode", "conv4, group norm", "branching"])
def test_first_convolutions_are_taken_together_with_their_norms_and_pools(name: str) -> None:
    make, shape = NETS[name]
    gradients, found = EmpiricalKernel(make())._survey("all", seen(1, 2, *shape), None)
    picks = [call.picks for call in gradients.trace(seen(1, 2, *shape))[2] if call.picks]
    assert len(picks) == (2 if name == "branching" else 1)
    assert not found.survey.others


class Wide(nn.Module):
    """Many outputs, from parameters of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 200) / math.sqrt(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


def test_a_wide_net_of_many_outputs_on_few_samples_is_taken_by_the_cheaper_way() -> None:
    net, x = Wide(), seen(1, 2, 8).float()
    kernel = EmpiricalKernel(net, outputs="full")
    assert plan_of(kernel, x, 2).way == "products"
