from __future__ import annotations

import pytest
import torch

from cases import numbered_images
from metabridge.environments.image_splits import classes_by_superclass, hold_out_images, random_subset


def test_superclasses_have_their_classes_of_all_splits(glyphs):
    members = classes_by_superclass(glyphs)
    assert list(members) == list(glyphs.superclass_names)
    assert torch.equal(torch.cat(list(members.values())).sort().values, torch.arange(len(glyphs.class_names)))
    for name, classes in members.items():
        assert {glyphs.superclass_names[index] for index in glyphs.superclasses[classes].tolist()} == {name}


@pytest.mark.parametrize(("per_class", "minimum", "held_out"), [(600, 60, 150), (20, 10, 10)])
def test_images_of_training_classes_are_held_out_and_those_of_test_classes_are_not(per_class, minimum, held_out):
    images = numbered_images(100, per_class)
    split = hold_out_images(images, minimum)
    assert {name: len(classes) for name, classes in split.splits.items()} == {"train": 80, "validation": 80, "test": 20}
    counts = split.labels.bincount()
    assert (counts[split.splits["train"]] == per_class - held_out).all()
    assert (counts[split.splits["validation"]] == held_out).all()
    assert (counts[split.splits["test"]] == per_class).all()
    for training_class, new_class in zip(split.splits["train"], split.splits["validation"]):
        original = images.labels[(split.labels == training_class) | (split.labels == new_class)]
        assert (original == training_class).all()
    assert split.class_names[100] == "class0 (held out)"


def test_a_random_subset_has_some_images_of_some_classes():
    images = numbered_images(100, 10)
    subset = random_subset(images, {"train": (3, 4), "test": (2, 5)}, seed=1)
    assert {split: len(classes) for split, classes in subset.splits.items()} == {"train": 3, "test": 2}
    for split, per_class in (("train", 4), ("test", 5)):
        assert set(subset.splits[split].tolist()) <= set(images.splits[split].tolist())
        assert (subset.labels.bincount(minlength=100)[subset.splits[split]] == per_class).all()
    larger = random_subset(images, {"train": (5, 6), "test": (2, 5)}, seed=1)
    assert torch.equal(larger.splits["test"], subset.splits["test"])
    assert torch.equal(larger.images[-10:], subset.images[-10:])
