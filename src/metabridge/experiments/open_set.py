"""How well outlier scores recognize images of unknown classes, and whether thresholds keep the promised rate.

No paper has published such numbers. The outlier score of `metabridge.heads` is compared with two usual scores on the
same tasks: the largest softmax probability of a logistic regression, and the distance to the nearest class mean of
unit-norm features. Every task has as many images of unknown classes as queries. At the scale "quick", small networks
are trained; at the scale "paper", the built-in models are used. Data sets that are not available are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from metabridge.environments.image_tasks import ImageTasks, LabeledImages
from metabridge.episodes import Episodes
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.heads import fit_outlier_detector
from metabridge.heads.logistic_regression import LogisticRegression
from metabridge.report.results import Row
from metabridge.schedules import Cosine
from metabridge.training import ImageTrainingConfig, Model, Score, load_model, train_on_images
from metabridge.training.assessment import OpenSetAssessment, assess_open_set, auroc, feature_table, open_set_tasks
from metabridge.training.model_images import image_shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from metabridge.training.evaluation import FeatureTable

# For each data set, the built-in model and the data set on which the small network is trained.
DATA_SETS = {
    "glyphs": ("characters", "glyphs"),
    "omniglot": ("characters", "glyphs"),
    "mini-imagenet": ("photos", "mini-imagenet"),
}
SHOTS = (1, 5)  # of the tasks on which scores are compared
THRESHOLD_SHOTS = (2, 5, 10)  # of the tasks on which rejections are counted
RATES = (0.05, 0.1)
QUERIES = 10  # per class; the smallest classes have 20 images
OURS, SOFTMAX, CENTROID = "outlier score", "largest softmax probability", "distance to the nearest centroid"
TRAINING = ImageTrainingConfig(
    "rfs",
    model="conv4",
    model_options={"filters": 64},
    statistics="running",
    batch_size=128,
    lr=3e-3,
    schedule=Cosine(),
    validate_tasks=20,
)


@dataclass(frozen=True)
class Settings:
    """The numbers of tasks, and how small networks are trained; None for the built-in models."""

    tasks: int
    iterations: dict[str, int] | None  # training steps, by data set
    size: int  # of the images of mini-ImageNet


SETTINGS = {
    "quick": Settings(200, {"glyphs": 100, "mini-imagenet": 60}, 32),
    "paper": Settings(2000, None, 84),
}


@dataclass(frozen=True)
class Comparison:
    """The results on one data set.

    Args:
        data: Name of the data set.
        aurocs: The AUROC of each score, by number of shots and name of the score.
        rejections: The open-set results with a threshold, by number of shots and promised rate.
    """

    data: str
    aurocs: dict[tuple[int, str], Score]
    rejections: dict[tuple[int, float], OpenSetAssessment]


def measure(options: ExperimentOptions) -> list[Comparison]:
    """Compare the scores on the test classes of every available data set."""
    settings = SETTINGS[options.scale]
    trained = cache(lambda name: train_model(name, options))
    comparisons = []
    for data, (built_in, training_data) in DATA_SETS.items():
        if not options.has_data(data):
            continue
        model = load_model(built_in, device=options.device) if settings.iterations is None else trained(training_data)
        images = options.load_images(data, size=image_shape(model.net)[1]).to(options.device)
        comparisons.append(compare_scores(data, model, images, settings.tasks, options))
    return comparisons


def train_model(data: str, options: ExperimentOptions) -> Model:
    """Train a small network on a data set."""
    settings = SETTINGS[options.scale]
    iterations = (settings.iterations or {})[data]
    config = replace(TRAINING, iterations=iterations, validate_every=iterations, seed=options.seed)
    images = options.load_images(data, size=settings.size)
    return train_on_images(config, images, device=options.device, progress=options.progress)


def compare_scores(
    data: str, model: Model, images: LabeledImages, tasks: int, options: ExperimentOptions
) -> Comparison:
    """Compute the AUROC of each score, and count rejections, on the same tasks with the same features."""

    def environment(shots: int) -> ImageTasks:
        return images.tasks("test", ways=5, shots=shots, queries=QUERIES)

    table = feature_table(model, environment(1), progress=options.progress)
    aurocs = {
        (shots, name): score
        for shots in SHOTS
        for name, score in score_aurocs(table, environment(shots), tasks, options.seed).items()
    }
    rejections = {
        (shots, rate): assess_open_set(
            model, environment(shots), tasks=tasks, seed=options.seed, rate=rate, table=table
        )
        for shots in THRESHOLD_SHOTS
        for rate in RATES
    }
    return Comparison(data, aurocs, rejections)


def score_aurocs(table: FeatureTable, environment: ImageTasks, tasks: int, seed: int) -> dict[str, Score]:
    """Return the AUROC of each score."""
    values: dict[str, list[Tensor]] = {}
    for episodes, unknown in open_set_tasks(table, environment, tasks=tasks, seed=seed):
        known_scores, unknown_scores = (all_scores(episodes, x, environment.ways) for x in (episodes.query_x, unknown))
        for name in known_scores:
            values.setdefault(name, []).append(auroc(known_scores[name], unknown_scores[name]))
    return {name: Score.of(torch.cat(batches)) for name, batches in values.items()}


def all_scores(episodes: Episodes, features: Tensor, ways: int) -> dict[str, Tensor]:
    """Return the scores of features, (tasks, n), by name. Higher scores are more unlike the support set."""
    support, labels = episodes.support_x, episodes.support_y
    logistic = LogisticRegression.with_penalty().fit(support, labels, outputs=ways)
    # The support examples are ordered by class.
    centroids = normalize(support, dim=-1).unflatten(1, (ways, -1)).mean(2)
    return {
        OURS: fit_outlier_detector(support, labels, ways).scores(features),
        SOFTMAX: -logistic.scores(features).softmax(-1).amax(-1),
        CENTROID: torch.cdist(normalize(features, dim=-1), centroids).amin(-1),
    }


def rows(comparisons: list[Comparison], options: ExperimentOptions) -> Iterator[Row]:
    """Yield the AUROCs, their differences, and the rejections."""
    for comparison in comparisons:
        for (shots, name), score in comparison.aurocs.items():
            label, note = f"{comparison.data}, {shots}-shot, {name}", f"{score.tasks} tasks"
            yield Row(label, "AUROC %", ours=100 * score.mean, ci95=100 * score.ci95, note=note)
        for shots in SHOTS:
            for name in (SOFTMAX, CENTROID):
                difference = comparison.aurocs[shots, OURS].minus(comparison.aurocs[shots, name])
                label = f"{comparison.data}, {shots}-shot, {OURS} over {name}"
                ours, ci95 = 100 * difference.mean, 100 * difference.ci95
                yield Row(label, "AUROC difference, points", ours=ours, ci95=ci95, note="paired by task")
        for (shots, rate), result in comparison.rejections.items():
            known, unknown = result.rejected_known, result.rejected_unknown
            assert known is not None
            assert unknown is not None
            label = f"{comparison.data}, {shots}-shot, threshold for {100 * rate:g} %"
            yield Row(label, "known rejected, %", ours=100 * known.mean, ci95=100 * known.ci95)
            yield Row(label, "unknown rejected, %", ours=100 * unknown.mean, ci95=100 * unknown.ci95)


def figure(outcome: Outcome[list[Comparison]]) -> Figure:
    """Draw the AUROC of each score."""
    from metabridge.report import result_figures

    return result_figures.compared_rows([row for row in outcome.result.rows if row.metric == "AUROC %"])


CONSTANTS = {"queries": QUERIES, "rates": RATES, "models": DATA_SETS}
EXPERIMENT = Experiment("open-set", measure, rows, figure, SETTINGS, CONSTANTS)
