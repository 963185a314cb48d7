"""Collins et al. 2022, table 3: with larger weights of hard tasks, NAL approaches MAML, which needs no weights.

NAL is non-adaptive learning. ν is the ratio of the weights of a hard and an easy task; the weights of a batch of 10
tasks sum to 1. According to the text of the paper, n₂ = 25 inner and n₁ = 500 outer samples are used, but only the
reverse gives the published coordinate of MAML. The text also states that w* has variance 1, but the published test
errors are those of variance ⅓; both variances are included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, LinearTasks
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.landscape_linear import LR, SgdSettings, train_and_test
from metabridge.intervals import mean_interval, t_quantile
from metabridge.report.results import Row
from metabridge.theory.landscape import noise_floor, risk_above_floor, task_weights
from metabridge.theory.linear_sgd import LinearLearner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
PUBLISHED = {  # average coordinate of w and test error, each with its standard deviation over 5 trials
    "NAL": ((0.18, 0.02), (0.78, 0.11)),
    "NAL, ν = 2": ((0.33, 0.02), (0.64, 0.08)),
    "NAL, ν = 5": ((0.61, 0.03), (0.51, 0.04)),
    "NAL, ν = 10": ((0.87, 0.03), (0.39, 0.05)),
    "MAML": ((1.58, 0.01), (0.26, 0.10)),
}
CI95_PER_DEVIATION = t_quantile(4) / math.sqrt(5)  # half-width of the 95 % interval / standard deviation, for 5 trials
METRICS = ("average coordinate", "test error")
ALPHA, M, BATCH_SIZE = 1.0, 500, 10
LEARNERS = {
    "NAL": LinearLearner(LR["nal"]),
    "NAL, ν = 2": LinearLearner(LR["nal"], hard_weight=2.0),
    "NAL, ν = 5": LinearLearner(LR["nal"], hard_weight=5.0),
    "NAL, ν = 10": LinearLearner(LR["nal"], hard_weight=10.0),
    "MAML": LinearLearner(LR["maml"] * M, ALPHA),
}
LANDSCAPES = {  # by the variance of w* around the centers of hard and easy tasks
    name: HardEasy(rho_hard=0.1, rho_easy=1.0, R=2.0, r_hard=variance, r_easy=variance, dimension=10, noise=0.01)
    for name, variance in (("w* of variance 1", 1.0), ("w* of variance ⅓", 1 / 3))
}
SETTINGS = {
    "quick": SgdSettings(iterations=2500, test_tasks=500, runs=5),
    "paper": SgdSettings(iterations=4000, runs=5),
}

Measurements = dict[str, dict[str, tuple[Tensor, Tensor]]]  # both metrics of each run, by landscape and learner


def measure(options: ExperimentOptions) -> Measurements:
    """Train all learners on the same tasks, and test each on new tasks."""
    sgd, generator = SETTINGS[options.scale], torch.Generator().manual_seed(options.seed)
    measurements: Measurements = {}
    for name, hard_easy in LANDSCAPES.items():
        tasks = LinearTasks(hard_easy.landscape, M, sgd.queries)
        by_learner = train_and_test(tasks, LEARNERS, ALPHA, sgd, generator, BATCH_SIZE)
        measurements[name] = {learner: (result.w.mean(1), result.test_loss) for learner, result in by_learner.items()}
    return measurements


def closed_form(learner: LinearLearner, tasks: HardEasy) -> tuple[float, float]:
    """Return the mean coordinate to which SGD converges, and the test error there.

    If k of the b tasks of a batch are hard, their weights in NAL sum to h(k) = kν/(kν + b − k). NAL therefore converges
    to R·E[h]ρ_H/(E[h]ρ_H + E[1 − h]ρ_E), which is R·νρ_H/(νρ_H + ρ_E) only for large batches. R is the coordinate of
    the center of the hard tasks; that of the easy tasks is 0.
    """
    nu = learner.hard_weight
    hard_weights = [k * nu / (k * nu + BATCH_SIZE - k) for k in range(BATCH_SIZE + 1)]
    mean_hard_weight = sum(math.comb(BATCH_SIZE, k) * 0.5**BATCH_SIZE * h for k, h in enumerate(hard_weights))
    hard, easy = mean_hard_weight * tasks.rho_hard, (1 - mean_hard_weight) * tasks.rho_easy
    if learner.alpha is not None:  # MAML, whose weights do not depend on ν
        hard, easy = task_weights(tasks, learner.alpha, M)
    coordinate = tasks.R * hard / (hard + easy)
    risk = risk_above_floor(tasks.landscape, torch.full((tasks.dimension,), coordinate), ALPHA, M)
    return coordinate, float(risk) + noise_floor(tasks.landscape, ALPHA, M)


def rows(measurements: Measurements, _: ExperimentOptions) -> Iterator[Row]:
    """Compare both metrics with the published ones; they agree if the 95 % intervals of the two means overlap."""
    for landscape, table in measurements.items():
        for i, metric in enumerate(METRICS):
            for learner, values in table.items():
                ours, margin = mean_interval(values[i].tolist())
                published, deviation = PUBLISHED[learner][i]
                theory = closed_form(LEARNERS[learner], LANDSCAPES[landscape])[i]
                yield Row(
                    f"{learner}; {landscape}",
                    metric,
                    published=published,
                    ours=ours,
                    ci95=margin,
                    agrees=abs(ours - published) <= margin + CI95_PER_DEVIATION * deviation,
                    note=f"closed form {theory:.3f}; the paper's standard deviation over 5 trials is {deviation:g}",
                )


def figure(outcome: Outcome[Measurements]) -> Figure:
    """Draw both metrics next to the published ones."""
    from metabridge.report import figures, result_figures

    title = "NAL trained with hard tasks weighted ν times as much as easy ones, and MAML"
    figure, panels = result_figures.subplots(title, 1, 2, (10.5, 4), sharey=True)
    xlabels = ("mean coordinate of w (center of hard tasks: 2, of easy tasks: 0)", "test error")
    for i, (axes, xlabel) in enumerate(zip(panels, xlabels)):
        points = {"published": [(mean, CI95_PER_DEVIATION * deviation) for mean, deviation in _column(PUBLISHED, i)]}
        points |= {
            f"ours, {name}": [mean_interval(values.tolist()) for values in _column(table, i)]
            for name, table in outcome.data.items()
        }
        for j, (label, intervals) in enumerate(points.items()):
            means, margins = zip(*intervals)
            positions = [row + 0.2 * (j - 1) for row in range(len(intervals))]
            marker, color = "Dos"[j], figures.COLORS[(1, 0, 2)[j]]
            axes.errorbar(means, positions, None, margins, marker, color=color, capsize=2, markersize=5, label=label)
        axes.set_yticks(range(len(PUBLISHED)), list(PUBLISHED))
        axes.set(xlabel=xlabel, xlim=(0, None))
        axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    handles, labels = axes.get_legend_handles_labels()
    legend_title = "means over 5 runs with 95 % intervals"
    figure.legend(handles, labels, loc="outside lower center", ncols=3, title=legend_title)
    return figure


def _column(table: Mapping[str, tuple[T, T]], index: int) -> list[T]:
    return [values[index] for values in table.values()]


CONSTANTS = {
    "landscapes": [asdict(tasks) for tasks in LANDSCAPES.values()],
    "alpha": ALPHA,
    "m": M,
    "batch_size": BATCH_SIZE,
}
EXPERIMENT = Experiment("landscape-table3", measure, rows, figure, SETTINGS, CONSTANTS, on_cpu=True)
