"""B's figure 2: the cells that MetaNTK-NAS finds, drawn, and how much they vary from seed to seed.

B shows an example. What it does not say, and is asked here: do two searches that differ by their seed find the same
cells, and are these nearer to each other than cells drawn at random?
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from metabridge.experiments import nas_trainings
from metabridge.experiments.nas_trainings import DEEP, METANTK, NTK, RANDOM, REGIONS, Finding, Outcome
from metabridge.experiments.result import Row, UnportedExperiment, Work
from metabridge.models.architecture import CELLS, INPUTS_PER_NODE, NODES, Architecture

ID = "nas-fig2"
DRAWN = {"5 cells, MAML kernel": METANTK, "8 cells, ANIL kernel": DEEP}
CASES = {**DRAWN, "5 cells, NTK": NTK, "5 cells, regions alone": REGIONS, "5 cells, random": RANDOM}


def run(work: Work) -> Outcome:
    """Search, or read what was found."""
    work.check_only([f"search-{label}" for case in CASES.values() for label in case.labels(work)])
    found = nas_trainings.findings(work, CASES.values())
    operators = len(nas_trainings.SCALES[work.scale].search.operators)
    rows = [row for name, case in CASES.items() for row in _rows(name, case.own(work, found), operators)]
    return Outcome.of(work, ID, rows, found, {})


def _rows(name: str, found: Sequence[Finding], operators: int) -> list[Row]:
    rows = []
    pairs = list(itertools.combinations([finding.architecture for finding in found], 2))
    if pairs:
        shares = zip(*(in_common(*pair) for pair in pairs))
        for what, each, chance in zip(("edges", "operators"), shares, by_chance(operators)):
            share = statistics.mean(each)
            edges = len(CELLS) * NODES * INPUTS_PER_NODE
            apart = f"{(1 - share / 100) * edges:.1f} of {edges} differ"
            note = f"{apart}, mean over pairs of {len(found)} searches; random cells have {chance:.0f} % in common"
            rows.append(Row(f"{name}, {what} in common", "% of edges", ours=share, note=note))
    return rows + nas_trainings.cost_rows(name, found, [])


def in_common(first: Architecture, second: Architecture) -> tuple[float, float]:
    """Return the percentages of edges that both have, and that both have with the same operator.

    >>> cell = (((0, "skip"), (1, "skip")), ((0, "skip"), (2, "skip")), ((1, "skip"), (3, "skip")))
    >>> other = (cell[0], ((0, "conv_3x3"), (1, "skip")), cell[2])
    >>> in_common(Architecture(cell, cell), Architecture(cell, other))
    (91.66..., 83.33...)
    """
    ours, theirs = (set(each.active_operators) for each in (first, second))
    edges = {choice[:2] for choice in ours} & {choice[:2] for choice in theirs}
    return 100 * len(edges) / len(ours), 100 * len(ours & theirs) / len(ours)


def by_chance(operators: int) -> tuple[float, float]:
    """Return what `in_common` gives on average for cells drawn at random out of so many operators.

    Each of a node's n sources is kept with probability k/n, k = INPUTS_PER_NODE, so two cells share k²/n on average.

    >>> by_chance(7)
    (72.22..., 10.31...)
    """
    edges = 100 * sum(INPUTS_PER_NODE**2 / (node + 2) for node in range(NODES)) / (NODES * INPUTS_PER_NODE)
    return edges, edges / operators


def figure(outcome: Outcome, file: Path) -> None:
    """Draw what the kernels of MAML and ANIL found, a line for each search; without any, what others did."""
    from matplotlib.figure import Figure

    from metabridge.models.architecture_drawing import draw_cell
    from metabridge.report import figures

    found = list(outcome.findings.values())
    drawn = [finding for finding in found if finding.plan["kernel"] in ("maml", "anil")] or found
    with figures.LIGHT.context():
        page = Figure(figsize=(19, 3.65 * len(drawn)), layout="constrained")
        for line, finding in zip(page.subplots(len(drawn), len(CELLS), squeeze=False), drawn):
            for axes, kind in zip(line, CELLS):
                draw_cell(getattr(finding.architecture, kind), axes)
                cells, kernel, seed = (finding.plan[key] for key in ("cells", "kernel", "seed"))
                axes.set_title(f"{kind} cell, {cells} cells, {kernel.upper()} kernel, seed {seed}", loc="left")
    figures.save(page, file)


EXPERIMENT = UnportedExperiment("nas-fig2", run, figure, resumable=True)
