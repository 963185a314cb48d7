"""Wang et al. 2021, table 4: GPU time to train multi-task learning (MTL) and MetaOptNet."""

from __future__ import annotations

from collections.abc import Mapping

from metabridge.experiments.bridge_fig2 import figure
from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.mini_imagenet_training_runs import train_or_load_all
from metabridge.experiments.training_records import TrainingRecord
from metabridge.report.results import Row

PUBLISHED_HOURS = {"metaoptnet": 85.6, "mtl": 3.7}


def measure(options: ExperimentOptions) -> dict[str, TrainingRecord]:
    """Return the records of both methods."""
    return train_or_load_all(options, ("mtl", "metaoptnet"))


def rows(records: Mapping[str, TrainingRecord], _: ExperimentOptions) -> list[Row]:
    """Return the training time of each method, and the ratio of the times to reach the same validation accuracy."""
    rows = [
        Row(
            f"{name}, training",
            "hours",
            published=PUBLISHED_HOURS[name],
            ours=record.minutes / 60,
            note=f"{record.iterations} iterations on {record.environment.device}",
        )
        for name, record in records.items()
    ]
    if len(records) == len(PUBLISHED_HOURS):
        rows.append(_ratio_row(records["mtl"], records["metaoptnet"]))
    return rows


def _ratio_row(mtl: TrainingRecord, metaoptnet: TrainingRecord) -> Row:
    """Return the ratio of the times until each method first reaches the highest accuracy that both reach."""
    target = min(max(point["accuracy"] for point in record.curve) for record in (mtl, metaoptnet))
    mtl_minutes, metaoptnet_minutes = (
        next(point["minutes"] for point in record.curve if point["accuracy"] >= target) for record in (mtl, metaoptnet)
    )
    note = f"minutes to {100 * target:.1f} % validation accuracy: {mtl_minutes:.2f} and {metaoptnet_minutes:.2f}"
    first_accuracy = mtl.curve[0]["accuracy"]
    if first_accuracy > target:
        note += f"; mtl already had {100 * first_accuracy:.1f} % at its first validation, so the true ratio is larger"
    return Row(
        "metaoptnet / mtl",
        "ratio of hours",
        published=PUBLISHED_HOURS["metaoptnet"] / PUBLISHED_HOURS["mtl"],
        ours=metaoptnet_minutes / mtl_minutes,
        note=note,
    )


EXPERIMENT = TrainingExperiment("bridge-table4", measure, rows, figure)
