"""Time kernel predictions for 1000 test tasks from 100 training tasks: all together, and in a loop over the tasks.

    python benchmarks/kernel_predict.py --json kernel-predict.json

Both ways use the same fitted kernel learner. Inputs have 10 features. Training tasks have 5 support and 5 query
examples, test tasks 5 and 10. The two ways are timed alternately, and `seconds` are medians. `mebibytes` is the growth
of the process memory while all tasks are predicted together; `difference` is the largest absolute difference between
the two predictions.
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
    """Return the predictions, computed one task at a time."""
    return torch.cat([fitted.predict(test[task]) for task in range(len(test))])


def time_call(compute: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the duration of a call in seconds, and its result."""
    start = time.perf_counter()
    result = compute()
    return time.perf_counter() - start, result


def measure(depth: int, method: KernelMethod, turns: int) -> dict[str, Any]:
    """Time both ways alternately and return a row of the table."""
    fitted, test = fit_case(depth, method)
    predict_in_loop(fitted, test[:10])  # warm-up
    batch_seconds: list[float] = []
    loop_seconds: list[float] = []
    difference = 0.0
    for _ in range(turns):
        seconds, predictions = time_call(lambda: fitted.predict(test))
        batch_seconds.append(seconds)
        seconds, loop_predictions = time_call(lambda: predict_in_loop(fitted, test))
        loop_seconds.append(seconds)
        difference = float((predictions - loop_predictions).abs().max())
    return {
        "name": f"{method.upper()}, {depth} layers",
        "training_tasks": TRAINING_TASKS,
        "test_tasks": TEST_TASKS,
        "seconds": statistics.median(batch_seconds),
        "loop_seconds": statistics.median(loop_seconds),
        "ratio": statistics.median(loop_seconds) / statistics.median(batch_seconds),
        "mebibytes": added_peak(lambda: fitted.predict(test), times=1),
        "difference": difference,
    }


def main() -> None:
    """Run every case, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="how often each way is timed (default: %(default)s)")
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
        environment = asdict(Machine.current("cpu")) | {"threads": options.threads}
        document = {"id": "bench-kernel-predict-cpu", "environment": environment, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
