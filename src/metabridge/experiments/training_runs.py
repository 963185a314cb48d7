"""Trainings that several experiments share. Each is done once and leaves a record of what it measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError
from metabridge.experiments import record_files
from metabridge.experiments.result import Environment, Work, environment
from metabridge.heads import LogisticRegression
from metabridge.training import Run, evaluate
from metabridge.training.config import Plan
from metabridge.training.evaluate import PLAIN, FeatureTable, Model, Views

PENALTIES = (1e-4, 1e-3, 0.01, 0.1, 0.33, 1.0, 3.0)  # A table 5


@dataclass(frozen=True)
class Measured:
    """A score, with the data and the head that it is of; `penalty` is None where the method has its own head."""

    split: str
    shots: int
    mean: float
    ci95: float
    tasks: int
    penalty: float | None = None
    views: Views = PLAIN

    def told(self) -> str:
        """Say how it was taken."""
        if self.penalty is None:
            return f"{self.tasks} test tasks"
        return f"{self.tasks} test tasks; chosen in validation: penalty {self.penalty:g}, {self.views.told()}"


@dataclass(frozen=True)
class Record:
    """What one training measured."""

    name: str
    plan: dict[str, Any]
    images: str
    environment: Environment
    minutes: float  # of training, without validation
    iterations: int
    parameters: int
    curve: tuple[dict[str, float], ...]  # minutes, iteration, accuracy and ci95 of every validation
    scores: tuple[Measured, ...]
    evaluation_seconds: float | None  # for the test tasks of all shots once the features are there, one head

    def score(self, split: str, shots: int, penalty: float | None, views: Views = PLAIN) -> Measured:
        """Return the score of a head with this penalty, on images looked at like this."""
        for score in self.scores:
            if (score.split, score.shots, score.penalty, score.views) == (split, shots, penalty, views):
                return score
        raise InputError(f"the record of {self.name} has no such score on {split} with {shots} shots.")

    def chosen(self, shots: int) -> Measured:
        """Return the test score of the head and views that were best in validation."""
        best = best_in_validation(self.scores, shots)
        return self.score("test", shots, best.penalty, best.views)


def best_in_validation(scores: Iterable[Measured], shots: int) -> Measured:
    """Return the best score on validation tasks with so many shots."""
    judged = [score for score in scores if score.split == "validation" and score.shots == shots]
    return max(judged, key=lambda score: score.mean)


def recorded(work: Work, name: str, plan: Plan) -> Record | None:
    """Return the record that a training of this plan has left, if there is one."""
    return record_files.stored(work, name, _plain(plan), _made)


def trial(
    work: Work,
    name: str,
    plan: Plan,
    images: LabelledImages,
    *,
    shots: Sequence[int],
    tasks: int,
    looks: Sequence[Views],
    teacher: Model | None = None,
) -> Record | None:
    """Train, measure, and leave a record; None if the time ran out before the end.

    Where the test-time head has a penalty, it and the best of the `looks` are chosen in validation.
    """
    folder = work.out / "runs" / name
    run = plan.train(
        images, device=work.device, out=folder, minutes=work.minutes, progress=work.progress, teacher=teacher
    )
    if not run.finished:
        return None
    here = images.to(work.device)
    record = Record(
        name,
        _plain(plan),
        f"{images.load_arguments['name'] if images.load_arguments else 'images'} at {images.images.shape[-1]} px",
        environment(work.device),
        run.seconds / 60,
        run.curve[-1].iteration,
        sum(value.numel() for value in run.net.features.parameters()),
        tuple(
            {
                "minutes": point.seconds / 60,
                "iteration": point.iteration,
                "accuracy": point.score.mean,
                "ci95": point.score.ci95,
            }
            for point in run.curve
            if point.score is not None
        ),
        tuple(_measure(run, here, plan.ways, shots, tasks, looks, work.seed)),
        _evaluation_seconds(run, here, plan.ways, shots, tasks),
    )
    record_files.keep(work, name, record)
    return record


def _measure(
    run: Run,
    images: LabelledImages,
    ways: int,
    shots: Sequence[int],
    tasks: int,
    looks: Sequence[Views],
    seed: int,
) -> list[Measured]:
    """Score the run on validation and test tasks.

    If its head has a penalty, every one is scored on plain images in both splits; all `looks` are scored in
    validation, and in the test split the best alone.
    """
    environments = {
        (split, count): images.tasks(split, ways=ways, shots=count)
        for split in ("validation", "test")
        for count in shots
    }
    if not isinstance(run.method.test, LogisticRegression):
        found = {key: evaluate(run, environment, tasks=tasks, seed=seed) for key, environment in environments.items()}
        return [Measured(*key, score.mean, score.ci95, score.tasks) for key, score in found.items()]
    head = run.method.test

    def scored(split: str, counts: Sequence[int], penalties: Sequence[float], views: Views) -> list[Measured]:
        models = [replace(run, method=replace(run.method, test=replace(head, penalty=each))) for each in penalties]
        table = FeatureTable.of(run, environments[split, shots[0]], views, seed=seed)
        return [
            Measured(split, count, score.mean, score.ci95, score.tasks, penalty, views)
            for count in counts
            for penalty, score in zip(
                penalties, table.evaluate(models, environments[split, count], tasks=tasks, seed=seed)
            )
        ]

    scores = scored("test", shots, PENALTIES, PLAIN) + scored("validation", shots, PENALTIES, PLAIN)
    for views in looks:
        scores += scored("validation", shots, PENALTIES[3:], views)
    for count in shots:
        best = best_in_validation(scores, count)
        if best.views != PLAIN and best.penalty is not None:
            scores += scored("test", [count], [best.penalty], best.views)
    return scores


def _evaluation_seconds(run: Run, images: LabelledImages, ways: int, shots: Sequence[int], tasks: int) -> float | None:
    if not isinstance(run.method.test, LogisticRegression):
        return None
    environments = [images.tasks("test", ways=ways, shots=count) for count in shots]
    table = FeatureTable.of(run, environments[0])
    started = time.perf_counter()
    for test in environments:
        table.evaluate([run], test, tasks=tasks)  # reads its scores, so the GPU is done as well
    return time.perf_counter() - started


def _plain(plan: Plan) -> dict[str, Any]:
    schedule = {"name": type(plan.schedule).__name__.lower(), **asdict(plan.schedule)}
    return record_files.plain(asdict(plan) | {"schedule": schedule})


def _made(held: dict[str, Any]) -> Record:
    scores = (Measured(**{**score, "views": Views(**score["views"])}) for score in held["scores"])
    plan = _plain(Plan(held["plan"]["method"])) | held["plan"]  # an older record lacks options that came later
    return Record(**{**held, "plan": plan, "curve": tuple(held["curve"]), "scores": tuple(scores)})
