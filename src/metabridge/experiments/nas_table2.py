"""B's table 2: what a search has from the MetaNTK, from the NTK in its place, and from linear regions alone.

Stacks of 5 cells, trained by one schedule on mini-ImageNet. Random cells are the level that a search must pass.
"""

from __future__ import annotations

from metabridge.experiments import beside, nas_trainings
from metabridge.experiments.nas_trainings import METANTK, NTK, RANDOM, REGIONS, Outcome
from metabridge.experiments.result import UnportedExperiment, Work

ID = "nas-table2"
OURS = "MetaNTK and regions"
CASES = {OURS: METANTK, "NTK and regions": NTK, "regions alone": REGIONS, "random cells": RANDOM}

# accuracy in percent and its standard deviation over searches, for 1 and 5 shots
PUBLISHED: dict[str, dict[int, tuple[float, float]]] = {
    OURS: {1: (63.88, 0.81), 5: (80.07, 0.45)},
    "NTK and regions": {1: (62.51, 0.42), 5: (79.02, 0.35)},
    "regions alone": {1: (62.96, 1.05), 5: (79.13, 0.96)},
    "random cells": {1: (62.55, 1.15), 5: (78.90, 0.58)},
}


def run(work: Work) -> Outcome:
    """Search and train, or read what that measured."""
    found, trained = nas_trainings.studied(work, CASES.values())
    records = {name: case.own(work, trained) for name, case in CASES.items()}
    judged, rows = work.scale == "paper", []
    for name, own in records.items():
        rows += nas_trainings.accuracy_rows(name, own, PUBLISHED[name], judged=judged)
    for name in list(CASES)[1:]:
        ends = (records[OURS], records[name]), (PUBLISHED[OURS], PUBLISHED[name])
        rows += nas_trainings.gain_rows(f"{OURS}, over {name}", *ends, judged=judged)
    for name, case in CASES.items():
        rows += nas_trainings.cost_rows(name, case.own(work, found), records[name])
    return Outcome.of(work, ID, rows, found, trained)


figure = beside.figure


EXPERIMENT = UnportedExperiment("nas-table2", run, figure, resumable=True)
