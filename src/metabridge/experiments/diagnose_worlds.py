"""Check whether a diagnosis is right on linear regression tasks, where the exact risks are known.

A problem is a random distribution of tasks with an inner learning rate. From sampled tasks, the diagnosis predicts the
risk of NAL divided by the risk of MAML. This ratio is compared with the ratio of the exact risks after NAL and MAML are
trained on other tasks, and its interval with the exact ratio for infinitely many training tasks. If two problems differ
only in r_H, the dispersion of the solutions of the hard tasks, adaptation gains more in the one with the smaller r_H.
The diagnosis must rank such pairs correctly even if inner learning rates and gains are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import correlation, median_low
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from metabridge.diagnosis import Diagnosis, diagnose
from metabridge.diagnosis.advice import MIN_RATIO
from metabridge.environments import HardEasy, Landscape, LinearTasks, TaskGroup
from metabridge.environments.linear_tasks import random_covariance
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
    from matplotlib.figure import Figure

# Plain pre-training is the right recommendation below the first true ratio, and adaptation above the second.
CLEAR_RATIOS = (1.1, 1.5)
QUERIES = 25
MAX_STEP = 1.5  # largest product of inner learning rate and curvature; from 2 on, gradient descent diverges
DISPERSION_FACTOR = 4  # r_H of the second problem of a pair, relative to the first
STEP_FACTOR = 0.1  # inner learning rate of both problems of a pair, relative to the random problem
TRAINING_TASKS = 500  # for NAL and MAML


@dataclass(frozen=True)
class Settings:
    """Numbers of problems, of pairs of problems, and of tasks per diagnosis."""

    problems: int
    pairs: int
    tasks: int


SETTINGS = {"quick": Settings(problems=16, pairs=8, tasks=100), "paper": Settings(problems=120, pairs=40, tasks=200)}


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """A landscape, the inner learning rate α, and the number m of support points per task."""

    landscape: Landscape
    alpha: float
    m: int

    @classmethod
    def random(cls, seed: int) -> LinearProblem:
        """Draw hard and easy tasks: for even seeds as in Collins et al. 2022, for odd seeds with random covariances."""
        generator = torch.Generator().manual_seed(seed)

        def log_uniform(low: float, high: float) -> float:
            exponent = float(torch.rand((), generator=generator, dtype=torch.float64))
            return float(low * (high / low) ** exponent)

        d = int(log_uniform(5, 21))
        rho_easy = log_uniform(0.5, 2)
        rho_hard, R = rho_easy * log_uniform(0.03, 1), log_uniform(0.5, 8)
        r_hard, r_easy, noise = log_uniform(0.02, 2), log_uniform(0.02, 2), log_uniform(0.01, 1)
        alpha, m = log_uniform(0.8, 1.1) / rho_easy, int(log_uniform(30, 500))
        if seed % 2 == 0:
            return cls(HardEasy(rho_hard, rho_easy, R, r_hard, r_easy, d, noise).landscape, alpha, m)
        center = torch.nn.functional.normalize(torch.randn(d, generator=generator).double(), dim=0) * R * math.sqrt(d)
        groups = (
            TaskGroup(rho_hard * random_covariance(d, 0.3, generator), center, r_hard, noise, 0.5),
            TaskGroup(rho_easy * random_covariance(d, 0.3, generator), 0.0, r_easy, noise, 0.5),
        )
        landscape = Landscape(groups, d)
        curvature = float(torch.linalg.eigvalsh(landscape.distribution.covariance).max())
        return cls(landscape, min(alpha, MAX_STEP / curvature), m)

    def diagnose(self, tasks: int, seed: int) -> Diagnosis:
        """Diagnose the problem from sampled tasks."""
        return diagnose(LinearTasks(self.landscape, self.m, QUERIES), tasks=tasks, alpha=self.alpha, seed=seed)

    def trained_risks(self, seed: int) -> Risks:
        """Train NAL and MAML on sampled tasks, and return the exact risk 𝓔_m of each."""
        generator = torch.Generator().manual_seed(seed)
        episodes = LinearTasks(self.landscape, self.m, QUERIES).sample(TRAINING_TASKS, generator)
        return self._risks(empirical_nal(episodes), empirical_maml(episodes, self.alpha))

    def population_risks(self) -> Risks:
        """Return the risks 𝓔_m of NAL and MAML after training on infinitely many tasks."""
        return self._risks(nal_solution(self.landscape), maml_solution(self.landscape, self.alpha, self.m))

    def _risks(self, nal: Tensor, maml: Tensor) -> Risks:
        risks = risk_above_floor(self.landscape, torch.stack([nal, maml]), self.alpha, self.m)
        return Risks(*risks.tolist())


@dataclass(frozen=True)
class Trial:
    """The diagnosis of a problem, and the true ratio of risks after training on finitely and infinitely many tasks."""

    diagnosis: Diagnosis
    trained: float
    population: float

    @property
    def is_right(self) -> bool | None:
        """Whether the recommendation is right; None if neither recommendation is clearly right."""
        if CLEAR_RATIOS[0] <= self.trained <= CLEAR_RATIOS[1]:
            return None
        return self.diagnosis.advice.adapts == (self.trained > CLEAR_RATIOS[1])

    @property
    def covered(self) -> bool:
        """Whether the 95 % interval contains the population ratio."""
        return self.diagnosis.ratio.low <= self.population <= self.diagnosis.ratio.high

    @property
    def error(self) -> float:
        """Population ratio minus predicted ratio, in half-widths of the interval."""
        ratio = self.diagnosis.ratio
        half_width = ratio.high - ratio.value if self.population > ratio.value else ratio.value - ratio.low
        return (self.population - ratio.value) / max(half_width, 1e-12)


class Pair(NamedTuple):
    """The diagnoses of two problems that differ only in r_H. Adaptation gains more in the first."""

    narrow: Diagnosis
    wide: Diagnosis


class Measurements(NamedTuple):
    """The diagnoses of single problems and of pairs."""

    trials: tuple[Trial, ...]
    pairs: tuple[Pair, ...]


def measure(options: ExperimentOptions) -> Measurements:
    """Diagnose random problems and pairs of problems."""
    settings, first_seed = SETTINGS[options.scale], 10_000 * (options.seed + 1)
    trials = tuple(run_trial(first_seed + i, settings.tasks) for i in range(settings.problems))
    pairs = tuple(run_pair(first_seed + 5_000 + i, settings.tasks) for i in range(settings.pairs))
    return Measurements(trials, pairs)


def run_trial(seed: int, tasks: int) -> Trial:
    """Diagnose a random problem, and train NAL and MAML on it."""
    problem = LinearProblem.random(seed)
    trained = problem.trained_risks(seed + 1_000_000).ratio
    return Trial(problem.diagnose(tasks, seed), trained, problem.population_risks().ratio)


def run_pair(seed: int, tasks: int) -> Pair:
    """Diagnose a random problem with a small inner learning rate, and the same problem with a larger r_H."""
    problem = LinearProblem.random(seed)
    narrow = replace(problem, alpha=STEP_FACTOR * problem.alpha)
    hard, easy = problem.landscape.groups
    landscape = replace(problem.landscape, groups=(replace(hard, spread=DISPERSION_FACTOR * hard.spread), easy))
    wide = replace(narrow, landscape=landscape)
    return Pair(narrow.diagnose(tasks, seed), wide.diagnose(tasks, seed + 1_000_000))


def rows(data: Measurements, _: ExperimentOptions) -> Iterator[Row]:
    """Yield the rows of the single problems and of the pairs."""
    yield from trial_rows(data.trials)
    yield from pair_rows(data.pairs)


def trial_rows(trials: Sequence[Trial]) -> Iterator[Row]:
    """Yield how well predicted ratios, recommendations and intervals agree with the true ratios."""
    ratios, trained = [trial.diagnosis.ratio for trial in trials], [trial.trained for trial in trials]
    predicted = [ratio.value for ratio in ratios]
    note = f"{len(trials)} problems; realized: exact risks after training on {TRAINING_TASKS} other tasks"
    linear = correlation(predicted, trained)
    yield Row("linear problems, predicted and realized ratio", "correlation", ours=linear, note=note)
    errors = [abs(value / true_ratio - 1) for value, true_ratio in zip(predicted, trained)]
    note = f"median error {100 * median_low(errors):.1f} %"
    logarithmic = correlation([math.log(value) for value in predicted], [math.log(value) for value in trained])
    yield Row("linear problems, logarithms of both ratios", "correlation", ours=logarithmic, note=note)
    low, high = CLEAR_RATIOS
    for condition, clear in (
        (f"above {high:g}", [trial for trial in trials if trial.trained > high]),
        (f"below {low:g}", [trial for trial in trials if trial.trained < low]),
    ):
        if clear:
            name, is_right = f"linear problems, true ratio {condition}", [bool(trial.is_right) for trial in clear]
            yield Row.share(name, "recommendation right %", is_right, note=f"{len(clear)} problems")
    is_covered = [trial.covered for trial in trials]
    note = "exact for infinitely many training tasks; 95 is the target if groups are known and tasks infinitely many"
    yield Row.share("linear problems, exact ratio in the 95 % interval", "problems %", is_covered, note=note)
    width = 100 * median_low((ratio.high - ratio.low) / ratio.value for ratio in ratios)
    yield Row("linear problems, width of the 95 % interval", "median % of the ratio", ours=width)


def pair_rows(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Yield how often the problem with the smaller r_H ranks above the other."""
    by_ratio = [narrow.ratio.value > wide.ratio.value for narrow, wide in pairs]
    apart = [is_right for is_right, (narrow, wide) in zip(by_ratio, pairs) if not narrow.ratio.overlaps(wide.ratio)]
    apart_note = f"; intervals apart in {len(apart)}, and then right in {sum(apart)}"
    by_limit = [narrow.gains_more_than(wide) for narrow, wide in pairs]
    for quantity, is_right, note in (("ratio", by_ratio, apart_note), ("1 + R²/r_H", by_limit, "")):
        name = (
            f"pairs of problems, one with {DISPERSION_FACTOR} times the other's r_H, steps {STEP_FACTOR:g} times as "
            f"long, ranked by {quantity}"
        )
        yield Row.share(name, "pairs right %", is_right, note=f"{len(pairs)} pairs{note}")


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw predicted ratios against true ratios, and errors relative to the intervals."""
    from metabridge.report import figures, result_figures

    figure, (left, right) = result_figures.subplots("", 1, 2, (10.4, 4.6))
    trials, ink = outcome.data.trials, figures.LIGHT.ink
    low, high = CLEAR_RATIOS
    for is_right, label, color, marker in (
        (True, "recommendation right", figures.COLORS[0], "o"),
        (None, f"true ratio from {low:g} to {high:g}: neither is clearly right", figures.COLORS[6], "s"),
        (False, "recommendation wrong or undecided", figures.COLORS[1], "X"),
    ):
        selected = [trial for trial in trials if trial.is_right is is_right]
        ratios = [trial.diagnosis.ratio for trial in selected]
        margins = [[ratio.value - ratio.low for ratio in ratios], [ratio.high - ratio.value for ratio in ratios]]
        xs, ys, label = [trial.trained for trial in selected], [r.value for r in ratios], f"{label} ({len(selected)})"
        left.errorbar(xs, ys, margins, fmt=marker, color=color, markersize=4, linewidth=0.8, label=label)
    max_ratio = 1.1 * max(max(trial.trained, trial.diagnosis.ratio.high) for trial in trials)
    left.plot([0.95, max_ratio], [0.95, max_ratio], color=ink, linewidth=0.8, zorder=0)
    label = f"smallest ratio for which adaptation is recommended, {MIN_RATIO:g}"
    left.axhline(MIN_RATIO, color=ink, linestyle=":", linewidth=0.8, zorder=0, label=label)
    left.set(xscale="log", yscale="log", title="random linear problems")
    left.set(xlabel="trained risk of NAL / trained risk of MAML", ylabel="predicted ratio with 95 % interval")
    for covered, label, color, marker in (
        (True, "in the 95 % interval", figures.COLORS[0], "o"),
        (False, "outside", figures.COLORS[1], "X"),
    ):
        selected = [trial for trial in trials if trial.covered is covered]
        xs, ys = [trial.population for trial in selected], [trial.error for trial in selected]
        right.plot(xs, ys, marker, color=color, markersize=4, label=f"{label} ({len(selected)})")
    right.axhspan(-1, 1, color=figures.LIGHT.line, alpha=0.5, zorder=0)
    right.set(xscale="log", title="error relative to the interval", xlabel="exact risk of NAL / exact risk of MAML")
    right.set_ylabel("(exact − predicted ratio) / half-width of the interval")
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick < max_ratio]
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure


CONSTANTS = {"trained on": TRAINING_TASKS, "clear": CLEAR_RATIOS, "worth": MIN_RATIO}
EXPERIMENT = Experiment("diagnose-worlds", measure, rows, figure, SETTINGS, CONSTANTS)
