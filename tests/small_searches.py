"""Small architecture searches, and small settings for the experiments of architecture search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metabridge.environments import LabeledImages
from metabridge.experiments import ExperimentOptions, nas_searches, nas_training_runs, training_records
from metabridge.experiments.nas_searches import Settings
from metabridge.experiments.training_records import TrainingRecord
from metabridge.nas import EDGES, OPERATORS, ActiveOperators, SearchConfig
from metabridge.report.results import Machine
from metabridge.training.head_selection import SplitAccuracy

MACHINE = Machine("abacus", torch="0", python="0", commit=None)  # of made-up results
SEARCH = SearchConfig(channels=2, tasks=1, ways=2, repeats=1, region_inputs=20, operators=("skip",))


def small_search(kernel: str = "maml", **options: object) -> SearchConfig:
    small = {"cells": 3, "channels": 2, "tasks": 2, "ways": 2, "repeats": 1, "region_inputs": 20}
    return SearchConfig(kernel, **{**small, **options})  # type: ignore[arg-type]


def two_operators_per_edge() -> ActiveOperators:
    edges = tuple(frozenset(OPERATORS[index % 7] for index in (edge, edge + 1)) for edge in range(len(EDGES)))
    return ActiveOperators(edges, edges)


def on_first_edge(operator: str) -> tuple[str, int, str]:
    """Return the operator with its place, the first edge of the normal cell, as searches record it."""
    return ("normal", 0, operator)


def small_images(images: LabeledImages) -> LabeledImages:
    """Return the centers of the images of a few classes."""
    splits = {split: members[:6] for split, members in images.splits.items()}
    return replace(images, images=images.images[..., 6:22, 6:22], splits=splits)


def small_settings() -> Settings:
    """Return settings with training runs of one step (recipe "longer": ten steps) and with small searches.

    A search evaluates 19 networks: the whole network, and one without each of its 18 edges.
    """
    quick = nas_searches.SETTINGS["quick"]
    config = replace(quick.config, iterations=1, validate_every=1, validate_tasks=2, batch_size=8)
    config = replace(config, model_options={**config.model_options, "widths": [4, 4, 8, 8]})
    return replace(
        quick, search=SEARCH, config=config, recipes={**quick.recipes, "longer": {"iterations": 10}}, tasks=2, views=()
    )


def shrink_experiments(patch: pytest.MonkeyPatch, glyphs: LabeledImages) -> list[int]:
    """Make the experiments small, and return the list of the image sizes that they will load."""
    sizes = []

    def load_images(options: ExperimentOptions, size: int) -> LabeledImages:
        sizes.append(size)
        return small_images(glyphs)

    patch.setitem(nas_searches.SETTINGS, "quick", small_settings())
    for module in (nas_searches, nas_training_runs):
        patch.setattr(module, "load_images", load_images)
    patch.setattr(training_records, "PENALTIES", (1.0,))
    return sizes


def make_record(accuracy: float) -> TrainingRecord:
    """Return the record of a training run with this accuracy ± 1 %."""
    scores = tuple(
        SplitAccuracy(split, shots, accuracy, ci95=0.01, tasks=10, penalty=0.1)
        for split in ("validation", "test")
        for shots in (1, 5)
    )
    return TrainingRecord(
        name="",
        plan={},
        environment=MACHINE,
        minutes=1.0,
        images="none",
        iterations=2,
        parameters=3,
        curve=(),
        scores=scores,
        evaluation_seconds=None,
    )
