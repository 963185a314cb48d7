"""Training runs on images, and their records. Experiments that need the same training run share its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from metabridge.environments.image_tasks import LabeledImages
from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.records import Record, as_json, image_description
from metabridge.training import Model
from metabridge.training.config import ImageTrainingConfig, replace_former_names
from metabridge.training.evaluation import NO_AUGMENTATION, TestTimeAugmentation
from metabridge.training.head_selection import HeadSelection, SplitAccuracy, best_in_validation
from metabridge.training.image_training import train_on_images

# L2 penalties of the test-time logistic regression (Wang et al. 2021, table 5)
PENALTIES = (1e-4, 1e-3, 0.01, 0.1, 0.33, 1.0, 3.0)
AUGMENTED_PENALTIES = PENALTIES[3:]  # the penalties that are also evaluated with test-time augmentation


@dataclass(frozen=True)
class Evaluation:
    """How to evaluate a trained network.

    Args:
        shots: Numbers of support images per class.
        tasks: Number of validation tasks, and of test tasks.
        views: Test-time augmentations, of which the best on validation tasks is used.
    """

    shots: Sequence[int]
    tasks: int
    views: Sequence[TestTimeAugmentation]


@dataclass(frozen=True)
class TrainingRecord(Record):
    """The measurements of one training run on images.

    Args:
        images: Name and size of the images.
        iterations: Number of training steps.
        parameters: Number of parameters of the network without its head.
        curve: Minutes, iteration, accuracy and ci95 of every validation.
        scores: The accuracy for each split, number of shots, penalty and augmentation that was evaluated.
        evaluation_seconds: Time to fit the logistic regression to all test tasks for all numbers of shots, not counting
            the computation of features; None if the method has another head.
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
        self, split: str, shots: int, penalty: float | None, views: TestTimeAugmentation = NO_AUGMENTATION
    ) -> SplitAccuracy:
        """Return the accuracy with this penalty and augmentation.

        Raises:
            InputError: If the record has no such accuracy.
        """
        for score in self.scores:
            if (score.split, score.shots, score.penalty, score.views) == (split, shots, penalty, views):
                return score
        raise InputError(f"the record of {self.name} has no such score on the {split} split with {shots} shots.")

    def selected_accuracy(self, shots: int) -> SplitAccuracy:
        """Return the test accuracy with the penalty and augmentation that have the best validation accuracy."""
        best = best_in_validation(self.scores, shots)
        return self.score("test", shots, best.penalty, best.views)


def train_or_load(
    options: ExperimentOptions,
    run_name: str,
    name: str,
    config: ImageTrainingConfig,
    load_images: Callable[[], LabeledImages],
    evaluation: Evaluation,
    load_teacher: Callable[[], Model] | None = None,
) -> TrainingRecord | None:
    """Return the record of a training run. If there is none yet, train and evaluate.

    Args:
        options: Options of the experiment.
        run_name: Name of the training run in `options.only`.
        name: Name of the record and of the run's folder.
        config: Training configuration.
        load_images: Function that loads the images. It is called only if the network is trained.
        evaluation: How to evaluate.
        load_teacher: Function that loads the teacher of a network that is trained by distillation.

    Returns:
        The record; None if `options.only` excludes the run or it was stopped by the time limit.
    """

    def measure() -> dict[str, Any] | None:
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
        selection = HeadSelection(
            ways=config.ways,
            shots=evaluation.shots,
            tasks=evaluation.tasks,
            penalties=PENALTIES,
            augmented_penalties=AUGMENTED_PENALTIES,
            augmentations=evaluation.views,
            seed=options.seed,
        )
        device_images = images.to(options.device)
        return {
            "minutes": run.seconds / 60,
            "images": image_description(images),
            "iterations": run.curve[-1].iteration,
            "parameters": run.net.num_feature_parameters,
            "curve": tuple(
                {
                    "minutes": point.seconds / 60,
                    "iteration": point.iteration,
                    "accuracy": point.score.mean,
                    "ci95": point.score.ci95,
                }
                for point in run.curve
                if point.score is not None
            ),
            "scores": tuple(selection.scores(run, device_images)),
            "evaluation_seconds": selection.fitting_seconds(run, device_images),
        }

    return TrainingRecord.load_or_measure(options, run_name, name, config_dict(config), measure)


def config_dict(config: ImageTrainingConfig) -> dict[str, Any]:
    """Return a configuration as a dict, in the form of `Record.plan`."""
    return as_json(config.as_dict())
