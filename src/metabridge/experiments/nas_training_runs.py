"""Training runs of the architectures that searches select (Wang et al. 2022, tables 1 and 2).

Every run writes a record. `--only train-LABEL` selects a run by its label, which starts with the label of the search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from metabridge.errors import InputError
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.mini_imagenet_training_runs import SHOTS
from metabridge.experiments.nas_searches import SETTINGS, SearchRecord, SearchVariant, load_images, search_all
from metabridge.experiments.records import Record
from metabridge.experiments.training_records import Evaluation, TrainingRecord, train_or_load
from metabridge.training.config import ImageTrainingConfig

IMAGE_SIZE = 84  # width and height of the images of mini-ImageNet in training


def search_and_train(
    options: ExperimentOptions, variants: Iterable[SearchVariant], *, additional_labels: Iterable[str] = ()
) -> dict[str, Record]:
    """Return the records of all finished searches and training runs, after running those that `options.only` selects.

    Args:
        options: Options of the experiment.
        variants: The variants of the search. All architectures that they select are trained in the same way.
        additional_labels: Labels of additional training runs, from `resnet12_label` or `recipe_label`.

    Returns:
        The records by the names that `--only` accepts.

    Raises:
        InputError: If `options.only` selects a training run whose search is not finished.
    """
    variants = tuple(variants)
    labels = [label for variant in variants for label in variant.seeds(options)]
    training_labels = [*labels, *additional_labels]
    options.check_selected_names(
        [f"search-{label}" for label in labels] + [f"train-{label}" for label in training_labels]
    )
    searches = search_all(options, variants)
    for label in labels:
        recipe_labels = (recipe_label(label, recipe) for recipe in SETTINGS[options.scale].recipes)
        selected_names = {f"train-{name}" for name in (label, *recipe_labels)} & set(options.only)
        if f"search-{label}" not in searches and selected_names:
            raise InputError(
                f"{min(selected_names)} needs search-{label}, which is not finished. Add search-{label} to --only."
            )
    configs = training_configs(options, searches)
    selected_configs = {label: config for label, config in configs.items() if label in training_labels}
    return {**searches, **train_all(options, selected_configs)}


def resnet12_label(options: ExperimentOptions) -> str:
    """Return the label of the training run of ResNet-12."""
    return f"resnet12-{options.seed}"


def recipe_label(label: str, recipe: str) -> str:
    """Return the label of the training run of the same architecture with another recipe."""
    return f"{label}-{recipe}"


def training_configs(
    options: ExperimentOptions, searches: Mapping[str, SearchRecord]
) -> dict[str, ImageTrainingConfig]:
    """Return the training configurations by label.

    There is one for each selected architecture with the default recipe, one with each other recipe, and one for
    ResNet-12.
    """
    settings = SETTINGS[options.scale]
    cell_configs = {name.removeprefix("search-"): cell_config(options, record) for name, record in searches.items()}
    recipe_configs = {
        recipe_label(label, recipe): replace(config, **changes)
        for label, config in cell_configs.items()
        for recipe, changes in settings.recipes.items()
    }
    return {**cell_configs, resnet12_label(options): replace(settings.config, seed=options.seed), **recipe_configs}


def cell_config(options: ExperimentOptions, search: SearchRecord) -> ImageTrainingConfig:
    """Return the training configuration of the architecture that a search selected, with the seed of the search."""
    settings = SETTINGS[options.scale]
    model_options = {
        "architecture": asdict(search.architecture),
        "cells": search.plan["cells"],
        "channels": search.plan["channels"],
        "image_channels": settings.image_channels,
        "drop_rate": settings.drop_rate,
    }
    return replace(
        settings.config, model="network", model_options=model_options, lr=settings.lr, seed=search.plan["seed"]
    )


def train_all(options: ExperimentOptions, configs: Mapping[str, ImageTrainingConfig]) -> dict[str, TrainingRecord]:
    """Return the records of all finished runs, after training those that `options.only` selects.

    A run that reaches the time limit is not finished.
    """
    settings = SETTINGS[options.scale]
    evaluation = Evaluation(SHOTS, settings.tasks, settings.views)
    records = {}
    for label, config in configs.items():
        run_name = f"train-{label}"
        record_name = f"nas-{run_name}-{options.scale}"
        record = train_or_load(
            options, run_name, record_name, config, lambda: load_images(options, IMAGE_SIZE), evaluation
        )
        if record is not None:
            records[run_name] = record
    return records


def finished_training_runs(records: Mapping[str, Record], labels: Iterable[str]) -> list[TrainingRecord]:
    """Return the records of the finished training runs with these labels."""
    records_or_none = (records.get(f"train-{label}") for label in labels)
    return [record for record in records_or_none if isinstance(record, TrainingRecord)]
