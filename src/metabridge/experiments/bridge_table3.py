"""A's table 3: few-shot accuracy on mini-ImageNet, of gradient-based meta-learning and of multi-task learning."""

from __future__ import annotations

from dataclasses import dataclass

from metabridge.experiments import beside
from metabridge.experiments.mini_imagenet_trainings import plans, records
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.experiments.training_runs import Record

# accuracy in percent and the half-width of its 95 % interval, for 1 and 5 shots
PUBLISHED: dict[str, dict[int, tuple[float, float]]] = {
    "maml": {1: (48.70, 1.84), 5: (63.11, 0.92)},
    "anil": {1: (48.0, 0.7), 5: (62.2, 0.5)},
    "r2d2": {1: (51.2, 0.6), 5: (68.8, 0.1)},
    "metaoptnet": {1: (62.64, 0.61), 5: (78.63, 0.46)},
    "mtl": {1: (59.84, 0.22), 5: (77.72, 0.09)},
    "rfs": {1: (62.02, 0.63), 5: (79.64, 0.44)},  # Tian et al. 2020, who name it so
}
OTHER_NET = {"r2d2": "published with four convolutions"}  # what is published is of another net than ours


@dataclass(frozen=True)
class Outcome:
    """The result and the records it was made of."""

    result: Result
    records: dict[str, Record]


def run(work: Work) -> Outcome:
    """Train every method, or read what its training measured."""
    found = records(work, tuple(plans(work.scale)))
    rows = [row for name, record in found.items() for row in _rows(name, record, judged=work.scale == "paper")]
    return Outcome(Result.of(work, "bridge-table3", tuple(rows), found), found)


def _rows(name: str, record: Record, judged: bool) -> list[Row]:
    rows = []
    for shots in sorted({score.shots for score in record.scores}):
        score = record.chosen(shots)
        method = name.partition("-")[0]
        published, margin = PUBLISHED[method][shots]
        ours, ci95 = 100 * score.mean, 100 * score.ci95
        rule = OTHER_NET.get(method, "agrees if its interval is not below the published")
        rows.append(
            Row(
                f"{method}, {shots}-shot",
                "accuracy %",
                published=published,
                ours=ours,
                ci95=ci95,
                agrees=ours + ci95 >= published - margin if judged and method not in OTHER_NET else None,
                note=f"{record.plan['model']} on {record.images}, {record.minutes:.1f} minutes; {score.told()}; {rule}",
            )
        )
    return rows


figure = beside.figure


EXPERIMENT = UnportedExperiment("bridge-table3", run, figure, resumable=True)
