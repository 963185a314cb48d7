"""Wang et al. 2022, table 2: MetaNTK-NAS compared with searches that use another kernel or no kernel.

One variant of the search uses the NTK and the number of linear regions, another only the number of linear regions.
Random cells are the baseline. All networks have 5 cells and are trained with the same schedule on mini-ImageNet.
"""

from __future__ import annotations

from collections.abc import Mapping

from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.nas_rows import accuracy_rows, cost_rows, gain_rows
from metabridge.experiments.nas_searches import METANTK, NTK, RANDOM, REGIONS
from metabridge.experiments.nas_training_runs import finished_training_runs, search_and_train
from metabridge.experiments.records import Record
from metabridge.report.results import Row

METANTK_NAME = "MetaNTK and regions"
VARIANTS = {METANTK_NAME: METANTK, "NTK and regions": NTK, "regions alone": REGIONS, "random cells": RANDOM}

# Accuracy in percent and its standard deviation over searches, by number of shots.
PUBLISHED: dict[str, dict[int, tuple[float, float]]] = {
    METANTK_NAME: {1: (63.88, 0.81), 5: (80.07, 0.45)},
    "NTK and regions": {1: (62.51, 0.42), 5: (79.02, 0.35)},
    "regions alone": {1: (62.96, 1.05), 5: (79.13, 0.96)},
    "random cells": {1: (62.55, 1.15), 5: (78.90, 0.58)},
}


def measure(options: ExperimentOptions) -> dict[str, Record]:
    """Return the records of all finished searches and training runs."""
    return search_and_train(options, VARIANTS.values())


def rows(records: Mapping[str, Record], options: ExperimentOptions) -> list[Row]:
    """Return rows of the accuracies, the gains of the MetaNTK over the other variants, and the costs."""
    runs_by_name = {name: finished_training_runs(records, variant.seeds(options)) for name, variant in VARIANTS.items()}
    comparable = options.scale == "paper"
    rows = []
    for name, runs in runs_by_name.items():
        rows += accuracy_rows(name, runs, PUBLISHED[name], comparable=comparable)
    for name in list(VARIANTS)[1:]:
        compared_runs = runs_by_name[METANTK_NAME], runs_by_name[name]
        published = PUBLISHED[METANTK_NAME], PUBLISHED[name]
        row_name = f"accuracy gain of {METANTK_NAME} over {name}"
        rows += gain_rows(row_name, compared_runs, published, comparable=comparable)
    for name, variant in VARIANTS.items():
        rows += cost_rows(name, variant.searches(records, options), runs_by_name[name])
    return rows


EXPERIMENT = TrainingExperiment("nas-table2", measure, rows)
