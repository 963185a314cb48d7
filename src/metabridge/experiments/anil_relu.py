"""Yüksel et al. 2023, appendix I: students of two and three layers with ReLUs learn the shared representation as well.

The tasks are those of the linear networks, whose theory does not cover these students. Two things are expected in the
first layer W: its squared singular values grow along the representation B* and stay small orthogonally to it; and new
tasks have lower risk than without the representation. The paper prints neither numbers nor how it trained these
students; ours are 100 units wide and trained by Adam on 100 of the tasks per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from metabridge.environments.shared_representation import SharedRepresentation
from metabridge.experiments.experiment import ExperimentOptions, Outcome, TrainingExperiment
from metabridge.experiments.records import Record, as_json, run_folder
from metabridge.heads import RidgeClassifier
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import mlp
from metabridge.report.results import Machine, Row
from metabridge.theory.anil import spectrum
from metabridge.training import Model, evaluate, fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SINGLE_TASK = {20: 1.84, 30: 1.63}  # table 1: ridge regression on the inputs themselves, by points
PENALTIES = (1.0, 10.0, 30.0, 100.0, 300.0)  # of ridge regression on the features, at test time
SPECTRUM = {
    "largest": "largest along B*",
    "smallest": "least along B*",
    "orthogonal_mean": "mean orthogonally to B*",
}


@dataclass(frozen=True)
class Settings:
    """How the students are trained and tested."""

    runs: int
    iterations: int
    lr: float
    test_tasks: int
    methods: tuple[str, ...] = ("fo-anil", "fo-maml")
    layers: tuple[int, ...] = (2, 3)
    width: int = 100
    pool: int = 5000
    batch_size: int = 100
    alpha: float = 0.025
    m_test: tuple[int, ...] = (20, 30)

    def stored(self) -> dict[str, Any]:
        """Return the fields under the keys of the records."""
        keys = {"batch_size": "batch", "test_tasks": "judged"}
        return {keys.get(key, key): value for key, value in asdict(self).items()}


SETTINGS = {
    "quick": Settings(runs=1, iterations=250, lr=3e-3, test_tasks=200, methods=("fo-anil",)),
    "paper": Settings(runs=3, iterations=5000, lr=1e-3, test_tasks=1000),
}


@dataclass(frozen=True)
class StudentRecord(Record):
    """The measurements of one student, each before and after training."""

    spectra: list[dict[str, float]]  # of the first layer
    risks: dict[str, list[float]]  # by estimator and points of a task


def measure(options: ExperimentOptions) -> dict[str, StudentRecord]:
    """Train every student, and return the records of those with all runs finished."""
    settings = SETTINGS[options.scale]
    students = [f"{name}-{layers}" for name in settings.methods for layers in settings.layers]
    options.check_only(students)
    seeds = range(options.seed * settings.runs, (options.seed + 1) * settings.runs)
    finished: dict[str, StudentRecord] = {}
    for student in students:
        runs = [train_student(options, student, settings, seed) for seed in seeds]
        records = {record.name: record for record in runs if record is not None}
        if len(records) == settings.runs:
            finished |= records
    return finished


def train_student(options: ExperimentOptions, student: str, settings: Settings, seed: int) -> StudentRecord | None:
    """Return the stored record of a student, or train it; None if `only` excludes it or the time runs out."""
    plan = as_json({"student": student, "seed": seed, **settings.stored()})
    name = f"{EXPERIMENT.id}-{student}-{options.scale}-{seed}"
    record = StudentRecord.load(options, name, plan)
    if record is not None or not options.includes(student):
        return record
    learner, _, layers = student.rpartition("-")
    environment = SharedRepresentation(pool=settings.pool, seed=seed)
    net = mlp(environment.dimension, 1, width=settings.width, depth=int(layers) - 1, bias=False, seed=seed)
    net = net.to(options.device)
    algorithm = method(learner, steps=1, lr=settings.alpha)
    spectrum_before, risks_before = measure_student(
        Model(algorithm, net, parameters(algorithm, net)), environment, settings
    )
    run = fit(
        net,
        algorithm,
        environment,
        iterations=settings.iterations,
        batch_size=settings.batch_size,
        lr=settings.lr,
        device=options.device,
        mode="captured" if options.device.startswith("cuda") else "vectorized",
        seed=seed,
        out=run_folder(options, name, plan),
        minutes=options.minutes,
        progress=options.progress,
        name=f"{learner}, {layers} layers, seed {seed}",
    )
    if not run.finished:
        return None
    spectrum_after, risks_after = measure_student(run, environment, settings)
    risks = {key: [risks_before[key], after] for key, after in risks_after.items()}
    machine, minutes = Machine.current(options.device), run.seconds / 60
    record = StudentRecord(name, plan, machine, minutes, [spectrum_before, spectrum_after], risks)
    record.save(options)
    return record


def measure_student(
    model: Model, environment: SharedRepresentation, settings: Settings
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the spectrum of the first layer, and the risks on new tasks of the same representation."""
    first_layer = next(parameter.detach() for parameter in model.net.features.parameters())
    singular_values = spectrum(first_layer.double().cpu().mT, environment.representation)
    ridges = [replace(model, method=replace(model.method, test=RidgeClassifier(penalty))) for penalty in PENALTIES]
    risks = {}
    for points in settings.m_test:
        tasks = replace(environment, shots=points, queries=50, pool=None)

        def risk(model: Model, seed: int, tasks: SharedRepresentation = tasks) -> float:
            score = evaluate(model, tasks, tasks=settings.test_tasks, seed=seed)
            return (score.mean - tasks.noise) / 2  # the query labels are noisy

        risks[f"1-GD, {points} points"] = risk(model, 1)
        risks[f"ridge, {points} points"] = risk(min(ridges, key=lambda ridge: risk(ridge, 0)), 1)
    return {quantity: float(value) for quantity, value in singular_values._asdict().items()}, risks


def by_student(records: Mapping[str, StudentRecord]) -> dict[str, list[StudentRecord]]:
    """Return the records of all runs by the name of the student, such as "FO-ANIL, 3 layers"."""
    students: dict[str, list[StudentRecord]] = {}
    for record in records.values():
        learner, _, layers = record.plan["student"].rpartition("-")
        students.setdefault(f"{learner.upper()}, {layers} layers", []).append(record)
    return students


def rows(records: Mapping[str, StudentRecord], _: ExperimentOptions) -> Iterator[Row]:
    """Compare the first layer's spectrum and the risks after training with those before."""
    for student, runs in by_student(records).items():
        ratios = [[layer["largest"] / layer["orthogonal_largest"] for layer in record.spectra] for record in runs]
        growth = [after / before for before, after in ratios]
        yield Row.mean(
            f"{student}, first layer",
            "growth along B* over that orthogonally to it",
            growth,
            agrees=min(growth) > 1,
            note="largest squared singular values; agrees if it grows more along B* in every run",
        )
        for key in runs[0].risks:
            before, after = zip(*(record.risks[key] for record in runs))
            single_task = SINGLE_TASK[int(key.split()[1])]
            yield Row.mean(
                f"{student}, {key}",
                "excess risk",
                after,
                agrees=max(a - b for a, b in zip(after, before)) < 0,
                note=f"untrained {sum(before) / len(before):.2f}, single-task ridge {single_task}; "
                "agrees if training lowers it in every run",
            )


def figure(outcome: Outcome[Mapping[str, StudentRecord]]) -> Figure:
    """Draw the first layer's singular values and the risks, before and after training."""
    from metabridge.report import result_figures

    students = by_student(outcome.data)
    title = "ReLU students of tasks that share a linear representation B*, before and after training"
    figure, (left, right) = result_figures.subplots(title, 1, 2, (11, 5))
    for i, (quantity, label) in enumerate(SPECTRUM.items()):
        pairs = [[[layer[quantity] for layer in record.spectra] for record in runs] for runs in students.values()]
        draw_before_after(left, pairs, label, i)
    for i, key in enumerate(next(iter(outcome.data.values())).risks):
        draw_before_after(right, [[record.risks[key] for record in runs] for runs in students.values()], key, i)
    left.set(ylabel="squared singular value of the first layer", yscale="log")
    right.set(ylabel="excess risk on new tasks", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(range(len(students)), [student.replace(", ", "\n") for student in students])
        axes.set_xlim(-0.6, len(students) - 0.4)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, title="○ untrained, ● trained")
    return figure


def draw_before_after(axes: Axes, students: list[list[list[float]]], label: str, index: int) -> None:
    """Draw one quantity of each run of each student before and after training, joined by a line."""
    from metabridge.report.figures import COLORS

    for position, runs in enumerate(students):
        for number, (before, after) in enumerate(runs):
            x, color = position + 0.12 * (index - 1.5), COLORS[index]
            axes.plot([x, x], [before, after], color=color, linewidth=1)
            axes.plot([x], [before], "o", color=color, markerfacecolor="none")
            axes.plot([x], [after], "o", color=color, label=label if position == number == 0 else None)


EXPERIMENT = TrainingExperiment("anil-relu", measure, rows, figure)
