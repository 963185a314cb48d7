"""A closer look at a trained classifier: which classes it fails, and how far its probabilities can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.environments.image_tasks import ImageTasks
from metabridge.errors import InputError
from metabridge.training.evaluate import PLAIN, Predictor, Score, Views, answered_right, diverged, outcomes, score_tasks

BINS = 10


@dataclass(frozen=True, eq=False)
class Assessment:
    """The accuracy over tasks, and what lies behind it."""

    score: Score
    classes: dict[str, float]  # accuracy on the queries of each class, over all tasks that it was in
    calibration: tuple[tuple[float, float, float], ...]  # of each bin: confidence, accuracy, share of the queries

    @property
    def worst(self) -> tuple[str, float]:
        """The class with the lowest accuracy."""
        return min(self.classes.items(), key=lambda item: item[1])

    @property
    def calibration_error(self) -> float:
        """Σ_bins share · |confidence − accuracy|, the expected calibration error."""
        return sum(share * abs(confidence - accuracy) for confidence, accuracy, share in self.calibration)


def assess(
    model: Predictor,
    environment: ImageTasks,
    *,
    tasks: int = 600,
    seed: int = 0,
    views: Views = PLAIN,
    progress: bool = False,
) -> Assessment:
    """Evaluate as `evaluate` does, on the same tasks, and keep count of classes and confidences.

    A query whose outputs are not finite is wrong and has no confidence, so calibration leaves it out.

    >>> from metabridge.datasets import load
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import conv4
    >>> from metabridge.training import Model
    >>> test, anil, net = load("glyphs").tasks("test"), method("anil"), conv4(1, 28)
    >>> found = assess(Model(anil, net, parameters(anil, net)), test, tasks=4)
    >>> len(found.classes) == test.classes, 0 <= found.calibration_error <= 1
    (False, True)
    """
    if not isinstance(environment, ImageTasks):
        raise InputError(f"environment is {type(environment).__name__}, but assess needs tasks over labelled images.")
    values, lost, right = [], [], torch.zeros(environment.classes, dtype=torch.float64)
    seen, bins = right.clone(), torch.zeros(BINS, 3, dtype=torch.float64)
    given = outcomes(model, environment, tasks=tasks, seed=seed, views=views, progress=progress)
    for outputs, episodes in given:
        values.append(score_tasks(outputs, episodes))
        lost.append(diverged(outputs))
        assert episodes.classes is not None
        hit = answered_right(outputs, episodes).double()
        _count(right, episodes.classes.gather(1, episodes.query_y), hit)
        _count(seen, episodes.classes.gather(1, episodes.query_y), torch.ones_like(hit))
        finite = outputs.isfinite().all(-1)
        probability = outputs[finite].softmax(-1).amax(-1).double()
        place = (probability * BINS).long().clamp_max(BINS - 1)
        for column, weight in enumerate((probability, hit[finite], torch.ones_like(probability))):
            _count(bins[:, column], place, weight)
    score = Score.of(torch.cat(values), diverged=int(torch.cat(lost).sum()))
    if score.diverged == tasks:
        raise InputError(
            f"adaptation diverged on all {tasks} tasks: outputs are NaN or infinite. Adapt with a lower rate or fewer "
            "steps, or train again with a lower learning rate."
        )
    names = environment.class_names
    present = seen.nonzero().squeeze(1).tolist()
    return Assessment(
        score,
        {names[index]: float(right[index] / seen[index]) for index in present},
        tuple((float(c / n), float(a / n), float(n / bins[:, 2].sum())) for c, a, n in bins if n > 0),
    )


def _count(total: Tensor, places: Tensor, weights: Tensor) -> None:
    total.index_add_(0, places.flatten().cpu(), weights.flatten().cpu())
