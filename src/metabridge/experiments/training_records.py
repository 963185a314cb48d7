"""Trainings on images that several experiments share. Each runs once and leaves a record of its scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.records import Record, as_json
from metabridge.heads import LogisticRegression
from metabridge.report.results import Machine
from metabridge.training import Run, evaluate
from metabridge.training.config import ImageTrainingConfig, former_names_replaced
from metabridge.training.evaluation import UNCHANGED, FeatureTable, Model, TestTimeAugmentation
from metabridge.training.image_training import train_on_images

PENALTIES = (1e-4, 1e-3, 0.01, 0.1, 0.33, 1.0, 3.0)  # Wang et al. 2021, table 5


@dataclass(frozen=True)
class SplitAccuracy:
    """The mean accuracy over tasks of a split.

    Args:
        split: "validation" or "test".
        shots: Support images per class.
        mean: Mean over the tasks.
        ci95: Half-width of the 95 % interval of the mean.
        tasks: Number of tasks.
        penalty: Penalty of the logistic regression; None if the method has another head.
        views: Test-time augmentation.
    """

    split: str
    shots: int
    mean: float
    ci95: float
    tasks: int
    penalty: float | None = None
    views: TestTimeAugmentation = UNCHANGED

    def __str__(self) -> str:
        """Return how it was measured."""
        if self.penalty is None:
            return f"{self.tasks} test tasks"
        return f"{self.tasks} test tasks; chosen in validation: penalty {self.penalty:g}, {self.views}"


@dataclass(frozen=True)
class TrainingRecord(Record):
    """What one training on images measured.

    Args:
        images: Name and size of the images.
        iterations: Number of steps.
        parameters: Number of parameters of the features.
        curve: Minutes, iteration, accuracy and ci95 of every validation.
        scores: The accuracies.
        evaluation_seconds: Time to fit one head to all test tasks of all shots, without computing features; None if
            the method has its own head.
    """

    images: str
    iterations: int
    parameters: int
    curve: tuple[dict[str, float], ...]
    scores: tuple[SplitAccuracy, ...]
    evaluation_seconds: float | None

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Return the record with these fields."""
        scores = (
            SplitAccuracy(**{**score, "views": TestTimeAugmentation(**former_names_replaced(score["views"]))})
            for score in stored["scores"]
        )
        # older records lack newer options
        plan = plan_dict(ImageTrainingConfig(stored["plan"]["method"])) | former_names_replaced(stored["plan"])
        return cls(**{**stored, "plan": plan, "curve": tuple(stored["curve"]), "scores": tuple(scores)})

    def score(
        self, split: str, shots: int, penalty: float | None, views: TestTimeAugmentation = UNCHANGED
    ) -> SplitAccuracy:
        """Return the accuracy with this head and augmentation.

        Raises:
            InputError: If the record has no such accuracy.
        """
        for score in self.scores:
            if (score.split, score.shots, score.penalty, score.views) == (split, shots, penalty, views):
                return score
        raise InputError(f"the record of {self.name} has no such score on {split} with {shots} shots.")

    def selected(self, shots: int) -> SplitAccuracy:
        """Return the test accuracy of the head and augmentation with the best validation accuracy."""
        best = best_in_validation(self.scores, shots)
        return self.score("test", shots, best.penalty, best.views)


def best_in_validation(scores: Iterable[SplitAccuracy], shots: int) -> SplitAccuracy:
    """Return the best validation accuracy with so many shots."""
    return max(
        (score for score in scores if score.split == "validation" and score.shots == shots),
        key=lambda score: score.mean,
    )


@dataclass(frozen=True)
class Evaluation:
    """How to evaluate a trained network: with which shots, on how many tasks, and with which augmentations."""

    shots: Sequence[int]
    tasks: int
    views: Sequence[TestTimeAugmentation]


def train_or_load(
    options: ExperimentOptions,
    training: str,
    name: str,
    plan: ImageTrainingConfig,
    load_images: Callable[[], LabelledImages],
    evaluation: Evaluation,
    load_teacher: Callable[[], Model] | None = None,
) -> TrainingRecord | None:
    """Return the record of a training, which is trained and evaluated if it has none yet.

    Args:
        options: Options of the experiment.
        training: Name of the training in `options.only`.
        name: Name of the record and of the run's folder.
        plan: How to train.
        load_images: Loads the images; called only to train.
        evaluation: How to evaluate.
        load_teacher: Loads the teacher, if the plan distils one.

    Returns:
        The record; None if `options.only` leaves the training out or the time was not enough.
    """
    record = TrainingRecord.load(options, name, plan_dict(plan))
    if record is not None or not options.includes(training):
        return record
    teacher = None if load_teacher is None else load_teacher()
    images = load_images()
    run = train_on_images(
        plan,
        images,
        device=options.device,
        out=options.out / "runs" / name,
        minutes=options.minutes,
        progress=options.progress,
        teacher=teacher,
    )
    if not run.finished:
        return None
    record = record_of(run, name, plan, images, evaluation, options)
    record.save(options)
    return record


def record_of(
    run: Run,
    name: str,
    plan: ImageTrainingConfig,
    images: LabelledImages,
    evaluation: Evaluation,
    options: ExperimentOptions,
) -> TrainingRecord:
    """Evaluate a finished run and return its record."""
    source = images.load_arguments["name"] if images.load_arguments else "images"
    on_device = images.to(options.device)
    return TrainingRecord(
        name=name,
        plan=plan_dict(plan),
        environment=Machine.current(options.device),
        minutes=run.seconds / 60,
        images=f"{source} at {images.images.shape[-1]} px",
        iterations=run.curve[-1].iteration,
        parameters=sum(value.numel() for value in run.net.features.parameters()),
        curve=tuple(
            {
                "minutes": point.seconds / 60,
                "iteration": point.iteration,
                "accuracy": point.score.mean,
                "ci95": point.score.ci95,
            }
            for point in run.curve
            if point.score is not None
        ),
        scores=tuple(_scores(run, on_device, plan.ways, evaluation, options.seed)),
        evaluation_seconds=_evaluation_seconds(run, on_device, plan.ways, evaluation),
    )


def _scores(run: Run, images: LabelledImages, ways: int, evaluation: Evaluation, seed: int) -> Iterator[SplitAccuracy]:
    """Yield the accuracies on validation and test tasks.

    For a head with a penalty these are all penalties on plain images in both splits, all augmentations in validation
    and the best of them in the test.
    """
    tasks = {
        (split, shots): images.tasks(split, ways=ways, shots=shots)
        for split in ("validation", "test")
        for shots in evaluation.shots
    }
    head = run.method.test
    if not isinstance(head, LogisticRegression):
        for key, environment in tasks.items():
            score = evaluate(run, environment, tasks=evaluation.tasks, seed=seed)
            yield SplitAccuracy(*key, score.mean, score.ci95, score.tasks)
        return

    def with_head(
        split: str, all_shots: Sequence[int], penalties: Sequence[float], views: TestTimeAugmentation
    ) -> Iterator[SplitAccuracy]:
        models = [replace(run, method=replace(run.method, test=replace(head, penalty=value))) for value in penalties]
        table = FeatureTable.of(run, tasks[split, evaluation.shots[0]], views, seed=seed)
        for shots in all_shots:
            scores = table.evaluate(models, tasks[split, shots], tasks=evaluation.tasks, seed=seed)
            for penalty, score in zip(penalties, scores):
                yield SplitAccuracy(split, shots, score.mean, score.ci95, score.tasks, penalty, views)

    yield from with_head("test", evaluation.shots, PENALTIES, UNCHANGED)
    validation = list(with_head("validation", evaluation.shots, PENALTIES, UNCHANGED))
    for views in evaluation.views:
        validation += with_head("validation", evaluation.shots, PENALTIES[3:], views)
    yield from validation
    for shots in evaluation.shots:
        best = best_in_validation(validation, shots)
        if best.views != UNCHANGED and best.penalty is not None:
            yield from with_head("test", [shots], [best.penalty], best.views)


def _evaluation_seconds(run: Run, images: LabelledImages, ways: int, evaluation: Evaluation) -> float | None:
    if not isinstance(run.method.test, LogisticRegression):
        return None
    environments = [images.tasks("test", ways=ways, shots=shots) for shots in evaluation.shots]
    table = FeatureTable.of(run, environments[0])
    started = time.perf_counter()
    for environment in environments:
        table.evaluate([run], environment, tasks=evaluation.tasks)  # reads the scores, so it waits for the GPU
    return time.perf_counter() - started


def plan_dict(plan: ImageTrainingConfig) -> dict[str, Any]:
    """Return a plan as JSON gives it back."""
    return as_json(plan.as_dict())
