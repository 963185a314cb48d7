"""Analytic kernels of a ten-layer ReLU net on 2000 × 2000 points, ours against neural-tangents', in one run.

    python benchmarks/ntk_analytic.py --peer nt/bin/python --json ntk-analytic.json

Both return Θ and K in float32. neural-tangents, which needs an environment of its own, is compiled by jax.jit, and what
that takes is not counted. The two run in turns, each in a process of its own, on the same cores; the seconds are
medians over all turns. `difference` is the largest one between the two Θ, relative to the largest entry. With
`--device cuda` only ours goes to the GPU, and `mib` is the most memory that PyTorch gives out there, result included;
without a peer ours there is compared with ours on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

POINTS, DEPTH, REPEATS = 2000, 10, 3
FEATURES = (10, 784)
CASES = tuple((features, symmetric) for features in FEATURES for symmetric in (True, False))


def inputs(features: int) -> tuple[Any, Any]:
    """Return the points of rows and columns."""
    random = np.random.default_rng(0)
    x, z = random.normal(size=(2, POINTS, features)).astype(np.float32)
    return x, z


def ours(features: int, symmetric: bool, device: str) -> Callable[[], Any]:
    """Return the computation with metabridge."""
    import torch

    from metabridge.kernels import fully_connected_kernel

    x, z = (torch.from_numpy(values).to(device) for values in inputs(features))
    kernel = fully_connected_kernel(DEPTH)

    def compute() -> Any:
        ntk = kernel.both(x, None if symmetric else z)[0]
        if device == "cuda":
            torch.cuda.synchronize()
        return ntk

    return compute


def theirs(features: int, symmetric: bool) -> Callable[[], Any]:
    """Return the computation with neural-tangents."""
    import jax  # type: ignore[import-not-found]
    from neural_tangents import stax  # type: ignore[import-not-found]

    dense = stax.Dense(1, W_std=2**0.5, b_std=0.0)
    kernel = jax.jit(stax.serial(dense, *(stax.Relu(), dense) * (DEPTH - 1))[2], static_argnames="get")
    x, z = (jax.numpy.asarray(values) for values in inputs(features))

    def compute() -> Any:
        return jax.block_until_ready(kernel(x, None if symmetric else z, get=("ntk", "nngp"))).ntk

    return compute


def peak(compute: Callable[[], Any]) -> float:
    """Return the MiB that the GPU gives out at most during a computation, beside what it had given out."""
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compute()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def turn(results: Path, device: str) -> None:
    """Time every case a few times, and leave seconds, kernels and a GPU's memory in the folder."""
    for features, symmetric in CASES:
        compute = theirs(features, symmetric) if find_spec("neural_tangents") else ours(features, symmetric, device)
        kernel = compute()
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            compute()
            seconds.append(time.perf_counter() - start)
        ntk = np.asarray(kernel if device == "cpu" else kernel.cpu())
        mib = peak(compute) if device == "cuda" else math.nan
        np.savez(results / f"{features}-{symmetric}.npz", seconds=seconds, ntk=ntk, mib=mib)


def run(
    python: str, threads: int, device: str, cases: dict[tuple[int, bool], list[float]]
) -> dict[tuple[int, bool], dict[str, Any]]:
    """Let one python have its turn, add its seconds to `cases`, and return what else it found."""
    settings = {"OMP_NUM_THREADS": str(threads), "TF_CPP_MIN_LOG_LEVEL": "3"}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    bind = functools.partial(os.sched_setaffinity, 0, cores)  # jax takes a thread for each core it sees
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, "--turn", folder, "--device", device]
        subprocess.run(command, check=True, env=os.environ | settings, preexec_fn=bind, stderr=subprocess.DEVNULL)
        for case in CASES:
            found[case] = dict(np.load(Path(folder) / f"{case[0]}-{case[1]}.npz"))
            cases[case] += found[case].pop("seconds").tolist()
    return found


def main() -> None:
    """Run the turns, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a python that has neural-tangents")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ours is computed")
    parser.add_argument("--turns", type=int, help="of each side: 3 unless given, and 1 on a GPU")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)  # what each of the processes is told
    options = parser.parse_args()
    if options.turn:
        turn(options.turn, options.device)
        return

    turns = options.turns or (3 if options.device == "cpu" else 1)
    peer = options.peer or (sys.executable if options.device == "cuda" else None)
    mine: dict[tuple[int, bool], list[float]] = {case: [] for case in CASES}
    peers: dict[tuple[int, bool], list[float]] = {case: [] for case in CASES}
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    references: dict[tuple[int, bool], dict[str, Any]] = {}
    for _ in range(turns):
        found = run(sys.executable, options.threads, options.device, mine)
        if peer:
            references = run(peer, options.threads, "cpu", peers)

    rows = []
    for case in CASES:
        features, symmetric = case
        row: dict[str, object] = {
            "name": f"{features} features, {'x with itself' if symmetric else 'x with z'}",
            "points": POINTS,
            "depth": DEPTH,
            "seconds": statistics.median(mine[case]),
        }
        if options.device == "cuda":
            row["mib"] = float(found[case]["mib"])
        if peer:
            ntk, exact = found[case]["ntk"], references[case]["ntk"]
            row["neural_tangents_seconds" if options.peer else "cpu_seconds"] = statistics.median(peers[case])
            row["ratio"] = statistics.median(peers[case]) / statistics.median(mine[case])
            row["difference"] = float(abs(ntk - exact).max() / abs(exact).max())
        rows.append(row)
    settings = {"threads": options.threads} | (versions(options.peer) if options.peer else {})
    report(rows, settings, options.device, options.json)


def versions(python: str) -> dict[str, str]:
    """Return the versions of what the peer runs."""
    names = ("neural-tangents", "jax")
    code = f"from importlib.metadata import version; print(*map(version, {names}))"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(names, found))


def report(rows: list[dict[str, Any]], settings: dict[str, Any], device: str, path: Path | None) -> None:
    """Print the rows, and write them with what computed them."""
    from rich.console import Console
    from rich.table import Table

    from metabridge.report.results import Machine

    table = Table(
        title=f"Θ and K of {DEPTH} layers, {POINTS} × {POINTS} points, float32, {device}, {settings['threads']} threads"
    )
    other = "ours on the CPU, s" if "cpu_seconds" in rows[0] else "neural-tangents, s"
    for heading in ("points", "ours, s", "ours, MiB", other, "ratio", "difference"):
        table.add_column(heading, justify="left" if heading == "points" else "right")
    for row in rows:
        seconds = row.get("neural_tangents_seconds", row.get("cpu_seconds"))
        peer = (f"{seconds:.3f}", f"{row['ratio']:.1f}×", f"{row['difference']:.0e}") if "ratio" in row else ()
        mib = f"{row['mib']:.0f}" if "mib" in row else ""
        table.add_row(row["name"], f"{row['seconds']:.4f}", mib, *peer)
    Console().print(table)
    if path:
        here = asdict(Machine.current(device)) | settings
        document = {"id": f"bench-ntk-analytic-{device}", "environment": here, "rows": rows}
        path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
