"""Compare test-time heads on 2000 five-way five-shot tasks with scikit-learn's estimators in a loop over the tasks.

    python benchmarks/heads.py --device cpu --json heads.json

The features imitate those of a trained network: class means with noise, non-negative and of unit length. Both libraries
fit the support set of every task and predict the queries. scikit-learn runs on the CPU, with one thread or with as many
threads as metabridge, whichever is faster.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn
import torch
from rich.console import Console
from rich.table import Table
from sklearn import linear_model, neighbors, svm
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from metabridge.heads import SVM, Head, LogisticRegression, NearestCentroid, RidgeClassifier
from metabridge.report.results import Machine

WAYS, SHOTS, QUERIES, FEATURES = 5, 5, 15, 640
PENALTY = 0.33
REPEATS = 5


class Comparison(NamedTuple):
    """A head, and a function that returns the equivalent estimator of scikit-learn."""

    name: str
    head: Head
    make_estimator: Callable[[], Any]


COMPARISONS = (
    Comparison(
        "logistic regression",
        LogisticRegression(PENALTY, normalize=False),
        lambda: linear_model.LogisticRegression(C=1 / PENALTY, max_iter=1000),
    ),
    Comparison("SVM, squared hinge", SVM(normalize=False), svm.LinearSVC),
    Comparison("SVM, hinge", SVM(loss="hinge", normalize=False), lambda: svm.SVC(kernel="linear", break_ties=True)),
    Comparison("ridge", RidgeClassifier(), linear_model.Ridge),
    Comparison("nearest centroid", NearestCentroid(), neighbors.NearestCentroid),
)


def features(tasks: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return support features (tasks, 25, 640) and query features (tasks, 75, 640), ordered by class."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(FEATURES, generator=generator).abs()
    means = common + 0.35 * torch.randn(tasks, WAYS, 1, FEATURES, generator=generator)
    noise = 1.6 * torch.randn(tasks, WAYS, SHOTS + QUERIES, FEATURES, generator=generator)
    examples = torch.nn.functional.normalize((means + noise).relu(), dim=-1)
    return examples[:, :, :SHOTS].flatten(1, 2), examples[:, :, SHOTS:].flatten(1, 2)


def time_metabridge(head: Head, support: Tensor, labels: Tensor, query: Tensor) -> tuple[float, Tensor]:
    """Return the median time in seconds to fit and predict all tasks, after a warm-up, and the predictions."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        predictions = head.fit(support, labels, WAYS).scores(query).argmax(-1).cpu()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:])), predictions


def time_sklearn(
    make_estimator: Callable[[], Any], support: Tensor, labels: Tensor, query: Tensor, threads: int
) -> tuple[float, Tensor]:
    """Return the time of a loop over the tasks in seconds, and the predictions."""
    arrays = list(zip(support.numpy(), labels.numpy(), query.numpy()))

    def loop(tasks: int, threads: int) -> tuple[float, list[Any]]:
        predictions = []
        with threadpool_limits(threads):
            start = time.perf_counter()
            for x, y, query_x in arrays[:tasks]:
                estimator = make_estimator()
                if isinstance(estimator, linear_model.Ridge):
                    scores = estimator.fit(x, np.eye(WAYS, dtype=x.dtype)[y]).predict(query_x)
                    predictions.append(scores.argmax(-1))
                else:
                    predictions.append(estimator.fit(x, y).predict(query_x))
            return time.perf_counter() - start, predictions

    fastest_threads = min(1, threads, key=lambda count: loop(50, count)[0])
    seconds, predictions = loop(len(arrays), fastest_threads)
    return seconds, torch.from_numpy(np.stack(predictions))


def main() -> None:
    """Run the comparisons, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=2000, help="number of tasks (default: %(default)s)")
    parser.add_argument(
        "--reference-tasks", type=int, default=2000, help="number of tasks for scikit-learn; its time is extrapolated"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of metabridge")
    parser.add_argument("--threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)

    support, query = features(options.tasks, options.seed)
    labels = torch.arange(WAYS).repeat_interleave(SHOTS).expand(options.tasks, -1)
    query_labels = torch.arange(WAYS).repeat_interleave(QUERIES)
    sklearn_tasks = min(options.reference_tasks, options.tasks)
    device_tensors = [tensor.to(options.device) for tensor in (support, labels, query)]

    rows = []
    for comparison in COMPARISONS:
        seconds, predictions = time_metabridge(comparison.head, *device_tensors)
        sklearn_seconds, sklearn_predictions = time_sklearn(
            comparison.make_estimator,
            support[:sklearn_tasks],
            labels[:sklearn_tasks],
            query[:sklearn_tasks],
            options.threads,
        )
        sklearn_seconds *= options.tasks / sklearn_tasks
        rows.append(
            {
                "name": comparison.name,
                "tasks": options.tasks,
                "seconds": seconds,
                "sklearn_seconds": sklearn_seconds,
                "sklearn_tasks": sklearn_tasks,
                "ratio": sklearn_seconds / seconds,
                "accuracy": (predictions[:sklearn_tasks] == query_labels).double().mean().item(),
                "sklearn_accuracy": (sklearn_predictions == query_labels).double().mean().item(),
                "same_predictions": (predictions[:sklearn_tasks] == sklearn_predictions).double().mean().item(),
            }
        )

    table = Table(title=f"{options.tasks} tasks, {WAYS}-way {SHOTS}-shot, {FEATURES} features, {options.device}")
    for heading in ("head", "ours, s", "sklearn, s", "ratio", "accuracy", "sklearn accuracy", "equal predictions"):
        table.add_column(heading, justify="left" if heading == "head" else "right")
    for row in rows:
        table.add_row(
            str(row["name"]),
            f"{row['seconds']:.3f}",
            f"{row['sklearn_seconds']:.2f}",
            f"{row['ratio']:.0f}×",
            f"{row['accuracy']:.4f}",
            f"{row['sklearn_accuracy']:.4f}",
            f"{row['same_predictions']:.5f}",
        )
    Console().print(table)
    if sklearn_tasks < options.tasks:
        Console().print(f"The time of scikit-learn is extrapolated from {sklearn_tasks} to {options.tasks} tasks.")
    if options.json:
        environment = asdict(Machine.current(options.device)) | {
            "threads": options.threads,
            "scikit-learn": sklearn.__version__,
        }
        document = {"id": f"bench-heads-{options.device}", "environment": environment, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
