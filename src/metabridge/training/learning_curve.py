"""The learning curve of a run: its points, and how they are stored as JSON."""

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
        iteration: Number of training steps so far.
        seconds: Training time so far in seconds, without validation.
        loss: Mean outer loss since the previous point.
        score: Validation score. None without validation tasks.
        best: Whether the score is the best so far.

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
    """Return the best validation score of a learning curve, or None if there was no validation."""
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
    """Return the point that `point_to_json` stored.

    Scores of single tasks are not stored, so the `values` of the returned point's score are empty.
    """
    validation = stored["validation"]
    score = None
    if validation is not None:
        metric = METRICS[METRICS.index(validation["metric"])]  # raises a ValueError if it is unknown
        mean, ci95 = float(validation["mean"]), float(validation["ci95"])
        score = Score(mean, ci95, operator.index(validation["tasks"]), torch.empty(0), metric)
    iteration, seconds = operator.index(stored["iteration"]), float(stored["seconds"])
    return Point(iteration, seconds, float(stored["loss"]), score, bool(stored["best"]))
