"""Kernel predictions for 1000 test tasks from 100 training tasks: all together, and in a loop over the tasks.

    python benchmarks/kernel_predict.py --json kernel-predict.json

Both use the same fitted kernel learner. Tasks have 10 features; test tasks have 5 support and 10 query points, training
tasks 5 and 5. The two run alternately, and the seconds are medians over the turns. `mebibytes` is the growth of the
process while it predicts all tasks together; `difference` is the largest difference between the two predictions.
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
from metabridge import Episodes
from metabridge.environments import Quadratic
from metabridge.kernels import FittedKernelLearner, KernelLearner, fully_connected_kernel
from metabridge.kernels.kernel_predictors import KernelMethod
from metabridge.report.results import Machine

TRAINING_TASKS, TEST_TASKS = 100, 1000
METHODS: tuple[KernelMethod, ...] = ("mtl", "anil", "maml")
CASES = tuple((depth, method) for depth in (3, 10) for method in METHODS)


def fit_case(depth: int, method: KernelMethod) -> tuple[FittedKernelLearner, Episodes]:
    """Return a fitted kernel learner and the test tasks."""
    generator = torch.Generator().manual_seed(0)
    train = Quadratic(shots=5, queries=5).sample(TRAINING_TASKS, generator)
    test = Quadratic().sample(TEST_TASKS, generator)
    return KernelLearner(fully_connected_kernel(depth), method, inner_time=0.3).fit(train), test


def predict_in_loop(fitted: FittedKernelLearner, test: Episodes) -> Tensor:
    """Predict task by task."""
    return torch.cat([fitted.predict(test[task]) for task in range(len(test))])


def time_call(compute: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the seconds and the result."""
    started = time.perf_counter()
    result = compute()
    return time.perf_counter() - started, result


def measure(depth: int, method: KernelMethod, turns: int) -> dict[str, Any]:
    """Time both ways alternately and return a row of the table."""
    fitted, test = fit_case(depth, method)
    predict_in_loop(fitted, test[:10])  # warm-up
    batched: list[float] = []
    loop: list[float] = []
    difference = 0.0
    for _ in range(turns):
        (first, together), (second, looped) = (
            time_call(lambda: fitted.predict(test)),
            time_call(lambda: predict_in_loop(fitted, test)),
        )
        difference = float((together - looped).abs().max())
        batched.append(first)
        loop.append(second)
    return {
        "name": f"{method.upper()}, {depth} layers",
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
    parser.add_argument("--turns", type=int, default=3, help="timed runs of each way")
    parser.add_argument("--threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(depth, method, options.turns) for depth, method in CASES]
    table = Table(title=f"{TEST_TASKS} test tasks from {TRAINING_TASKS} training tasks, {options.threads} thread(s)")
    for heading in ("method", "together, s", "loop, s", "ratio", "memory, MiB", "difference"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
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
