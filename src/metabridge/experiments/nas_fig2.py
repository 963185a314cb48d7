"""Wang et al. 2022, figure 2: the cells that MetaNTK-NAS selects, and how much they vary between seeds.

The paper shows the cells of one search. The rows contain the mean percentages of edges and operators that the cells of
two searches with different seeds have in common. Their notes give the same percentages for random cells.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from metabridge.experiments.experiment import ExperimentOptions, Outcome, TrainingExperiment
from metabridge.experiments.nas_rows import cost_rows
from metabridge.experiments.nas_searches import DEEP, METANTK, NTK, RANDOM, REGIONS, SETTINGS, SearchRecord, search_all
from metabridge.models.architecture import CELLS, INPUTS_PER_NODE, NODES, Architecture
from metabridge.report.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = {
    "5 cells, MAML kernel": METANTK,
    "8 cells, ANIL kernel": DEEP,
    "5 cells, NTK": NTK,
    "5 cells, regions alone": REGIONS,
    "5 cells, random": RANDOM,
}
EDGES = len(CELLS) * NODES * INPUTS_PER_NODE  # number of edges of an architecture


def measure(options: ExperimentOptions) -> dict[str, SearchRecord]:
    """Return the records of all searches."""
    options.check_selected_names(
        [f"search-{label}" for variant in VARIANTS.values() for label in variant.seeds(options)]
    )
    return search_all(options, VARIANTS.values())


def rows(records: Mapping[str, SearchRecord], options: ExperimentOptions) -> list[Row]:
    """Return how much the cells of each variant overlap, and the costs of the searches."""
    num_operators = len(SETTINGS[options.scale].search.operators)
    rows = []
    for name, variant in VARIANTS.items():
        searches = variant.searches(records, options)
        rows += overlap_rows(name, searches, num_operators) + cost_rows(name, searches, [])
    return rows


def overlap_rows(name: str, searches: Sequence[SearchRecord], num_operators: int) -> list[Row]:
    """Return the mean percentages of common edges and operators over pairs of searches."""
    pairs = list(itertools.combinations([search.architecture for search in searches], 2))
    if not pairs:
        return []
    rows = []
    percentages = zip(*(overlap(*pair) for pair in pairs))
    for quantity, values, expected in zip(("edges", "operators"), percentages, expected_overlap(num_operators)):
        mean = statistics.mean(values)
        note = (
            f"{(1 - mean / 100) * EDGES:.1f} of {EDGES} differ, mean over pairs of {len(searches)} searches; "
            f"random cells have {expected:.0f} % in common"
        )
        rows.append(Row(f"{name}, {quantity} in common", "% of edges", ours=mean, note=note))
    return rows


def overlap(first: Architecture, second: Architecture) -> tuple[float, float]:
    """Return the percentage of edges that two architectures share, and of edges that also have the same operator.

    >>> cell = (((0, "skip"), (1, "skip")), ((0, "skip"), (2, "skip")), ((1, "skip"), (3, "skip")))
    >>> other = (cell[0], ((0, "conv_3x3"), (1, "skip")), cell[2])
    >>> overlap(Architecture(cell, cell), Architecture(cell, other))
    (91.66..., 83.33...)
    """
    # An active operator is a cell, an edge and the operator on this edge.
    operators, other_operators = (set(architecture.active_operators) for architecture in (first, second))
    common_edges = {operator[:2] for operator in operators} & {operator[:2] for operator in other_operators}
    return 100 * len(common_edges) / len(operators), 100 * len(operators & other_operators) / len(operators)


def expected_overlap(num_operators: int) -> tuple[float, float]:
    """Return the expected `overlap` of random cells with this number of candidate operators.

    Node i has n = i + 2 candidate inputs: the two inputs of the cell and all earlier nodes. A random node keeps each of
    them with probability k/n, where k = INPUTS_PER_NODE. On average, two random nodes therefore have k²/n inputs in
    common.

    >>> expected_overlap(7)
    (72.22..., 10.31...)
    """
    common_edges = 100 * sum(INPUTS_PER_NODE**2 / (node + 2) for node in range(NODES)) / (NODES * INPUTS_PER_NODE)
    return common_edges, common_edges / num_operators


def figure(outcome: Outcome[Mapping[str, SearchRecord]]) -> Figure:
    """Draw the cells found with the MAML and ANIL kernels, or the cells of all searches if there are no such searches.

    The figure has one row per search.
    """
    from matplotlib.figure import Figure

    from metabridge.models.architecture_drawing import draw_cell

    searches = list(outcome.data.values())
    drawn_searches = [search for search in searches if search.plan["kernel"] in ("maml", "anil")] or searches
    figure = Figure(figsize=(19, 3.65 * len(drawn_searches)), layout="constrained")
    for panels, search in zip(figure.subplots(len(drawn_searches), len(CELLS), squeeze=False), drawn_searches):
        for axes, kind in zip(panels, CELLS):
            draw_cell(getattr(search.architecture, kind), axes)
            cells, kernel, seed = (search.plan[key] for key in ("cells", "kernel", "seed"))
            axes.set_title(f"{kind} cell, {cells} cells, {kernel.upper()} kernel, seed {seed}", loc="left")
    return figure


EXPERIMENT = TrainingExperiment("nas-fig2", measure, rows, figure)
