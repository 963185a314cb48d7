"""Wang et al. 2022, table 1: cells selected by MetaNTK-NAS compared with ResNet-12.

All networks are trained with RFS on mini-ImageNet, for the same number of steps. The architecture of one search is also
trained for longer, and with Muon.
"""

from __future__ import annotations

from collections.abc import Mapping

from metabridge.experiments.experiment import ExperimentOptions, TrainingExperiment
from metabridge.experiments.nas_rows import accuracy_rows, cost_rows, gain_rows
from metabridge.experiments.nas_searches import DEEP, METANTK
from metabridge.experiments.nas_training_runs import (
    finished_training_runs,
    recipe_label,
    resnet12_label,
    search_and_train,
)
from metabridge.experiments.records import Record
from metabridge.report.results import Row

SHALLOW_CELLS, DEEP_CELLS = "5 cells, MAML kernel", "8 cells, ANIL kernel"
LONGER, MUON, RESNET12 = f"{SHALLOW_CELLS}, longer", f"{SHALLOW_CELLS}, Muon", "ResNet-12"
VARIANTS = {SHALLOW_CELLS: METANTK, DEEP_CELLS: DEEP}

# Accuracy in percent and its standard deviation over searches, by number of shots. We train networks of 5 cells in
# three ways, the paper only in one. The published accuracy is therefore the same for all three.
PUBLISHED: dict[str, dict[int, tuple[float, float]]] = {
    SHALLOW_CELLS: {1: (63.88, 0.81), 5: (80.07, 0.45)},
    LONGER: {1: (63.88, 0.81), 5: (80.07, 0.45)},
    MUON: {1: (63.88, 0.81), 5: (80.07, 0.45)},
    DEEP_CELLS: {1: (64.26, 0.14), 5: (80.35, 0.12)},
    # From one training run; the second number is the half-width of the 95 % interval over tasks.
    RESNET12: {1: (62.02, 0.63), 5: (79.64, 0.44)},
}
PARAMETERS = {SHALLOW_CELLS: 1.77, LONGER: 1.77, MUON: 1.77, DEEP_CELLS: 3.21, RESNET12: 12.5}  # in millions
SEARCH_HOURS = {SHALLOW_CELLS: 1.54, DEEP_CELLS: 1.92}  # duration of a search on a V100 GPU


def additional_labels(options: ExperimentOptions) -> dict[str, str]:
    """Return the labels of the training runs with other recipes and of ResNet-12, by the name in the rows."""
    first_label = next(iter(METANTK.seeds(options)))
    return {
        LONGER: recipe_label(first_label, "longer"),
        MUON: recipe_label(first_label, "muon"),
        RESNET12: resnet12_label(options),
    }


def measure(options: ExperimentOptions) -> dict[str, Record]:
    """Return the records of all finished searches and training runs."""
    return search_and_train(options, VARIANTS.values(), additional_labels=additional_labels(options).values())


def rows(records: Mapping[str, Record], options: ExperimentOptions) -> list[Row]:
    """Return rows of the accuracies, the gains over ResNet-12, and the costs."""
    runs_by_name = {name: finished_training_runs(records, variant.seeds(options)) for name, variant in VARIANTS.items()}
    for name, label in additional_labels(options).items():
        runs_by_name[name] = finished_training_runs(records, [label])
    comparable = options.scale == "paper"
    rows = []
    for name, runs in runs_by_name.items():
        rows += accuracy_rows(name, runs, PUBLISHED[name], comparable=comparable)
    for name in VARIANTS:
        compared_runs, published = (runs_by_name[name], runs_by_name[RESNET12]), (PUBLISHED[name], PUBLISHED[RESNET12])
        rows += gain_rows(f"{name}: accuracy gain over {RESNET12}", compared_runs, published, comparable=comparable)
    for name, runs in runs_by_name.items():
        searches = VARIANTS[name].searches(records, options) if name in VARIANTS else []
        rows += cost_rows(
            name, searches, runs, published_parameters=PARAMETERS[name], published_hours=SEARCH_HOURS.get(name)
        )
    return rows


EXPERIMENT = TrainingExperiment("nas-table1", measure, rows)
