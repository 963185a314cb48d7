"""Time the condition numbers of candidate networks, as an architecture search computes them and in simpler ways.

    python benchmarks/search.py --device cpu --channels 16 --cells 3 --json search.json
    python benchmarks/search.py --device cuda --channels 48 --cells 5 --json search.json

- gradients: build the candidate's network, compute a forward and a backward pass of the summed outputs for each image,
  and multiply the matrix of all gradients by its transpose
- batches: the same with one forward pass for all images. The backward pass of each image then goes through the whole
  batch, which is more computation in fewer calls
- kernel: the library's MAML kernel of the empirical NTK
- one Gram: the MAML kernel from one Gram matrix of all images

Some of these take too long: by default, "batches" is omitted on a CPU, and "kernel" and "one Gram" on a GPU (see
`--ways`).

All ways are timed in turns on the same candidates in one process, with the supernets of the first, a middle and the
last round of a search. The time per candidate in other rounds is interpolated by the number of operators on an edge.
Linear regions, which are computed in the same way in all cases, are not included.
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
from metabridge.kernels.meta_kernels import meta_ntk
from metabridge.models.architecture import EdgeOperator
from metabridge.models.cells import set_active_operators, supernet
from metabridge.models.network import Network
from metabridge.nas import EDGES, NODES, OPERATORS, ActiveOperators
from metabridge.nas.proxies import ConditionNumber, KernelMatrices, all_images, condition_number_score
from metabridge.nas.pruning import count_evaluations
from metabridge.nas.supernet_ntk import CandidateKernels
from metabridge.report.results import Machine
from metabridge.threads import stream_over_threads

ROUNDS = tuple(range(len(OPERATORS), 0, -1))  # number of operators on an edge in each round of a search
MEASURED_ROUNDS = (7, 4, 1)
REPEATS = 3  # repeats of every round in a search
CONDITION = ConditionNumber("maml")
PROGRESS = Console(stderr=True)

Values = dict[EdgeOperator, float]


def by_search(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return the condition numbers as a search computes them."""
    candidates = CandidateKernels(net, active, all_images(tasks))

    def compute(thread_removals: Sequence[EdgeOperator]) -> Iterator[tuple[Any, float]]:
        for removal, grams in candidates.matrices(thread_removals):
            yield removal, CONDITION.from_matrices(grams, len(tasks), tasks.query_x.shape[1]).value

    return dict(compute(removals) if tasks.device.type == "cuda" else stream_over_threads(compute, removals))


def by_grams(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return the condition numbers from one Gram matrix per candidate."""
    values: Values = {}
    for removal in removals:
        set_active_operators(net, active.without(removal))
        values[removal] = CONDITION(net, tasks).value
    return values


def by_kernels(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return the condition numbers from the MAML kernel of the empirical NTK."""
    values: Values = {}
    for removal in removals:
        set_active_operators(net, active.without(removal))
        kernel = EmpiricalKernel(net, outputs="sum")
        matrix = meta_ntk(
            kernel, tasks.query_x, tasks.support_x, adapts="all", time=CONDITION.time, ridge=CONDITION.ridge
        )
        values[removal] = condition_number_score(matrix.double().cpu(), torch.finfo(matrix.dtype).eps).value
    return values


def by_gradients(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return the condition numbers from gradients computed one image at a time, with one network per candidate."""

    def jacobian_rows(pruned: Network, x: Tensor) -> Iterator[Tensor]:
        for image in x.split(1):
            yield _gradient(pruned, pruned(image).sum())

    return _by_jacobian_rows(jacobian_rows, net, active, tasks, removals)


def by_batches(net: Network, active: ActiveOperators, tasks: Episodes, removals: Sequence[EdgeOperator]) -> Values:
    """Return the condition numbers from gradients of images in one batch, with one network per candidate."""

    def jacobian_rows(pruned: Network, x: Tensor) -> Iterator[Tensor]:
        for output in pruned(x).sum(1):
            yield _gradient(pruned, output)

    return _by_jacobian_rows(jacobian_rows, net, active, tasks, removals)


def _gradient(net: Network, output: Tensor) -> Tensor:
    grads = torch.autograd.grad(output, list(net.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def _by_jacobian_rows(
    jacobian_rows: Callable[[Network, Tensor], Iterator[Tensor]],
    net: Network,
    active: ActiveOperators,
    tasks: Episodes,
    removals: Sequence[EdgeOperator],
) -> Values:
    values: Values = {}
    x, weights, features = all_images(tasks), net.state_dict(), cast(Any, net.features)
    cells, channels = len(features.cells), features.stem[0].out_channels // NODES
    for removal in removals:
        pruned = supernet(active.without(removal), cells=cells, channels=channels, size=x.shape[-1]).to(x.device)
        pruned.load_state_dict({name: weights[name] for name in pruned.state_dict()})
        jacobian = torch.stack(list(jacobian_rows(pruned, x)))
        grams = KernelMatrices(jacobian @ jacobian.mT, None)
        values[removal] = CONDITION.from_matrices(grams, len(tasks), tasks.query_x.shape[1]).value
    return values


WAYS: dict[str, Callable[[Network, ActiveOperators, Episodes, Sequence[EdgeOperator]], Values]] = {
    "search": by_search,
    "one Gram": by_grams,
    "kernel": by_kernels,
    "gradients": by_gradients,
    "batches": by_batches,
}
ALTERNATIVES = [way for way in WAYS if way != "search"]
DEFAULT_WAYS = {"cpu": ["one Gram", "kernel", "gradients"], "cuda": ["gradients", "batches"]}


def compare(operators: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds per candidate, their ratios, and relative differences of the condition numbers for one round.

    Ratios and differences are those of each other way to the search.

    Args:
        operators: Number of operators on an edge.
        options: Options of the command line.
    """
    ways = ("search", *options.ways)
    edges = tuple(
        frozenset(OPERATORS[(edge + k) % len(OPERATORS)] for k in range(operators)) for edge in range(len(EDGES))
    )
    active = ActiveOperators(edges, edges)
    net = supernet(active, cells=options.cells, channels=options.channels, size=options.size).to(options.device)
    generator = torch.Generator().manual_seed(0)
    support, query = torch.rand(2, options.tasks, 5, 3, options.size, options.size, generator=generator)
    labels = torch.zeros(options.tasks, 5, dtype=torch.int64)
    tasks = Episodes(support, labels, query, labels).to(options.device)
    all_removals = list(active)
    step = len(all_removals) // options.candidates  # candidates from both cells and all edges
    search_removals = all_removals[1::step][: options.candidates]
    other_removals = search_removals[:: len(search_removals) // options.plain][: options.plain]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    values: dict[str, Values] = {}
    for turn in range(options.turns + 1):
        for way in ways:
            removals = search_removals if way == "search" else other_removals
            start = time.perf_counter()
            values[way] = WAYS[way](net, active, tasks, removals)
            seconds[way].append((time.perf_counter() - start) / len(removals))
            milliseconds = f"{1e3 * seconds[way][-1]:.0f} ms per candidate ({len(removals)} candidates)"
            PROGRESS.print(f"{operators} operators on an edge, turn {turn}, {way}: {milliseconds}")
    medians = {way: statistics.median(seconds[way][1:]) for way in ways}  # the first turn is a warm-up
    differences = {way: _relative_differences(values["search"], values[way]) for way in options.ways}
    return {
        "operators": operators,
        "seconds": medians,
        "ratios": {way: medians[way] / medians["search"] for way in options.ways},
        "differences": {way: max(differences[way], default=math.nan) for way in options.ways},
    }


def _relative_differences(values: Values, reference: Values) -> list[float]:
    return [abs(values[removal] / value - 1) for removal, value in reference.items() if math.isfinite(value)]


def extrapolate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the time of all rounds of a search, from rows with decreasing numbers of operators."""
    counts = [REPEATS * (2 * len(EDGES) * operators + 1) for operators in ROUNDS]
    assert sum(counts) == count_evaluations(ActiveOperators.full(), REPEATS)
    measured = [row["operators"] for row in rows[::-1]]
    candidate_seconds = {way: [row["seconds"][way] for row in rows[::-1]] for way in rows[0]["seconds"]}
    total = {way: float(np.interp(ROUNDS, measured, times) @ counts) for way, times in candidate_seconds.items()}
    ratios = {way: total[way] / total["search"] for way in rows[0]["ratios"]}
    return {"candidates": sum(counts), "seconds": total, "ratios": ratios}


def main() -> None:
    """Compare all ways, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--size", type=int, default=32, help="width and height of the images in pixels")
    parser.add_argument("--tasks", type=int, default=3, help="number of tasks with 5 support and 5 query images")
    parser.add_argument("--candidates", type=int, default=16, help="number of candidates for the search")
    parser.add_argument("--plain", type=int, default=1, help="number of these candidates that the other ways compute")
    parser.add_argument("--ways", nargs="+", choices=ALTERNATIVES, help="ways to compare with the search")
    parser.add_argument("--threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--turns", type=int, default=2, help="number of timed turns, after a warm-up")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    options = parser.parse_args()
    options.ways = options.ways or DEFAULT_WAYS[options.device]
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = False

    rows = [compare(operators, options) for operators in MEASURED_ROUNDS]
    whole_search = extrapolate(rows)
    network = f"{options.cells} cells, {options.channels} channels, {10 * options.tasks} images, {options.device}"
    table = Table(title=f"condition numbers, {network}")
    for heading in ("operators on an edge", *(f"{way}, ms" for way in whole_search["seconds"])):
        table.add_column(heading, justify="right")
    for heading in ("ratios", "differences"):
        table.add_column(f"{heading}: {', '.join(options.ways)}", justify="right")
    for row in rows:
        times = (f"{1e3 * seconds:.0f}" for seconds in row["seconds"].values())
        ratios = ", ".join(f"{ratio:.1f}" for ratio in row["ratios"].values())
        differences = ", ".join(f"{difference:.0e}" for difference in row["differences"].values())
        table.add_row(str(row["operators"]), *times, ratios, differences)
    minutes = (f"{seconds / 60:.1f} min" for seconds in whole_search["seconds"].values())
    table.add_row("all rounds", *minutes, ", ".join(f"{ratio:.1f}" for ratio in whole_search["ratios"].values()), "")
    Console(width=140).print(table)
    if options.json:
        names = ("cells", "channels", "size", "tasks", "candidates", "plain", "turns")
        report = {
            "id": f"bench-search-{options.device}",
            "environment": {**asdict(Machine.current(options.device)), "threads": options.threads},
            "settings": {name: getattr(options, name) for name in names},
            "rows": rows,
            "search": {**whole_search, "extrapolated": True},
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
