"""Condition numbers of a search's candidates: as the search computes them, and in two plain ways.

    python benchmarks/search.py --device cpu --channels 16 --cells 3 --json search.json

The straightforward way asks the library for the MAML kernel of the empirical NTK of each candidate, from scratch. The
other takes one Gram matrix of all images from the empirical NTK, which is the search's reference path. All three take
turns on the same candidates in one process, with supernets as they are in the first, a middle and the last round.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from metabridge.episodes import Episodes
from metabridge.experiments.result import environment
from metabridge.kernels.empirical import Empirical
from metabridge.kernels.meta import split_kernel
from metabridge.models.cells import mask, supernet
from metabridge.models.network import Network
from metabridge.search import EDGES, OPERATORS, Alive
from metabridge.search.candidates import Candidates
from metabridge.search.proxies import Conditioning, condition_number, points
from metabridge.search.prune import Removal, removable
from metabridge.search.threads import over_threads

WAYS = ("search", "one Gram", "straightforward")
OPERATORS_LEFT = (7, 4, 2)  # on an edge, in the rounds that are measured
CONDITION = Conditioning("maml")

Values = dict[Removal, float]


def supernets(left: int) -> Alive:
    """So many operators on every edge."""
    edges = tuple(frozenset(OPERATORS[(edge + k) % len(OPERATORS)] for k in range(left)) for edge in range(len(EDGES)))
    return Alive(edges, edges)


def by_search(net: Network, alive: Alive, tasks: Episodes, removals: Sequence[Removal]) -> Values:
    """Return the condition numbers as a search finds them."""

    def part(share: Sequence[Removal]) -> Iterator[tuple[Removal, float]]:
        for removal, grams in Candidates(net, alive, points(tasks)).grams(share):
            yield removal, CONDITION.of_grams(grams, len(tasks), tasks.query_x.shape[1]).value

    return dict(part(removals) if tasks.device.type == "cuda" else over_threads(part, removals))


def by_grams(net: Network, alive: Alive, tasks: Episodes, removals: Sequence[Removal]) -> Values:
    """Return them from one Gram matrix of each candidate."""
    found: Values = {}
    for removal in removals:
        mask(net, alive if removal is None else alive.without(*removal))
        found[removal] = CONDITION(net, tasks).value
    mask(net, alive)
    return found


def by_kernels(net: Network, alive: Alive, tasks: Episodes, removals: Sequence[Removal]) -> Values:
    """Return them from the kernel between tasks of the empirical NTK."""
    found: Values = {}
    for removal in removals:
        mask(net, alive if removal is None else alive.without(*removal))
        kernel = Empirical(net, outputs="sum")
        ends = tasks.query_x, tasks.support_x
        matrix = split_kernel(kernel, *ends, adapts="all", time=CONDITION.time, ridge=CONDITION.ridge)
        found[removal] = condition_number(matrix.double().cpu(), torch.finfo(matrix.dtype).eps).value
    mask(net, alive)
    return found


def compare(left: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let the ways take turns, and return seconds a candidate, ratios and how far the condition numbers differ."""
    alive = supernets(left)
    net = supernet(alive, cells=options.cells, channels=options.channels, size=options.size).to(options.device)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2, options.tasks, 5, 3, options.size, options.size, generator=generator)
    labels = torch.zeros(options.tasks, 5, dtype=torch.int64)
    tasks = Episodes(drawn[0], labels, drawn[1], labels).to(options.device)
    choices = removable(alive)
    sides: dict[str, Callable[..., Values]] = dict(zip(WAYS, (by_search, by_grams, by_kernels)))
    counts = dict(zip(WAYS, (options.candidates, options.plain, options.plain)))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    values: dict[str, Values] = {}
    for way in WAYS:  # libraries choose their algorithms
        sides[way](net, alive, tasks, choices[:1])
    for _ in range(options.turns):
        for way, side in sides.items():
            start = time.perf_counter()
            values[way] = side(net, alive, tasks, choices[: counts[way]])
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds[way].append((time.perf_counter() - start) / counts[way])
    took = {way: statistics.median(seconds[way]) for way in WAYS}
    exact = values[WAYS[2]]
    gaps = [abs(values[WAYS[0]][removal] / value - 1) for removal, value in exact.items() if math.isfinite(value)]
    return {
        "operators": left,
        "seconds": took[WAYS[0]],
        "gram_seconds": took[WAYS[1]],
        "reference_seconds": took[WAYS[2]],
        "gram_ratio": took[WAYS[1]] / took[WAYS[0]],
        "time_ratio": took[WAYS[2]] / took[WAYS[0]],
        "difference": max(gaps, default=math.nan),
    }


def main() -> None:
    """Compare, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--tasks", type=int, default=3, help="tasks of 5 support and 5 query images")
    parser.add_argument("--candidates", type=int, default=8, help="that the search's way is timed on")
    parser.add_argument("--plain", type=int, default=2, help="of them, those that the others are timed on")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = False

    rows = [compare(left, options) for left in OPERATORS_LEFT]
    form = f"{options.cells} cells, {options.channels} channels, {10 * options.tasks} images"
    table = Table(title=f"a candidate's condition number, {form}, {options.device}")
    for heading in ("operators an edge", *(f"{way}, ms" for way in WAYS), "ratio", "ratio", "difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = (f"{1e3 * row[name]:.1f}" for name in ("seconds", "gram_seconds", "reference_seconds"))
        ratios = (f"{row[name]:.1f}" for name in ("gram_ratio", "time_ratio"))
        table.add_row(str(row["operators"]), *times, *ratios, f"{row['difference']:.0e}")
    Console(width=120).print(table)
    if options.json:
        names = ("cells", "channels", "size", "tasks", "candidates", "plain", "turns")
        report = {
            "id": f"bench-search-{options.device}",
            "environment": {**asdict(environment(options.device)), "threads": options.threads},
            "settings": {name: getattr(options, name) for name in names},
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
