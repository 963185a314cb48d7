"""Whether a diagnosis is right on linear regression tasks, where the truth is known.

The problems, landscapes of tasks with a step size, are random. The ratio of risks that the diagnosis predicts from
sampled tasks is compared with the ratio of the exact risks of NAL and MAML after both are trained on other tasks, and
its interval with the ratio after training on infinitely many. Of two problems that differ in r_H only, adaptation gains
more in the one with the smaller r_H; the diagnosis must say so even where steps are short and gains small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metabridge.diagnosis import Diagnosis, diagnose
from metabridge.diagnosis.advice import MIN_RATIO
from metabridge.environments import HardEasy, Landscape, LinearTasks, TaskGroup
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.report.results import Row
from metabridge.theory.landscape import (
    Risks,
    empirical_maml,
    empirical_nal,
    maml_solution,
    nal_solution,
    risk_above_floor,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLEAR = (1.1, 1.5)  # plain pre-training is right below the first true ratio, adaptation above the second
QUERIES = 25
STEEPEST = 1.5  # the largest step, times the largest curvature; from 2 on gradient descent diverges
WIDER, SHORTER = 4, 0.1  # factors of r_H in the second problem of a pair, and of the step in both
TRAINING_TASKS = 500  # for NAL and MAML


@dataclass(frozen=True)
class Settings:
    """Numbers of problems, of pairs of problems, and of tasks in a diagnosis."""

    problems: int
    pairs: int
    tasks: int


SETTINGS = {"quick": Settings(problems=16, pairs=8, tasks=100), "paper": Settings(problems=120, pairs=40, tasks=200)}


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """A landscape, the size of the adaptation step, and the number of samples for it."""

    landscape: Landscape
    alpha: float
    m: int

    @classmethod
    def random(cls, seed: int) -> LinearProblem:
        """Draw hard and easy tasks: for even seeds as in Collins et al. 2022, for odd ones with random covariances."""
        generator = torch.Generator().manual_seed(seed)

        def log_uniform(low: float, high: float) -> float:
            share = float(torch.rand((), generator=generator, dtype=torch.float64))
            return float(low * (high / low) ** share)

        d = int(log_uniform(5, 21))
        easy = log_uniform(0.5, 2)
        hard, R = easy * log_uniform(0.03, 1), log_uniform(0.5, 8)
        r_hard, r_easy, noise = log_uniform(0.02, 2), log_uniform(0.02, 2), log_uniform(0.01, 1)
        alpha, m = log_uniform(0.8, 1.1) / easy, int(log_uniform(30, 500))
        if seed % 2 == 0:
            return cls(HardEasy(hard, easy, R, r_hard, r_easy, d, noise).landscape, alpha, m)
        center = torch.nn.functional.normalize(torch.randn(d, generator=generator).double(), dim=0) * R * math.sqrt(d)
        groups = (
            TaskGroup(hard * _random_covariance(d, generator), center, r_hard, noise, 0.5),
            TaskGroup(easy * _random_covariance(d, generator), 0.0, r_easy, noise, 0.5),
        )
        landscape = Landscape(groups, d)
        curvature = float(torch.linalg.eigvalsh(landscape.distribution.covariance).max())
        return cls(landscape, min(alpha, STEEPEST / curvature), m)

    def diagnose(self, tasks: int, seed: int) -> Diagnosis:
        """Diagnose sampled tasks."""
        return diagnose(LinearTasks(self.landscape, self.m, QUERIES), tasks=tasks, alpha=self.alpha, seed=seed)

    def trained_risks(self, seed: int) -> Risks:
        """Train NAL and MAML on sampled tasks, and return the exact 𝓔_m of both."""
        generator = torch.Generator().manual_seed(seed)
        episodes = LinearTasks(self.landscape, self.m, QUERIES).sample(TRAINING_TASKS, generator)
        return self._risks(empirical_nal(episodes), empirical_maml(episodes, self.alpha))

    def population_risks(self) -> Risks:
        """Return 𝓔_m of both after training on infinitely many tasks."""
        return self._risks(nal_solution(self.landscape), maml_solution(self.landscape, self.alpha, self.m))

    def _risks(self, nal: Tensor, maml: Tensor) -> Risks:
        risks = risk_above_floor(self.landscape, torch.stack([nal, maml]), self.alpha, self.m)
        return Risks(*risks.tolist())


@dataclass(frozen=True)
class Trial:
    """The diagnosis of a problem, and its ratios of risks after training on finitely and on infinitely many tasks."""

    diagnosis: Diagnosis
    trained: float
    population: float

    @property
    def right(self) -> bool | None:
        """Whether the recommendation is right; None where the true ratio is not clear."""
        if CLEAR[0] <= self.trained <= CLEAR[1]:
            return None
        return self.diagnosis.advice.adapts == (self.trained > CLEAR[1])

    @property
    def covered(self) -> bool:
        """Whether the population ratio is in the interval."""
        return self.diagnosis.ratio.low <= self.population <= self.diagnosis.ratio.high

    @property
    def error(self) -> float:
        """Population ratio minus predicted one, in half-widths of the interval: it is outside below −1 and above 1."""
        ratio = self.diagnosis.ratio
        side = ratio.high - ratio.value if self.population > ratio.value else ratio.value - ratio.low
        return (self.population - ratio.value) / max(side, 1e-12)


@dataclass(frozen=True)
class Pair:
    """The diagnoses of two problems that differ in r_H only. Adaptation gains more in the first."""

    narrow: Diagnosis
    wide: Diagnosis

    @property
    def separated(self) -> bool:
        """Whether the intervals of their ratios do not overlap."""
        return not self.narrow.ratio.overlaps(self.wide.ratio)

    @property
    def ranked(self) -> bool:
        """Whether their ratios rank them correctly."""
        return self.narrow.ratio.value > self.wide.ratio.value


@dataclass(frozen=True)
class Measurements:
    """The diagnoses of single problems and of pairs."""

    trials: tuple[Trial, ...]
    pairs: tuple[Pair, ...]


def measure(options: ExperimentOptions) -> Measurements:
    """Diagnose random problems and pairs of problems."""
    settings, first = SETTINGS[options.scale], 10_000 * (options.seed + 1)
    trials = tuple(run_trial(first + i, settings.tasks) for i in range(settings.problems))
    return Measurements(trials, tuple(run_pair(first + 5_000 + i, settings.tasks) for i in range(settings.pairs)))


def run_trial(seed: int, tasks: int) -> Trial:
    """Diagnose and train on a random problem."""
    problem = LinearProblem.random(seed)
    trained = problem.trained_risks(seed + 1_000_000).ratio
    return Trial(problem.diagnose(tasks, seed), trained, problem.population_risks().ratio)


def run_pair(seed: int, tasks: int) -> Pair:
    """Diagnose a random problem with a short step, and the same with a larger r_H."""
    problem = LinearProblem.random(seed)
    narrow = replace(problem, alpha=SHORTER * problem.alpha)
    hard, easy = problem.landscape.groups
    landscape = replace(problem.landscape, groups=(replace(hard, spread=WIDER * hard.spread), easy))
    wide = replace(narrow, landscape=landscape)
    return Pair(narrow.diagnose(tasks, seed), wide.diagnose(tasks, seed + 1_000_000))


def rows(data: Measurements, _: ExperimentOptions) -> Iterator[Row]:
    """Give how predicted and true ratios agree, and how often pairs are ranked correctly."""
    yield from trial_rows(data.trials)
    yield from pair_rows(data.pairs)


def trial_rows(trials: Sequence[Trial]) -> Iterator[Row]:
    """Give how predicted ratios, recommendations and intervals agree with the true ratios."""
    predicted, trained = (
        torch.tensor(values, dtype=torch.float64)
        for values in zip(*((trial.diagnosis.ratio.value, trial.trained) for trial in trials))
    )
    note = f"{len(trials)} problems; realized: exact risks after training on {TRAINING_TASKS} other tasks"
    correlation = _correlation(predicted, trained)
    yield Row("linear problems, predicted and realized ratio", "correlation", ours=correlation, note=note)
    note = f"median error {100 * float((predicted / trained - 1).abs().median()):.1f} %"
    correlation = _correlation(predicted.log(), trained.log())
    yield Row("linear problems, logarithms of both ratios", "correlation", ours=correlation, note=note)
    for kind, selected in ((f"above {CLEAR[1]:g}", trained > CLEAR[1]), (f"below {CLEAR[0]:g}", trained < CLEAR[0])):
        right = [bool(trial.right) for trial, is_selected in zip(trials, selected.tolist()) if is_selected]
        if right:
            share, note = 100 * sum(right) / len(right), f"{len(right)} problems"
            yield Row(f"linear problems, true ratio {kind}", "recommendation right %", ours=share, note=note)
    share = 100 * sum(trial.covered for trial in trials) / len(trials)
    note = "exact for infinitely many training tasks; 95 is the target if groups are known and tasks infinitely many"
    yield Row("linear problems, exact ratio in the 95 % interval", "problems %", ours=share, note=note)
    ratios = [trial.diagnosis.ratio for trial in trials]
    widths = torch.tensor([(ratio.high - ratio.low) / ratio.value for ratio in ratios], dtype=torch.float64)
    width = 100 * float(widths.median())
    yield Row("linear problems, width of the 95 % interval", "median % of the ratio", ours=width)


def pair_rows(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Give how often the problem with the smaller r_H ranks above the other."""
    separated = [pair for pair in pairs if pair.separated]
    overlap = f"intervals apart in {len(separated)}, and then right in {sum(pair.ranked for pair in separated)}"
    label = f"pairs of problems, one with {WIDER} times the other's r_H, steps {SHORTER:g} times as long, ranked by"
    for quantity, right, note in (
        ("ratio", [pair.ranked for pair in pairs], f"{len(pairs)} pairs; {overlap}"),
        ("1 + R²/r_H", [pair.narrow.gains_more_than(pair.wide) for pair in pairs], f"{len(pairs)} pairs"),
    ):
        yield Row(f"{label} {quantity}", "pairs right %", ours=100 * sum(right) / len(right), note=note)


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def _random_covariance(d: int, generator: torch.Generator) -> Tensor:
    """Return a matrix of random directions, with eigenvalues that differ by about 30 % and have mean 1."""
    directions = torch.linalg.qr(torch.randn(d, d, generator=generator).double()).Q
    values = (0.3 * torch.randn(d, generator=generator).double()).exp()
    return (directions * (values / values.mean())) @ directions.T  # type: ignore[no-any-return]


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw predicted against true ratios, and the errors relative to the intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    trials = outcome.data.trials
    largest = 1.1 * max(max(trial.trained, trial.diagnosis.ratio.high) for trial in trials)
    draw_predictions(left, trials, largest)
    draw_errors(right, trials)
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick < largest]
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure


def draw_predictions(axes: Axes, trials: Sequence[Trial], largest: float) -> None:
    """Draw predicted ratios with their intervals against those after training, by whether the advice is right."""
    from metabridge.report import figures

    for right, label, color, marker in (
        (True, "recommendation right", figures.COLORS[0], "o"),
        (None, f"true ratio from {CLEAR[0]:g} to {CLEAR[1]:g}: not clear", figures.COLORS[6], "s"),
        (False, "recommendation wrong or undecided", figures.COLORS[1], "X"),
    ):
        selected = [trial for trial in trials if trial.right is right]
        ratios = [trial.diagnosis.ratio for trial in selected]
        margins = [[ratio.value - ratio.low for ratio in ratios], [ratio.high - ratio.value for ratio in ratios]]
        xs, ys, label = [trial.trained for trial in selected], [r.value for r in ratios], f"{label} ({len(selected)})"
        axes.errorbar(xs, ys, margins, fmt=marker, color=color, markersize=4, linewidth=0.8, label=label)
    axes.plot([0.95, largest], [0.95, largest], color=figures.LIGHT.ink, linewidth=0.8, zorder=0)
    label = f"adaptation is recommended from {MIN_RATIO:g} on"
    axes.axhline(MIN_RATIO, color=figures.LIGHT.ink, linestyle=":", linewidth=0.8, zorder=0, label=label)
    axes.set(xscale="log", yscale="log", title="random linear problems")
    axes.set(xlabel="realized risk of NAL / risk of MAML", ylabel="predicted, with 95 % interval")


def draw_errors(axes: Axes, trials: Sequence[Trial]) -> None:
    """Draw the errors of the predicted ratios in half-widths of their intervals."""
    from metabridge.report import figures

    for covered, label, color, marker in (
        (True, "in the 95 % interval", figures.COLORS[0], "o"),
        (False, "outside", figures.COLORS[1], "X"),
    ):
        selected = [trial for trial in trials if trial.covered is covered]
        xs, ys = [trial.population for trial in selected], [trial.error for trial in selected]
        axes.plot(xs, ys, marker, color=color, markersize=4, label=f"{label} ({len(selected)})")
    axes.axhspan(-1, 1, color=figures.LIGHT.line, alpha=0.5, zorder=0)
    axes.set(xscale="log", title="exact ratio and interval")
    axes.set(xlabel="exact risk of NAL / risk of MAML", ylabel="exact − predicted, in half-widths of the interval")


CONSTANTS = {"trained on": TRAINING_TASKS, "clear": CLEAR, "worth": MIN_RATIO}
EXPERIMENT = Experiment("diagnose-worlds", measure, rows, figure, SETTINGS, CONSTANTS)
