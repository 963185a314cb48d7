"""Yüksel et al. (2023, appendices A and I): tasks with a nonzero mean, μ* = (1, …, 1), which theorem 1 does not cover.

The parameters of a task are B*w*, where w* has mean μ*. The parameters of the network before adaptation are Bw. In the
paper, Bw converges to the mean task B*μ* in first-order (FO) ANIL and MAML. With infinitely many tasks, the limit of
B*ᵀBBᵀB* is the same Λ* as for μ* = 0, because at Bw = B*μ* the training steps depend only on the deviations of the
tasks from their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metabridge.experiments import anil_training_runs
from metabridge.experiments.anil_training_runs import (
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

# The methods, each with the relative tolerance of its smallest squared singular value.
TOLERANCE = {"fo-anil": 0.15, "fo-maml": 0.15, "infinite-tasks": 0.01}
# A run agrees if training reduces the squared distance from the mean task to less than this fraction.
MAX_REMAINING_DISTANCE = 0.05
QUANTITIES = {  # labels of the y-axes, by the key of the curve in records; "start" is the distance from the mean task
    "start": "squared distance from the mean task, $\\|Bw - B_*\\mu_*\\|^2$",
    "smallest": "smallest squared singular value of $B_*^T B$",
    "orthogonal_mean": "mean squared singular value of $B_{*\\perp}^T B$",
}


def linear_config(scale: str) -> LinearAnilConfig:
    """Return the training configuration at this scale."""
    config = anil_training_runs.SETTINGS[scale]
    return replace(config, mean=(1.0,) * len(config.variances))


def measure(options: ExperimentOptions) -> dict[str, LinearRecord]:
    """Train FO-ANIL and FO-MAML on finitely many tasks, and FO-ANIL on infinitely many."""
    return train_methods(options, linear_config(options.scale), tuple(TOLERANCE))


def rows(records: Mapping[str, LinearRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Yield the distance from the mean task, the smallest singular value with its limit, and the excess risks."""
    config, is_paper_scale = linear_config(options.scale), options.scale == "paper"
    limit = config.limiting_eigenvalues(config.anil_settings)[0]
    for name, record in records.items():
        label, tolerance = METHODS[name], TOLERANCE[name]
        distances = record.curves.values["start"]  # one curve per run
        remaining_fractions = [curve[-1] / curve[0] for curve in distances]
        yield Row.mean(
            f"{label}, distance from the mean task",
            "‖Bw − B*μ*‖² / initial ‖Bw − B*μ*‖²",
            remaining_fractions,
            agrees=max(remaining_fractions) < MAX_REMAINING_DISTANCE if is_paper_scale else None,
            note=f"agrees if below {MAX_REMAINING_DISTANCE:.0%} in every run",
        )
        values = record.final_values("smallest")
        row = Row.mean(f"{label}, smallest singular value", "squared singular value of B*ᵀB", values)
        agrees = abs(row.ours - limit) <= tolerance * limit if is_paper_scale else None
        note = f"the published value is the limit; agrees if within {tolerance:.0%}"
        yield replace(row, published=limit, agrees=agrees, note=note)
        for estimator, risks in record.risks.items():
            note = "ridge regression shrinks towards zero, not towards the mean task"
            yield Row.mean(
                f"{label}, {estimator}", "excess risk", risks, note=note if estimator.startswith("ridge") else ""
            )


def figure(outcome: Outcome[Mapping[str, LinearRecord]]) -> Figure:
    """Draw the distance from the mean task and the squared singular values during training."""
    config = linear_config(outcome.result.scale)
    figure, panels = curve_panels(f"{config.tasks} tasks whose mean is not zero", 3, config, outcome.data)
    for axes, (quantity, label) in zip(panels, QUANTITIES.items()):
        draw_curves(axes, outcome.data, quantity)
        axes.set(ylabel=label)
    panels[0].set(yscale="log")
    limit = config.limiting_eigenvalues(config.anil_settings)[0]
    panels[1].axhline(limit, color="gray", linestyle=":", label="limit for infinitely many tasks")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


EXPERIMENT = TrainingExperiment("anil-mean", measure, rows, figure)
