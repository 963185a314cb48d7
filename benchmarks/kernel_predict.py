"""Kernel predictions for 1 000 test tasks against 100 training tasks: all at once, and in a loop over the tasks.

    python benchmarks/kernel_predict.py --json kernel-predict.json

Both give the same fitted twin the same tasks, 5 supports and 10 queries of 10 features each, training tasks of 5 and 5.
They take turns, and the seconds are medians over the turns. `mebibytes` is by how much the process grows
while it predicts all tasks at once; `difference` is the largest one between the two predictions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from memory import added_peak
from metabridge import Episodes, Quadratic
from metabridge.kernels import FittedKernelLearner, KernelLearner, fully_connected_kernel
from metabridge.kernels.kernel_predictors import KernelMethod
from metabridge.report.results import Machine

TRAINING_TASKS, TEST_TASKS = 100, 1000
TWINS: tuple[KernelMethod, ...] = ("mtl", "anil", "maml")
CASES = tuple((depth, twin) for depth in (3, 10) for twin in TWINS)


def case(depth: int, twin: KernelMethod) -> tuple[FittedKernelLearner, Episodes]:
    """Return a fitted twin and the test tasks."""
    generator = torch.Generator().manual_seed(0)
    train = Quadratic(shots=5, queries=5).sample(TRAINING_TASKS, generator)
    test = Quadratic().sample(TEST_TASKS, generator)
    return KernelLearner(fully_connected_kernel(depth), twin, inner_time=0.3).fit(train), test


def looped(fitted: FittedKernelLearner, test: Episodes) -> Tensor:
    """Predict task by task."""
    return torch.cat([fitted.predict(test[task]) for task in range(len(test))])


def timed(compute: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the seconds and the result."""
    started = time.perf_counter()
    result = compute()
    return time.perf_counter() - started, result


def measure(depth: int, twin: KernelMethod, turns: int) -> dict[str, Any]:
    """Let both have their turns."""
    fitted, test = case(depth, twin)
    looped(fitted, test[:10])  # a rehearsal
    batched: list[float] = []
    loop: list[float] = []
    difference = 0.0
    for _ in range(turns):
        (first, together), (second, apart) = timed(lambda: fitted.predict(test)), timed(lambda: looped(fitted, test))
        difference = float((together - apart).abs().max())
        batched.append(first)
        loop.append(second)
    return {
        "name": f"{twin.upper()}, {depth} layers",
        "training_tasks": TRAINING_TASKS,
        "test_tasks": TEST_TASKS,
        "seconds": statistics.median(batched),
        "loop_seconds": statistics.median(loop),
        "ratio": statistics.median(loop) / statistics.median(batched),
        "mebibytes": added_peak(lambda: fitted.predict(test), times=1),
        "difference": difference,
    }


def main() -> None:
    """Run every case, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(depth, twin, options.turns) for depth, twin in CASES]
    table = Table(title=f"{TEST_TASKS} test tasks against {TRAINING_TASKS} training tasks, {options.threads} thread(s)")
    for heading in ("twin", "at once, s", "loop, s", "ratio", "memory, MiB", "difference"):
        table.add_column(heading, justify="left" if heading == "twin" else "right")
    for row in rows:
        numbers = (f"{row['seconds']:.2f}", f"{row['loop_seconds']:.2f}", f"{row['ratio']:.1f}×")
        table.add_row(row["name"], *numbers, f"{row['mebibytes']:.0f}", f"{row['difference']:.0e}")
    Console().print(table)
    if options.json:
        here = asdict(Machine.current("cpu")) | {"threads": options.threads}
        document = {"id": "bench-kernel-predict-cpu", "environment": here, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
