"""Wang et al. 2021, table 3: few-shot accuracy of meta-learning and multi-task learning (MTL) on mini-ImageNet."""

from __future__ import annotations

from collections.abc import Mapping

from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.mini_imagenet_training_runs import configs, train_or_load_all
from metabridge.experiments.training_records import TrainingRecord
from metabridge.report.results import Row

# Accuracy in percent and the half-width of its 95 % interval, by method and number of shots.
PUBLISHED: dict[str, dict[int, tuple[float, float]]] = {
    "maml": {1: (48.70, 1.84), 5: (63.11, 0.92)},
    "anil": {1: (48.0, 0.7), 5: (62.2, 0.5)},
    "r2d2": {1: (51.2, 0.6), 5: (68.8, 0.1)},
    "metaoptnet": {1: (62.64, 0.61), 5: (78.63, 0.46)},
    "mtl": {1: (59.84, 0.22), 5: (77.72, 0.09)},
    "rfs": {1: (62.02, 0.63), 5: (79.64, 0.44)},  # Tian et al. 2020
}
# Methods whose published network differs from ours, so that the accuracies are not comparable.
OTHER_NETWORK = {"r2d2": "published with four convolutions"}


def measure(options: ExperimentOptions) -> dict[str, TrainingRecord]:
    """Return the records of all methods."""
    return train_or_load_all(options, tuple(configs(options.scale)))


def rows(records: Mapping[str, TrainingRecord], options: ExperimentOptions) -> list[Row]:
    """Return the accuracy of every method for every number of shots."""
    rows = []
    for name, record in records.items():
        method = name.partition("-")[0]  # the name may end in the number of shots, such as "maml-5"
        for shots in sorted({score.shots for score in record.scores}):
            score = record.selected_accuracy(shots)
            published, published_ci95 = PUBLISHED[method][shots]
            ours, ci95 = 100 * score.mean, 100 * score.ci95
            comparable = options.scale == "paper" and method not in OTHER_NETWORK
            comparison_note = OTHER_NETWORK.get(method, "agrees if its interval is not below the published one")
            training_note = f"{record.plan['model']} on {record.images}, {record.minutes:.1f} minutes"
            rows.append(
                Row(
                    f"{method}, {shots}-shot",
                    "accuracy %",
                    published=published,
                    ours=ours,
                    ci95=ci95,
                    agrees=ours + ci95 >= published - published_ci95 if comparable else None,
                    note=f"{training_note}; {score}; {comparison_note}",
                )
            )
    return rows


EXPERIMENT = TrainingExperiment("bridge-table3", measure, rows)
