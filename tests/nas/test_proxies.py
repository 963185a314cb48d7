import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.meta_kernels import meta_ntk
from metabridge.models import mlp
from metabridge.models.cells import set_active_operators, supernet
from metabridge.nas import EDGES, OPERATORS, ActiveOperators, EdgeOperator
from metabridge.nas.cached_forward import CachedForward, ForwardCache
from metabridge.nas.linear_regions import LinearRegionCounter, thin_supernet
from metabridge.nas.proxies import (
    ConditionNumber,
    KernelMatrices,
    ProxyScore,
    all_images,
    condition_number_score,
    count_linear_regions,
    mean_score,
)
from metabridge.nas.supernet_ntk import CandidateKernels

ADAPTED_PART = {"maml": "all", "anil": "head"}


def make_tasks(tasks: int, ways: int, shots: int, queries: int, *shape: int) -> Episodes:
    """Return tasks with random inputs of a shape. All labels are 0, because no proxy uses them."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(tasks, ways * count, *shape, generator=generator, dtype=torch.float64)
        return x, torch.zeros(tasks, ways * count, dtype=torch.int64)

    return Episodes(*draw(shots), *draw(queries))


@pytest.mark.parametrize(("time", "ridge"), [(math.inf, 1e-3), (1.0, 1e-5), (0.3, 0.0)])
@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (3, 5, 1, 1), (2, 3, 2, 4)])  # tasks, ways, shots, queries
@pytest.mark.parametrize("kernel", ["maml", "anil"])
def test_condition_number_is_that_of_the_meta_ntk(
    kernel: str, sizes: tuple[int, int, int, int], time: float, ridge: float
) -> None:
    net, tasks = mlp(6, 5, width=64).double(), make_tasks(*sizes, 6)
    kernel_matrix = meta_ntk(
        EmpiricalKernel(net, outputs="sum"),
        tasks.query_x,
        tasks.support_x,
        adapts=ADAPTED_PART[kernel],
        time=time,
        ridge=ridge,
    )
    eigenvalues = torch.linalg.eigvalsh(kernel_matrix)
    score = ConditionNumber(kernel, time, ridge)(net, tasks)
    assert score.failure is None
    assert score.value == pytest.approx(float(eigenvalues[-1] / eigenvalues[0]), rel=1e-6)


def test_ntk_uses_all_images_of_all_tasks() -> None:
    net, tasks = mlp(6, 5, width=64).double(), make_tasks(3, 2, 1, 2, 6)
    x = torch.cat([tasks.query_x, tasks.support_x], 1).flatten(0, 1)
    eigenvalues = torch.linalg.eigvalsh(EmpiricalKernel(net, outputs="sum").ntk(x))
    expected = float(eigenvalues[-1] / eigenvalues[0])
    assert ConditionNumber("ntk")(net, tasks).value == pytest.approx(expected, rel=1e-9)


def with_operators_per_edge(count: int) -> ActiveOperators:
    """Return `count` operators for each edge, such that each operator is on some edge of both cells."""
    edges = tuple(frozenset(OPERATORS[(edge + index) % len(OPERATORS)] for index in range(count)) for edge in range(9))
    return ActiveOperators(edges, edges)


@pytest.mark.parametrize("size", [8, 9])  # with an odd size there are more even pixels than odd ones
def test_candidate_kernels_equal_those_of_the_masked_network(size: int) -> None:
    active = with_operators_per_edge(2)
    net, tasks = supernet(active, cells=3, channels=2, size=size).double(), make_tasks(2, 2, 1, 1, 3, size, size)
    removals = [None, ("normal", 0, "avg_pool_3x3"), ("reduction", 5, "dil_conv_3x3")]
    for removal, matrices in CandidateKernels(net, active, all_images(tasks)).matrices(removals):
        set_active_operators(net, active.without(removal))
        expected = KernelMatrices(*EmpiricalKernel(net, outputs="sum").both(all_images(tasks)))
        torch.testing.assert_close(matrices.ntk, expected.ntk, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(matrices.nngp, expected.nngp, rtol=1e-6, atol=1e-9)
        for kernel in ("maml", "anil", "ntk"):
            proxy = ConditionNumber(kernel)
            score = proxy.from_matrices(matrices, tasks=2, queries=2)
            expected_score = proxy.from_matrices(expected, tasks=2, queries=2)
            assert score.value == pytest.approx(expected_score.value, rel=1e-6)


def gradients_per_image(net: nn.Module, x: Tensor) -> Tensor:
    rows = []
    for image in x.split(1):
        grads = torch.autograd.grad(net(image).sum(), list(net.parameters()), materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("candidates_per_pass", [1, 3])
def test_candidate_kernels_equal_products_of_gradients_per_image(candidates_per_pass: int) -> None:
    active = ActiveOperators.full()
    net, x = supernet(active, cells=3, channels=2, size=8).double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    removals = [("normal", 0, "skip"), None, ("normal", 8, "conv_3x3"), ("reduction", 4, "dil_conv_3x3")]
    for removal, matrices in CandidateKernels(net, active, x, candidates_per_pass).matrices(removals):
        set_active_operators(net, active.without(removal))
        rows = gradients_per_image(net, x)
        torch.testing.assert_close(matrices.ntk, rows @ rows.mT, rtol=1e-9, atol=1e-12)


def test_running_out_of_memory_reduces_the_candidates_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    active = with_operators_per_edge(1)
    net, x = supernet(active, cells=3, channels=2, size=8).double(), torch.rand(2, 3, 8, 8, dtype=torch.float64)
    removals = [None, *active][:9]
    expected = dict(CandidateKernels(net, active, x, 8).matrices(removals))
    run_copies, pass_sizes = CandidateKernels._run_copies, []

    def run_at_most_two(self: CandidateKernels, removals: Sequence[EdgeOperator | None]) -> tuple[Tensor, Tensor]:
        pass_sizes.append(len(removals))
        if len(removals) > 2:
            raise torch.OutOfMemoryError
        return run_copies(self, removals)

    monkeypatch.setattr(CandidateKernels, "_run_copies", run_at_most_two)
    matrices_of_removal = dict(CandidateKernels(net, active, x, 8).matrices(removals))
    assert pass_sizes == [8, 4, 2, 2, 2, 2, 1]  # 8 and 4 did not fit
    assert list(matrices_of_removal) == removals
    for removal, matrices in matrices_of_removal.items():
        torch.testing.assert_close(matrices.ntk, expected[removal].ntk, rtol=1e-12, atol=1e-12)


def test_a_source_without_operators_has_no_gradient() -> None:
    edges = tuple(frozenset() if source in (0, 3) else {"conv_3x3"} for _, source in EDGES)
    active = ActiveOperators(edges, edges)
    net, x = supernet(active, cells=3, channels=2, size=8).double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    ((_, matrices),) = CandidateKernels(net, active, x).matrices([None])
    rows = gradients_per_image(net, x)
    torch.testing.assert_close(matrices.ntk, rows @ rows.mT, rtol=1e-9, atol=1e-12)


def test_layers_that_do_not_depend_on_the_removed_operator_are_not_run_again() -> None:
    class Result(NamedTuple):
        output: Tensor

    def make_runner(layers: Sequence[nn.Module]) -> Callable[[Tensor], Result]:
        def run(x: Tensor) -> Result:
            inputs_of_runs.append(x)
            return Result(nn.Sequential(*layers)(x))

        return run

    inputs_of_runs: list[Tensor] = []
    active, cache, x = with_operators_per_edge(3), ForwardCache(), torch.rand(2, 3, 8, 8)
    forward = CachedForward(supernet(active, cells=3, channels=2, size=8).features, make_runner)

    def count_runs(removal: EdgeOperator | None, cache: ForwardCache) -> int:
        inputs_of_runs.clear()
        forward(x, active.without(removal), cache)
        return len(inputs_of_runs)

    supernet_runs = count_runs(None, cache)
    assert count_runs(None, ForwardCache(cache)) == 0
    assert count_runs(("normal", 0, "max_pool_3x3"), ForwardCache(cache)) > supernet_runs / 2
    assert 0 < count_runs(("reduction", 8, "skip"), ForwardCache(cache)) < supernet_runs / 2  # only the last cell


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_an_invalid_number_of_candidates_per_pass_raises_an_input_error(count: int) -> None:
    active = with_operators_per_edge(1)
    with pytest.raises(InputError, match="candidates_per_pass is"):
        CandidateKernels(supernet(active, cells=3, channels=2), active, torch.rand(2, 3, 8, 8), count)


def test_candidate_kernels_do_not_change_the_active_operators_of_the_network() -> None:
    all_operators, active = ActiveOperators.full(), with_operators_per_edge(1)
    net = supernet(all_operators, cells=3, channels=2)
    list(CandidateKernels(net, active, torch.rand(2, 3, 8, 8)).matrices([None]))
    assert net.features.active == all_operators


def test_candidate_kernels_require_group_norm() -> None:
    with pytest.raises(InputError, match="norm='group'"):
        CandidateKernels(
            supernet(with_operators_per_edge(1), cells=3, channels=2, norm="batch"),
            with_operators_per_edge(1),
            torch.rand(2, 3, 8, 8),
        )


BREAKPOINTS = {nn.ReLU: (0.0,), nn.LeakyReLU: (0.0,), nn.PReLU: (0.0,), nn.ReLU6: (0.0, 6.0), nn.Hardtanh: (-1.0, 1.0)}


def count_by_brute_force(net: nn.Sequential, inputs: Tensor) -> int:
    """Count the distinct activation patterns, one input, layer and breakpoint at a time."""
    patterns = set()
    for x in inputs:
        pattern = ""
        for layer in net:
            for breakpoint_value in BREAKPOINTS.get(type(layer), ()):
                pattern += "".join("1" if value > breakpoint_value else "0" for value in x.flatten().tolist())
            x = layer(x)
        patterns.add(pattern)
    return len(patterns)


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (3, 1), (5, 3), (20, 2)])
@pytest.mark.parametrize("activation", BREAKPOINTS)
def test_regions_equal_brute_force(width: int, depth: int, activation: type[nn.Module]) -> None:
    torch.manual_seed(width)
    layers = [layer for index in range(depth) for layer in (nn.Linear(width if index else 2, width), activation())]
    net, inputs = nn.Sequential(*layers, nn.Linear(width, 1)), 9 * torch.randn(200, 2)
    assert count_linear_regions(net, inputs) == ProxyScore(count_by_brute_force(net, inputs))


def test_a_prelu_in_a_network_with_a_relu_is_counted_too() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 20), nn.PReLU())
    inputs = torch.linspace(-5, 5, 200)[:, None]
    assert count_linear_regions(net, inputs).value == count_by_brute_force(net, inputs) > 2


def test_batch_norm_over_the_batch_is_rejected() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU())
    with pytest.raises(InputError, match=r"batch norm '1' normalizes over the batch.*Use net.eval()"):
        count_linear_regions(net, torch.randn(9, 2))
    assert count_linear_regions(net.eval(), torch.randn(9, 2)).failure is None
    with pytest.raises(InputError, match="inputs is empty"):
        count_linear_regions(net, torch.randn(0, 2))


def test_one_relu_on_a_line_has_two_regions() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU())
    assert count_linear_regions(net, torch.tensor([[-2.0], [-1.0], [1.0], [3.0]])).value == 2


def test_regions_do_not_depend_on_how_inputs_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    net, inputs = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(100, 2)
    expected = count_linear_regions(net, inputs)
    monkeypatch.setattr("metabridge.nas.proxies._INPUT_ENTRIES_PER_PASS", 14)  # seven inputs at a time
    assert count_linear_regions(net, inputs) == expected
    assert 1 < expected.value < 100


@pytest.mark.parametrize("candidates_per_pass", [1, 5])
@pytest.mark.parametrize("count", [1, 2])  # with one operator per edge, the ReLU of a source may have one consumer
def test_fast_region_counts_equal_those_of_the_masked_network(candidates_per_pass: int, count: int) -> None:
    active = with_operators_per_edge(count)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.linspace(0, 1, 300).view(-1, 1, 1, 1) * torch.randn(1, 1, 3, 3, generator=generator)
    net = thin_supernet(active, seed=0, patch_count=len(inputs))
    counts = set()
    for removal, score in LinearRegionCounter(active, inputs, 0, candidates_per_pass).scores([None, *active]):
        set_active_operators(net, active.without(removal))
        assert score == count_linear_regions(net, inputs)
        counts.add(score.value)
    assert len(counts) > 1


def test_a_network_without_relu_has_no_regions_to_count() -> None:
    assert "no ReLU" in str(count_linear_regions(nn.Linear(2, 1), torch.randn(3, 2)).failure)


def test_outputs_that_are_nan_are_reported() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    nn.init.constant_(net[0].weight, math.nan)
    assert "NaN" in str(count_linear_regions(net, torch.randn(3, 2)).failure)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kernel", ["maml", "anil", "ntk"])
def test_a_kernel_that_is_not_finite_is_reported(kernel: str, value: float) -> None:
    matrix = torch.eye(4)
    matrix[0, 1] = value
    score = ConditionNumber(kernel).from_matrices(KernelMatrices(matrix, matrix), tasks=2, queries=1)
    assert "NaN or infinite" in str(score.failure)


def test_a_smallest_eigenvalue_lost_in_rounding_is_reported() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1e-8], dtype=torch.float64))
    assert condition_number_score(matrix, eps=1e-16).value == pytest.approx(1e8)
    assert "lost in rounding" in str(condition_number_score(matrix, eps=1e-7).failure)
    score = ConditionNumber("ntk").from_matrices(KernelMatrices(matrix.float(), None), tasks=1, queries=1)
    assert "lost in rounding" in str(score.failure)


def test_a_duplicate_support_image_is_reported_if_there_is_no_ridge() -> None:
    net, tasks = mlp(6, 5, width=16).double(), make_tasks(2, 3, 1, 1, 6)
    tasks.support_x[0, 1] = tasks.support_x[0, 0]
    assert "points are 0 and 1" in str(ConditionNumber("maml", ridge=0.0)(net, tasks).failure)


@pytest.mark.parametrize("seed", range(8))
def test_an_eigenvalue_of_the_support_kernel_lost_in_rounding_is_reported(seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 6))  # K has rank 17: 16 features and 1
    tasks = make_tasks(1, 6, 3, 1, 30)  # 18 support images
    for dtype in (torch.float64, torch.float32):
        score = ConditionNumber("anil", ridge=0.0)(net.to(dtype), tasks.to(dtype=dtype))
        assert "is singular" in str(score.failure)


@pytest.mark.parametrize("kernel", ["maml", "anil"])
@pytest.mark.parametrize("seed", range(4))
def test_cancellation_by_adaptation_is_reported(kernel: str, seed: int) -> None:
    """For almost equal images, the MetaNTK is a small difference of large kernel values."""
    tasks = make_tasks(2, 5, 1, 1, 784)
    similar_images = replace(tasks, support_x=0.8 + 3e-3 * tasks.support_x, query_x=0.8 + 3e-3 * tasks.query_x)
    net, proxy = mlp(784, 5, seed=seed), ConditionNumber(kernel)
    assert proxy(net.double(), similar_images).failure is None
    assert "lost in rounding" in str(proxy(net.float(), similar_images.to(dtype=torch.float32)).failure)
    values = [proxy(net.to(dtype), tasks.to(dtype=dtype)).value for dtype in (torch.float32, torch.float64)]
    assert values[0] == pytest.approx(values[1], rel=1e-2)


@pytest.mark.parametrize("kernel", ["maml", "anil", "ntk"])
def test_a_network_whose_outputs_are_not_finite_is_reported(kernel: str) -> None:
    net, tasks = mlp(6, 5, width=16).double(), make_tasks(2, 3, 1, 1, 6)
    nn.init.constant_(net.head.weight, math.nan)
    assert "outputs are NaN" in str(ConditionNumber(kernel)(net, tasks).failure)


def test_a_value_that_is_not_finite_always_has_a_failure() -> None:
    assert ProxyScore(math.nan).failure
    assert ProxyScore(math.inf).failure
    assert mean_score([ProxyScore(1.0), ProxyScore(math.inf)]).failure


@pytest.mark.parametrize("options", [{"kernel": "mtl"}, {"time": 0.0}, {"ridge": -1.0}, {"ridge": math.nan}])
def test_invalid_settings_are_rejected(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        ConditionNumber(**options)


def test_proxies_accept_any_module() -> None:
    tasks = make_tasks(2, 5, 1, 1, 1, 28, 28).to(dtype=torch.float32)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9 * 9, 5))
    assert ConditionNumber("anil")(net, tasks).value > 1
    assert 1 < count_linear_regions(net, tasks.query_x.flatten(0, 1)).value <= 10  # there are ten query images
