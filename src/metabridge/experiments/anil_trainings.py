"""Trainings of linear nets on tasks with a shared representation, of which D's figures and table are made.

All runs of a method are trained side by side and leave one record of what they measured. An experiment asked for
again reads the records that are there, goes on with trainings that were stopped, and begins those that are missing.
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
from metabridge.experiments.linear_anil import Curves, Setting, Trained, descend, factorise
from metabridge.experiments.power_law import mean
from metabridge.experiments.record_files import keep, plain, run_folder, stored
from metabridge.experiments.result import Environment, Result, Row, Work, environment
from metabridge.files import FolderLock
from metabridge.theory.adaptation import one_step_risk, ridge_risks
from metabridge.theory.anil import TaskMoments
from metabridge.training.checkpoint import RunFolder

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
SETTINGS = {"quick": Setting(runs=2, tasks=500, steps=2000, iterations=60, designs=200), "paper": Setting()}
PENALTIES = torch.logspace(-1, 4, 51, dtype=torch.float64)  # of ridge regression at test


@dataclass(frozen=True)
class Record:
    """What the runs of one method measured; `plan` is all that it depends on.

    `risks` are those on new tasks, a number for each run, by estimator and by points of a task.
    """

    name: str
    plan: dict[str, Any]
    environment: Environment
    minutes: float
    curves: Curves
    risks: dict[str, list[float]]

    def final(self, quantity: str) -> list[float]:
        """Return a quantity of every run at the end of training."""
        return [values[-1] for values in self.curves.values[quantity]]


@dataclass(frozen=True)
class Outcome:
    """The result, the records it was made of, and how their nets were trained."""

    result: Result
    records: dict[str, Record]
    setting: Setting


def trained(work: Work, setting: Setting, methods: Sequence[str] = tuple(METHODS)) -> dict[str, Record]:
    """Return the record of every method that is trained to the end, after training those that are asked for."""
    work.check_only(methods)
    found = {name: _record(work, name, setting) for name in methods}
    return {name: record for name, record in found.items() if record is not None}


def _record(work: Work, method: str, setting: Setting) -> Record | None:
    plan = plain({"method": method, "seed": work.seed, **asdict(setting)})
    name = f"anil{'' if setting.mean is None else '-mean'}-{method}-{work.scale}-{work.seed}"
    record = stored(work, name, plan, lambda held: Record(**{**held, "curves": Curves(**held["curves"])}))
    if record is not None or (work.only and method not in work.only):
        return record
    worlds = setting.worlds(work.seed)
    until = math.inf if work.minutes is None else time.perf_counter() + 60 * work.minutes
    with FolderLock(run_folder(work, name, plan)) as lock:
        folder = RunFolder(lock.folder)
        if method == "burer-monteiro":
            done = factorise(setting, worlds, work.device, folder, until)
        else:
            done = descend(method, setting, worlds, work.device, folder, until)
    if done is None:
        return None
    record = Record(name, plan, environment(work.device), done.seconds / 60, done.curves, _risks(setting, worlds, done))
    keep(work, name, record)
    return record


def _risks(setting: Setting, worlds: list[SharedRepresentation], done: Trained) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for points in setting.m_test:
        if done.w is not None:
            tasks = (TaskMoments.from_environment(world) for world in worlds)
            found[f"1-GD, {points} points"] = [
                float(one_step_risk(B, w, own, setting.alpha, points)) for B, w, own in zip(done.B, done.w, tasks)
            ]
        found[f"ridge, {points} points"] = [ridge_risk(setting, world, B, points) for world, B in zip(worlds, done.B)]
    return found


def ridge_risk(setting: Setting, world: SharedRepresentation, B: Tensor, points: int) -> float:
    """Return the risk of ridge regression on a representation, its penalty chosen on other designs than judge it."""
    generator = torch.Generator().manual_seed(world.seed)
    shape = (setting.designs, points, setting.dimension)
    choosing, judging = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    tasks = TaskMoments.from_environment(world)
    penalty = PENALTIES[ridge_risks(B, tasks, choosing, PENALTIES).argmin()]
    return float(ridge_risks(B, tasks, judging, penalty[None]))


def row(name: str, metric: str, values: Sequence[float], **beside: Any) -> Row:
    """Return the row of a mean over runs, with its 95 % interval."""
    middle, margin = mean(values)
    return Row(name, metric, ours=middle, ci95=margin, **beside)


def draw(axes: Axes, records: Mapping[str, Record], quantity: str) -> None:
    """Draw a quantity over training: the mean over runs, and a band of one standard deviation to either side."""
    from metabridge.report.figures import COLOURS

    for name, record in records.items():
        if quantity not in record.curves.values:
            continue
        values = torch.tensor(record.curves.values[quantity], dtype=torch.float64)
        middle, spread = values.mean(0), values.std(0)
        steps = [100 * step / record.curves.steps[-1] for step in record.curves.steps]
        place = list(METHODS).index(name)
        # FO-MAML lies on FO-ANIL: dashes let both be seen
        style, colour = "--" if name == "fo-maml" else "-", COLOURS[place]
        axes.fill_between(steps, middle - spread, middle + spread, color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, middle, style, color=colour, label=METHODS[name], linewidth=2.2 if place == 0 else 1.8)


def pictured(outcome: Outcome, title: str, panels: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels against the share of training, with a title that says what the bands are."""
    from matplotlib.figure import Figure

    setting = outcome.setting
    share = f"training, % of {setting.steps:,} steps".replace(",000", " 000")
    if "burer-monteiro" in outcome.records:
        share += f"\n(Burer–Monteiro: of {setting.iterations} iterations of L-BFGS)"
    picture = Figure(figsize=(1 + 4.6 * panels, 5), layout="constrained")
    picture.suptitle(f"{title}: means of {setting.runs} runs ± one standard deviation")
    axes = list(picture.subplots(1, panels, **options))
    for own in axes:
        own.set(xlabel=share)
    return picture, axes
