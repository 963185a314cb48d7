"""Training of linear networks on tasks with a shared representation (Yüksel et al. 2023, figures 2 and 3, table 1).

All runs of a method are trained together and stored in one record, which the experiments share.
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
from metabridge.experiments.records import Record, as_json, run_folder
from metabridge.files import FolderLock
from metabridge.report.results import Machine
from metabridge.theory.adaptation import one_step_risk, ridge_risks
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

METHODS = {
    "fo-anil": "FO-ANIL",
    "fo-maml": "FO-MAML",
    "infinite-tasks": "FO-ANIL, infinite tasks",
    "infinite-samples": "FO-ANIL, infinite samples",
    "burer-monteiro": "Burer–Monteiro",
}
SETTINGS = {
    "quick": LinearAnilConfig(runs=2, tasks=500, steps=2000, iterations=60, designs=200),
    "paper": LinearAnilConfig(),
}
PENALTIES = torch.logspace(-1, 4, 51, dtype=torch.float64)  # of ridge regression at test time


@dataclass(frozen=True)
class LinearRecord(Record):
    """The measurements of all runs of one method."""

    curves: RepresentationCurves
    risks: dict[str, list[float]]  # one risk on new tasks per run, by estimator and number of points per task

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> LinearRecord:
        """Return the record with these fields, as read from JSON."""
        return cls(**{**stored, "curves": RepresentationCurves(**stored["curves"])})

    def final(self, quantity: str) -> list[float]:
        """Return a quantity at the end of training, for each run."""
        return [curve[-1] for curve in self.curves.values[quantity]]


def train_all_methods(options: ExperimentOptions) -> dict[str, LinearRecord]:
    """Train all methods on tasks with mean zero."""
    return train_methods(options, SETTINGS[options.scale], tuple(METHODS))


def train_methods(
    options: ExperimentOptions, config: LinearAnilConfig, methods: Sequence[str]
) -> dict[str, LinearRecord]:
    """Train the methods that `only` selects, and return the records of all methods that are finished."""
    options.check_only(methods)
    records = {name: train_method(options, name, config) for name in methods}
    return {name: record for name, record in records.items() if record is not None}


def train_method(options: ExperimentOptions, method: str, config: LinearAnilConfig) -> LinearRecord | None:
    """Return a method's stored record, or train it. Return None if `only` excludes it or the time limit ends it."""
    plan = as_json({"method": method, "seed": options.seed, **asdict(config)})
    name = f"anil{'' if config.mean is None else '-mean'}-{method}-{options.scale}-{options.seed}"
    record = LinearRecord.load(options, name, plan)
    if record is not None or not options.includes(method):
        return record
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
    record = LinearRecord(name, plan, Machine.current(options.device), nets.seconds / 60, nets.curves, risks)
    record.save(options)
    return record


def new_task_risks(
    config: LinearAnilConfig, environments: list[SharedRepresentation], nets: TrainedLinearNets
) -> dict[str, list[float]]:
    """Return the risks of each run on new tasks, by estimator and number of points per task."""
    risks: dict[str, list[float]] = {}
    for points in config.m_test:
        if nets.w is not None:
            moments = (TaskMoments.from_environment(environment) for environment in environments)
            risks[f"1-GD, {points} points"] = [
                float(one_step_risk(B, w, tasks, config.alpha, points)) for B, w, tasks in zip(nets.B, nets.w, moments)
            ]
        risks[f"ridge, {points} points"] = [
            ridge_risk(config, environment, B, points) for environment, B in zip(environments, nets.B)
        ]
    return risks


def ridge_risk(config: LinearAnilConfig, environment: SharedRepresentation, B: Tensor, points: int) -> float:
    """Return the risk of ridge regression on a representation, with the penalty selected on other random designs."""
    generator = torch.Generator().manual_seed(environment.seed)
    shape = (config.designs, points, config.dimension)
    validation_x, test_x = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    tasks = TaskMoments.from_environment(environment)
    penalty = PENALTIES[ridge_risks(B, tasks, validation_x, PENALTIES).argmin()]
    return float(ridge_risks(B, tasks, test_x, penalty[None]))


def curve_panels(
    title: str, panels: int, config: LinearAnilConfig, records: Mapping[str, LinearRecord], **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels whose x axis is the percentage of training, and the panels."""
    from metabridge.report import result_figures

    title = f"{title}: means of {config.runs} runs ± one standard deviation"
    figure, axes = result_figures.subplots(title, 1, panels, (1 + 4.6 * panels, 5), **options)
    xlabel = f"training, % of {config.steps:,} steps".replace(",000", " 000")
    if "burer-monteiro" in records:
        xlabel += f"\n(Burer–Monteiro: of {config.iterations} iterations of L-BFGS)"
    for panel in axes:
        panel.set(xlabel=xlabel)
    return figure, list(axes)


def draw_curves(axes: Axes, records: Mapping[str, LinearRecord], quantity: str) -> None:
    """Draw the mean of a quantity over runs during training, with a band of ± one standard deviation."""
    from metabridge.report.figures import COLORS
    from metabridge.report.result_figures import plot_mean_and_deviation

    for (name, label), color in zip(METHODS.items(), COLORS):
        if name not in records or quantity not in records[name].curves.values:
            continue
        curves = records[name].curves
        percent = [100 * step / curves.steps[-1] for step in curves.steps]
        # The curves of FO-MAML and FO-ANIL coincide. Dashes on a wider line show both.
        style, width = "--" if name == "fo-maml" else "-", 2.2 if name == "fo-anil" else 1.8
        runs = curves.values[quantity]
        plot_mean_and_deviation(axes, percent, runs, color, label, linestyle=style, linewidth=width)
