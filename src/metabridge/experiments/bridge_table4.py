"""A's table 4: what MTL's training costs beside MetaOptNet's, in time on the graphics card."""

from __future__ import annotations

from pathlib import Path

from metabridge.experiments.bridge_fig2 import figure as costs
from metabridge.experiments.bridge_table3 import Outcome
from metabridge.experiments.mini_imagenet_trainings import records
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.experiments.training_runs import Record

HOURS = {"metaoptnet": 85.6, "mtl": 3.7}


def run(work: Work) -> Outcome:
    """Compare the minutes of training, as a whole and to equal validation accuracy."""
    found = records(work, ("mtl", "metaoptnet"))
    rows = [
        Row(
            f"{name}, training",
            "hours",
            published=HOURS[name],
            ours=record.minutes / 60,
            note=f"{record.iterations} iterations on {record.environment.device}",
        )
        for name, record in found.items()
    ]
    if len(found) == len(HOURS):
        mark, mtl, rival = _equal_accuracy(found["mtl"], found["metaoptnet"])
        rows.append(
            Row(
                "metaoptnet over mtl",
                "ratio of hours",
                published=HOURS["metaoptnet"] / HOURS["mtl"],
                ours=rival / mtl,
                note=f"minutes to a validation accuracy of {100 * mark:.1f} %: {mtl:.2f} and {rival:.2f}"
                + _at_once(found["mtl"], mark),
            )
        )
    return Outcome(Result.of(work, "bridge-table4", tuple(rows), found), found)


def _equal_accuracy(mtl: Record, rival: Record) -> tuple[float, float, float]:
    """The highest accuracy that both reach, and the minutes after which each first did."""
    mark = min(max(point["accuracy"] for point in record.curve) for record in (mtl, rival))
    first = [next(p["minutes"] for p in record.curve if p["accuracy"] >= mark) for record in (mtl, rival)]
    return mark, first[0], first[1]


def _at_once(mtl: Record, mark: float) -> str:
    """Say so where MTL was past the mark when it was first looked at."""
    accuracy = mtl.curve[0]["accuracy"]
    return f"; mtl had {100 * accuracy:.1f} % when first validated, so the ratio is larger" if accuracy > mark else ""


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the learning curves against minutes."""
    costs(outcome, file)


EXPERIMENT = UnportedExperiment("bridge-table4", run, figure, resumable=True)
