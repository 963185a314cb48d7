"""Minima of the losses of NAL and MAML for networks of a single neuron (Collins et al. 2022, figures 4 to 6).

The teacher network of a task, which produces its labels, and the trained student network have one neuron with two
weights (M = 1, d = 2). The inputs of hard tasks have half the variance of those of easy tasks. Each task has τ episodes
of n₂ support and n₁ query examples. The loss of MAML is the query loss after one gradient step on the support set. The
loss of non-adaptive learning (NAL) is the loss on the same n = τn₁ queries without this step (§4, app. C.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from metabridge.environments.teacher_networks import Activation
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.landscape_thm1 import EASY, HARD, BoundCheck, check_theorem
from metabridge.report.results import Row
from metabridge.theory.loss_surface import EXTENT
from metabridge.theory.sampled_minima import SampledMinima
from metabridge.theory.teachers import TeacherTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Neuron = tuple[float, float]  # its weights

SQUARE: tuple[Neuron, ...] = ((1.0, 1.0), (-1.0, 1.0), (-1.0, -1.0), (1.0, -1.0))
# The paper does not give α. Here it is the inverse of the curvature of an easy task at the origin, which is σ'(0)², or
# ½ for ReLU. One step then solves the linearized easy task, as α = 1/ρ_E does in corollary 2.
ALPHA: dict[Activation, float] = {"softplus": 4.0, "sigmoid": 16.0, "tanh": 1.0, "relu": 2.0}


@dataclass(frozen=True)
class Case:
    """A few easy and hard tasks with the same activation."""

    name: str
    activation: Activation
    support: int  # n₂ = m, support examples of an episode
    easy: tuple[Neuron, ...]  # the teacher's neuron of each easy task
    hard: tuple[Neuron, ...] = ()  # the same for hard tasks
    minima_differ: bool | None = None  # whether they do in the paper; None if the paper does not show this case

    @property
    def tasks(self) -> list[TeacherTask]:
        """The tasks, hard ones first."""
        variances = [(neuron, HARD) for neuron in self.hard] + [(neuron, EASY) for neuron in self.easy]
        return [
            TeacherTask(torch.tensor([neuron], dtype=torch.float64), self.activation, variance)
            for neuron, variance in variances
        ]

    @property
    def neurons(self) -> dict[str, Sequence[Neuron]]:
        """The neurons by the labels that they have in figures."""
        return {"neuron of an easy task": self.easy, "neuron of a hard task": self.hard}


@dataclass(frozen=True)
class NetSettings:
    """The cases and the numbers of samples. n₁, τ and n₂ are those of the paper at both scales."""

    cases: tuple[Case, ...]
    draws: int  # how often all episodes are sampled; the minima are computed for each draw
    grid: int  # grid points per axis of the drawn landscapes
    test_episodes: int  # new episodes of each task, on which the risks of the minima are measured
    pairs: int  # pairs of teachers for which theorem 1 is checked
    episodes: int = 25  # τ
    queries: int = 20  # n₁


def settings_by_scale(cases: tuple[Case, ...]) -> dict[str, NetSettings]:
    """Return the settings of both scales."""
    return {
        "quick": NetSettings(cases, draws=3, grid=41, test_episodes=100, pairs=3),
        "paper": NetSettings(cases, draws=10, grid=81, test_episodes=400, pairs=12),
    }


class CaseMinima(NamedTuple):
    """The minima of NAL and MAML in a case."""

    case: Case
    minima: SampledMinima


@dataclass(frozen=True)
class NetData:
    """The minima in each case, and the checks of theorem 1 for each activation."""

    minima: tuple[CaseMinima, ...]
    checks: Mapping[Activation, list[BoundCheck]]


def measure_nets(settings: NetSettings, options: ExperimentOptions) -> NetData:
    """Find the minima in each case, and check theorem 1 for each activation."""
    minima = tuple(
        CaseMinima(
            case,
            SampledMinima.find(
                case.tasks,
                ALPHA[case.activation],
                shots=case.support,
                queries=settings.queries,
                episodes=settings.episodes,
                test_episodes=settings.test_episodes,
                draws=settings.draws,
                grid_size=settings.grid,
                seed=options.seed,
            ),
        )
        for case in settings.cases
    )
    activations = dict.fromkeys(case.activation for case in settings.cases)
    return NetData(minima, {name: check_theorem(name, settings.pairs, options.seed) for name in activations})


def minima_rows(case_minima: CaseMinima) -> Iterator[Row]:
    """Yield rows of the minima, their distances from the neurons, their risks, and the differences between the methods.

    If the paper's minima differ, a difference agrees if its whole interval is on the side that the paper claims.
    """
    case, minima = case_minima
    risks = minima.risks
    draws = f"over {len(risks['NAL'])} draws of all episodes"

    def row(name: str, metric: str, values: Sequence[float], note: str = draws, above: float | None = None) -> Row:
        """Return a row with the mean of the values. If the paper's minima differ, it agrees if the mean is `above`."""
        row = Row.mean(f"{case.name}: {name}", metric, values, note=note)
        if above is None or not case.minima_differ:
            return row
        assert row.ci95 is not None
        note = f"the paper claims more than {above:g}; {note}"
        return replace(row, agrees=row.ours - row.ci95 > above, note=note)

    for method in ("NAL", "MAML"):
        for axis, label in enumerate(("first", "second")):
            yield row(f"minimum of {method}, {label} coordinate", "w", minima.positions[method][:, axis].tolist())
        for hardness, neurons in (("hard", case.hard), ("easy", case.easy)):
            if neurons:
                distances = minima.distances(method, neurons)
                yield row(f"minimum of {method} to {hardness} tasks", "mean distance", distances)
        note = f"F_m, with m = {case.support} samples; {draws}"
        yield row(f"risk of {method}", "loss after a step", risks[method], note)
    if case.hard:
        nal, maml = (minima.distances(method, case.hard) for method in ("NAL", "MAML"))
        differences = [a - b for a, b in zip(nal, maml)]
        yield row("mean distance to hard tasks, NAL − MAML", "distance", differences, above=0.0)
    ratios = [nal / maml for nal, maml in zip(risks["NAL"], risks["MAML"])]
    yield row("risk of NAL / risk of MAML", "ratio", ratios, above=1.0)
    yield from population_rows(case, minima)


def population_rows(case: Case, minima: SampledMinima) -> Iterator[Row]:
    """Yield a row of the distance between the population minima of NAL and MAML (m = ∞), if both are found."""
    points = minima.population_minima()
    if points is None:
        return
    distance = float((points["NAL"] - points["MAML"]).norm())
    note = "m = ∞; " + ", ".join(f"{name} ({point[0]:.3f}, {point[1]:.3f})" for name, point in points.items())
    expected_equal = case.minima_differ is False
    yield Row(
        f"{case.name}: population minima of NAL and MAML",
        "distance",
        published=0.0 if expected_equal else None,
        ours=distance,
        agrees=distance < 1e-3 if expected_equal else None,  # 0 up to the error of the search
        note=f"{note}; equal in the paper, which does not give the neurons of its tasks" if expected_equal else note,
    )


def draw_minima(panels: Sequence[Axes], case_minima: CaseMinima) -> None:
    """Draw the loss surfaces of NAL and MAML, each with all neurons and both minima of the first draw."""
    from metabridge.report.loss_surface_figures import draw_loss_surface

    case, minima = case_minima
    positions = {f"minimum of {method}'s loss": w[:1].tolist() for method, w in minima.positions.items()}
    for axes, (method, losses) in zip(panels, minima.surfaces.items()):
        stage = "before adaptation" if method == "NAL" else "after one step"
        draw_loss_surface(axes, losses, EXTENT, f"{method}: loss {stage}", {**case.neurons, **positions})
