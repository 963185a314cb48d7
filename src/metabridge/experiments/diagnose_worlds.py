"""Check the diagnosis on random linear regression problems, whose exact risks are known.

From sampled tasks, the diagnosis predicts a ratio: the risk of non-adaptive learning (NAL) divided by the risk of MAML.
The prediction is compared with the ratio of the exact risks after NAL and MAML are trained on other tasks. Its interval
is compared with the exact ratio for infinitely many training tasks.

If two problems differ only in r_H, the dispersion of the solutions of the hard tasks, the gain of adaptation is larger
for the problem with the smaller r_H. The diagnosis must rank such pairs correctly even if inner learning rates and
gains are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import correlation, median_low
from typing import TYPE_CHECKING, NamedTuple

from metabridge.diagnosis import Diagnosis, diagnose
from metabridge.diagnosis.advice import MIN_RATIO
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.report.results import Row
from metabridge.theory.linear_problems import LinearProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Below the first ratio, NAL is clearly the right recommendation; above the second, adaptation is.
CLEAR_RATIOS = (1.1, 1.5)
QUERIES = 25
DISPERSION_FACTOR = 4  # r_H of the second problem of a pair divided by r_H of the first
STEP_FACTOR = 0.1  # inner learning rate of both problems of a pair divided by that of single problems
TRAINING_TASKS = 500  # number of tasks on which NAL and MAML are trained


@dataclass(frozen=True)
class Settings:
    """Numbers of problems, of pairs of problems, and of tasks per diagnosis."""

    problems: int
    pairs: int
    tasks: int


SETTINGS = {"quick": Settings(problems=16, pairs=8, tasks=100), "paper": Settings(problems=120, pairs=40, tasks=200)}


@dataclass(frozen=True)
class Trial:
    """The diagnosis of a problem, and the true ratios of the risks of NAL and MAML."""

    diagnosis: Diagnosis
    trained_ratio: float  # after training on `TRAINING_TASKS` tasks
    population_ratio: float  # for infinitely many training tasks

    @property
    def is_right(self) -> bool | None:
        """Whether the recommendation is right. None if neither recommendation is clearly right."""
        if CLEAR_RATIOS[0] <= self.trained_ratio <= CLEAR_RATIOS[1]:
            return None
        return self.diagnosis.advice.adapts == (self.trained_ratio > CLEAR_RATIOS[1])


Pair = tuple[Diagnosis, Diagnosis]  # diagnoses of two problems that differ only in r_H; the first r_H is smaller


class Measurements(NamedTuple):
    """The diagnoses of single problems and of pairs."""

    trials: tuple[Trial, ...]
    pairs: tuple[Pair, ...]


def measure(options: ExperimentOptions) -> Measurements:
    """Diagnose random problems and pairs of problems."""
    # The seeds of problems are so far apart that single problems, pairs and runs with other seeds have different ones.
    settings, first_seed = SETTINGS[options.scale], 10_000 * (options.seed + 1)
    trials = tuple(run_trial(first_seed + i, settings.tasks) for i in range(settings.problems))
    pairs = tuple(run_pair(first_seed + 5_000 + i, settings.tasks) for i in range(settings.pairs))
    return Measurements(trials, pairs)


def random_problem(seed: int) -> LinearProblem:
    """Draw a problem, with the covariances of Collins et al. (2022) for even seeds and random ones for odd seeds."""
    return LinearProblem.random(seed, isotropic=seed % 2 == 0)


def diagnose_problem(problem: LinearProblem, tasks: int, seed: int) -> Diagnosis:
    """Diagnose a problem from sampled tasks."""
    return diagnose(problem.environment(QUERIES), tasks=tasks, alpha=problem.alpha, seed=seed)


def run_trial(seed: int, tasks: int) -> Trial:
    """Diagnose a random problem, and train NAL and MAML on it."""
    problem = random_problem(seed)
    # seed + 1_000_000, so that the problem is trained on other tasks than those of the diagnosis
    trained_ratio = problem.trained_risks(TRAINING_TASKS, QUERIES, seed + 1_000_000).ratio
    return Trial(diagnose_problem(problem, tasks, seed), trained_ratio, problem.population_risks().ratio)


def run_pair(seed: int, tasks: int) -> Pair:
    """Diagnose a random problem with a small inner learning rate, and the same problem with a larger r_H."""
    problem = random_problem(seed)
    problem = replace(problem, alpha=STEP_FACTOR * problem.alpha)
    hard, easy = problem.landscape.groups
    landscape = replace(problem.landscape, groups=(replace(hard, spread=DISPERSION_FACTOR * hard.spread), easy))
    dispersed_problem = replace(problem, landscape=landscape)
    # seed + 1_000_000, so that the second problem is diagnosed from other tasks
    return diagnose_problem(problem, tasks, seed), diagnose_problem(dispersed_problem, tasks, seed + 1_000_000)


def rows(data: Measurements, _: ExperimentOptions) -> Iterator[Row]:
    """Yield the rows of the single problems and of the pairs."""
    yield from trial_rows(data.trials)
    yield from pair_rows(data.pairs)


def trial_rows(trials: Sequence[Trial]) -> Iterator[Row]:
    """Yield how well predicted ratios, recommendations and intervals agree with the true ratios."""
    intervals = [trial.diagnosis.ratio for trial in trials]
    predicted_ratios, true_ratios = [ratio.value for ratio in intervals], [trial.trained_ratio for trial in trials]
    note = f"{len(trials)} problems; realized: exact risks after training on {TRAINING_TASKS} other tasks"
    linear = correlation(predicted_ratios, true_ratios)
    yield Row("linear problems, predicted and realized ratio", "correlation", ours=linear, note=note)
    errors = [abs(predicted / true - 1) for predicted, true in zip(predicted_ratios, true_ratios)]
    note = f"median error {100 * median_low(errors):.1f} %"
    logarithmic = correlation(list(map(math.log, predicted_ratios)), list(map(math.log, true_ratios)))
    yield Row("linear problems, logarithms of both ratios", "correlation", ours=logarithmic, note=note)
    low, high = CLEAR_RATIOS
    for condition, clear_trials in (
        (f"above {high:g}", [trial for trial in trials if trial.trained_ratio > high]),
        (f"below {low:g}", [trial for trial in trials if trial.trained_ratio < low]),
    ):
        if clear_trials:
            name = f"linear problems, true ratio {condition}"
            is_right = [bool(trial.is_right) for trial in clear_trials]
            yield Row.share(name, "recommendation right %", is_right, note=f"{len(clear_trials)} problems")
    is_covered = [trial.diagnosis.ratio.contains(trial.population_ratio) for trial in trials]
    note = "exact for infinitely many training tasks; 95 is the target if groups are known and tasks infinitely many"
    yield Row.share("linear problems, exact ratio in the 95 % interval", "problems %", is_covered, note=note)
    width = 100 * median_low((ratio.high - ratio.low) / ratio.value for ratio in intervals)
    yield Row("linear problems, width of the 95 % interval", "median % of the ratio", ours=width)


def pair_rows(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Yield how often the diagnosis predicts a larger gain for the problem with the smaller r_H."""
    right_by_ratio = [small.ratio.value > large.ratio.value for small, large in pairs]
    right_if_disjoint = [  # for the pairs with disjoint intervals
        is_right for is_right, (small, large) in zip(right_by_ratio, pairs) if not small.ratio.overlaps(large.ratio)
    ]
    disjoint_note = (
        f"; {len(right_if_disjoint)} with disjoint intervals, of which {sum(right_if_disjoint)} are ranked correctly"
    )
    right_by_limit = [small.gains_more_than(large) for small, large in pairs]
    for quantity, is_right, note in (("ratio", right_by_ratio, disjoint_note), ("1 + R²/r_H", right_by_limit, "")):
        name = (
            f"pairs of problems, one with {DISPERSION_FACTOR} times the other's r_H, steps {STEP_FACTOR:g} times as "
            f"long, ranked by {quantity}"
        )
        yield Row.share(name, "pairs right %", is_right, note=f"{len(pairs)} pairs{note}")


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw predicted ratios against true ratios, and errors divided by the half-widths of the intervals."""
    from metabridge.report import result_figures

    trials, (low, high) = outcome.data.trials, CLEAR_RATIOS
    figure, (left, right) = result_figures.subplots("", 1, 2, (10.4, 4.6))
    labels = {
        True: "recommendation right",
        None: f"true ratio from {low:g} to {high:g}: neither is clearly right",
        False: "recommendation wrong or undecided",
    }
    points = [(trial.trained_ratio, trial.diagnosis.ratio, trial.is_right) for trial in trials]
    threshold_label = f"smallest ratio for which adaptation is recommended, {MIN_RATIO:g}"
    result_figures.draw_predicted_ratios(left, points, labels, MIN_RATIO, threshold_label)
    left.set(title="random linear problems", xlabel="trained risk of NAL / trained risk of MAML")
    left.set_ylabel("predicted ratio with 95 % interval")
    result_figures.draw_ratio_errors(right, [(trial.population_ratio, trial.diagnosis.ratio) for trial in trials])
    right.set(title="error relative to the interval", xlabel="exact risk of NAL / exact risk of MAML")
    right.set_ylabel("(exact − predicted ratio) / half-width of the interval")
    return figure


# The keys are stored in results/diagnose-worlds.json. "worth" is the smallest ratio for which adaptation is
# recommended.
CONSTANTS = {"trained on": TRAINING_TASKS, "clear": CLEAR_RATIOS, "worth": MIN_RATIO}
EXPERIMENT = Experiment("diagnose-worlds", measure, rows, figure, SETTINGS, CONSTANTS)
