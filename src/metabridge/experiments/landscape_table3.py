"""C's table 3: giving hard tasks more weight in NAL brings it nearer to MAML, which weighs them more by itself.

ν is the weight of a hard task against that of an easy one; the weights of a batch of 10 tasks add up to 1. The text
says n₂ = 25 inner and n₁ = 500 outer samples, but only the reverse gives the coordinate it prints for MAML. It says
that w* has variance 1; its test errors are those of variance ⅓. Both are here.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, LinearTasks
from metabridge.experiments.landscape_linear import STEPS, Learner, Scale, completed, descend, judge
from metabridge.experiments.power_law import mean
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.intervals import t_quantile
from metabridge.theory.landscape import noise_floor, risk_above_floor, task_weights

ID = "landscape-table3"
VARIANCES = {"w* of variance 1": 1.0, "w* of variance ⅓": 1 / 3}
ALPHA, M, BATCH = 1.0, 500, 10
PUBLISHED = {  # average coordinate and test error, with their deviations over 5 trials
    "NAL": ((0.18, 0.02), (0.78, 0.11)),
    "NAL, ν = 2": ((0.33, 0.02), (0.64, 0.08)),
    "NAL, ν = 5": ((0.61, 0.03), (0.51, 0.04)),
    "NAL, ν = 10": ((0.87, 0.03), (0.39, 0.05)),
    "MAML": ((1.58, 0.01), (0.26, 0.10)),
}
METRICS = {
    "average coordinate": "mean coordinate of w (centre of hard tasks: 2, of easy: 0)",
    "test error": "test error",
}
TRIALS = t_quantile(4) / math.sqrt(5)  # from a deviation over 5 trials to the half-width of their mean's 95 % interval
LEARNERS = {
    "NAL": Learner(STEPS["nal"]),
    "NAL, ν = 2": Learner(STEPS["nal"], hard=2.0),
    "NAL, ν = 5": Learner(STEPS["nal"], hard=5.0),
    "NAL, ν = 10": Learner(STEPS["nal"], hard=10.0),
    "MAML": Learner(STEPS["maml"] * M, ALPHA),
}
SCALES = {"quick": Scale(iterations=2500, judged=500, runs=5), "paper": Scale(iterations=4000, runs=5)}

Column = dict[str, Tensor]  # by learner, a value for each run


@dataclass(frozen=True)
class Outcome:
    """The result, and both columns of the table for each variance of w*."""

    result: Result
    columns: dict[str, dict[str, Column]]


def world(variance: float) -> HardEasy:
    """Return the tasks, with this variance of w* around the centres of both kinds."""
    return HardEasy(rho_hard=0.1, rho_easy=1.0, R=2.0, r_hard=variance, r_easy=variance, dimension=10, noise=0.01)


def run(work: Work) -> Outcome:
    """Train all learners on the same tasks, and judge each on its own."""
    scale, started = SCALES[work.scale], time.perf_counter()
    generator = torch.Generator().manual_seed(work.seed)
    columns = {}
    for label, variance in VARIANCES.items():
        tasks = LinearTasks(world(variance).landscape, M, scale.outer)
        found = descend(tasks, LEARNERS, scale, generator, batch=BATCH)
        errors = {name: judge(tasks, w, ALPHA, scale, generator) for name, w in found.items()}
        columns[label] = dict(zip(METRICS, ({name: w.mean(1) for name, w in found.items()}, errors)))
    about = asdict(scale) | {"worlds": [asdict(world(each)) for each in VARIANCES.values()]}
    about |= {"alpha": ALPHA, "m": M, "batch": BATCH}
    return Outcome(completed(work, ID, started, rows(columns), about), columns)


def expected(learner: Learner, tasks: HardEasy) -> tuple[float, float]:
    """Return the coordinate at which SGD ends on average, and the test error there.

    With k hard tasks in a batch of b, NAL gives these the share h(k) = kν/(kν + b − k) of the weight, so it ends at
    R·E[h]ρ_H/(E[h]ρ_H + E[1 − h]ρ_E), which is R·νρ_H/(νρ_H + ρ_E) only for large batches.
    """
    shares = [k * learner.hard / (k * learner.hard + BATCH - k) for k in range(BATCH + 1)]
    share = sum(math.comb(BATCH, k) * 0.5**BATCH * own for k, own in enumerate(shares))
    hard, easy = share * tasks.rho_hard, (1 - share) * tasks.rho_easy
    if learner.alpha is not None:
        hard, easy = task_weights(tasks, learner.alpha, M)
    coordinate = tasks.R * hard / (hard + easy)
    risk = risk_above_floor(tasks.landscape, torch.full((tasks.dimension,), coordinate), ALPHA, M)
    return coordinate, float(risk) + noise_floor(tasks.landscape, ALPHA, M)


def rows(columns: dict[str, dict[str, Column]]) -> list[Row]:
    """Give both columns beside the published ones; they agree where the 95 % intervals of the two means meet."""
    made = []
    for label, table in columns.items():
        for place, (metric, column) in enumerate(table.items()):
            for name, values in column.items():
                ours, margin = mean(values.tolist())
                value, deviation = PUBLISHED[name][place]
                theory = expected(LEARNERS[name], world(VARIANCES[label]))[place]
                note = f"closed form {theory:.3f}; the paper's deviation over 5 trials is {deviation:g}"
                agrees = abs(ours - value) <= margin + TRIALS * deviation
                row = Row(f"{name}; {label}", metric, published=value, ours=ours, ci95=margin, agrees=agrees, note=note)
                made.append(row)
    return made


def figure(outcome: Outcome, file: Path) -> None:
    """Draw both columns beside the published ones."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    with figures.LIGHT.context():
        picture = Figure(figsize=(10.5, 4), layout="constrained")
        picture.suptitle("NAL with hard tasks weighed ν times as much as easy ones in training, and MAML")
        for place, (axes, (metric, label)) in enumerate(zip(picture.subplots(1, 2, sharey=True), METRICS.items())):
            table = {
                "published": [(value, TRIALS * spread) for value, spread in (own[place] for own in PUBLISHED.values())]
            } | {
                f"ours, {name}": [mean(each.tolist()) for each in own[metric].values()]
                for name, own in outcome.columns.items()
            }
            for index, ((name, points), marker) in enumerate(zip(table.items(), "Dos")):
                middles, margins = zip(*points)
                lines = [line + 0.2 * (index - 1) for line in range(len(points))]
                colour = figures.COLOURS[(1, 0, 2)[index]]
                axes.errorbar(
                    middles, lines, xerr=margins, fmt=marker, color=colour, label=name, capsize=2, markersize=5
                )
            axes.set_yticks(range(len(PUBLISHED)), list(PUBLISHED))
            axes.set(xlabel=label, xlim=(0, None))
            axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
        handles, labels = axes.get_legend_handles_labels()
        picture.legend(
            handles, labels, loc="outside lower center", ncols=3, title="means over 5 runs with 95 % intervals"
        )
    figures.save(picture, file)


EXPERIMENT = UnportedExperiment("landscape-table3", run, figure)
