"""Trainings of the networks that architecture searches find (Wang et al. 2022, tables 1 and 2).

Every training leaves a record. Its name for `--only` is "train-LABEL", with the label of the search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.mini_imagenet_trainings import SHOTS
from metabridge.experiments.nas_searches import SETTINGS, SearchRecord, SearchVariant, load_images, search_all
from metabridge.experiments.records import Record
from metabridge.experiments.training_records import Evaluation, TrainingRecord, train_or_load
from metabridge.training.config import ImageTrainingConfig

IMAGE_SIZE = 84  # pixels of mini-ImageNet, for training


def search_and_train(
    options: ExperimentOptions, variants: Iterable[SearchVariant], *, additional: Iterable[str] = ()
) -> dict[str, Record]:
    """Return the records of all finished searches and trainings, after running those that `only` selects.

    Args:
        options: Options of the experiment.
        variants: What to search by. All networks found are trained with one schedule.
        additional: Labels of further trainings: `resnet12_label`, or a `longer_label`.

    Returns:
        The records by name for `--only`.

    Raises:
        InputError: If `only` selects a training whose search is not finished.
    """
    variants = tuple(variants)
    labels = [label for variant in variants for label in variant.seeds(options)]
    trained = [*labels, *additional]
    options.check_only([f"search-{label}" for label in labels] + [f"train-{label}" for label in trained])
    searches = search_all(options, variants)
    for label in labels:
        selected = {f"train-{label}", f"train-{longer_label(label)}"} & set(options.only)
        if f"search-{label}" not in searches and selected:
            raise InputError(f"{min(selected)} needs a search that is finished. Add search-{label} to --only.")
    plans = {label: plan for label, plan in training_plans(options, searches).items() if label in trained}
    return {**searches, **train_all(options, plans)}


def resnet12_label(options: ExperimentOptions) -> str:
    """Return the label of the training of ResNet-12."""
    return f"resnet12-{options.seed}"


def longer_label(label: str) -> str:
    """Return the label of a longer training of the same network."""
    return f"{label}-longer"


def training_plans(options: ExperimentOptions, searches: Mapping[str, SearchRecord]) -> dict[str, ImageTrainingConfig]:
    """Return by label how each network found and ResNet-12 are trained, and how the former are trained longer."""
    settings = SETTINGS[options.scale]
    cell_plans = {name.removeprefix("search-"): cell_plan(options, record) for name, record in searches.items()}
    longer = {
        longer_label(label): replace(plan, iterations=settings.longer, validate_every=settings.longer // 10)
        for label, plan in cell_plans.items()
    }
    return {**cell_plans, resnet12_label(options): replace(settings.plan, seed=options.seed), **longer}


def cell_plan(options: ExperimentOptions, search: SearchRecord) -> ImageTrainingConfig:
    """Return how the network that a search found is trained. The seed is that of the search."""
    settings = SETTINGS[options.scale]
    model_options = {
        "architecture": asdict(search.architecture),
        "cells": search.plan["cells"],
        "channels": search.plan["channels"],
        "image_channels": settings.image_channels,
        "drop_rate": settings.drop_rate,
    }
    return replace(
        settings.plan, model="network", model_options=model_options, lr=settings.lr, seed=search.plan["seed"]
    )


def train_all(options: ExperimentOptions, plans: Mapping[str, ImageTrainingConfig]) -> dict[str, TrainingRecord]:
    """Return the records of all finished trainings, after running those that `only` selects, as far as time allows."""
    settings = SETTINGS[options.scale]
    evaluation = Evaluation(SHOTS, settings.tasks, settings.views)
    records = {}
    for label, plan in plans.items():
        part = f"train-{label}"
        name = f"nas-{part}-{options.scale}"
        record = train_or_load(options, part, name, plan, lambda: load_images(options, IMAGE_SIZE), evaluation)
        if record is not None:
            records[part] = record
    return records


def finished_trainings(records: Mapping[str, Record], labels: Iterable[str]) -> list[TrainingRecord]:
    """Return the records of the trainings with these labels, as far as they are finished."""
    finished = (records.get(f"train-{label}") for label in labels)
    return [record for record in finished if isinstance(record, TrainingRecord)]
