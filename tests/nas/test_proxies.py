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
from metabridge.kernels.meta_kernels import split_kernel
from metabridge.models import mlp
from metabridge.models.cells import mask, supernet
from metabridge.nas import EDGES, OPERATORS, ActiveOperators, EdgeOperator
from metabridge.nas.cached_forward import Memory, Walker
from metabridge.nas.linear_regions import ThinRegions, thin
from metabridge.nas.proxies import Conditioning, Grams, Score, condition_number, mean, points, regions
from metabridge.nas.supernet_ntk import Candidates

ADAPTS = {"maml": "all", "anil": "head"}


def sampled(tasks: int, ways: int, shots: int, queries: int, *shape: int) -> Episodes:
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(tasks, ways * count, *shape, generator=generator, dtype=torch.float64)
        return x, torch.zeros(tasks, ways * count, dtype=torch.int64)

    return Episodes(*drawn(shots), *drawn(queries))


@pytest.mark.parametrize(("time", "ridge"), [(math.inf, 1e-3), (1.0, 1e-5), (0.3, 0.0)])
@pytest.mark.parametrize("form", [(1, 2, 1, 1), (3, 5, 1, 1), (2, 3, 2, 4)])
@pytest.mark.parametrize("kernel", ["maml", "anil"])
def test_condition_number_is_that_of_the_kernel_between_tasks(
    kernel: str, form: tuple[int, int, int, int], time: float, ridge: float
) -> None:
    net, tasks = mlp(6, 5, width=64).double(), sampled(*form, 6)
    exact = split_kernel(
        EmpiricalKernel(net, outputs="sum"),
        tasks.query_x,
        tasks.support_x,
        adapts=ADAPTS[kernel],
        time=time,
        ridge=ridge,
    )
    values = torch.linalg.eigvalsh(exact)
    found = Conditioning(kernel, time, ridge)(net, tasks)
    assert found.trouble is None
    assert found.value == pytest.approx(float(values[-1] / values[0]), rel=1e-6)


def test_plain_ntk_is_over_all_images_of_all_tasks() -> None:
    net, tasks = mlp(6, 5, width=64).double(), sampled(3, 2, 1, 2, 6)
    x = torch.cat([tasks.query_x, tasks.support_x], 1).flatten(0, 1)
    values = torch.linalg.eigvalsh(EmpiricalKernel(net, outputs="sum").ntk(x))
    assert Conditioning("ntk")(net, tasks).value == pytest.approx(float(values[-1] / values[0]), rel=1e-9)


def thinned(each: int) -> ActiveOperators:
    """So many operators an edge, all of them somewhere in either cell."""
    edges = tuple(frozenset(OPERATORS[(edge + place) % len(OPERATORS)] for place in range(each)) for edge in range(9))
    return ActiveOperators(edges, edges)


@pytest.mark.parametrize("size", [8, 9])  # with an odd side there are more even pixels than odd ones
def test_fast_candidates_equal_the_reference(size: int) -> None:
    active = thinned(2)
    net, tasks = supernet(active, cells=3, channels=2, size=size).double(), sampled(2, 2, 1, 1, 3, size, size)
    removals = [None, ("normal", 0, "avg_pool_3x3"), ("reduction", 5, "dil_conv_3x3")]
    for removal, fast in Candidates(net, active, points(tasks)).grams(removals):
        mask(net, active.without(removal))
        exact = Grams(*EmpiricalKernel(net, outputs="sum").both(points(tasks)))
        torch.testing.assert_close(fast.ntk, exact.ntk, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(fast.nngp, exact.nngp, rtol=1e-6, atol=1e-9)
        for kernel in ("maml", "anil", "ntk"):
            found, wanted = (Conditioning(kernel).of_grams(grams, tasks=2, queries=2) for grams in (fast, exact))
            assert found.value == pytest.approx(wanted.value, rel=1e-6)


def gradients_of_each(net: nn.Module, x: Tensor) -> Tensor:
    rows = []
    for image in x.split(1):
        slopes = torch.autograd.grad(net(image).sum(), list(net.parameters()), materialize_grads=True)
        rows.append(torch.cat([slope.flatten() for slope in slopes]))
    return torch.stack(rows)


@pytest.mark.parametrize("side_by_side", [1, 3])
def test_candidates_equal_products_of_the_gradients_of_each_image(side_by_side: int) -> None:
    active = ActiveOperators.full()
    net, x = supernet(active, cells=3, channels=2, size=8).double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    removals = [("normal", 0, "skip"), None, ("normal", 8, "conv_3x3"), ("reduction", 4, "dil_conv_3x3")]
    for removal, fast in Candidates(net, active, x, side_by_side).grams(removals):
        mask(net, active.without(removal))
        rows = gradients_of_each(net, x)
        torch.testing.assert_close(fast.ntk, rows @ rows.mT, rtol=1e-9, atol=1e-12)


def test_where_memory_ends_fewer_candidates_go_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    active = thinned(1)
    net, x = supernet(active, cells=3, channels=2, size=8).double(), torch.rand(2, 3, 8, 8, dtype=torch.float64)
    removals = [None, *active][:9]
    exact = dict(Candidates(net, active, x, 8).grams(removals))
    whole, tried = Candidates._together, []

    def small(self: Candidates, chosen: Sequence[EdgeOperator | None]) -> tuple[Tensor, Tensor]:
        tried.append(len(chosen))
        if len(chosen) > 2:
            raise torch.OutOfMemoryError
        return whole(self, chosen)

    monkeypatch.setattr(Candidates, "_together", small)
    found = dict(Candidates(net, active, x, 8).grams(removals))
    assert tried == [8, 4, 2, 2, 2, 2, 1]
    assert list(found) == removals
    for removal, grams in found.items():
        torch.testing.assert_close(grams.ntk, exact[removal].ntk, rtol=1e-12, atol=1e-12)


def test_a_source_that_no_operator_takes_up_has_no_part() -> None:
    edges = tuple(frozenset() if source in (0, 3) else {"conv_3x3"} for _, source in EDGES)
    active = ActiveOperators(edges, edges)
    net, x = supernet(active, cells=3, channels=2, size=8).double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    ((_, fast),) = Candidates(net, active, x).grams([None])
    rows = gradients_of_each(net, x)
    torch.testing.assert_close(fast.ntk, rows @ rows.mT, rtol=1e-9, atol=1e-12)


def test_what_a_missing_operator_does_not_reach_is_not_run_again() -> None:
    class Ran(NamedTuple):
        output: Tensor

    def run(layers: Sequence[nn.Module]) -> Callable[[Tensor], Ran]:
        def step(x: Tensor) -> Ran:
            count[0] += 1
            return Ran(nn.Sequential(*layers)(x))

        return step

    count, active, memory, x = [0], thinned(3), Memory(), torch.rand(2, 3, 8, 8)
    walker = Walker(supernet(active, cells=3, channels=2, size=8).features, run)

    def ran(removal: EdgeOperator | None, known: Memory) -> int:
        count[0] = 0
        walker(x, active.without(removal), known)
        return count[0]

    whole = ran(None, memory)
    assert ran(None, Memory(memory)) == 0
    assert ran(("normal", 0, "max_pool_3x3"), Memory(memory)) > whole / 2
    assert 0 < ran(("reduction", 8, "skip"), Memory(memory)) < whole / 2  # the last cell, and nothing before it


def test_candidates_want_group_norm() -> None:
    with pytest.raises(InputError, match="norm='group'"):
        Candidates(supernet(thinned(1), cells=3, channels=2, norm="batch"), thinned(1), torch.rand(2, 3, 8, 8))


BENDS = {nn.ReLU: (0.0,), nn.LeakyReLU: (0.0,), nn.PReLU: (0.0,), nn.ReLU6: (0.0, 6.0), nn.Hardtanh: (-1.0, 1.0)}


def brute_force(net: nn.Sequential, inputs: Tensor) -> int:
    """Distinct strings of sides, one input at a time, layer by layer and bend by bend."""
    found = set()
    for x in inputs:
        sides = ""
        for layer in net:
            for bend in BENDS.get(type(layer), ()):
                sides += "".join("1" if value > bend else "0" for value in x.flatten().tolist())
            x = layer(x)
        found.add(sides)
    return len(found)


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (3, 1), (5, 3), (20, 2)])
@pytest.mark.parametrize("kind", BENDS)
def test_regions_equal_brute_force(width: int, depth: int, kind: type[nn.Module]) -> None:
    torch.manual_seed(width)
    layers = [layer for place in range(depth) for layer in (nn.Linear(width if place else 2, width), kind())]
    net, inputs = nn.Sequential(*layers, nn.Linear(width, 1)), 9 * torch.randn(200, 2)
    assert regions(net, inputs) == Score(brute_force(net, inputs))


def test_another_bend_beside_a_relu_is_not_overlooked() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 20), nn.PReLU())
    inputs = torch.linspace(-5, 5, 200)[:, None]
    assert regions(net, inputs).value == brute_force(net, inputs) > 2


def test_regions_want_inputs_that_do_not_depend_on_each_other() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU())
    with pytest.raises(InputError, match=r"batch norm '1' normalises by the batch.*Use net.eval()"):
        regions(net, torch.randn(9, 2))
    assert regions(net.eval(), torch.randn(9, 2)).trouble is None
    with pytest.raises(InputError, match="inputs is empty"):
        regions(net, torch.randn(0, 2))


def test_regions_of_one_relu_on_a_line_are_two() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU())
    assert regions(net, torch.tensor([[-2.0], [-1.0], [1.0], [3.0]])).value == 2


def test_regions_do_not_depend_on_how_inputs_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    net, inputs = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(100, 2)
    whole = regions(net, inputs)
    monkeypatch.setattr("metabridge.nas.proxies._AT_ONCE", 14)
    assert regions(net, inputs) == whole
    assert 1 < whole.value < 100


@pytest.mark.parametrize("side_by_side", [1, 5])
@pytest.mark.parametrize("each", [1, 2])  # with one an edge, the first ReLU of a source may have no other reader
def test_regions_of_the_thin_network_are_those_of_what_is_left(side_by_side: int, each: int) -> None:
    active = thinned(each)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.linspace(0, 1, 300).view(-1, 1, 1, 1) * torch.randn(1, 1, 3, 3, generator=generator)
    net = thin(active, seed=0, inputs=len(inputs))
    counts = set()
    for removal, found in ThinRegions(active, inputs, 0, side_by_side).scores([None, *active]):
        mask(net, active.without(removal))
        assert found == regions(net, inputs)
        counts.add(found.value)
    assert len(counts) > 1


def test_a_network_without_relu_has_no_regions_to_count() -> None:
    assert "no ReLU" in str(regions(nn.Linear(2, 1), torch.randn(3, 2)).trouble)


def test_outputs_that_are_nan_are_reported() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    nn.init.constant_(net[0].weight, math.nan)
    assert "NaN" in str(regions(net, torch.randn(3, 2)).trouble)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kernel", ["maml", "anil", "ntk"])
def test_a_kernel_that_is_not_finite_is_reported(kernel: str, bad: float) -> None:
    gram = torch.eye(4)
    gram[0, 1] = bad
    found = Conditioning(kernel).of_grams(Grams(gram, gram), tasks=2, queries=1)
    assert "NaN or infinite" in str(found.trouble)


def test_an_eigenvalue_lost_in_rounding_is_reported() -> None:
    exact = torch.diag(torch.tensor([1.0, 1e-8], dtype=torch.float64))
    assert condition_number(exact, eps=1e-16).value == pytest.approx(1e8)
    assert "lost in rounding" in str(condition_number(exact, eps=1e-7).trouble)
    single = Conditioning("ntk").of_grams(Grams(exact.float(), None), tasks=1, queries=1)
    assert "lost in rounding" in str(single.trouble)


def test_the_same_image_twice_in_a_support_is_reported_without_a_ridge() -> None:
    net, tasks = mlp(6, 5, width=16).double(), sampled(2, 3, 1, 1, 6)
    tasks.support_x[0, 1] = tasks.support_x[0, 0]
    assert "points 0 and 1" in str(Conditioning("maml", ridge=0.0)(net, tasks).trouble)


@pytest.mark.parametrize("seed", range(8))
def test_a_mode_of_the_support_that_single_precision_loses_is_reported(seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 6))  # K has the rank 17
    tasks = sampled(1, 6, 3, 1, 30)
    for dtype in (torch.float64, torch.float32):
        found = Conditioning("anil", ridge=0.0)(net.to(dtype), tasks.to(dtype=dtype))
        assert "cannot be inverted" in str(found.trouble)


@pytest.mark.parametrize("kernel", ["maml", "anil"])
@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_that_is_lost_beside_what_adaptation_takes_away_is_reported(kernel: str, seed: int) -> None:
    tasks = sampled(2, 5, 1, 1, 784)
    alike = replace(tasks, support_x=0.8 + 3e-3 * tasks.support_x, query_x=0.8 + 3e-3 * tasks.query_x)
    net, proxy = mlp(784, 5, seed=seed), Conditioning(kernel)
    assert proxy(net.double(), alike).trouble is None
    assert "lost in rounding" in str(proxy(net.float(), alike.to(dtype=torch.float32)).trouble)
    usual = [proxy(net.to(dtype), tasks.to(dtype=dtype)).value for dtype in (torch.float32, torch.float64)]
    assert usual[0] == pytest.approx(usual[1], rel=1e-2)


@pytest.mark.parametrize("kernel", ["maml", "anil", "ntk"])
def test_a_network_whose_outputs_are_not_finite_is_reported(kernel: str) -> None:
    net, tasks = mlp(6, 5, width=16).double(), sampled(2, 3, 1, 1, 6)
    nn.init.constant_(net.head.weight, math.nan)
    assert "outputs are NaN" in str(Conditioning(kernel)(net, tasks).trouble)


def test_a_value_that_is_no_number_is_never_without_trouble() -> None:
    assert Score(math.nan).trouble
    assert Score(math.inf).trouble
    assert mean([Score(1.0), Score(math.inf)]).trouble


@pytest.mark.parametrize("wrong", [{"kernel": "mtl"}, {"time": 0.0}, {"ridge": -1.0}, {"ridge": math.nan}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Conditioning(**wrong)


def test_any_module_can_be_scored() -> None:
    tasks = sampled(2, 5, 1, 1, 1, 28, 28).to(dtype=torch.float32)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(324, 5))
    assert Conditioning("anil")(net, tasks).value > 1
    assert 1 < regions(net, tasks.query_x.flatten(0, 1)).value <= 10
