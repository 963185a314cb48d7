"""Wang et al. 2022, figure 2: the cells that MetaNTK-NAS finds, and how much they vary between seeds.

The paper shows one example. The rows compare cells found with different seeds: do they have more edges in common than
random cells have?
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
EDGES = len(CELLS) * NODES * INPUTS_PER_NODE


def measure(options: ExperimentOptions) -> dict[str, SearchRecord]:
    """Return the records of all searches."""
    options.check_only([f"search-{label}" for variant in VARIANTS.values() for label in variant.seeds(options)])
    return search_all(options, VARIANTS.values())


def rows(records: Mapping[str, SearchRecord], options: ExperimentOptions) -> list[Row]:
    """Return what the cells of each variant have in common, and the costs of the searches."""
    operators = len(SETTINGS[options.scale].search.operators)
    rows = []
    for name, variant in VARIANTS.items():
        searches = variant.searches(records, options)
        rows += overlap_rows(name, searches, operators) + cost_rows(name, searches, [])
    return rows


def overlap_rows(name: str, searches: Sequence[SearchRecord], operators: int) -> list[Row]:
    """Return the mean percentages of common edges and operators over pairs of searches."""
    pairs = list(itertools.combinations([search.architecture for search in searches], 2))
    if not pairs:
        return []
    rows = []
    percentages = zip(*(overlap(*pair) for pair in pairs))
    for part, values, expected in zip(("edges", "operators"), percentages, expected_overlap(operators)):
        mean = statistics.mean(values)
        note = (
            f"{(1 - mean / 100) * EDGES:.1f} of {EDGES} differ, mean over pairs of {len(searches)} searches; "
            f"random cells have {expected:.0f} % in common"
        )
        rows.append(Row(f"{name}, {part} in common", "% of edges", ours=mean, note=note))
    return rows


def overlap(first: Architecture, second: Architecture) -> tuple[float, float]:
    """Return the percentage of edges that both have, and of edges that both have with the same operator.

    >>> cell = (((0, "skip"), (1, "skip")), ((0, "skip"), (2, "skip")), ((1, "skip"), (3, "skip")))
    >>> other = (cell[0], ((0, "conv_3x3"), (1, "skip")), cell[2])
    >>> overlap(Architecture(cell, cell), Architecture(cell, other))
    (91.66..., 83.33...)
    """
    choices, other_choices = (set(architecture.active_operators) for architecture in (first, second))
    edges = {choice[:2] for choice in choices} & {choice[:2] for choice in other_choices}
    return 100 * len(edges) / len(choices), 100 * len(choices & other_choices) / len(choices)


def expected_overlap(operators: int) -> tuple[float, float]:
    """Return the mean `overlap` of random cells with this number of operators to choose from.

    A random node keeps each of its n inputs with probability k/n, k = INPUTS_PER_NODE, so that two nodes share k²/n
    inputs on average.

    >>> expected_overlap(7)
    (72.22..., 10.31...)
    """
    edges = 100 * sum(INPUTS_PER_NODE**2 / (node + 2) for node in range(NODES)) / (NODES * INPUTS_PER_NODE)
    return edges, edges / operators


def figure(outcome: Outcome[Mapping[str, SearchRecord]]) -> Figure:
    """Draw the cells found with the kernels of MAML and ANIL, one line per search, or all cells if there are none."""
    from matplotlib.figure import Figure

    from metabridge.models.architecture_drawing import draw_cell

    searches = list(outcome.data.values())
    drawn = [search for search in searches if search.plan["kernel"] in ("maml", "anil")] or searches
    figure = Figure(figsize=(19, 3.65 * len(drawn)), layout="constrained")
    for line, search in zip(figure.subplots(len(drawn), len(CELLS), squeeze=False), drawn):
        for axes, kind in zip(line, CELLS):
            draw_cell(getattr(search.architecture, kind), axes)
            cells, kernel, seed = (search.plan[key] for key in ("cells", "kernel", "seed"))
            axes.set_title(f"{kind} cell, {cells} cells, {kernel.upper()} kernel, seed {seed}", loc="left")
    return figure


EXPERIMENT = TrainingExperiment("nas-fig2", measure, rows, figure)
