"""Wang et al. 2021, figure 2: accuracy against training time of four methods, all with a ResNet-12."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from metabridge.experiments.experiment import ExperimentOptions, Outcome, TrainingExperiment
from metabridge.experiments.mini_imagenet_training_runs import SHOTS, train_or_load_all
from metabridge.experiments.training_records import TrainingRecord
from metabridge.report.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure(options: ExperimentOptions) -> dict[str, TrainingRecord]:
    """Return the records of the four methods."""
    return train_or_load_all(options, ("mtl", "rfs", "r2d2", "metaoptnet"))


def rows(records: Mapping[str, TrainingRecord], _: ExperimentOptions) -> list[Row]:
    """Return the test accuracies, and the durations of evaluation and training."""
    rows = []
    for name, record in records.items():
        for shots in SHOTS:
            score = record.selected_accuracy(shots)
            ours, ci95, note = 100 * score.mean, 100 * score.ci95, f"after {record.minutes:.1f} minutes"
            rows.append(Row(f"{name}, {shots}-shot", "accuracy %", ours=ours, ci95=ci95, note=note))
        if record.evaluation_seconds is not None:
            tasks = f"{score.tasks} tasks with 1 shot and {score.tasks} with 5 shots"
            note = f"{tasks}; the time excludes feature extraction"
            rows.append(Row(f"{name}, evaluation", "seconds", ours=record.evaluation_seconds, note=note))
        rows.append(Row(f"{name}, training", "minutes", ours=record.minutes, note=f"on {record.environment.device}"))
    return rows


def figure(outcome: Outcome[Mapping[str, TrainingRecord]]) -> Figure:
    """Draw the validation accuracies against training time."""
    from metabridge.report.result_figures import accuracy_over_time

    curves = {
        name: [(point["minutes"], point["accuracy"], point["ci95"]) for point in record.curve]
        for name, record in outcome.data.items()
    }
    return accuracy_over_time(curves)


EXPERIMENT = TrainingExperiment("bridge-fig2", measure, rows, figure)
