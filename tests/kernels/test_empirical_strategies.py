"""How empirical kernels are computed: choice of strategy, memory use, and reuse of profiles and CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from finite_nets import NETS, STRATEGIES, build_seeded, explicit_kernel, minimum_memory, random_normal, relative_error
from metabridge.errors import InputError
from metabridge.kernels import empirical, layer_overrides
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.strategy import KernelProblem, Strategy
from metabridge.models import conv4, mlp
from metabridge.models.network import with_group_norm


def strategy_for(kernel: EmpiricalKernel, x: Tensor, samples: int) -> Strategy:
    """Return the strategy for the kernel of `samples` samples with the shape of those in `x`."""
    profile = kernel._prepare(kernel.part, x, None)[1].profile
    problem = KernelProblem(profile, kernel.outputs, kernel.memory, samples, samples, True, layer_overrides.on_cpu(x))
    return kernel._choose_strategy(problem, kernel.strategy)


@pytest.mark.parametrize("outputs", ["sum", "full"])
def test_memory_stays_within_the_limit_on_the_gpu_path(outputs: str, simulate_gpu_path: None) -> None:
    test_memory_stays_within_the_limit(outputs, "gradients")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("outputs", ["sum", "full"])
def test_memory_stays_within_the_limit(outputs: str, strategy: str) -> None:
    net, x = with_group_norm(conv4(3, 16, 4, filters=16, statistics="batch")), random_normal(1, 8, 3, 16, 16).float()
    kernel = EmpiricalKernel(net, outputs=outputs, strategy=strategy)  # type: ignore[arg-type]
    for memory in (minimum_memory(kernel, x), 2 * minimum_memory(kernel, x), 2**24):
        kernel = replace(kernel, memory=memory)
        kernel.ntk(x)  # profiles the network
        result_bytes = 4 * (8 * 4) ** 2  # float32, 8 samples, 4 outputs; not part of the limit
        assert peak_memory(lambda: kernel.ntk(x)) < memory + 2 * result_bytes  # noqa: B023


def peak_memory(compute: Callable[[], object]) -> int:
    """Return the peak of the bytes that PyTorch's allocator holds during a computation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    assert peak > 0
    return peak


class Gated(nn.Module):
    """A network that uses a weight outside its layer, with zero gradient while the gate is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.loose, self.last, self.drop = nn.Linear(40, 40), nn.Linear(40, 3), nn.Dropout(0.5)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(x + self.gate * F.linear(x, self.loose.weight)))  # type: ignore[no-any-return]


def test_a_network_is_profiled_once_and_again_after_a_change() -> None:
    net, x = build_seeded(Gated).eval(), random_normal(1, 4, 40)
    forward_calls: list[nn.Module] = []
    net.register_forward_hook(lambda layer, inputs, output: forward_calls.append(layer))
    kernel = EmpiricalKernel(net, outputs="full", strategy="gradients")
    kernel.ntk(x)
    first_count = len(forward_calls)
    kernel.ntk(x)
    assert len(forward_calls) - first_count == 2 < first_count  # one for supported layers, one for the other parameters
    with torch.no_grad():
        net.gate.fill_(2.0)
    assert relative_error(kernel.ntk(x), explicit_kernel(net, x, x, "full", lambda name: True)) < 1e-9
    net.last = nn.Linear(40, 2).double()
    assert relative_error(kernel.ntk(x), explicit_kernel(net, x, x, "full", lambda name: True)) < 1e-9
    net.train()
    with pytest.raises(InputError, match="or on random numbers"):
        kernel.ntk(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["mlp", "conv4, group norm", "resnet12, evaluation mode"])
def test_a_captured_kernel_follows_changes_of_samples_and_parameters(name: str) -> None:
    make, shape = NETS[name]
    net, x, z = make().cuda(), random_normal(1, 4, *shape).cuda(), random_normal(2, 4, *shape).cuda()
    kernel = EmpiricalKernel(net, outputs="full")
    replayed = [kernel.ntk(x) for _ in range(3)][-1]
    assert relative_error(replayed, explicit_kernel(net, x, x, "full", lambda name: True)) < 1e-9
    assert relative_error(kernel.ntk(z), explicit_kernel(net, z, z, "full", lambda name: True)) < 1e-9
    # The replay for z has not overwritten the result for x.
    assert relative_error(replayed, explicit_kernel(net, x, x, "full", lambda name: True)) < 1e-9
    with torch.no_grad():
        next(net.parameters()).mul_(2.0)
    for _ in range(3):
        assert relative_error(kernel.ntk(x), explicit_kernel(net, x, x, "full", lambda name: True)) < 1e-9
        assert relative_error(kernel.ntk(x, z), explicit_kernel(net, x, z, "full", lambda name: True)) < 1e-9


def test_a_repeated_computation_is_replayed_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[FakeCapture] = []

    class FakeCapture:
        """Computes the kernel at every call instead of replaying a CUDA graph, and counts the calls."""

        def __init__(self, compute: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, z: Tensor | None) -> None:
            self.compute, self.replays = compute, 0
            captures.append(self)

        def __call__(self, x: Tensor, z: Tensor | None) -> Tensor:
            self.replays += 1
            return self.compute(x, z)

    monkeypatch.setattr(empirical, "_CapturedKernel", FakeCapture)
    net, x, z = mlp(5, 3).double(), random_normal(1, 4, 5), random_normal(2, 4, 5)
    kernel = EmpiricalKernel(net)
    for points in (x, x, z):
        kernel._prepare("all", points, None)[1].capturable = True  # as on a GPU
        assert relative_error(kernel.ntk(points), EmpiricalKernel(net).ntk(points)) < 1e-12
    assert [capture.replays for capture in captures] == [2]
    assert relative_error(kernel.ntk(x[:3]), EmpiricalKernel(net).ntk(x[:3])) < 1e-12  # another size
    assert [capture.replays for capture in captures] == [2]
    with torch.no_grad():
        net.head.weight.mul_(2.0)
    assert relative_error(kernel.ntk(x), EmpiricalKernel(net).ntk(x)) < 1e-12
    assert [capture.replays for capture in captures] == [2]


def test_gradients_of_the_head_are_factored_and_those_of_convolutions_materialized() -> None:
    net, x = with_group_norm(conv4(3, 84, 5, statistics="batch")), random_normal(1, 2, 3, 84, 84).float()
    kernel = EmpiricalKernel(net, outputs="full")
    strategy = strategy_for(kernel, x, 100)
    assert strategy.name == "gradients"
    assert strategy.tile == 100
    assert [info.name for info in strategy.factored] == ["head.weight"]


def test_a_gpu_takes_all_samples_in_one_pass_if_they_fit(simulate_gpu_path: None) -> None:
    net, x = with_group_norm(conv4(3, 84, 5, statistics="batch")), random_normal(1, 2, 3, 84, 84).float()
    kernel = EmpiricalKernel(net, outputs="full")
    strategy = strategy_for(kernel, x, 100)
    assert (strategy.tile, strategy.chunk) == (100, 100)
    strategy = strategy_for(replace(kernel, memory=2**28), x, 100)
    assert strategy.tile == 100
    assert 1 < strategy.chunk < 50


@pytest.mark.parametrize("name", ["conv4, evaluation mode", "conv4, group norm", "branching"])
def test_first_convolutions_are_computed_together_with_their_norms_and_pools(name: str) -> None:
    make, shape = NETS[name]
    gradients, prepared = EmpiricalKernel(make())._prepare("all", random_normal(1, 2, *shape), None)
    pooled = [call.pooled for call in gradients.trace(random_normal(1, 2, *shape))[2] if call.pooled]
    assert len(pooled) == (2 if name == "branching" else 1)
    assert not prepared.profile.generic_names


class ManyOutputs(nn.Module):
    """A network with many outputs, whose only parameter does not belong to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 200) / math.sqrt(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


def test_products_are_chosen_for_many_outputs_and_few_samples() -> None:
    net, x = ManyOutputs(), random_normal(1, 2, 8).float()
    kernel = EmpiricalKernel(net, outputs="full")
    assert strategy_for(kernel, x, 2).name == "products"
