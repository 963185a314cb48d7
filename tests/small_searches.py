"""Searches of a few small networks, and what experiments make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metabridge.environments import LabelledImages
from metabridge.experiments import nas_trainings, training_records
from metabridge.experiments.nas_trainings import Scale
from metabridge.experiments.result import Environment
from metabridge.experiments.training_records import SplitAccuracy, TrainingRecord
from metabridge.nas import EDGES, OPERATORS, ActiveOperators
from metabridge.nas.architecture_search import Search

MACHINE = Environment("abacus", "0", "0", None)
SEARCH = Search(channels=2, tasks=1, ways=2, repeats=1, inputs=20, operators=("skip",))


def small_search(kernel: str = "maml", **options: object) -> Search:
    small = {"cells": 3, "channels": 2, "tasks": 2, "ways": 2, "repeats": 1, "inputs": 20}
    return Search(kernel, **{**small, **options})  # type: ignore[arg-type]


def thinned() -> ActiveOperators:
    """Two operators on every edge."""
    edges = tuple(frozenset(OPERATORS[place % 7] for place in (edge, edge + 1)) for edge in range(len(EDGES)))
    return ActiveOperators(edges, edges)


def on_first_edge(operator: str) -> tuple[str, int, str]:
    return ("normal", 0, operator)


def few(images: LabelledImages) -> LabelledImages:
    """Few classes, and the middle of the pictures."""
    splits = {split: members[:6] for split, members in images.splits.items()}
    return replace(images, images=images.images[..., 6:22, 6:22], splits=splits)


def tiny() -> Scale:
    """One search is of 19 networks, and a training of a single step, or of ten where it is longer."""
    quick = nas_trainings.SCALES["quick"]
    plan = replace(quick.plan, iterations=1, validate_every=1, validate_tasks=2, batch=8)
    plan = replace(plan, model_options={**plan.model_options, "widths": [4, 4, 8, 8]})
    return replace(quick, search=SEARCH, plan=plan, longer=10, tasks=2, looks=())


def shrink(patch: pytest.MonkeyPatch, glyphs: LabelledImages) -> None:
    """Let the experiments of searches be tiny."""
    patch.setitem(nas_trainings.SCALES, "quick", tiny())
    patch.setattr(nas_trainings, "images", lambda work, size: few(glyphs))
    patch.setattr(training_records, "PENALTIES", (1.0,))


def record(accuracy: float) -> TrainingRecord:
    """What a training of this accuracy measured."""
    scores = tuple(
        SplitAccuracy(split, shots, accuracy, 0.01, 10, 0.1) for split in ("validation", "test") for shots in (1, 5)
    )
    return TrainingRecord("", {}, MACHINE, 1.0, "none", 2, 3, (), scores, None)
