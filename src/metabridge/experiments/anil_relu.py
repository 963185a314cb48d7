"""D's appendix I: students of two and three layers with ReLUs learn the shared linear representation as well.

The tasks are those of the linear nets, beyond whose theory this is. What to look for in the first layer W: its squared
singular values grow along the representation B* and stay small orthogonally to it, and new tasks cost less than
without the representation. The paper prints no numbers, and how it trained these students is not at hand: ours are
100 units wide, and trained by Adam on 100 of the tasks in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from metabridge.environments.shared_representation import SharedRepresentation
from metabridge.experiments.anil_trainings import row
from metabridge.experiments.record_files import keep, plain, run_folder, stored
from metabridge.experiments.result import Environment, Result, Row, UnportedExperiment, Work, environment
from metabridge.heads import RidgeClassifier
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import Network, mlp
from metabridge.theory.anil import spectrum
from metabridge.training import Model, evaluate, fit

ID = "anil-relu"
PENALTIES = (1.0, 10.0, 30.0, 100.0, 300.0)  # of ridge regression on the features, at test
SINGLE_TASK = {20: 1.84, 30: 1.63}  # D table 1: ridge regression on the inputs themselves, by points


@dataclass(frozen=True)
class Setting:
    """How the students are trained and judged."""

    runs: int
    iterations: int
    lr: float
    judged: int  # test tasks
    methods: tuple[str, ...] = ("fo-anil", "fo-maml")
    layers: tuple[int, ...] = (2, 3)
    width: int = 100
    pool: int = 5000
    batch: int = 100
    alpha: float = 0.025
    m_test: tuple[int, ...] = (20, 30)


SETTINGS = {
    "quick": Setting(runs=1, iterations=250, lr=3e-3, judged=200, methods=("fo-anil",)),
    "paper": Setting(runs=3, iterations=5000, lr=1e-3, judged=1000),
}


@dataclass(frozen=True)
class Record:
    """What one student measured; `spectra` are those of its first layer before and after training."""

    name: str
    plan: dict[str, Any]
    environment: Environment
    minutes: float
    spectra: list[dict[str, float]]
    risks: dict[str, list[float]]  # before and after training, by estimator and points of a task


@dataclass(frozen=True)
class Outcome:
    """The result and the records it was made of, by method and layers, one for each run."""

    result: Result
    records: dict[str, list[Record]]


def run(work: Work) -> Outcome:
    """Train every student, or read its record."""
    setting = SETTINGS[work.scale]
    parts = [f"{name}-{layers}" for name in setting.methods for layers in setting.layers]
    work.check_only(parts)
    seeds = range(work.seed * setting.runs, (work.seed + 1) * setting.runs)
    found = {part: [_record(work, part, setting, seed) for seed in seeds] for part in parts}
    records = {part: [own for own in runs if own is not None] for part, runs in found.items()}
    records = {part: runs for part, runs in records.items() if len(runs) == setting.runs}
    each = {own.name: own for runs in records.values() for own in runs}
    return Outcome(Result.of(work, ID, tuple(rows(records)), each), records)


def _record(work: Work, part: str, setting: Setting, seed: int) -> Record | None:
    plan = plain({"student": part, "seed": seed, **asdict(setting)})
    name = f"{ID}-{part}-{work.scale}-{seed}"
    record = stored(work, name, plan, lambda held: Record(**held))
    if record is not None or (work.only and part not in work.only):
        return record
    learner, _, layers = part.rpartition("-")
    world = SharedRepresentation(pool=setting.pool, seed=seed)
    net = mlp(world.dimension, 1, width=setting.width, depth=int(layers) - 1, bias=False, seed=seed).to(work.device)
    chosen = method(learner, steps=1, lr=setting.alpha)
    before = _judged(Model(chosen, net, parameters(chosen, net)), world, setting)
    trained = fit(
        net,
        chosen,
        world,
        iterations=setting.iterations,
        tasks=setting.batch,
        lr=setting.lr,
        device=work.device,
        mode="captured" if work.device.startswith("cuda") else "vectorised",
        seed=seed,
        out=run_folder(work, name, plan),
        minutes=work.minutes,
        progress=work.progress,
        name=f"{learner}, {layers} layers, seed {seed}",
    )
    if not trained.finished:
        return None
    after = _judged(trained, world, setting)
    risks = {key: [before[1][key], after[1][key]] for key in after[1]}
    record = Record(name, plan, environment(work.device), trained.seconds / 60, [before[0], after[0]], risks)
    keep(work, name, record)
    return record


def _judged(model: Model, world: SharedRepresentation, setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Return the spectrum of the first layer, and the risks on new tasks of the same representation."""
    found = spectrum(_first_layer(model.net).double().cpu().mT, world.representation)
    ridges = [replace(model, method=replace(model.method, test=RidgeClassifier(penalty))) for penalty in PENALTIES]
    risks = {}
    for points in setting.m_test:
        tasks = replace(world, shots=points, queries=50, pool=None)

        def risk(model: Model, seed: int, tasks: SharedRepresentation = tasks) -> float:
            score = evaluate(model, tasks, tasks=setting.judged, seed=seed)
            return (score.mean - tasks.noise) / 2  # queries are noisy

        risks[f"1-GD, {points} points"] = risk(model, 1)
        risks[f"ridge, {points} points"] = risk(min(ridges, key=lambda own: risk(own, 0)), 1)
    return {quantity: float(value) for quantity, value in found._asdict().items()}, risks


def _first_layer(net: Network) -> torch.Tensor:
    return next(parameter.detach() for parameter in net.features.parameters())


def told(part: str) -> str:
    """Say which student it is.

    >>> told("fo-anil-3")
    'FO-ANIL, 3 layers'
    """
    learner, _, layers = part.rpartition("-")
    return f"{learner.upper()}, {layers} layers"


def rows(records: Mapping[str, Sequence[Record]]) -> list[Row]:
    """Give the first layer's spectrum and the risks after training, beside those before it."""
    made = []
    for part, runs in records.items():
        gains = [_contrast(own.spectra[1]) / _contrast(own.spectra[0]) for own in runs]
        made.append(
            _row(
                f"{told(part)}, first layer",
                "growth along B* over that orthogonally to it",
                gains,
                agrees=min(gains) > 1,
                note="largest squared singular values; agrees if it grows more along B* in every run",
            )
        )
        for key in runs[0].risks:
            before, after = zip(*(own.risks[key] for own in runs))
            alone = SINGLE_TASK[int(key.split()[1])]
            made.append(
                _row(
                    f"{told(part)}, {key}",
                    "excess risk",
                    after,
                    agrees=max(a - b for a, b in zip(after, before)) < 0,
                    note=f"untrained {sum(before) / len(before):.2f}, single-task ridge {alone}; "
                    "agrees if training lowers it in every run",
                )
            )
    return made


def _contrast(layer: Mapping[str, float]) -> float:
    return layer["largest"] / layer["orthogonal_largest"]


def _row(name: str, metric: str, values: Sequence[float], **beside: Any) -> Row:
    return Row(name, metric, ours=values[0], **beside) if len(values) == 1 else row(name, metric, values, **beside)


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the first layer's singular values, and the risk of ridge regression, before and after training."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    records = outcome.records
    with figures.LIGHT.context():
        picture = Figure(figsize=(11, 5), layout="constrained")
        picture.suptitle("ReLU students of tasks that share a linear representation B*, before and after training")
        left, right = picture.subplots(1, 2)
        quantities = {
            "largest": "largest along B*",
            "smallest": "least along B*",
            "orthogonal_mean": "mean orthogonally to B*",
        }
        for (quantity, label), colour in zip(quantities.items(), figures.COLOURS):
            _arrows(left, [[own.spectra for own in runs] for runs in records.values()], quantity, label, colour)
        keys = next(iter(records.values()))[0].risks
        for key, colour in zip(keys, figures.COLOURS):
            pairs = [[[{key: value} for value in own.risks[key]] for own in runs] for runs in records.values()]
            _arrows(right, pairs, key, key, colour)
        left.set(ylabel="squared singular value of the first layer", yscale="log")
        right.set(ylabel="excess risk on new tasks", ylim=(0, None))
        for axes in (left, right):
            axes.set_xticks(range(len(records)), [told(part).replace(", ", "\n") for part in records])
            axes.set_xlim(-0.6, len(records) - 0.4)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, title="○ untrained, ● trained")
    figures.save(picture, file)


def _arrows(axes: Any, students: list[list[list[dict[str, float]]]], key: str, label: str, colour: str) -> None:
    """Draw a quantity of every student before and after training, joined by a line, each run by itself."""
    shift = 0.12 * (len(axes.get_legend_handles_labels()[1]) - 1.5)
    for place, runs in enumerate(students):
        for number, (before, after) in enumerate(runs):
            x, named = place + shift, label if place == number == 0 else None
            axes.plot([x, x], [before[key], after[key]], color=colour, linewidth=1)
            axes.plot([x], [before[key]], "o", color=colour, markerfacecolor="none")
            axes.plot([x], [after[key]], "o", color=colour, label=named)


EXPERIMENT = UnportedExperiment("anil-relu", run, figure, resumable=True)
