"""Training runs on images that several experiments share. Each is trained once, and its scores are recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from metabridge.environments.image_tasks import LabeledImages
from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.records import Record, as_json, image_description
from metabridge.heads import LogisticRegression
from metabridge.report.results import Machine
from metabridge.training import Run, evaluate
from metabridge.training.config import ImageTrainingConfig, replace_former_names
from metabridge.training.evaluation import UNCHANGED, FeatureTable, Model, TestTimeAugmentation
from metabridge.training.image_training import train_on_images

PENALTIES = (1e-4, 1e-3, 0.01, 0.1, 0.33, 1.0, 3.0)  # Wang et al. 2021, table 5


@dataclass(frozen=True)
class SplitAccuracy:
    """The mean accuracy of a network over tasks of a split.

    Args:
        split: "validation" or "test".
        shots: Number of support images per class.
        mean: Mean over the tasks.
        ci95: Half-width of the 95 % confidence interval of the mean.
        tasks: Number of tasks.
        penalty: L2 penalty of the logistic regression; None if the method has another head.
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
        """Return the number of tasks, and the penalty and augmentation if they were selected."""
        if self.penalty is None:
            return f"{self.tasks} test tasks"
        return f"{self.tasks} test tasks; chosen in validation: penalty {self.penalty:g}, {self.views}"


@dataclass(frozen=True)
class TrainingRecord(Record):
    """The measurements of one training run on images.

    Args:
        images: Name and size of the images.
        iterations: Number of training steps.
        parameters: Number of parameters of the features.
        curve: Minutes, iteration, accuracy and ci95 of every validation.
        scores: The accuracies.
        evaluation_seconds: Time to fit the logistic regression to all test tasks for all numbers of shots, without
            computing features; None if the method has another head.
    """

    images: str
    iterations: int
    parameters: int
    curve: tuple[dict[str, float], ...]
    scores: tuple[SplitAccuracy, ...]
    evaluation_seconds: float | None

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Return the record with these fields, as read from JSON."""
        scores = (
            SplitAccuracy(**{**score, "views": TestTimeAugmentation(**replace_former_names(score["views"]))})
            for score in stored["scores"]
        )
        # Options that are missing in older records have their defaults.
        plan = config_dict(ImageTrainingConfig(stored["plan"]["method"])) | replace_former_names(stored["plan"])
        return cls(**{**stored, "plan": plan, "curve": tuple(stored["curve"]), "scores": tuple(scores)})

    def score(
        self, split: str, shots: int, penalty: float | None, views: TestTimeAugmentation = UNCHANGED
    ) -> SplitAccuracy:
        """Return the accuracy with this penalty and augmentation.

        Raises:
            InputError: If the record has no such accuracy.
        """
        for score in self.scores:
            if (score.split, score.shots, score.penalty, score.views) == (split, shots, penalty, views):
                return score
        raise InputError(f"the record of {self.name} has no such score on the {split} split with {shots} shots.")

    def selected(self, shots: int) -> SplitAccuracy:
        """Return the test accuracy with the penalty and augmentation that have the best validation accuracy."""
        best = best_in_validation(self.scores, shots)
        return self.score("test", shots, best.penalty, best.views)


def best_in_validation(scores: Iterable[SplitAccuracy], shots: int) -> SplitAccuracy:
    """Return the best validation accuracy with this number of shots."""
    return max(
        (score for score in scores if score.split == "validation" and score.shots == shots),
        key=lambda score: score.mean,
    )


@dataclass(frozen=True)
class Evaluation:
    """How to evaluate a trained network.

    Args:
        shots: Numbers of support images per class.
        tasks: Number of tasks of each split.
        views: Test-time augmentations to choose from in validation.
    """

    shots: Sequence[int]
    tasks: int
    views: Sequence[TestTimeAugmentation]


def train_or_load(
    options: ExperimentOptions,
    training: str,
    name: str,
    config: ImageTrainingConfig,
    load_images: Callable[[], LabeledImages],
    evaluation: Evaluation,
    load_teacher: Callable[[], Model] | None = None,
) -> TrainingRecord | None:
    """Return the record of a training run. If there is none yet, train and evaluate.

    Args:
        options: Options of the experiment.
        training: Name of the training run in `options.only`.
        name: Name of the record and of the run's folder.
        config: How to train.
        load_images: Function that loads the images; called only to train.
        evaluation: How to evaluate.
        load_teacher: Function that loads the teacher, if there is distillation.

    Returns:
        The record; None if `options.only` excludes the run or the time limit ended it.
    """
    record = TrainingRecord.load(options, name, config_dict(config))
    if record is not None or not options.includes(training):
        return record
    teacher = None if load_teacher is None else load_teacher()
    images = load_images()
    run = train_on_images(
        config,
        images,
        device=options.device,
        out=options.out / "runs" / name,
        minutes=options.minutes,
        progress=options.progress,
        teacher=teacher,
    )
    if not run.finished:
        return None
    device_images = images.to(options.device)
    record = TrainingRecord(
        name=name,
        plan=config_dict(config),
        environment=Machine.current(options.device),
        minutes=run.seconds / 60,
        images=image_description(images),
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
        scores=tuple(_scores(run, device_images, config.ways, evaluation, options.seed)),
        evaluation_seconds=_evaluation_seconds(run, device_images, config.ways, evaluation),
    )
    record.save(options)
    return record


def _scores(run: Run, images: LabeledImages, ways: int, evaluation: Evaluation, seed: int) -> Iterator[SplitAccuracy]:
    """Yield the accuracies on validation and test tasks.

    If the method's head is a logistic regression, yield accuracies without augmentation for every penalty on both
    splits, with every augmentation on validation tasks, and with the best augmentation on test tasks.
    """
    environments = {
        (split, shots): images.tasks(split, ways=ways, shots=shots)
        for split in ("validation", "test")
        for shots in evaluation.shots
    }
    head = run.method.test
    if not isinstance(head, LogisticRegression):
        for (split, shots), environment in environments.items():
            score = evaluate(run, environment, tasks=evaluation.tasks, seed=seed)
            yield SplitAccuracy(split, shots, score.mean, score.ci95, score.tasks)
        return

    def evaluate_penalties(
        split: str, all_shots: Sequence[int], penalties: Sequence[float], views: TestTimeAugmentation
    ) -> Iterator[SplitAccuracy]:
        """Yield the accuracy for each number of shots and each penalty."""
        models = [replace(run, method=replace(run.method, test=replace(head, penalty=value))) for value in penalties]
        table = FeatureTable.of(run, environments[split, evaluation.shots[0]], views, seed=seed)
        for shots in all_shots:
            scores = table.evaluate(models, environments[split, shots], tasks=evaluation.tasks, seed=seed)
            for penalty, score in zip(penalties, scores):
                yield SplitAccuracy(split, shots, score.mean, score.ci95, score.tasks, penalty, views)

    yield from evaluate_penalties("test", evaluation.shots, PENALTIES, UNCHANGED)
    validation_scores = list(evaluate_penalties("validation", evaluation.shots, PENALTIES, UNCHANGED))
    for views in evaluation.views:
        validation_scores += evaluate_penalties("validation", evaluation.shots, PENALTIES[3:], views)
    yield from validation_scores
    for shots in evaluation.shots:
        best = best_in_validation(validation_scores, shots)
        if best.views != UNCHANGED and best.penalty is not None:
            yield from evaluate_penalties("test", [shots], [best.penalty], best.views)


def _evaluation_seconds(run: Run, images: LabeledImages, ways: int, evaluation: Evaluation) -> float | None:
    """Return the time to fit the logistic regression to all test tasks, or None if the method has another head."""
    if not isinstance(run.method.test, LogisticRegression):
        return None
    environments = [images.tasks("test", ways=ways, shots=shots) for shots in evaluation.shots]
    table = FeatureTable.of(run, environments[0])
    started = time.perf_counter()
    for environment in environments:
        table.evaluate([run], environment, tasks=evaluation.tasks)  # copies the scores to the CPU: waits for the GPU
    return time.perf_counter() - started


def config_dict(config: ImageTrainingConfig) -> dict[str, Any]:
    """Return a configuration as it is stored in `Record.plan`."""
    return as_json(config.as_dict())
