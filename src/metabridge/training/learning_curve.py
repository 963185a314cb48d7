"""The learning curve of a run: its points, and their form on disk."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metabridge.training.evaluation import Metric, Score

METRICS: tuple[Metric, ...] = ("accuracy", "squared error")


@dataclass(frozen=True)
class Point:
    """One point of a learning curve.

    Args:
        iteration: Number of training steps done.
        seconds: Training time so far, without validation.
        loss: Mean outer loss since the previous point.
        score: Validation score, if there are validation tasks.
        best: Whether the score was the best so far.

    >>> print(Point(100, 2.5, loss=0.693, score=None))
    loss 0.693
    """

    iteration: int
    seconds: float
    loss: float
    score: Score | None
    best: bool = False

    def __str__(self) -> str:
        validation = "" if self.score is None else f", validation {self.score}"
        return f"loss {self.loss:.3g}{validation}"


def best_score(curve: Sequence[Point]) -> Score | None:
    """Return the best validation score of a learning curve, if there was a validation."""
    return next((point.score for point in reversed(curve) if point.best), None)


def point_to_json(point: Point) -> dict[str, object]:
    """Return a point as a dictionary that JSON can store."""
    score = point.score
    validation = (
        None
        if score is None
        else {"metric": score.metric, "mean": score.mean, "ci95": score.ci95, "tasks": score.tasks}
    )
    return {
        "iteration": point.iteration,
        "seconds": point.seconds,
        "loss": point.loss,
        "best": point.best,
        "validation": validation,
    }


def point_from_json(stored: dict[str, Any]) -> Point:
    """Return the point that `point_to_json` stored. Its score has no values of single tasks."""
    validation = stored["validation"]
    score = None
    if validation is not None:
        metric = METRICS[METRICS.index(validation["metric"])]  # a ValueError for any other
        mean, margin = float(validation["mean"]), float(validation["ci95"])
        score = Score(mean, margin, operator.index(validation["tasks"]), torch.empty(0), metric)
    iteration, seconds = operator.index(stored["iteration"]), float(stored["seconds"])
    return Point(iteration, seconds, float(stored["loss"]), score, bool(stored["best"]))
