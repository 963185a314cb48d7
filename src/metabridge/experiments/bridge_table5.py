"""Wang et al. 2021, table 5: 5-shot accuracy of multi-task learning (MTL) for each L2 penalty at test time.

At test time, the head of a task is fitted by logistic regression with the penalty.
"""

from __future__ import annotations

from collections.abc import Mapping

from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.mini_imagenet_training_runs import train_or_load_all
from metabridge.experiments.training_records import PENALTIES, TrainingRecord
from metabridge.report.results import Row

PUBLISHED = dict(zip(PENALTIES, (76.86, 77.02, 77.28, 77.61, 77.72, 77.55, 76.82)))  # accuracy in percent, by penalty


def measure(options: ExperimentOptions) -> dict[str, TrainingRecord]:
    """Return the record of MTL, which contains the accuracy for every penalty."""
    return train_or_load_all(options, ("mtl",))


def rows(records: Mapping[str, TrainingRecord], _: ExperimentOptions) -> list[Row]:
    """Return the accuracy for every penalty."""
    rows = []
    for record in records.values():
        for penalty, published in PUBLISHED.items():
            score = record.score("test", 5, penalty)
            rows.append(
                Row(
                    f"penalty {penalty:g}",
                    "accuracy %",
                    published=published,
                    ours=100 * score.mean,
                    ci95=100 * score.ci95,
                    note=f"{score.tasks} test tasks, 5-shot",
                )
            )
    return rows


EXPERIMENT = TrainingExperiment("bridge-table5", measure, rows)
