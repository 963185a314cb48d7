"""Condition numbers of a search's candidates: as the search computes them, and in plain ways.

    python benchmarks/search.py --device cpu --channels 16 --cells 3 --json search.json
    python benchmarks/search.py --device cuda --channels 48 --cells 5 --json search.json

- gradients: for each candidate a network without the operator, for each image a forward and a backward pass of its
  summed outputs, and one product of the stacked gradients
- batches: the same, but all images go forward together, and a backward pass of each goes through all of them: more to
  compute, in fewer calls
- kernel: the library's MAML kernel between tasks of the empirical NTK
- one Gram: the same from one matrix over all images, which is the search's reference path

On a CPU batches are left out unless asked for with `--ways`, on a GPU the two kernels: they take too long there.

All ways take turns on the same candidates in one process, with supernets as they are in the first, the middle and the
last round of a search. The time of all rounds is extrapolated from these: that of a candidate is interpolated between
them by the number of operators on an edge. Linear regions, which are the same for all ways, are left out.
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
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.meta_kernels import split_kernel
from metabridge.models.architecture import EdgeOperator
from metabridge.models.cells import mask, supernet
from metabridge.models.network import Network
from metabridge.nas import EDGES, NODES, OPERATORS, ActiveOperators
from metabridge.nas.proxies import ConditionNumber, KernelMatrices, all_images, condition_number_score
from metabridge.nas.pruning import count_evaluations
from metabridge.nas.supernet_ntk import CandidateKernels
from metabridge.report.results import Machine
from metabridge.threads import stream_over_threads

ROUNDS = tuple(range(len(OPERATORS), 0, -1))  # operators on an edge
MEASURED = (7, 4, 1)
REPEATS = 3
CONDITION = ConditionNumber("maml")
PROGRESS = Console(stderr=True)

Values = dict[EdgeOperator, float]


def by_search(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return the condition numbers as a search finds them."""
    candidates = CandidateKernels(net, active, all_images(tasks))

    def part(share: Sequence[EdgeOperator]) -> Iterator[tuple[Any, float]]:
        for removal, grams in candidates.matrices(share):
            yield removal, CONDITION.from_matrices(grams, len(tasks), tasks.query_x.shape[1]).value

    return dict(part(removals) if tasks.device.type == "cuda" else stream_over_threads(part, removals))


def by_grams(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return them from one Gram matrix of each candidate."""
    found: Values = {}
    for removal in removals:
        mask(net, active.without(removal))
        found[removal] = CONDITION(net, tasks).value
    return found


def by_kernels(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return them from the kernel between tasks of the empirical NTK."""
    found: Values = {}
    for removal in removals:
        mask(net, active.without(removal))
        kernel = EmpiricalKernel(net, outputs="sum")
        ends = tasks.query_x, tasks.support_x
        matrix = split_kernel(kernel, *ends, adapts="all", time=CONDITION.time, ridge=CONDITION.ridge)
        found[removal] = condition_number_score(matrix.double().cpu(), torch.finfo(matrix.dtype).eps).value
    return found


def by_gradients(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return them from the gradients of each image by itself, of a network made for each candidate."""

    def rows(pruned: Network, x: Tensor) -> Iterator[Tensor]:
        for image in x.split(1):
            yield _gradient(pruned, pruned(image).sum())

    return _by_rows(rows, net, active, tasks, removals)


def by_batches(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return them from the gradients of each image of a batch, of a network made for each candidate."""

    def rows(pruned: Network, x: Tensor) -> Iterator[Tensor]:
        for output in pruned(x).sum(1):
            yield _gradient(pruned, output)

    return _by_rows(rows, net, active, tasks, removals)


def _gradient(net: Network, output: Tensor) -> Tensor:
    slopes = torch.autograd.grad(output, list(net.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([slope.flatten() for slope in slopes])


def _by_rows(
    rows: Callable[[Network, Tensor], Iterator[Tensor]],
    net: Network,
    active: ActiveOperators,
    tasks: Episodes,
    removals: Sequence[EdgeOperator],
) -> Values:
    found: Values = {}
    x, weights, features = all_images(tasks), net.state_dict(), cast(Any, net.features)
    cells, channels = len(features.cells), features.stem[0].out_channels // NODES
    for removal in removals:
        pruned = supernet(active.without(removal), cells=cells, channels=channels, size=x.shape[-1]).to(x.device)
        pruned.load_state_dict({name: weights[name] for name in pruned.state_dict()})
        jacobian = torch.stack(list(rows(pruned, x)))
        grams = KernelMatrices(jacobian @ jacobian.mT, None)
        found[removal] = CONDITION.from_matrices(grams, len(tasks), tasks.query_x.shape[1]).value
    return found


WAYS: dict[str, Callable[[Network, ActiveOperators, Episodes, Sequence[EdgeOperator]], Values]] = {
    "search": by_search,
    "one Gram": by_grams,
    "kernel": by_kernels,
    "gradients": by_gradients,
    "batches": by_batches,
}
PLAIN = [way for way in WAYS if way != "search"]
USUAL = {"cpu": ["one Gram", "kernel", "gradients"], "cuda": ["gradients", "batches"]}


def compare(left: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let the ways take turns, and return seconds a candidate, ratios and how far the condition numbers differ."""
    ways = ("search", *options.ways)
    edges = tuple(frozenset(OPERATORS[(edge + k) % len(OPERATORS)] for k in range(left)) for edge in range(len(EDGES)))
    active = ActiveOperators(edges, edges)
    net = supernet(active, cells=options.cells, channels=options.channels, size=options.size).to(options.device)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2, options.tasks, 5, 3, options.size, options.size, generator=generator)
    labels = torch.zeros(options.tasks, 5, dtype=torch.int64)
    tasks = Episodes(drawn[0], labels, drawn[1], labels).to(options.device)
    choices = list(active)
    chosen = choices[1 :: len(choices) // options.candidates][: options.candidates]  # from both cells and all edges
    few = chosen[:: len(chosen) // options.plain][: options.plain]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    values: dict[str, Values] = {}
    for turn in range(options.turns + 1):
        for way in ways:
            removals = chosen if way == "search" else few
            start = time.perf_counter()
            values[way] = WAYS[way](net, active, tasks, removals)
            seconds[way].append((time.perf_counter() - start) / len(removals))
            told = f"operators an edge: {left}, turn {turn}, {way}"
            PROGRESS.print(f"{told}: {1e3 * seconds[way][-1]:.0f} ms a candidate, of {len(removals)}")
    took = {way: statistics.median(seconds[way][1:]) for way in ways}  # in the first, libraries choose algorithms
    return {
        "operators": left,
        "seconds": took,
        "ratios": {way: took[way] / took["search"] for way in options.ways},
        "differences": {way: max(_gaps(values["search"], values[way]), default=math.nan) for way in options.ways},
    }


def _gaps(found: Values, exact: Values) -> list[float]:
    return [abs(found[removal] / value - 1) for removal, value in exact.items() if math.isfinite(value)]


def in_all(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Extrapolate to all rounds of a search: those measured stand in order of falling numbers of operators."""
    counts = [REPEATS * (2 * len(EDGES) * left + 1) for left in ROUNDS]
    assert sum(counts) == count_evaluations(ActiveOperators.full(), REPEATS)
    known = [row["operators"] for row in rows[::-1]]
    each = {way: [row["seconds"][way] for row in rows[::-1]] for way in rows[0]["seconds"]}
    took = {way: float(np.interp(ROUNDS, known, times) @ counts) for way, times in each.items()}
    ratios = {way: took[way] / took["search"] for way in rows[0]["ratios"]}
    return {"candidates": sum(counts), "seconds": took, "ratios": ratios}


def main() -> None:
    """Compare, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--tasks", type=int, default=3, help="tasks of 5 support and 5 query images")
    parser.add_argument("--candidates", type=int, default=16, help="that the search's way is timed on")
    parser.add_argument("--plain", type=int, default=1, help="of them, those that the others are timed on")
    parser.add_argument("--ways", nargs="+", choices=PLAIN, help="plain ways to set beside the search's")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--turns", type=int, default=2, help="that are timed, after one that is not")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    options.ways = options.ways or USUAL[options.device]
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = False

    rows = [compare(left, options) for left in MEASURED]
    whole = in_all(rows)
    form = f"{options.cells} cells, {options.channels} channels, {10 * options.tasks} images, {options.device}"
    table = Table(title=f"condition numbers, {form}")
    for heading in ("operators an edge", *(f"{way}, ms" for way in whole["seconds"])):
        table.add_column(heading, justify="right")
    for heading in ("ratios", "differences"):
        table.add_column(f"{heading}: {', '.join(options.ways)}", justify="right")
    for row in rows:
        times = (f"{1e3 * took:.0f}" for took in row["seconds"].values())
        ratios = ", ".join(f"{ratio:.1f}" for ratio in row["ratios"].values())
        differences = ", ".join(f"{gap:.0e}" for gap in row["differences"].values())
        table.add_row(str(row["operators"]), *times, ratios, differences)
    minutes = (f"{took / 60:.1f} min" for took in whole["seconds"].values())
    table.add_row("all rounds", *minutes, ", ".join(f"{ratio:.1f}" for ratio in whole["ratios"].values()), "")
    Console(width=140).print(table)
    if options.json:
        names = ("cells", "channels", "size", "tasks", "candidates", "plain", "turns")
        report = {
            "id": f"bench-search-{options.device}",
            "environment": {**asdict(Machine.current(options.device)), "threads": options.threads},
            "settings": {name: getattr(options, name) for name in names},
            "rows": rows,
            "search": {**whole, "extrapolated": True},
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
