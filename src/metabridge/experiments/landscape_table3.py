"""Collins et al. 2022, table 3: NAL with more weight on hard tasks comes closer to MAML, which favors them by itself.

ν is the weight of a hard task over that of an easy one; the weights of a batch of 10 tasks sum to 1. The text has
n₂ = 25 inner and n₁ = 500 outer samples, but only the reverse gives the coordinate printed for MAML. It says that w*
has variance 1, but its test errors are those of variance ⅓; both are included.
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
PUBLISHED = {  # average coordinate and test error, each with its standard deviation over 5 trials
    "NAL": ((0.18, 0.02), (0.78, 0.11)),
    "NAL, ν = 2": ((0.33, 0.02), (0.64, 0.08)),
    "NAL, ν = 5": ((0.61, 0.03), (0.51, 0.04)),
    "NAL, ν = 10": ((0.87, 0.03), (0.39, 0.05)),
    "MAML": ((1.58, 0.01), (0.26, 0.10)),
}
TRIALS_TO_CI95 = t_quantile(4) / math.sqrt(5)  # from a deviation over 5 trials to the half-width of the mean's interval
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

Columns = dict[str, dict[str, tuple[Tensor, Tensor]]]  # both metrics of each run, by landscape and learner


def measure(options: ExperimentOptions) -> Columns:
    """Train all learners on the same tasks, and test each on new ones."""
    sgd, generator = SETTINGS[options.scale], torch.Generator().manual_seed(options.seed)
    columns: Columns = {}
    for name, hard_easy in LANDSCAPES.items():
        tasks = LinearTasks(hard_easy.landscape, M, sgd.queries)
        trained = train_and_test(tasks, LEARNERS, ALPHA, sgd, generator, BATCH_SIZE)
        columns[name] = {learner: (end.w.mean(1), end.test_loss) for learner, end in trained.items()}
    return columns


def closed_form(learner: LinearLearner, tasks: HardEasy) -> tuple[float, float]:
    """Return the coordinate at which SGD ends on average, and the test error there.

    With k hard tasks in a batch of b, NAL gives these the share h(k) = kν/(kν + b − k) of the weight, so it ends at
    R·E[h]ρ_H/(E[h]ρ_H + E[1 − h]ρ_E), which is R·νρ_H/(νρ_H + ρ_E) only for large batches.
    """
    nu = learner.hard_weight
    shares = [k * nu / (k * nu + BATCH_SIZE - k) for k in range(BATCH_SIZE + 1)]
    share = sum(math.comb(BATCH_SIZE, k) * 0.5**BATCH_SIZE * h for k, h in enumerate(shares))
    hard, easy = share * tasks.rho_hard, (1 - share) * tasks.rho_easy
    if learner.alpha is not None:
        hard, easy = task_weights(tasks, learner.alpha, M)
    coordinate = tasks.R * hard / (hard + easy)
    risk = risk_above_floor(tasks.landscape, torch.full((tasks.dimension,), coordinate), ALPHA, M)
    return coordinate, float(risk) + noise_floor(tasks.landscape, ALPHA, M)


def rows(columns: Columns, _: ExperimentOptions) -> Iterator[Row]:
    """Compare both columns with the published ones; they agree where the 95 % intervals of the two means meet."""
    for landscape, table in columns.items():
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
                    agrees=abs(ours - published) <= margin + TRIALS_TO_CI95 * deviation,
                    note=f"closed form {theory:.3f}; the paper's deviation over 5 trials is {deviation:g}",
                )


def figure(outcome: Outcome[Columns]) -> Figure:
    """Draw both columns next to the published ones."""
    from metabridge.report import figures, result_figures

    title = "NAL trained with hard tasks weighted ν times as much as easy ones, and MAML"
    figure, panels = result_figures.subplots(title, 1, 2, (10.5, 4), sharey=True)
    xlabels = ("mean coordinate of w (center of hard tasks: 2, of easy tasks: 0)", "test error")
    for i, (axes, xlabel) in enumerate(zip(panels, xlabels)):
        points = {"published": [(mean, TRIALS_TO_CI95 * deviation) for mean, deviation in _column(PUBLISHED, i)]}
        points |= {
            f"ours, {name}": [mean_interval(values.tolist()) for values in _column(table, i)]
            for name, table in outcome.data.items()
        }
        for j, (label, line) in enumerate(points.items()):
            means, margins = zip(*line)
            heights = [row + 0.2 * (j - 1) for row in range(len(line))]
            marker, color = "Dos"[j], figures.COLORS[(1, 0, 2)[j]]
            axes.errorbar(means, heights, None, margins, marker, color=color, capsize=2, markersize=5, label=label)
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
