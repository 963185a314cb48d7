"""Assessment of a classifier: its accuracy on each class, its confidence, and how well it finds unknown classes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metabridge.environments.image_tasks import ImageTasks
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.heads.outliers import fit_outlier_detector
from metabridge.training.evaluation import (
    NO_AUGMENTATION,
    FeatureTable,
    Model,
    Predictor,
    Score,
    Scorer,
    TestTimeAugmentation,
    check_predictor,
    check_task_count,
    correct_predictions,
    has_fixed_features,
    predictions,
)

BINS = 10  # number of intervals into which confidences are divided for the calibration
COVERAGES = (0.5, 0.8, 0.9)  # fractions of the most confident queries whose accuracy is measured
REJECTION_RATE = 0.05  # default fraction of the queries of known classes that are rejected


@dataclass(frozen=True, eq=False)
class Assessment:
    """Mean accuracy of a classifier over tasks, its accuracy on each class, and its calibration.

    Args:
        score: Mean accuracy over all tasks.
        classes: Accuracy on the queries of each class, over all tasks with this class, by class name.
        calibration: For each bin of confidences that contains queries, their mean confidence, their accuracy, and
            their fraction of all queries. The confidence of a prediction is its largest probability.
        accuracy_at_coverage: For each fraction of `COVERAGES`, the accuracy on this fraction of the queries of a task,
            those with the highest confidence; a mean over tasks.
        risk_coverage_area: The area under the risk-coverage curve: the error rate on the most confident queries,
            averaged over all fractions of the queries; a mean over tasks. Lower is better.
    """

    score: Score
    classes: dict[str, float]
    calibration: tuple[tuple[float, float, float], ...]
    accuracy_at_coverage: dict[float, float]
    risk_coverage_area: float

    @property
    def worst_class(self) -> tuple[str, float]:
        """The class with the lowest accuracy, and this accuracy."""
        return min(self.classes.items(), key=lambda item: item[1])

    @property
    def calibration_error(self) -> float:
        """The expected calibration error, Σ_bins fraction · |confidence − accuracy|."""
        return sum(fraction * abs(confidence - accuracy) for confidence, accuracy, fraction in self.calibration)


@dataclass(frozen=True, eq=False)
class OpenSetAssessment:
    """How well outlier scores separate queries of a task's classes from images of unknown classes.

    Args:
        auroc: Area under the ROC curve: the probability that an image of an unknown class has a higher outlier score
            than a query of a known class; a mean over tasks.
        rate: The fraction of queries of known classes that the threshold is set to reject.
        rejected_known: The fraction of the queries of known classes that was rejected. None if the threshold cannot be
            calibrated, because the tasks have one support example per class.
        rejected_unknown: The fraction of the images of unknown classes that was rejected, or None.
    """

    auroc: Score
    rate: float
    rejected_known: Score | None
    rejected_unknown: Score | None


def assess(
    model: Predictor,
    environment: ImageTasks,
    *,
    tasks: int = 600,
    seed: int = 0,
    augmentation: TestTimeAugmentation = NO_AUGMENTATION,
    progress: bool = False,
    table: FeatureTable | None = None,
) -> Assessment:
    """Measure a classifier's mean accuracy, its accuracy on each class, its calibration and its confidence.

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
        table: The features of all images, as `feature_table` returns them. Default: compute them if they are fixed.

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
    _check_image_tasks(environment)
    scorer = Scorer()
    # for each class, the number of correct queries and the number of all queries
    num_correct, num_queries = torch.zeros(2, environment.classes, dtype=torch.float64)
    # for each bin, the sum of the confidences, the number of correct queries and the number of queries
    bins = torch.zeros(BINS, 3, dtype=torch.float64)
    accuracies_by_coverage: list[Tensor] = []  # for each batch of tasks, (tasks, queries)
    for outputs, episodes in predictions(
        model, environment, tasks=tasks, seed=seed, augmentation=augmentation, progress=progress, table=table
    ):
        scorer.add(outputs, episodes)
        assert episodes.classes is not None
        is_correct = correct_predictions(outputs, episodes).double()
        class_indices = episodes.classes.gather(1, episodes.query_y)
        _add_at(num_correct, class_indices, is_correct)
        _add_at(num_queries, class_indices, torch.ones_like(is_correct))
        accuracies_by_coverage.append(accuracy_by_coverage(outputs, is_correct))
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
    by_coverage = torch.cat(accuracies_by_coverage).mean(0)
    sampled_classes = num_queries.nonzero().squeeze(1).tolist()
    return Assessment(
        score,
        {names[index]: float(num_correct[index] / num_queries[index]) for index in sampled_classes},
        tuple(
            (float(confidence_sum / count), float(correct_count / count), float(count / bins[:, 2].sum()))
            for confidence_sum, correct_count, count in bins
            if count > 0
        ),
        {coverage: float(by_coverage[math.ceil(coverage * len(by_coverage)) - 1]) for coverage in COVERAGES},
        float(1 - by_coverage.mean()),
    )


def accuracy_by_coverage(outputs: Tensor, is_correct: Tensor) -> Tensor:
    """Return the accuracy on the k most confident queries of each task, for all k, (tasks, queries).

    The confidence is the largest softmax probability. Queries whose outputs are not finite are the least confident.

    Args:
        outputs: The outputs for the queries, (tasks, queries, outputs).
        is_correct: Whether each query is predicted correctly, (tasks, queries).

    Returns:
        The accuracies, where column k − 1 is the accuracy on k queries.

    >>> outputs = torch.tensor([[[3.0, 0.0], [0.0, 1.0], [0.0, 2.0]]])
    >>> accuracy_by_coverage(outputs, torch.tensor([[1.0, 0.0, 1.0]]))
    tensor([[1.0000, 1.0000, 0.6667]])
    """
    confidence = outputs.softmax(-1).amax(-1).masked_fill(~outputs.isfinite().all(-1), -1)
    sorted_correct = is_correct.gather(-1, confidence.argsort(dim=-1, descending=True, stable=True))
    numbers = torch.arange(1, is_correct.shape[-1] + 1, device=is_correct.device)
    return sorted_correct.cumsum(-1) / numbers


def assess_open_set(
    model: Predictor,
    environment: ImageTasks,
    *,
    tasks: int = 600,
    seed: int = 0,
    rate: float = REJECTION_RATE,
    augmentation: TestTimeAugmentation = NO_AUGMENTATION,
    progress: bool = False,
    table: FeatureTable | None = None,
) -> OpenSetAssessment:
    """Measure how well outlier scores tell queries of known classes from images of unknown classes.

    Each task of `evaluate` with the same seed is extended by as many images of other classes of the split as it has
    queries. An outlier detector is fitted to the support set (see `metabridge.heads.outliers`), without augmented
    copies.

    Args:
        model: Trained model whose features do not depend on the task.
        environment: Tasks of labeled images, with fewer ways than the split has classes.
        tasks: Number of tasks, at least 2.
        seed: Seed of the tasks and of the images of unknown classes.
        rate: The fraction of queries of known classes that the threshold is set to reject.
        augmentation: Changes to the images at test time.
        progress: Whether to show a progress bar while the features of all images are computed.
        table: The features of all images, as `feature_table` returns them. Default: compute them.

    Returns:
        The assessment.

    Raises:
        InputError: If the features of the model are not fixed, no class is unknown, or `evaluate` raises it.

    >>> from metabridge.datasets import load
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import conv4
    >>> from metabridge.models.batch_norm import estimate_statistics
    >>> from metabridge.training import Model
    >>> images, frozen, net = load("glyphs"), method("frozen"), conv4(1, 28, statistics="running")
    >>> estimate_statistics(net, [images.float_images(torch.arange(64))])
    >>> result = assess_open_set(Model(frozen, net, parameters(frozen, net)), images.tasks("test", shots=5), tasks=4)
    >>> 0.5 < result.auroc.mean < 1
    True
    """
    check_task_count(tasks)
    if table is None:
        table = feature_table(model, environment, seed=seed, augmentation=augmentation, progress=progress)
    aurocs, rejected_known, rejected_unknown = [], [], []
    for episodes, unknown in open_set_tasks(table, environment, tasks=tasks, seed=seed):
        detector = fit_outlier_detector(episodes.support_x, episodes.support_y, environment.ways)
        known_scores, unknown_scores = detector.scores(episodes.query_x), detector.scores(unknown)
        aurocs.append(auroc(known_scores, unknown_scores))
        if environment.shots > 1:
            threshold = detector.threshold(rate)[:, None]
            rejected_known.append((known_scores > threshold).double().mean(-1))
            rejected_unknown.append((unknown_scores > threshold).double().mean(-1))
    return OpenSetAssessment(
        Score.of(torch.cat(aurocs)),
        rate,
        Score.of(torch.cat(rejected_known)) if rejected_known else None,
        Score.of(torch.cat(rejected_unknown)) if rejected_unknown else None,
    )


def feature_table(
    model: Predictor,
    environment: ImageTasks,
    *,
    seed: int = 0,
    augmentation: TestTimeAugmentation = NO_AUGMENTATION,
    progress: bool = False,
) -> FeatureTable:
    """Compute the features of all images of a split once, for several assessments of the same model.

    Args:
        model: Trained model whose features do not depend on the task.
        environment: Tasks of labeled images; only their split matters.
        seed: Seed of the augmented copies.
        augmentation: Changes to the images at test time.
        progress: Whether to show a progress bar.

    Returns:
        The features.

    Raises:
        InputError: If the tasks are not tasks of labeled images, or the features of the model are not fixed.
    """
    _check_image_tasks(environment)
    if not (isinstance(model, Model) and has_fixed_features(model)):
        raise InputError(
            f"model is {model}, but outlier scores need features that do not depend on the task. Use a method that "
            "adapts only the head, such as mtl, and a network with statistics='running'."
        )
    check_predictor(model, environment)
    return FeatureTable.of(model, environment, augmentation, seed=seed, progress=progress)


def open_set_tasks(
    table: FeatureTable, environment: ImageTasks, *, tasks: int, seed: int
) -> Iterator[tuple[Episodes, Tensor]]:
    """Sample the tasks of `assess_open_set` in batches.

    Args:
        table: The features of all images.
        environment: Tasks of labeled images.
        tasks: Number of tasks.
        seed: Seed of the tasks and of the images of unknown classes.

    Yields:
        A batch of tasks, whose inputs are features, without augmented copies; and the features of as many images of
        unknown classes as each task has queries, (tasks, queries, dimension).
    """
    # Another generator, so that the tasks are those of `evaluate`.
    generator, generator_of_unknown = (torch.Generator().manual_seed(seed + offset) for offset in (0, 2**32))
    support_images = environment.ways * environment.shots
    for episodes in table.batches(environment, tasks, generator):
        assert episodes.classes is not None
        plain = replace(
            episodes,
            support_x=episodes.support_x[:, :support_images],
            support_y=episodes.support_y[:, :support_images],
        )
        unknown = environment.sample_unknown(episodes.classes, episodes.query_y.shape[1], generator_of_unknown)
        yield plain, table.features_of(unknown)


def auroc(known_scores: Tensor, unknown_scores: Tensor) -> Tensor:
    """Return the area under the ROC curve of each task.

    It is the probability that an unknown example has a higher score than a known one, where equal scores count half.

    Args:
        known_scores: Outlier scores of the queries of known classes, (tasks, n).
        unknown_scores: Outlier scores of examples of unknown classes, (tasks, m).

    Returns:
        The areas, float64 (tasks,).

    >>> auroc(torch.tensor([[0.1, 0.2]]), torch.tensor([[0.2, 0.3]]))
    tensor([0.8750], dtype=torch.float64)
    """
    known_scores, unknown_scores = known_scores.sort(-1).values.contiguous(), unknown_scores.contiguous()
    lower = torch.searchsorted(known_scores, unknown_scores)
    not_higher = torch.searchsorted(known_scores, unknown_scores, right=True)
    return ((lower + not_higher).double() / 2).mean(-1) / known_scores.shape[-1]


def _check_image_tasks(environment: ImageTasks) -> None:
    if not isinstance(environment, ImageTasks):
        raise InputError(f"environment is {type(environment).__name__}, but assess needs tasks of labeled images.")


def _add_at(totals: Tensor, indices: Tensor, weights: Tensor) -> None:
    """Add each weight to the total at its index, in place."""
    totals.index_add_(0, indices.flatten().cpu(), weights.flatten().cpu())
