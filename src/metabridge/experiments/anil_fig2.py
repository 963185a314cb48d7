"""Yüksel et al. 2023, figure 2: the shared representation is learned; squared singular values of B*ᵀB during training.

With infinitely many tasks they converge to the eigenvalues of Λ* (theorem 1), with infinitely many points per task to
1/α. The paper has a figure and no numbers; the rows compare with these limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metabridge.experiments.anil_trainings import (
    METHODS,
    SETTINGS,
    LinearRecord,
    curve_panels,
    draw_curves,
    train_all_methods,
)
from metabridge.experiments.experiment import ExperimentOptions, Outcome, TrainingExperiment
from metabridge.report.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The relative difference from the limit that counts as agreement. Theorem 1 is for infinitely many tasks; for 5000 the
# paper says that both learners come close to it.
TOLERANCE = {"infinite-tasks": 0.01, "infinite-samples": 0.01, "fo-anil": 0.1, "fo-maml": 0.1}
QUANTITIES = {"smallest": "least", "largest": "largest"}  # of the squared singular values


def rows(records: Mapping[str, LinearRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Compare the extreme squared singular values at the end of training with the limit."""
    config = SETTINGS[options.scale]
    for name, record in records.items():
        limits = config.limit(config.infinite_sample_rates if name == "infinite-samples" else config.rates)
        tolerance = TOLERANCE.get(name)
        for (quantity, label), limit in zip(QUANTITIES.items(), limits):
            row = Row.mean(f"{METHODS[name]}, {label}", "squared singular value of B*ᵀB", record.final(quantity))
            if tolerance is None:
                yield replace(row, note="no limit is known")
                continue
            agrees = abs(row.ours - limit) <= tolerance * limit if options.scale == "paper" else None
            note = f"published: the limit; agrees within {tolerance:.0%}"
            yield replace(row, published=limit, agrees=agrees, note=note)


def figure(outcome: Outcome[Mapping[str, LinearRecord]]) -> Figure:
    """Draw the least and the largest squared singular value during training."""
    config = SETTINGS[outcome.result.scale]
    title = f"Learning the shared representation B* of {config.tasks} tasks"
    figure, panels = curve_panels(title, 2, config, outcome.data)
    for axes, (quantity, label), limit in zip(panels, QUANTITIES.items(), config.limit(config.rates)):
        draw_curves(axes, outcome.data, quantity)
        axes.axhline(limit, color="gray", linestyle=":", label="theorem 1's limit Λ*, infinite tasks")
        axes.set(ylabel=f"{label} squared singular value of $B_*^T B$", ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


EXPERIMENT = TrainingExperiment("anil-fig2", train_all_methods, rows, figure)
