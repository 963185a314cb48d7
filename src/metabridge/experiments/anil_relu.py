"""Yüksel et al. 2023, appendix I: ReLU networks of two and three layers learn the shared representation B* as well.

These networks, called students, are trained on the same tasks as the linear networks, but the theory does not cover
them. Two results are expected: in the first layer, squared singular values grow along B* and stay small in the
directions orthogonal to B*; and the excess risk on new tasks, after one step of gradient descent (1-GD) or with ridge
regression on the features, is lower than before training. The paper reports neither numbers nor training options for
these networks. Ours have a width of 100 and are trained by Adam with 100 tasks per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from metabridge.environments.shared_representation import SharedRepresentation
from metabridge.experiments.experiment import ExperimentOptions, Outcome, TrainingExperiment
from metabridge.experiments.records import Record, as_json, rename_keys, run_folder
from metabridge.heads import RidgeClassifier
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import mlp
from metabridge.report.results import Row
from metabridge.theory.anil import spectrum
from metabridge.training import Model, evaluate, fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SINGLE_TASK = {20: 1.84, 30: 1.63}  # table 1: excess risk of ridge regression on the inputs, by number of points
PENALTIES = (1.0, 10.0, 30.0, 100.0, 300.0)  # candidates for ridge regression on the features at test time
SPECTRUM = {  # the squared singular values in the figure, with their labels
    "largest": "largest along B*",
    "smallest": "smallest along B*",
    "orthogonal_mean": "mean orthogonal to B*",
}


@dataclass(frozen=True)
class Settings:
    """The networks, and how they are trained and tested."""

    runs: int
    iterations: int
    lr: float
    test_tasks: int
    methods: tuple[str, ...] = ("fo-anil", "fo-maml")
    layers: tuple[int, ...] = (2, 3)
    width: int = 100
    pool: int = 5000  # number of training tasks
    batch_size: int = 100
    alpha: float = 0.025  # inner learning rate
    m_test: tuple[int, ...] = (20, 30)  # numbers of support points of a test task

    def to_dict(self) -> dict[str, Any]:
        """Return the fields with the keys that they have in records."""
        # These keys of version 0.1.0 are kept, so that existing records still match their settings.
        return rename_keys(asdict(self), {"batch_size": "batch", "test_tasks": "judged"})


SETTINGS = {
    "quick": Settings(runs=1, iterations=250, lr=3e-3, test_tasks=200, methods=("fo-anil",)),
    "paper": Settings(runs=3, iterations=5000, lr=1e-3, test_tasks=1000),
}


@dataclass(frozen=True)
class StudentRecord(Record):
    """The measurements of one training run of a student. Each list has two elements: before and after training."""

    spectra: list[dict[str, float]]  # squared singular values of the first layer
    risks: dict[str, list[float]]  # excess risks on new tasks, by a key such as "ridge, 20 points"


def measure(options: ExperimentOptions) -> dict[str, StudentRecord]:
    """Train every student with every seed. Return the records of the students for which all runs are finished."""
    settings = SETTINGS[options.scale]
    students = [f"{name}-{layers}" for name in settings.methods for layers in settings.layers]
    options.check_selected_names(students)
    seeds = range(options.seed * settings.runs, (options.seed + 1) * settings.runs)
    finished_records: dict[str, StudentRecord] = {}
    for student in students:
        runs = [train_student(options, student, settings, seed) for seed in seeds]
        records = {record.name: record for record in runs if record is not None}
        if len(records) == settings.runs:
            finished_records |= records
    return finished_records


def train_student(options: ExperimentOptions, student: str, settings: Settings, seed: int) -> StudentRecord | None:
    """Return the record of one run of a student. If there is none yet, train the student; see `Record.load_or_measure`.

    The name of a student contains its method and its number of layers, such as "fo-anil-2".
    """
    plan = as_json({"student": student, "seed": seed, **settings.to_dict()})
    name = f"{EXPERIMENT.id}-{student}-{options.scale}-{seed}"

    def train_and_measure() -> dict[str, Any] | None:
        method_name, _, layers = student.rpartition("-")
        environment = SharedRepresentation(pool=settings.pool, seed=seed)
        net = mlp(environment.dimension, 1, width=settings.width, depth=int(layers) - 1, bias=False, seed=seed)
        net = net.to(options.device)
        student_method = method(method_name, steps=1, lr=settings.alpha)
        untrained_student = Model(student_method, net, parameters(student_method, net))
        measured_before = measure_student(untrained_student, environment, settings)
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
        spectra, risks = zip(measured_before, measure_student(run, environment, settings))
        risks_by_estimator = {key: [risk[key] for risk in risks] for key in risks[0]}
        return {"minutes": run.seconds / 60, "spectra": list(spectra), "risks": risks_by_estimator}

    return StudentRecord.load_or_measure(options, student, name, plan, train_and_measure)


def measure_student(
    model: Model, environment: SharedRepresentation, settings: Settings
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the squared singular values of the first layer, and the excess risks on new tasks."""
    first_layer = next(parameter.detach() for parameter in model.net.features.parameters())
    singular_values = spectrum(first_layer.double().cpu().mT, environment.representation)
    ridge_models = [
        replace(model, method=replace(model.method, test_solver=RidgeClassifier(penalty))) for penalty in PENALTIES
    ]

    def risk(model: Model, points: int, seed: int) -> float:
        tasks = replace(environment, shots=points, queries=50, pool=None)
        score = evaluate(model, tasks, tasks=settings.test_tasks, seed=seed)
        return (score.mean - tasks.noise) / 2  # the score is the squared error, including the noise of the labels

    risks = {}
    for points in settings.m_test:
        best_ridge_model = min(ridge_models, key=lambda ridge_model: risk(ridge_model, points, seed=0))
        risks[f"1-GD, {points} points"] = risk(model, points, seed=1)
        risks[f"ridge, {points} points"] = risk(best_ridge_model, points, seed=1)
    return {quantity: float(value) for quantity, value in singular_values._asdict().items()}, risks


def by_student(records: Mapping[str, StudentRecord]) -> dict[str, list[StudentRecord]]:
    """Group the records by student. The keys are labels such as "FO-ANIL, 3 layers"."""
    students: dict[str, list[StudentRecord]] = {}
    for record in records.values():
        method_name, _, layers = record.plan["student"].rpartition("-")
        students.setdefault(f"{method_name.upper()}, {layers} layers", []).append(record)
    return students


def rows(records: Mapping[str, StudentRecord], _: ExperimentOptions) -> Iterator[Row]:
    """Yield rows that show how training changes the singular values of the first layer and the risks."""
    for student, runs in by_student(records).items():
        ratios = [[values["largest"] / values["orthogonal_largest"] for values in run.spectra] for run in runs]
        growth_ratios = [after / before for before, after in ratios]
        yield Row.mean(
            f"{student}, first layer",
            "growth along B* / growth orthogonal to B*",
            growth_ratios,
            agrees=min(growth_ratios) > 1,
            note="of the largest squared singular values; agrees if above 1 in every run",
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
