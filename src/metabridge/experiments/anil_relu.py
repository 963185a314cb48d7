"""Yüksel et al. 2023, appendix I: ReLU networks of two and three layers learn the shared representation B* as well.

These networks, the students, are trained on the same tasks as the linear networks, but the theory does not cover them.
Two results are expected: in the first layer, squared singular values grow along B* and stay small orthogonally to it;
and on new tasks the risk is lower than before training. The paper prints neither numbers nor how it trained these
students. Ours are 100 units wide and trained with Adam on 100 tasks per step.
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
from metabridge.report.results import Row
from metabridge.theory.anil import spectrum
from metabridge.training import Model, evaluate, fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SINGLE_TASK = {20: 1.84, 30: 1.63}  # table 1: risk of ridge regression on the inputs, by number of points per task
PENALTIES = (1.0, 10.0, 30.0, 100.0, 300.0)  # of ridge regression on the features at test time
SPECTRUM = {
    "largest": "largest along B*",
    "smallest": "smallest along B*",
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
        """Return the fields with the keys that records use."""
        keys = {"batch_size": "batch", "test_tasks": "judged"}
        return {keys.get(key, key): value for key, value in asdict(self).items()}


SETTINGS = {
    "quick": Settings(runs=1, iterations=250, lr=3e-3, test_tasks=200, methods=("fo-anil",)),
    "paper": Settings(runs=3, iterations=5000, lr=1e-3, test_tasks=1000),
}


@dataclass(frozen=True)
class StudentRecord(Record):
    """The measurements of one student. Each list has two elements: before and after training."""

    spectra: list[dict[str, float]]  # squared singular values of the first layer
    risks: dict[str, list[float]]  # on new tasks, by estimator and number of points per task


def measure(options: ExperimentOptions) -> dict[str, StudentRecord]:
    """Train every student with every seed, and return the records of the students for which all runs are finished."""
    settings = SETTINGS[options.scale]
    students = [f"{name}-{layers}" for name in settings.methods for layers in settings.layers]
    options.check_only(students)
    seeds = range(options.seed * settings.runs, (options.seed + 1) * settings.runs)
    finished_records: dict[str, StudentRecord] = {}
    for student in students:
        runs = [train_student(options, student, settings, seed) for seed in seeds]
        records = {record.name: record for record in runs if record is not None}
        if len(records) == settings.runs:
            finished_records |= records
    return finished_records


def train_student(options: ExperimentOptions, student: str, settings: Settings, seed: int) -> StudentRecord | None:
    """Return a student's stored record, or train it. Return None if `only` excludes it or the time limit ends it."""
    plan = as_json({"student": student, "seed": seed, **settings.stored()})
    name = f"{EXPERIMENT.id}-{student}-{options.scale}-{seed}"

    def measurements() -> dict[str, Any] | None:
        method_name, _, layers = student.rpartition("-")
        environment = SharedRepresentation(pool=settings.pool, seed=seed)
        net = mlp(environment.dimension, 1, width=settings.width, depth=int(layers) - 1, bias=False, seed=seed)
        net = net.to(options.device)
        student_method = method(method_name, steps=1, lr=settings.alpha)
        untrained = Model(student_method, net, parameters(student_method, net))
        before = measure_student(untrained, environment, settings)
        run = fit(
            net,
            student_method,
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
            name=f"{method_name}, {layers} layers, seed {seed}",
        )
        if not run.finished:
            return None
        spectra, risks = zip(before, measure_student(run, environment, settings))
        risks_by_estimator = {key: [risk[key] for risk in risks] for key in risks[0]}
        return {"minutes": run.seconds / 60, "spectra": list(spectra), "risks": risks_by_estimator}

    return StudentRecord.load_or_measure(options, student, name, plan, measurements)


def measure_student(
    model: Model, environment: SharedRepresentation, settings: Settings
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the spectrum of the first layer, and the risks on new tasks with the same representation."""
    first_layer = next(parameter.detach() for parameter in model.net.features.parameters())
    singular_values = spectrum(first_layer.double().cpu().mT, environment.representation)
    ridge_models = [
        replace(model, method=replace(model.method, test_solver=RidgeClassifier(penalty))) for penalty in PENALTIES
    ]

    def risk(model: Model, points: int, seed: int) -> float:
        tasks = replace(environment, shots=points, queries=50, pool=None)
        score = evaluate(model, tasks, tasks=settings.test_tasks, seed=seed)
        return (score.mean - tasks.noise) / 2  # the query labels are noisy

    risks = {}
    for points in settings.m_test:
        best_ridge_model = min(ridge_models, key=lambda ridge: risk(ridge, points, seed=0))
        risks[f"1-GD, {points} points"] = risk(model, points, seed=1)
        risks[f"ridge, {points} points"] = risk(best_ridge_model, points, seed=1)
    return {quantity: float(value) for quantity, value in singular_values._asdict().items()}, risks


def by_student(records: Mapping[str, StudentRecord]) -> dict[str, list[StudentRecord]]:
    """Return the records of all runs of each student, by a label such as "FO-ANIL, 3 layers"."""
    students: dict[str, list[StudentRecord]] = {}
    for record in records.values():
        method_name, _, layers = record.plan["student"].rpartition("-")
        students.setdefault(f"{method_name.upper()}, {layers} layers", []).append(record)
    return students


def rows(records: Mapping[str, StudentRecord], _: ExperimentOptions) -> Iterator[Row]:
    """Yield how training changes the spectrum of the first layer and the risks."""
    for student, runs in by_student(records).items():
        ratios = [[values["largest"] / values["orthogonal_largest"] for values in run.spectra] for run in runs]
        growth = [after / before for before, after in ratios]
        yield Row.mean(
            f"{student}, first layer",
            "growth along B* over that orthogonally to it",
            growth,
            agrees=min(growth) > 1,
            note="largest squared singular values; agrees if it grows more along B* in every run",
        )
        for key in runs[0].risks:
            before, after = zip(*(run.risks[key] for run in runs))
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

    spectra, risks = {}, {}
    for student, runs in by_student(outcome.data).items():
        label = student.replace(", ", "\n")
        spectra[label] = {
            quantity_label: [[spectrum[quantity] for spectrum in run.spectra] for run in runs]
            for quantity, quantity_label in SPECTRUM.items()
        }
        risks[label] = {key: [run.risks[key] for run in runs] for key in runs[0].risks}
    title = "ReLU networks on tasks with a shared linear representation B*, before and after training"
    figure, (left, right) = result_figures.subplots(title, 1, 2, (11, 5))
    result_figures.plot_before_and_after(left, spectra)
    result_figures.plot_before_and_after(right, risks)
    left.set(ylabel="squared singular value of the first layer", yscale="log")
    right.set(ylabel="excess risk on new tasks", ylim=(0, None))
    for axes in (left, right):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, title="○ untrained, ● trained")
    return figure


EXPERIMENT = TrainingExperiment("anil-relu", measure, rows, figure)
