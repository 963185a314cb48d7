from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metabridge import InputError
from metabridge.environments import LabeledImages
from metabridge.environments.image_tasks import ImageBatches
from metabridge.learners import PRESETS
from metabridge.training import Augment
from metabridge.training.config import ImageTrainingConfig, default_config
from metabridge.training.image_training import (
    augmentation_of,
    method_of,
    network_of,
    train_on_images,
    training_tasks,
    validation_tasks,
)


def images(channels: int = 3, size: int = 16, images_per_class: int = 8, validation_classes: int = 3) -> LabeledImages:
    """Return random images of seven training classes and up to three validation classes."""
    labels = torch.arange(10).repeat_interleave(images_per_class)
    pixels = torch.randint(0, 256, (len(labels), channels, size, size), generator=torch.Generator().manual_seed(0))
    splits = {"train": torch.arange(0, 7), "validation": torch.arange(7, 7 + validation_classes)}
    return LabeledImages(
        pixels.to(torch.uint8),
        labels,
        tuple("abcdefghij"),
        torch.zeros(10, dtype=torch.int64),
        ("all",),
        {split: members for split, members in splits.items() if len(members)},
    )


# options of a short training run
SHORT = {"iterations": 2, "validate_every": 1, "validate_tasks": 2, "queries": 2, "model_options": {"filters": 4}}


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"burer-monteiro", "frozen"}))
def test_the_default_configuration_of_every_method_trains_on_images(name):
    config = replace(default_config(name), **SHORT, batch_size=4 if name == "rfs" else 1, shots=1)
    run = train_on_images(config, images(), progress=False)
    assert run.method == method_of(config)
    assert run.best.tasks == 2
    if name in ("mtl", "rfs"):  # their heads have a row for each training class
        assert run.params["heads.weight"].shape[0] == 7


def test_the_method_that_trains_nothing_is_refused_with_the_way_out():
    with pytest.raises(InputError, match=r"method is frozen, which trains nothing\. Evaluate or adapt the model"):
        train_on_images(replace(default_config("frozen"), **SHORT), images(), progress=False)


def test_validation_has_as_many_ways_and_queries_as_classes_and_images_allow():
    # three validation classes; of the six images of each, two are support images, which leaves four queries
    small_tasks = validation_tasks(ImageTrainingConfig("anil", ways=5, validate_shots=2), images(images_per_class=6))
    assert (small_tasks.ways, small_tasks.shots, small_tasks.queries) == (3, 2, 4)
    # with enough classes and images, the tasks have `ways` classes and 15 queries
    full_tasks = validation_tasks(ImageTrainingConfig("anil", ways=2), images(images_per_class=30))
    assert (full_tasks.ways, full_tasks.shots, full_tasks.queries) == (2, 1, 15)


def test_training_tasks_may_have_more_ways_than_validation_tasks():
    config = replace(default_config("mtl"), **SHORT, batch_size=1, shots=1, ways=3, training_ways=6)
    assert training_tasks(config, images(), method_of(config)).ways == 6
    assert validation_tasks(config, images()).ways == 3
    assert train_on_images(config, images(), progress=False).best.tasks == 2


def test_there_is_no_validation_if_there_are_no_validation_classes():
    config = replace(default_config("anil"), **SHORT, ways=3)
    run = train_on_images(config, images(validation_classes=0), progress=False)
    assert run.best is None
    assert [point.score for point in run.curve] == [None, None]


@pytest.mark.parametrize(
    ("augment", "channels", "expected"),
    [
        (None, 3, Augment(padding=4)),
        (None, 1, None),
        (True, 1, Augment(padding=4)),
        (False, 3, None),
        (Augment(scale=(0.5, 1.0)), 1, Augment(scale=(0.5, 1.0))),
    ],
)
def test_color_images_are_augmented_by_default(augment, channels, expected):
    assert augmentation_of(ImageTrainingConfig("anil", augment=augment), images(channels)) == expected


def test_rotated_classes_quadruple_the_training_classes():
    config = replace(default_config("rfs"), **SHORT, batch_size=4, rotated_classes=True, augment=False)
    run = train_on_images(config, images(), progress=False)
    assert run.params["heads.weight"].shape[0] == 28


def test_rfs_is_trained_on_batches_of_images_and_other_methods_on_tasks():
    rfs, mtl = replace(default_config("rfs"), batch_size=6), ImageTrainingConfig("mtl", ways=4, shots=2, queries=3)
    batches = training_tasks(rfs, images(), method_of(rfs))
    assert isinstance(batches, ImageBatches)
    assert batches.size == 6
    tasks = training_tasks(mtl, images(), method_of(mtl))
    assert (tasks.ways, tasks.shots, tasks.queries) == (4, 2, 3)


@pytest.mark.parametrize(
    ("model", "options", "features"),
    [
        ("mlp", {"width": 11}, 11),
        ("conv4", {"filters": 6}, 6),
        ("resnet12", {"widths": [4, 4, 4, 12]}, 12),
    ],
)
def test_a_model_is_built_for_the_shape_of_the_images_and_the_ways(model, options, features):
    net = network_of(ImageTrainingConfig("anil", model=model, model_options=options, ways=3, seed=2), images())
    assert (net.head.in_features, net.head.out_features) == (features, 3)
    assert net.recipe["seed"] == 2
    assert net(torch.zeros(2, 3, 16, 16)).shape == (2, 3)
