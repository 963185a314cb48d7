"""Methods of the taxonomy side by side on the built-in glyphs: 5-way 1-shot, on alphabets never seen in training.

There is no published number to meet. What to look for: how much each method gains over its own
untrained network, at what cost, and how much harder tasks within one alphabet are than across them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from metabridge.datasets import load
from metabridge.environments.image_tasks import ImageTasks
from metabridge.episodes import Episodes
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work, environment
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import conv4
from metabridge.training import Model, Run, Score, evaluate, fit


@dataclass(frozen=True)
class Setting:
    """How one method is trained; `options` are those of `metabridge.method`."""

    iterations: int
    lr: float
    options: dict[str, object] = field(default_factory=dict)
    batch: int = 4  # tasks in a training step
    queries: int = 15  # of each class, in training tasks


@dataclass(frozen=True)
class Scale:
    """The methods, and how many tasks judge them."""

    methods: dict[str, Setting]
    validation_tasks: int
    test_tasks: int
    other_tasks: int  # for the untrained network, and for tasks of the same and of different alphabets


SETTINGS = {
    "quick": Scale(
        validation_tasks=60,
        test_tasks=600,
        other_tasks=200,
        methods={
            "maml": Setting(200, 3e-3, {"steps": 3, "lr": 0.2}),
            "anil": Setting(250, 1e-2, {"steps": 5, "lr": 0.3}),
            # Every row of the joint head learns only in tasks with its class: many small tasks serve that best.
            "mtl": Setting(250, 1e-2, batch=16, queries=4),
            "nal": Setting(100, 1e-3, {"steps": 5, "lr": 0.1}),
        },
    ),
    # Chosen on validation tasks, from one to three tries a method.
    "paper": Scale(
        validation_tasks=200,
        test_tasks=2000,
        other_tasks=600,
        methods={
            "maml": Setting(3000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "fo-maml": Setting(3000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "anil": Setting(8000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "fo-anil": Setting(8000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "anil-frozen": Setting(8000, 1e-3, {"steps": 5, "lr": 0.1}, queries=5),
            "reptile": Setting(3000, 1e-2, {"steps": 8, "lr": 0.1}, queries=5),
            "imaml": Setting(1500, 1e-3, {"strength": 0.5, "steps": 10, "lr": 0.1, "cg_steps": 3}, queries=5),
            "minibatch-prox": Setting(3000, 1e-2, {"strength": 0.1, "steps": 8, "lr": 0.1}, queries=5),
            "r2d2": Setting(8000, 1e-3, queries=5),
            "metaoptnet": Setting(3000, 1e-3, queries=5),
            "mtl": Setting(6000, 3e-3, batch=16, queries=4),
            "nal": Setting(1000, 1e-3, {"steps": 10, "lr": 0.1}, queries=5),
            "rfs": Setting(4000, 1e-3, batch=16, queries=4),
        },
    ),
}


@dataclass(frozen=True)
class Trial:
    """One method: the trained run, its scores on test tasks, and that of its untrained network."""

    name: str
    setting: Setting
    run: Run
    untrained: Score
    test: Score
    same: Score
    different: Score

    def scores(self) -> dict[str, Score]:
        """Return the scores by what they are of, the main one first."""
        return {
            "test tasks": self.test,
            "untrained": self.untrained,
            "same alphabet": self.same,
            "different alphabets": self.different,
        }


@dataclass(frozen=True)
class Outcome:
    """The result, a trial for each method, and the test tasks to draw examples from."""

    result: Result
    trials: tuple[Trial, ...]
    environment: ImageTasks

    def examples(self, tasks: int) -> Episodes:
        """Draw some test tasks, the same for every method."""
        generator = torch.Generator().manual_seed(self.result.seed)
        return self.environment.sample(tasks, generator)


def run(work: Work) -> Outcome:
    """Train and test every method of the scale, each from the same initial weights and on the same tasks."""
    settings, device, seed, started = SETTINGS[work.scale], work.device, work.seed, time.perf_counter()
    glyphs = load("glyphs").to(device)
    validation, test = glyphs.tasks("validation"), glyphs.tasks("test")
    same, different = glyphs.tasks("test", superclass="same"), glyphs.tasks("test", superclass="different")
    trials = []
    for name, setting in settings.methods.items():
        train = glyphs.tasks("train", queries=setting.queries)
        chosen, net = method(name, **setting.options), conv4(channels=1, size=28, seed=seed).to(device)
        initial = Model(chosen, net, parameters(chosen, net, classes=train.classes, seed=seed))
        untrained = evaluate(initial, test, tasks=settings.other_tasks, seed=seed)
        trained = fit(
            net,
            chosen,
            train,
            validate=validation,
            validate_tasks=settings.validation_tasks,
            iterations=setting.iterations,
            tasks=setting.batch,
            lr=setting.lr,
            device=device,
            seed=seed,
            progress=work.progress,
            name=name,
        )
        tested = evaluate(trained, test, tasks=settings.test_tasks, seed=seed)
        hard, easy = (evaluate(trained, tasks, tasks=settings.other_tasks, seed=seed) for tasks in (same, different))
        trials.append(Trial(name, setting, trained, untrained, tested, hard, easy))
    result = Result(
        id="glyphs",
        scale=work.scale,
        seed=seed,
        settings=asdict(settings),
        environment=environment(device),
        seconds=time.perf_counter() - started,
        rows=tuple(row for trial in trials for row in rows(trial)),
    )
    return Outcome(result, tuple(trials), test)


def rows(trial: Trial) -> list[Row]:
    """Return a row for every score of the trial, and one for the time that training took."""
    scored = [
        Row(
            f"{trial.name}, {kind}",
            "accuracy %",
            ours=100 * score.mean,
            ci95=100 * score.ci95,
            note=f"{score.tasks} tasks",
        )
        for kind, score in trial.scores().items()
    ]
    return [*scored, Row(f"{trial.name}, training", "seconds", ours=trial.run.seconds, note="without validation")]


def figure(outcome: Outcome, file: Path) -> None:
    """Draw every method's accuracies."""
    from metabridge.report import figures

    figures.save(figures.accuracies({trial.name: trial.scores() for trial in outcome.trials}), file)


EXPERIMENT = UnportedExperiment("glyphs", run, figure)
