"""Compare analytic kernels of a ten-layer ReLU network on 2000 × 2000 inputs with neural-tangents.

    python benchmarks/ntk_analytic.py --peer nt/bin/python --json ntk-analytic.json

Both libraries compute Θ and K in float32. neural-tangents needs a separate environment and is compiled by jax.jit;
compilation is not timed. The two run in turns in separate processes on the same cores, and `seconds` are medians.
`difference` is the largest difference between the two Θ, divided by the largest entry. With `--device cuda`, metabridge
runs on the GPU, and `mib` is the peak of the GPU memory that it allocates, including the result. Without `--peer`, the
GPU is compared with metabridge on the CPU.
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


def make_inputs(features: int) -> tuple[Any, Any]:
    """Return the inputs of the rows and of the columns of the kernels."""
    random = np.random.default_rng(0)
    x, z = random.normal(size=(2, POINTS, features)).astype(np.float32)
    return x, z


def metabridge_case(features: int, symmetric: bool, device: str) -> Callable[[], Any]:
    """Return a function that computes the kernels with metabridge and returns Θ."""
    import torch

    from metabridge.kernels import fully_connected_kernel

    x, z = (torch.from_numpy(values).to(device) for values in make_inputs(features))
    kernel = fully_connected_kernel(DEPTH)

    def compute() -> Any:
        ntk = kernel.both(x, None if symmetric else z)[0]
        if device == "cuda":
            torch.cuda.synchronize()
        return ntk

    return compute


def neural_tangents_case(features: int, symmetric: bool) -> Callable[[], Any]:
    """Return a function that computes the kernels with neural-tangents and returns Θ."""
    import jax  # type: ignore[import-not-found]
    from neural_tangents import stax  # type: ignore[import-not-found]

    dense = stax.Dense(1, W_std=2**0.5, b_std=0.0)
    kernel = jax.jit(stax.serial(dense, *(stax.Relu(), dense) * (DEPTH - 1))[2], static_argnames="get")
    x, z = (jax.numpy.asarray(values) for values in make_inputs(features))

    def compute() -> Any:
        return jax.block_until_ready(kernel(x, None if symmetric else z, get=("ntk", "nngp"))).ntk

    return compute


def gpu_peak_mib(compute: Callable[[], Any]) -> float:
    """Return the peak of the GPU memory that a computation allocates, in MiB."""
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compute()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def run_turn(results: Path, device: str) -> None:
    """Time every case `REPEATS` times, and write the durations, Θ and the GPU memory to a folder."""
    for features, symmetric in CASES:
        compute = (
            neural_tangents_case(features, symmetric)
            if find_spec("neural_tangents")
            else metabridge_case(features, symmetric, device)
        )
        kernel = compute()
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            compute()
            seconds.append(time.perf_counter() - start)
        ntk = np.asarray(kernel if device == "cpu" else kernel.cpu())
        mib = gpu_peak_mib(compute) if device == "cuda" else math.nan
        np.savez(results / f"{features}-{symmetric}.npz", seconds=seconds, ntk=ntk, mib=mib)


def run_process(
    python: str, threads: int, device: str, seconds: dict[tuple[int, bool], list[float]]
) -> dict[tuple[int, bool], dict[str, Any]]:
    """Run a turn with this Python interpreter, append its durations to `seconds`, and return its other results."""
    environment = {"OMP_NUM_THREADS": str(threads), "TF_CPP_MIN_LOG_LEVEL": "3"}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    bind = functools.partial(os.sched_setaffinity, 0, cores)  # jax starts a thread for every visible core
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, "--turn", folder, "--device", device]
        subprocess.run(command, check=True, env=os.environ | environment, preexec_fn=bind, stderr=subprocess.DEVNULL)
        for case in CASES:
            results[case] = dict(np.load(Path(folder) / f"{case[0]}-{case[1]}.npz"))
            seconds[case] += results[case].pop("seconds").tolist()
    return results


def main() -> None:
    """Run the turns, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="Python interpreter with neural-tangents")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of metabridge")
    parser.add_argument("--turns", type=int, help="number of turns per library (default: 3, or 1 on a GPU)")
    parser.add_argument("--threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)  # set for the subprocesses
    options = parser.parse_args()
    if options.turn:
        run_turn(options.turn, options.device)
        return

    turns = options.turns or (3 if options.device == "cpu" else 1)
    peer = options.peer or (sys.executable if options.device == "cuda" else None)
    seconds: dict[tuple[int, bool], list[float]] = {case: [] for case in CASES}
    peer_seconds: dict[tuple[int, bool], list[float]] = {case: [] for case in CASES}
    results: dict[tuple[int, bool], dict[str, Any]] = {}
    references: dict[tuple[int, bool], dict[str, Any]] = {}
    for _ in range(turns):
        results = run_process(sys.executable, options.threads, options.device, seconds)
        if peer:
            references = run_process(peer, options.threads, "cpu", peer_seconds)

    rows = []
    for case in CASES:
        features, symmetric = case
        row: dict[str, object] = {
            "name": f"{features} features, {'x with itself' if symmetric else 'x with z'}",
            "points": POINTS,
            "depth": DEPTH,
            "seconds": statistics.median(seconds[case]),
        }
        if options.device == "cuda":
            row["mib"] = float(results[case]["mib"])
        if peer:
            ntk, reference_ntk = results[case]["ntk"], references[case]["ntk"]
            row["neural_tangents_seconds" if options.peer else "cpu_seconds"] = statistics.median(peer_seconds[case])
            row["ratio"] = statistics.median(peer_seconds[case]) / statistics.median(seconds[case])
            row["difference"] = float(abs(ntk - reference_ntk).max() / abs(reference_ntk).max())
        rows.append(row)
    settings = {"threads": options.threads} | (versions(options.peer) if options.peer else {})
    report(rows, settings, options.device, options.json)


def versions(python: str) -> dict[str, str]:
    """Return the versions of neural-tangents and jax that are installed for this Python interpreter."""
    names = ("neural-tangents", "jax")
    code = f"from importlib.metadata import version; print(*map(version, {names}))"
    output = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(names, output))


def report(rows: list[dict[str, Any]], settings: dict[str, Any], device: str, path: Path | None) -> None:
    """Print the rows, and write them and the environment to a file."""
    from rich.console import Console
    from rich.table import Table

    from metabridge.report.results import Machine

    table = Table(
        title=f"Θ and K of {DEPTH} layers, {POINTS} × {POINTS} inputs, float32, {device}, {settings['threads']} threads"
    )
    reference = "metabridge on the CPU, s" if "cpu_seconds" in rows[0] else "neural-tangents, s"
    for heading in ("inputs", "metabridge, s", "metabridge, MiB", reference, "ratio", "difference"):
        table.add_column(heading, justify="left" if heading == "inputs" else "right")
    for row in rows:
        seconds = row.get("neural_tangents_seconds", row.get("cpu_seconds"))
        peer = (f"{seconds:.3f}", f"{row['ratio']:.1f}×", f"{row['difference']:.0e}") if "ratio" in row else ()
        mib = f"{row['mib']:.0f}" if "mib" in row else ""
        table.add_row(row["name"], f"{row['seconds']:.4f}", mib, *peer)
    Console().print(table)
    if path:
        environment = asdict(Machine.current(device)) | settings
        document = {"id": f"bench-ntk-analytic-{device}", "environment": environment, "rows": rows}
        path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
