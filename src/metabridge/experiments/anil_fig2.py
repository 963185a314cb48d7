"""Yüksel et al. (2023, figure 2): learning of the shared representation B*.

FO-ANIL and FO-MAML are first-order ANIL and MAML. B is the representation of the network. How much of B* it has learned
is measured by the squared singular values of B*ᵀB. With infinitely many tasks, they converge to the eigenvalues of Λ*,
the limit of B*ᵀBBᵀB* (theorem 1). With infinitely many points per task, they converge to 1/α, where α is the inner
learning rate. The paper shows a figure but no numbers, so our values are compared with these limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metabridge.experiments.anil_training_runs import (
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

# Largest relative difference from the limit that counts as agreement. FO-ANIL and FO-MAML are trained on 5000 tasks,
# for which the paper says that they come close to the limit for infinitely many tasks.
TOLERANCE = {"infinite-tasks": 0.01, "infinite-samples": 0.01, "fo-anil": 0.1, "fo-maml": 0.1}
QUANTITIES = ("smallest", "largest")  # which of the squared singular values of B*ᵀB


def rows(records: Mapping[str, LinearRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Yield the smallest and largest squared singular values at the end of training, compared with their limits."""
    config = SETTINGS[options.scale]
    for name, record in records.items():
        limits = config.limiting_eigenvalues(
            config.infinite_sample_settings if name == "infinite-samples" else config.anil_settings
        )
        tolerance = TOLERANCE.get(name)  # None for Burer–Monteiro factorization
        for quantity, limit in zip(QUANTITIES, limits):
            values = record.final_values(quantity)
            row = Row.mean(f"{METHODS[name]}, {quantity}", "squared singular value of B*ᵀB", values)
            if tolerance is None:
                yield replace(row, note="no limit is known")
                continue
            agrees = abs(row.ours - limit) <= tolerance * limit if options.scale == "paper" else None
            note = f"the published value is the limit; agrees if within {tolerance:.0%}"
            yield replace(row, published=limit, agrees=agrees, note=note)


def figure(outcome: Outcome[Mapping[str, LinearRecord]]) -> Figure:
    """Draw the smallest and the largest squared singular value during training, with their limits."""
    config = SETTINGS[outcome.result.scale]
    title = f"Learning the shared representation B* of {config.tasks} tasks"
    figure, panels = curve_panels(title, 2, config, outcome.data)
    for axes, quantity, limit in zip(panels, QUANTITIES, config.limiting_eigenvalues(config.anil_settings)):
        draw_curves(axes, outcome.data, quantity)
        axes.axhline(limit, color="gray", linestyle=":", label="limit for infinitely many tasks (theorem 1)")
        axes.set(ylabel=f"{quantity} squared singular value of $B_*^T B$", ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


EXPERIMENT = TrainingExperiment("anil-fig2", train_all_methods, rows, figure)
