"""Yüksel et al. 2023, appendices A and I: tasks with a nonzero mean, μ* = (1, …, 1), which theorem 1 does not cover.

The initial function Bw must then find the mean task B*μ* instead of zero. Both first-order learners do in the paper.
With infinitely many tasks the limit is the same as for a zero mean: at Bw = B*μ* the recursion depends only on the
deviations of the tasks from their mean, so B*ᵀBBᵀB* converges to Λ* of their covariance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metabridge.experiments import anil_trainings
from metabridge.experiments.anil_trainings import (
    METHODS,
    LinearRecord,
    curve_panels,
    draw_curves,
    train_methods,
)
from metabridge.experiments.experiment import ExperimentOptions, Outcome, TrainingExperiment
from metabridge.report.results import Row
from metabridge.training.linear_anil import LinearAnilConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLERANCE = {"fo-anil": 0.15, "fo-maml": 0.15, "infinite-tasks": 0.01}  # relative, from the limit; also the methods
REMAINING_DISTANCE = 0.05  # of the squared distance from the mean task at the start
QUANTITIES = {
    "start": "squared distance from the mean task, $\\|Bw - B_*\\mu_*\\|^2$",
    "smallest": "least squared singular value of $B_*^T B$",
    "orthogonal_mean": "mean squared singular value of $B_{*\\perp}^T B$",
}


def settings(scale: str) -> LinearAnilConfig:
    """Return how the networks are trained."""
    config = anil_trainings.SETTINGS[scale]
    return replace(config, mean=(1.0,) * len(config.variances))


def measure(options: ExperimentOptions) -> dict[str, LinearRecord]:
    """Train both learners and the limit of infinitely many tasks."""
    return train_methods(options, settings(options.scale), tuple(TOLERANCE))


def rows(records: Mapping[str, LinearRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Give the distance from the mean task, compare the least singular value with the limit, and give the risks."""
    config, paper = settings(options.scale), options.scale == "paper"
    limit = config.limit(config.rates)[0]
    for name, record in records.items():
        label, tolerance = METHODS[name], TOLERANCE[name]
        starts = [curve[0] for curve in record.curves.values["start"]]
        remaining = [end / start for end, start in zip(record.final("start"), starts)]
        yield Row.mean(
            f"{label}, distance from the mean task",
            "‖Bw − B*μ*‖² over that at the start",
            remaining,
            agrees=max(remaining) < REMAINING_DISTANCE if paper else None,
            note=f"agrees below {REMAINING_DISTANCE:.0%} in every run",
        )
        least = Row.mean(f"{label}, least", "squared singular value of B*ᵀB", record.final("smallest"))
        agrees = abs(least.ours - limit) <= tolerance * limit if paper else None
        yield replace(
            least, published=limit, agrees=agrees, note=f"published: the limit; agrees within {tolerance:.0%}"
        )
        for estimator, risks in record.risks.items():
            note = "ridge regression shrinks towards zero, not towards the mean task"
            yield Row.mean(
                f"{label}, {estimator}", "excess risk", risks, note=note if estimator.startswith("ridge") else ""
            )


def figure(outcome: Outcome[Mapping[str, LinearRecord]]) -> Figure:
    """Draw what is learned and what is unlearned during training."""
    config = settings(outcome.result.scale)
    figure, panels = curve_panels(f"{config.tasks} tasks whose mean is not zero", 3, config, outcome.data)
    for axes, (quantity, label) in zip(panels, QUANTITIES.items()):
        draw_curves(axes, outcome.data, quantity)
        axes.set(ylabel=label)
    panels[0].set(yscale="log")
    limit = config.limit(config.rates)[0]
    panels[1].axhline(limit, color="gray", linestyle=":", label="the limit Λ*, infinite tasks")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


EXPERIMENT = TrainingExperiment("anil-mean", measure, rows, figure)
