"""Assessment of a classifier: its accuracy on each class, and the calibration of its probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.environments.image_tasks import ImageTasks
from metabridge.errors import InputError
from metabridge.training.evaluation import (
    NO_AUGMENTATION,
    Predictor,
    Score,
    Scorer,
    TestTimeAugmentation,
    correct_predictions,
    predictions,
)

BINS = 10  # number of intervals into which confidences are divided for the calibration


@dataclass(frozen=True, eq=False)
class Assessment:
    """Mean accuracy of a classifier over tasks, its accuracy on each class, and its calibration.

    Args:
        score: Mean accuracy over all tasks.
        classes: Accuracy on the queries of each class, over all tasks with this class, by class name.
        calibration: For each bin of confidences that contains queries, their mean confidence, their accuracy, and
            their fraction of all queries. The confidence of a prediction is its largest probability.
    """

    score: Score
    classes: dict[str, float]
    calibration: tuple[tuple[float, float, float], ...]

    @property
    def worst_class(self) -> tuple[str, float]:
        """The class with the lowest accuracy, and this accuracy."""
        return min(self.classes.items(), key=lambda item: item[1])

    @property
    def calibration_error(self) -> float:
        """The expected calibration error, Σ_bins fraction · |confidence − accuracy|."""
        return sum(fraction * abs(confidence - accuracy) for confidence, accuracy, fraction in self.calibration)


def assess(
    model: Predictor,
    environment: ImageTasks,
    *,
    tasks: int = 600,
    seed: int = 0,
    augmentation: TestTimeAugmentation = NO_AUGMENTATION,
    progress: bool = False,
) -> Assessment:
    """Measure a classifier's mean accuracy, its accuracy on each class and its calibration.

    With the same seed, the tasks are those of `evaluate`.

    A query whose outputs are not finite counts as wrong, and is left out of the calibration.

    Args:
        model: Trained model, or a kernel predictor.
        environment: Tasks of labeled images.
        tasks: Number of tasks, at least 2.
        seed: Seed of the tasks.
        augmentation: Changes to the images at test time.
        progress: Whether to show a progress bar while the features of all images are computed. No bar is shown if the
            features of an image depend on the task or on other images, since they are then computed for every task.

    Returns:
        The assessment.

    Raises:
        InputError: If the tasks are not tasks of labeled images, there are fewer than 2 tasks, the weights are not
            finite, the model cannot be evaluated on these tasks, or adaptation diverges on all of them.

    >>> from metabridge.datasets import load
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import conv4
    >>> from metabridge.training import Model
    >>> test, anil, net = load("glyphs").tasks("test"), method("anil"), conv4(1, 28)
    >>> assessment = assess(Model(anil, net, parameters(anil, net)), test, tasks=4)
    >>> len(assessment.classes) < test.classes  # four tasks do not contain all classes
    True
    >>> 0 <= assessment.calibration_error <= 1
    True
    """
    if not isinstance(environment, ImageTasks):
        raise InputError(f"environment is {type(environment).__name__}, but assess needs tasks of labeled images.")
    scorer = Scorer()
    # for each class, the number of correct queries and the number of all queries
    num_correct, num_queries = torch.zeros(2, environment.classes, dtype=torch.float64)
    # for each bin, the sum of the confidences, the number of correct queries and the number of queries
    bins = torch.zeros(BINS, 3, dtype=torch.float64)
    for outputs, episodes in predictions(
        model, environment, tasks=tasks, seed=seed, augmentation=augmentation, progress=progress
    ):
        scorer.add(outputs, episodes)
        assert episodes.classes is not None
        is_correct = correct_predictions(outputs, episodes).double()
        class_indices = episodes.classes.gather(1, episodes.query_y)
        _add_at(num_correct, class_indices, is_correct)
        _add_at(num_queries, class_indices, torch.ones_like(is_correct))
        is_finite = outputs.isfinite().all(-1)
        confidence = outputs[is_finite].softmax(-1).amax(-1).double()
        bin_index = (confidence * BINS).long().clamp_max(BINS - 1)
        for column, weights in enumerate((confidence, is_correct[is_finite], torch.ones_like(confidence))):
            _add_at(bins[:, column], bin_index, weights)
    score = scorer.score()
    if score.diverged == tasks:
        raise InputError(
            f"adaptation diverged on all {tasks} tasks: outputs are NaN or infinite. Adapt with a lower learning rate "
            "or fewer steps, or train again with a lower learning rate."
        )
    names = environment.class_names
    sampled_classes = num_queries.nonzero().squeeze(1).tolist()
    return Assessment(
        score,
        {names[index]: float(num_correct[index] / num_queries[index]) for index in sampled_classes},
        tuple(
            (float(confidence_sum / count), float(correct_count / count), float(count / bins[:, 2].sum()))
            for confidence_sum, correct_count, count in bins
            if count > 0
        ),
    )


def _add_at(totals: Tensor, indices: Tensor, weights: Tensor) -> None:
    """Add each weight to the total at its index, in place."""
    totals.index_add_(0, indices.flatten().cpu(), weights.flatten().cpu())
