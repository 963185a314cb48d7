"""B's table 1: cells found by MetaNTK-NAS, trained by RFS on mini-ImageNet, beside ResNet-12 trained equally long."""

from __future__ import annotations

from metabridge.experiments import beside, nas_trainings
from metabridge.experiments.nas_trainings import DEEP, METANTK, Outcome
from metabridge.experiments.result import UnportedExperiment, Work

ID, OURS, LONGER, RESNET12 = "nas-table1", "5 cells, MAML kernel", "5 cells, MAML kernel, longer", "ResNet-12"
CASES = {OURS: METANTK, "8 cells, ANIL kernel": DEEP}

# accuracy in percent and its standard deviation over searches, for 1 and 5 shots
PUBLISHED: dict[str, dict[int, tuple[float, float]]] = {
    OURS: {1: (63.88, 0.81), 5: (80.07, 0.45)},
    LONGER: {1: (63.88, 0.81), 5: (80.07, 0.45)},
    "8 cells, ANIL kernel": {1: (64.26, 0.14), 5: (80.35, 0.12)},
    RESNET12: {1: (62.02, 0.63), 5: (79.64, 0.44)},  # one training, with the 95 % interval over tasks
}
PARAMETERS = {OURS: 1.77, LONGER: 1.77, "8 cells, ANIL kernel": 3.21, RESNET12: 12.5}  # millions
HOURS = {OURS: 1.54, "8 cells, ANIL kernel": 1.92}  # of searching, on a V100


def run(work: Work) -> Outcome:
    """Search and train, or read what that measured."""
    further = {LONGER: nas_trainings.longer(next(iter(METANTK.labels(work)))), RESNET12: nas_trainings.resnet12(work)}
    found, trained = nas_trainings.studied(work, CASES.values(), further=further.values())
    records = {name: case.own(work, trained) for name, case in CASES.items()}
    for name, label in further.items():
        records[name] = [trained[label]] if label in trained else []
    judged, rows = work.scale == "paper", []
    for name, own in records.items():
        rows += nas_trainings.accuracy_rows(name, own, PUBLISHED[name], judged=judged)
    for name in CASES:
        ends = (records[name], records[RESNET12]), (PUBLISHED[name], PUBLISHED[RESNET12])
        rows += nas_trainings.gain_rows(f"{name}, over {RESNET12}", *ends, judged=judged)
    for name, own in records.items():
        searches = CASES[name].own(work, found) if name in CASES else []
        rows += nas_trainings.cost_rows(name, searches, own, parameters=PARAMETERS[name], hours=HOURS.get(name))
    return Outcome.of(work, ID, rows, found, trained)


figure = beside.figure


EXPERIMENT = UnportedExperiment("nas-table1", run, figure, resumable=True)
