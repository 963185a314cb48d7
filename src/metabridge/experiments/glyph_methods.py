"""All methods on 5-way 1-shot tasks of the built-in glyphs, tested on alphabets that are not used in training.

No paper has published such numbers. The experiment shows how much more accurate each method is than its untrained
network, how long training takes, and how much harder tasks within one alphabet are than tasks across alphabets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from metabridge.datasets import load
from metabridge.environments.image_tasks import ImageTasks
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import conv4
from metabridge.report.results import Row
from metabridge.training import Model, Run, Score, evaluate, fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MethodSettings:
    """How to train one method.

    Args:
        iterations: Number of training steps.
        lr: Learning rate of Adam.
        options: Options of the method.
        batch_size: Number of tasks per step.
        queries: Number of query images per class in training.
    """

    iterations: int
    lr: float
    options: dict[str, object] = field(default_factory=dict)
    batch_size: int = 4
    queries: int = 15


@dataclass(frozen=True)
class Settings:
    """How to train and test the methods.

    Args:
        methods: Settings of each method, by its name. "mtl" is multi-task learning, "nal" is non-adaptive learning, and
            "rfs" is the method of Tian et al. 2020, which trains a classifier of all training classes.
        validation_tasks: Number of validation tasks.
        test_tasks: Number of test tasks for the trained networks.
        other_tasks: Number of tasks in each of the other evaluations: of untrained networks, and of trained networks on
            tasks within one alphabet and on tasks across alphabets.
    """

    methods: dict[str, MethodSettings]
    validation_tasks: int
    test_tasks: int
    other_tasks: int


SETTINGS = {
    "quick": Settings(
        validation_tasks=60,
        test_tasks=600,
        other_tasks=200,
        methods={
            "maml": MethodSettings(200, 3e-3, {"steps": 3, "lr": 0.2}),
            "anil": MethodSettings(250, 1e-2, {"steps": 5, "lr": 0.3}),
            # MTL's head has a row for each class, trained only by tasks with this class, so many small tasks are best.
            "mtl": MethodSettings(250, 1e-2, batch_size=16, queries=4),
            "nal": MethodSettings(100, 1e-3, {"steps": 5, "lr": 0.1}),
        },
    ),
    # For each method, the best of up to three settings on validation tasks.
    "paper": Settings(
        validation_tasks=200,
        test_tasks=2000,
        other_tasks=600,
        methods={
            "maml": MethodSettings(3000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "fo-maml": MethodSettings(3000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "anil": MethodSettings(8000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "fo-anil": MethodSettings(8000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "anil-frozen": MethodSettings(8000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "reptile": MethodSettings(3000, 1e-2, {"steps": 8, "lr": 0.1}, queries=5),
            "imaml": MethodSettings(1500, 1e-3, {"strength": 0.5, "steps": 10, "lr": 0.1, "cg_steps": 3}, queries=5),
            "minibatch-prox": MethodSettings(3000, 1e-2, {"strength": 0.1, "steps": 8, "lr": 0.1}, queries=5),
            "r2d2": MethodSettings(8000, 1e-3, queries=5),
            "metaoptnet": MethodSettings(3000, 1e-3, queries=5),
            "mtl": MethodSettings(6000, 3e-3, batch_size=16, queries=4),
            "nal": MethodSettings(1000, 1e-3, {"steps": 10, "lr": 0.1}, queries=5),
            "rfs": MethodSettings(4000, 1e-3, batch_size=16, queries=4),
        },
    ),
}


class Comparison(NamedTuple):
    """The trained models by method, their scores by method and kind of evaluation, and the source of test tasks."""

    runs: dict[str, Run]
    scores: dict[str, dict[str, Score]]
    test_environment: ImageTasks


def measure(options: ExperimentOptions) -> Comparison:
    """Train and test every method, from the same initial weights and on the same tasks."""
    settings, seed = SETTINGS[options.scale], options.seed
    glyphs = load("glyphs").to(options.device)
    comparison = Comparison({}, {}, glyphs.tasks("test"))
    same_alphabet, different_alphabets = (glyphs.tasks("test", superclass=value) for value in ("same", "different"))
    for name, method_settings in settings.methods.items():
        train = glyphs.tasks("train", queries=method_settings.queries)
        few_shot_method = method(name, **method_settings.options)
        net = conv4(channels=1, size=28, seed=seed).to(options.device)
        params = parameters(few_shot_method, net, classes=train.classes, seed=seed)
        untrained_model = Model(few_shot_method, net, params)
        untrained_score = evaluate(untrained_model, comparison.test_environment, tasks=settings.other_tasks, seed=seed)
        run = fit(
            net,
            few_shot_method,
            train,
            validate=glyphs.tasks("validation"),
            validate_tasks=settings.validation_tasks,
            iterations=method_settings.iterations,
            batch_size=method_settings.batch_size,
            lr=method_settings.lr,
            device=options.device,
            seed=seed,
            progress=options.progress,
            name=name,
        )
        comparison.runs[name] = run
        comparison.scores[name] = {
            "test tasks": evaluate(run, comparison.test_environment, tasks=settings.test_tasks, seed=seed),
            "untrained": untrained_score,
            "same alphabet": evaluate(run, same_alphabet, tasks=settings.other_tasks, seed=seed),
            "different alphabets": evaluate(run, different_alphabets, tasks=settings.other_tasks, seed=seed),
        }
    return comparison


def rows(comparison: Comparison, _: ExperimentOptions) -> list[Row]:
    """Return the scores and the training time of every method."""
    rows = []
    for name, run in comparison.runs.items():
        for label, score in comparison.scores[name].items():
            ours, ci95, note = 100 * score.mean, 100 * score.ci95, f"{score.tasks} tasks"
            rows.append(Row(f"{name}, {label}", "accuracy %", ours=ours, ci95=ci95, note=note))
        rows.append(Row(f"{name}, training", "seconds", ours=run.seconds, note="the time excludes validation"))
    return rows


def figure(outcome: Outcome[Comparison]) -> Figure:
    """Draw the accuracies of all methods."""
    from metabridge.report import figures

    return figures.accuracies(outcome.data.scores)


EXPERIMENT = Experiment("glyphs", measure, rows, figure, SETTINGS)
