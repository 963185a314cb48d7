"""A's table 5: how the ℓ2 penalty of the test-time logistic regression moves MTL's 5-shot accuracy."""

from __future__ import annotations

from metabridge.experiments import beside
from metabridge.experiments.bridge_table3 import Outcome
from metabridge.experiments.mini_imagenet_trainings import records
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.experiments.training_runs import PENALTIES

PUBLISHED = dict(zip(PENALTIES, (76.86, 77.02, 77.28, 77.61, 77.72, 77.55, 76.82)))


def run(work: Work) -> Outcome:
    """Read the sweep over penalties that the record of MTL's training holds."""
    found = records(work, ("mtl",))
    rows = []
    for record in found.values():
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
    return Outcome(Result.of(work, "bridge-table5", tuple(rows), found), found)


figure = beside.figure


EXPERIMENT = UnportedExperiment("bridge-table5", run, figure, resumable=True)
