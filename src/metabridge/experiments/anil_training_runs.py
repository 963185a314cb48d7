"""Linear networks trained on tasks with a shared representation (Yüksel et al. 2023, figures 2 and 3, table 1).

All runs of a method are trained together, and their measurements are stored in one record, which several experiments
share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metabridge.environments.shared_representation import SharedRepresentation
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.records import Record, run_folder
from metabridge.files import FolderLock
from metabridge.theory.adaptation import one_step_risk, selected_ridge_risk
from metabridge.theory.anil import TaskMoments
from metabridge.training.checkpoint import RunFolder
from metabridge.training.linear_anil import (
    LinearAnilConfig,
    RepresentationCurves,
    TrainedLinearNets,
    train_burer_monteiro,
    train_first_order,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The label of each method, which is also in the names of rows in results/anil-*.json. "FO" means first-order.
# Burer–Monteiro factorization trains without an inner loop.
METHODS = {
    "fo-anil": "FO-ANIL",
    "fo-maml": "FO-MAML",
    "infinite-tasks": "FO-ANIL, infinitely many tasks",
    "infinite-samples": "FO-ANIL, infinitely many samples",
    "burer-monteiro": "Burer–Monteiro",
}
SETTINGS = {
    "quick": LinearAnilConfig(runs=2, tasks=500, steps=2000, iterations=60, designs=200),
    "paper": LinearAnilConfig(),
}
PENALTIES = torch.logspace(-1, 4, 51, dtype=torch.float64)  # candidates for ridge regression at test time


@dataclass(frozen=True)
class LinearRecord(Record):
    """The measurements of all runs of one method."""

    curves: RepresentationCurves
    risks: dict[str, list[float]]  # excess risk of each run on new tasks, by a key such as "ridge, 20 points"

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> LinearRecord:
        """Return the record with these fields, as read from JSON."""
        return cls(**{**stored, "curves": RepresentationCurves(**stored["curves"])})

    def final_values(self, quantity: str) -> list[float]:
        """Return the value of a quantity at the end of training, for each run."""
        return [curve[-1] for curve in self.curves.values[quantity]]


def train_all_methods(options: ExperimentOptions) -> dict[str, LinearRecord]:
    """Return the records of all methods on tasks whose parameters have mean zero (μ* = 0); see `train_methods`."""
    return train_methods(options, SETTINGS[options.scale], tuple(METHODS))


def train_methods(
    options: ExperimentOptions, config: LinearAnilConfig, methods: Sequence[str]
) -> dict[str, LinearRecord]:
    """Train the methods that `options.only` selects, except those with a record. Return all records."""
    options.check_selected_names(methods)
    records = {name: train_method(options, name, config) for name in methods}
    return {name: record for name, record in records.items() if record is not None}


def train_method(options: ExperimentOptions, method: str, config: LinearAnilConfig) -> LinearRecord | None:
    """Return the record of a method. If there is none yet, train first; see `Record.load_or_measure`."""
    plan = {"method": method, "seed": options.seed, **asdict(config)}
    name = f"anil{'' if config.mean is None else '-mean'}-{method}-{options.scale}-{options.seed}"

    def measure() -> dict[str, Any] | None:
        environments = config.environments(options.seed)
        deadline = math.inf if options.minutes is None else time.perf_counter() + 60 * options.minutes
        with FolderLock(run_folder(options, name, plan)) as lock:
            folder = RunFolder(lock.folder)
            if method == "burer-monteiro":
                nets = train_burer_monteiro(config, environments, options.device, folder, deadline)
            else:
                nets = train_first_order(method, config, environments, options.device, folder, deadline)
        if nets is None:
            return None
        risks = new_task_risks(config, environments, nets)
        return {"minutes": nets.seconds / 60, "curves": nets.curves, "risks": risks}

    return LinearRecord.load_or_measure(options, method, name, plan, measure)


def new_task_risks(
    config: LinearAnilConfig, environments: list[SharedRepresentation], nets: TrainedLinearNets
) -> dict[str, list[float]]:
    """Return the excess risks of all runs on new tasks, by estimator and number of points per task."""
    risks: dict[str, list[float]] = {}
    for points in config.m_test:
        if nets.w is not None:  # Burer–Monteiro factorization trains no head w
            tasks_by_run = (TaskMoments.from_environment(environment) for environment in environments)
            risks[f"1-GD, {points} points"] = [  # 1-GD is one step of gradient descent
                float(one_step_risk(B, w, tasks, config.alpha, points))
                for B, w, tasks in zip(nets.B, nets.w, tasks_by_run)
            ]
        risks[f"ridge, {points} points"] = [
            ridge_risk(config, environment, B, points) for environment, B in zip(environments, nets.B)
        ]
    return risks


def ridge_risk(config: LinearAnilConfig, environment: SharedRepresentation, B: Tensor, points: int) -> float:
    """Return the excess risk of ridge regression on the representation `B`.

    The penalty is selected on random inputs. The risk is then computed on other random inputs.
    """
    tasks, generator = TaskMoments.from_environment(environment), torch.Generator().manual_seed(environment.seed)
    return selected_ridge_risk(B, tasks, points, PENALTIES, designs=config.designs, generator=generator)


def curve_panels(
    title: str, num_panels: int, config: LinearAnilConfig, records: Mapping[str, LinearRecord], **subplot_options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels. The x-axis of each panel is the percentage of the training steps.

    `subplot_options` are passed to `Figure.subplots`.
    """
    from metabridge.report import result_figures

    title = f"{title}: means of {config.runs} runs ± one standard deviation"
    figure, axes = result_figures.subplots(title, 1, num_panels, (1 + 4.6 * num_panels, 5), **subplot_options)
    xlabel = f"training, % of {config.steps:,} steps".replace(",000", " 000")  # 30 000 instead of 30,000
    if "burer-monteiro" in records:
        xlabel += f"\n(Burer–Monteiro: of {config.iterations} iterations of L-BFGS)"
    for panel in axes:
        panel.set(xlabel=xlabel)
    return figure, list(axes)


def draw_curves(axes: Axes, records: Mapping[str, LinearRecord], quantity: str) -> None:
    """Draw a quantity during training: its mean over runs, with a band of ± one standard deviation."""
    from metabridge.report.figures import COLORS
    from metabridge.report.result_figures import plot_mean_and_deviation

    for (name, label), color in zip(METHODS.items(), COLORS):
        if name not in records or quantity not in records[name].curves.values:
            continue
        curves = records[name].curves
        percent = [100 * step / curves.steps[-1] for step in curves.steps]
        # The curves of FO-MAML and FO-ANIL coincide. To show both, FO-MAML is dashed, over a wider line of FO-ANIL.
        style, width = "--" if name == "fo-maml" else "-", 2.2 if name == "fo-anil" else 1.8
        runs = curves.values[quantity]
        plot_mean_and_deviation(axes, percent, runs, color, label, linestyle=style, linewidth=width)
