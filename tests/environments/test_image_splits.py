from __future__ import annotations

import pytest
import torch

from cases import numbered_images
from metabridge.environments.image_splits import classes_by_superclass, hold_out_images, random_subset


def test_classes_of_all_splits_are_grouped_by_superclass(glyphs):
    groups = classes_by_superclass(glyphs)
    assert list(groups) == list(glyphs.superclass_names)
    assert torch.equal(torch.cat(list(groups.values())).sort().values, torch.arange(len(glyphs.class_names)))
    for name, classes in groups.items():
        assert {glyphs.superclass_names[index] for index in glyphs.superclasses[classes].tolist()} == {name}


# A quarter of the images of a class is held out, but at least `min_held_out`: max(600/4, 60) and max(20/4, 10).
@pytest.mark.parametrize(("images_per_class", "min_held_out", "held_out"), [(600, 60, 150), (20, 10, 10)])
def test_images_of_training_classes_are_held_out_and_those_of_test_classes_are_not(
    images_per_class, min_held_out, held_out
):
    original = numbered_images(100, images_per_class)
    changed = hold_out_images(original, min_held_out)
    num_classes = {split: len(classes) for split, classes in changed.splits.items()}
    assert num_classes == {"train": 80, "validation": 80, "test": 20}
    counts = changed.labels.bincount()
    assert (counts[changed.splits["train"]] == images_per_class - held_out).all()
    assert (counts[changed.splits["validation"]] == held_out).all()
    assert (counts[changed.splits["test"]] == images_per_class).all()
    for training_class, validation_class in zip(changed.splits["train"], changed.splits["validation"]):
        in_either_class = (changed.labels == training_class) | (changed.labels == validation_class)
        assert (original.labels[in_either_class] == training_class).all()
    assert changed.class_names[100] == "class0 (held out)"


def test_a_random_subset_has_the_requested_numbers_of_classes_and_of_images_per_class():
    images = numbered_images(100, 10)
    subset = random_subset(images, {"train": (3, 4), "test": (2, 5)}, seed=1)
    assert {split: len(classes) for split, classes in subset.splits.items()} == {"train": 3, "test": 2}
    for split, images_per_class in (("train", 4), ("test", 5)):
        assert set(subset.splits[split].tolist()) <= set(images.splits[split].tolist())
        assert (subset.labels.bincount(minlength=100)[subset.splits[split]] == images_per_class).all()
    larger = random_subset(images, {"train": (5, 6), "test": (2, 5)}, seed=1)
    assert torch.equal(larger.splits["test"], subset.splits["test"])
    assert torch.equal(larger.images[-10:], subset.images[-10:])  # the 2 · 5 test images are the last ones
