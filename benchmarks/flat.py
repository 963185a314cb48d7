"""Measure the peak memory of second-order MAML for several numbers of inner steps, with and without memory-flat mode.

The network is conv4 with 32 filters. The task has five classes with one support and one query image of 84×84 pixels
each, so that most of the memory is used by the inner loop, not by the forward pass of the queries. Each peak is
measured in a separate process.

    python benchmarks/flat.py --json results/bench-flat-cpu.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import metabridge as mb
from memory import added_peak
from metabridge.report.results import Machine

STEPS = (2, 5, 10, 20)


def measure_here(steps: int, flat: bool) -> float:
    """Return by how many MiB meta-steps increase the peak memory of this process."""
    x = torch.randn(1, 5, 3, 84, 84, generator=torch.Generator().manual_seed(0))
    y = torch.arange(5)[None]
    method, net = mb.method("maml", steps=steps), mb.models.conv4(3, 84)
    params = mb.parameters(method, net)
    engine = mb.Engine(method, net, mode="loop", flat=flat)
    return added_peak(lambda: engine(params, mb.Episodes(x, y, x, y)))


def peak_memory(steps: int, mode: str) -> float:
    """Return the result of `measure_here` in a separate process."""
    command = [sys.executable, __file__, "--measure", str(steps), mode]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Measure every number of steps in both modes, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(measure_here(int(options.measure[0]), options.measure[1] == "flat"))
        return
    rows: list[dict[str, object]] = []
    for mode in ("flat", "unrolled"):
        peaks = {steps: peak_memory(steps, mode) for steps in STEPS}
        rows += [
            {"mode": mode, "steps": steps, "peak MiB": round(peak, 1), "ratio": round(peak / peaks[STEPS[0]], 2)}
            for steps, peak in peaks.items()
        ]
    table = Table(title="peak memory of a second-order meta-step, conv4-32, 84 px")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json:
        report = {"id": "bench-flat-cpu", "environment": asdict(Machine.current("cpu")), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
