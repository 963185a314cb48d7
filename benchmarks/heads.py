"""Test-time heads on 2000 five-way five-shot tasks, against a loop over scikit-learn's estimators, in one run.

    python benchmarks/heads.py --device cpu --json heads.json

Features are those of a trained network in kind: non-negative, of unit length, class means and noise. Both sides fit
every task's support set and predict its queries; scikit-learn runs on the CPU with its own defaults, and with one
thread or with as many as ours, whichever is faster.
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


class Contest(NamedTuple):
    """One of our heads and the estimator it equals."""

    name: str
    head: Head
    reference: Callable[[], Any]


CONTESTS = (
    Contest(
        "logistic regression",
        LogisticRegression(PENALTY, normalize=False),
        lambda: linear_model.LogisticRegression(C=1 / PENALTY, max_iter=1000),
    ),
    Contest("SVM, squared hinge", SVM(normalize=False), svm.LinearSVC),
    Contest("SVM, hinge", SVM(loss="hinge", normalize=False), lambda: svm.SVC(kernel="linear", break_ties=True)),
    Contest("ridge", RidgeClassifier(), linear_model.Ridge),
    Contest("nearest centroid", NearestCentroid(), neighbors.NearestCentroid),
)


def features(tasks: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return support (tasks, 25, 640) and query (tasks, 75, 640) features, classes in order."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(FEATURES, generator=generator).abs()
    means = common + 0.35 * torch.randn(tasks, WAYS, 1, FEATURES, generator=generator)
    noise = 1.6 * torch.randn(tasks, WAYS, SHOTS + QUERIES, FEATURES, generator=generator)
    points = torch.nn.functional.normalize((means + noise).relu(), dim=-1)
    return points[:, :, :SHOTS].flatten(1, 2), points[:, :, SHOTS:].flatten(1, 2)


def ours(head: Head, support: Tensor, labels: Tensor, query: Tensor) -> tuple[float, Tensor]:
    """Return the median seconds to fit all tasks and predict, after a warm-up, and the predictions."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        predictions = head.fit(support, labels, WAYS).scores(query).argmax(-1).cpu()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:])), predictions


def theirs(
    make: Callable[[], Any], support: Tensor, labels: Tensor, query: Tensor, threads: int
) -> tuple[float, Tensor]:
    """Return the seconds a loop over the tasks takes, and the predictions."""
    arrays = list(zip(support.numpy(), labels.numpy(), query.numpy()))

    def loop(tasks: int, threads: int) -> tuple[float, list[Any]]:
        predictions = []
        with threadpool_limits(threads):
            start = time.perf_counter()
            for x, y, points in arrays[:tasks]:
                estimator = make()
                if isinstance(estimator, linear_model.Ridge):
                    scores = estimator.fit(x, np.eye(WAYS, dtype=x.dtype)[y]).predict(points)
                    predictions.append(scores.argmax(-1))
                else:
                    predictions.append(estimator.fit(x, y).predict(points))
            return time.perf_counter() - start, predictions

    faster = min(1, threads, key=lambda count: loop(50, count)[0])
    seconds, predictions = loop(len(arrays), faster)
    return seconds, torch.from_numpy(np.stack(predictions))


def main() -> None:
    """Run the contests, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=2000, help="tasks that our heads solve")
    parser.add_argument("--reference-tasks", type=int, default=2000, help="tasks that scikit-learn's loop runs over")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where our heads run")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)

    support, query = features(options.tasks, options.seed)
    labels = torch.arange(WAYS).repeat_interleave(SHOTS).expand(options.tasks, -1)
    truth = torch.arange(WAYS).repeat_interleave(QUERIES)
    looped = min(options.reference_tasks, options.tasks)
    there = [tensor.to(options.device) for tensor in (support, labels, query)]

    rows = []
    for contest in CONTESTS:
        seconds, mine = ours(contest.head, *there)
        loop, reference = theirs(contest.reference, support[:looped], labels[:looped], query[:looped], options.threads)
        loop *= options.tasks / looped
        rows.append(
            {
                "name": contest.name,
                "tasks": options.tasks,
                "seconds": seconds,
                "sklearn_seconds": loop,
                "sklearn_tasks": looped,
                "ratio": loop / seconds,
                "accuracy": (mine[:looped] == truth).double().mean().item(),
                "sklearn_accuracy": (reference == truth).double().mean().item(),
                "same_predictions": (mine[:looped] == reference).double().mean().item(),
            }
        )

    table = Table(title=f"{options.tasks} tasks, {WAYS}-way {SHOTS}-shot, {FEATURES} features, {options.device}")
    for heading in ("head", "ours, s", "sklearn, s", "ratio", "accuracy", "sklearn's", "same"):
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
    if looped < options.tasks:
        Console().print(f"scikit-learn ran over {looped} tasks; its seconds are scaled up to {options.tasks}.")
    if options.json:
        here = asdict(Machine.current(options.device)) | {
            "threads": options.threads,
            "scikit-learn": sklearn.__version__,
        }
        document = {"id": f"bench-heads-{options.device}", "environment": here, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
