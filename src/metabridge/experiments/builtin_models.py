"""Accuracy of the built-in models, "photos" and "characters", on classes that they were not trained on.

The files of mini-ImageNet's test classes are written to a folder under new names, and "photos" is evaluated on that
folder, as a user's own photos would be. No paper has published these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from metabridge.choices import BUILTIN_MODELS
from metabridge.datasets import load
from metabridge.datasets.image_files import ImageSource
from metabridge.datasets.loading import DATASETS
from metabridge.environments.image_tasks import LabeledImages
from metabridge.experiments.experiment import Experiment, ExperimentOptions
from metabridge.report.results import Row
from metabridge.training import Score, evaluate, load_model


@dataclass(frozen=True)
class Settings:
    """How many tasks are sampled, and how many images per class are written to the folder."""

    tasks: int
    images_per_class: int
    shots: tuple[int, ...] = (1, 5)
    ways: int = 5
    queries: int = 15


SETTINGS = {"quick": Settings(tasks=100, images_per_class=25), "paper": Settings(tasks=2000, images_per_class=600)}


def test_images(options: ExperimentOptions, folder: Path) -> Iterator[tuple[str, str, LabeledImages]]:
    """Yield the name of a model, the name of a data set and its images, for all available data sets."""
    photos, characters = (load_model(name).net.decode_options for name in BUILTIN_MODELS)
    if options.data is not None and options.has_data("mini-imagenet"):
        source = DATASETS["mini-imagenet"].open_source(options.data / "mini-imagenet")
        write_folder(source, folder, SETTINGS[options.scale].images_per_class)
        images = load(folder, decode_options=photos)
        yield (
            "photos",
            "folder of mini-ImageNet files",
            replace(images, splits={"test": torch.arange(len(images.class_names))}),
        )
    if options.has_data("omniglot") and options.data is not None:
        yield "characters", "Omniglot", load("omniglot", options.data / "omniglot", decode_options=characters)
    yield "characters", "glyphs", load("glyphs")


def write_folder(source: ImageSource, folder: Path, images_per_class: int) -> None:
    """Write the files of the test classes of a data set to one subfolder per class, with new names."""
    test_labels = [label for label, info in enumerate(source.classes) if info.split == "test"]
    counts = dict.fromkeys(test_labels, 0)
    for image in source.images():
        if counts.get(image.label, images_per_class) < images_per_class and isinstance(image.content, bytes):
            file = folder / f"class {test_labels.index(image.label):02}" / f"photo {counts[image.label]:03}.webp"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(image.content)
            counts[image.label] += 1


def measure(options: ExperimentOptions) -> dict[tuple[str, str, int], Score]:
    """Return the accuracy for each model, data set and number of support images per class."""
    settings, scores = SETTINGS[options.scale], {}
    with TemporaryDirectory() as folder:
        for name, data, images in test_images(options, Path(folder)):
            model = load_model(name, device=options.device)
            for shots in settings.shots:
                tasks = images.tasks("test", ways=settings.ways, shots=shots, queries=settings.queries)
                scores[name, data, shots] = evaluate(
                    model, tasks, tasks=settings.tasks, seed=options.seed, progress=options.progress
                )
    return scores


def rows(scores: dict[tuple[str, str, int], Score], options: ExperimentOptions) -> list[Row]:
    """Return the accuracies."""
    ways = SETTINGS[options.scale].ways
    return [
        Row(
            f"{name}, {data}, {ways}-way {shots}-shot",
            "accuracy %",
            ours=100 * score.mean,
            ci95=100 * score.ci95,
            note=f"{score.tasks} test tasks",
        )
        for (name, data, shots), score in scores.items()
    ]


EXPERIMENT = Experiment("builtin-models", measure, rows, settings=SETTINGS)
