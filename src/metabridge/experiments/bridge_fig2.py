"""A's figure 2: accuracy against the time that training takes, for methods on the same ResNet-12."""

from __future__ import annotations

from pathlib import Path

from metabridge.experiments.bridge_table3 import Outcome
from metabridge.experiments.mini_imagenet_trainings import records
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work


def run(work: Work) -> Outcome:
    """Give the best accuracy and the minutes of every method."""
    found = records(work, ("mtl", "rfs", "r2d2", "metaoptnet"))
    rows = []
    for name, record in found.items():
        for shots in (1, 5):
            score = record.chosen(shots)
            rows.append(
                Row(
                    f"{name}, {shots}-shot",
                    "accuracy %",
                    ours=100 * score.mean,
                    ci95=100 * score.ci95,
                    note=f"after {record.minutes:.1f} minutes",
                )
            )
        if record.evaluation_seconds is not None:
            note = f"{score.tasks} tasks of 1 and of 5 shots, once the features are there"
            rows.append(Row(f"{name}, evaluation", "seconds", ours=record.evaluation_seconds, note=note))
        rows.append(Row(f"{name}, training", "minutes", ours=record.minutes, note=f"on {record.environment.device}"))
    return Outcome(Result.of(work, "bridge-fig2", tuple(rows), found), found)


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the validation accuracies against minutes of training."""
    from metabridge.report import figures, result_figures

    curves = {
        name: [(point["minutes"], point["accuracy"], point["ci95"]) for point in record.curve]
        for name, record in outcome.records.items()
    }
    figures.save(result_figures.accuracy_over_time(curves), file)


EXPERIMENT = UnportedExperiment("bridge-fig2", run, figure, resumable=True)
