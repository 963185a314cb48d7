"""Yüksel et al. (2023, figure 3): unlearning of directions that the tasks do not share.

B is the representation of the network, and B*⊥ spans the orthogonal complement of the shared representation B*. How
much of B*⊥ the network has unlearned is measured by the squared singular values of B*⊥ᵀB. With infinitely many tasks
and finitely many points per task, they decrease to zero at least as fast as 1/t after t training steps (app. H). With
infinitely many points per task, they stay constant. For Burer–Monteiro factorization, they grow. The paper shows a
figure but no numbers, so the rows state whether our values follow these trends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

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
from metabridge.theory.anil import unlearning_bound
from metabridge.training.linear_anil import LinearAnilConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Which of the squared singular values: the keys of their curves in records, with their labels in the rows.
QUANTITIES = {"orthogonal_mean": "mean", "orthogonal_largest": "largest"}


def largest_singular_value_bounds(config: LinearAnilConfig, steps: list[int]) -> list[float]:
    """Return the bound of app. H on the largest squared singular value of B*⊥ᵀB after each number of steps.

    Initially, BBᵀ = I/(4α), so all squared singular values are 1/(4α).
    """
    total_variance = sum(config.variances) + config.noise
    initial_value = 0.25 / config.alpha
    bounds: list[float] = unlearning_bound(
        initial_value, torch.tensor(steps), total_variance, config.anil_settings
    ).tolist()
    return bounds


def rows(records: Mapping[str, LinearRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Yield the squared singular values at the end of training, and whether they change as in the paper."""
    config = SETTINGS[options.scale]
    for name, record in records.items():
        for quantity, label in QUANTITIES.items():
            claim_holds, note = check_claim(name, record, quantity, config)
            # The claims about first-order (FO) ANIL and MAML are for many tasks and steps, as at the paper scale.
            agrees = claim_holds if options.scale == "paper" or name not in ("fo-anil", "fo-maml") else None
            metric = "squared singular value of B*⊥ᵀB"
            yield Row.mean(f"{METHODS[name]}, {label}", metric, record.final_values(quantity), agrees=agrees, note=note)


def check_claim(name: str, record: LinearRecord, quantity: str, config: LinearAnilConfig) -> tuple[bool, str]:
    """Return whether the paper's claim about a method holds in all runs, and a note that states the claim."""
    curves = record.curves.values[quantity]
    if name == "infinite-tasks":
        bounds = largest_singular_value_bounds(config, record.curves.steps)
        rounding = 1.000001  # factor that allows for rounding errors
        within_bounds = all(value <= rounding * bound for curve in curves for value, bound in zip(curve, bounds))
        return within_bounds, f"agrees if it never exceeds the bound of app. H ({bounds[-1]:.3g} at the end)"
    if name == "infinite-samples":
        return all(abs(curve[-1] / curve[0] - 1) <= 0.01 for curve in curves), "agrees if it stays constant within 1%"
    if name == "burer-monteiro":
        return all(max(curve) > curve[0] for curve in curves), "agrees if it exceeds its initial value"
    return all(curve[-1] < curve[0] for curve in curves), "agrees if it ends below its initial value"


def figure(outcome: Outcome[Mapping[str, LinearRecord]]) -> Figure:
    """Draw the mean and the largest squared singular value during training."""
    config = SETTINGS[outcome.result.scale]
    title = f"Unlearning what {config.tasks} tasks do not share"
    figure, panels = curve_panels(title, 2, config, outcome.data, sharey=True)
    percent = list(range(101))
    bounds = largest_singular_value_bounds(config, [config.steps * value // 100 for value in percent])
    for axes, (quantity, label) in zip(panels, QUANTITIES.items()):
        draw_curves(axes, outcome.data, quantity)
        axes.plot(percent, bounds, ":", color="gray", label="bound for infinitely many tasks (app. H)")
        axes.set(ylabel=f"{label} squared singular value of $B_{{*\\perp}}^T B$")
    panels[0].set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


EXPERIMENT = TrainingExperiment("anil-fig3", train_all_methods, rows, figure)
