"""Other divisions of labeled images: classes by superclass, random subsets, and images held out of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from metabridge.environments.image_tasks import LabeledImages


def classes_by_superclass(images: LabeledImages) -> dict[str, Tensor]:
    """Return the classes of each superclass in all splits, without superclasses that have none.

    Args:
        images: Labeled images.

    Returns:
        The classes in ascending order, by the name of the superclass.

    >>> from metabridge.datasets import load
    >>> len(classes_by_superclass(load("glyphs"))["Latin"])
    45
    """
    classes = torch.cat(list(images.splits.values())).sort().values
    superclasses = images.superclasses[classes]
    by_name = {name: classes[superclasses == index] for index, name in enumerate(images.superclass_names)}
    return {name: members for name, members in by_name.items() if len(members)}


def random_subset(images: LabeledImages, sizes: Mapping[str, tuple[int, int]], *, seed: int = 0) -> LabeledImages:
    """Return random classes of some splits, with some random images of each class.

    `sizes` maps splits to the number of classes and the number of images per class, at least 2. The classes and images
    of a split do not depend on the sizes of the other splits.

    >>> from metabridge.datasets import load
    >>> random_subset(load("glyphs"), {"train": (50, 5), "test": (8, 6)})
    LabeledImages(298 images of 1×28×28, 50 train / 8 test classes)
    """
    rows, splits = [], {}
    for split, (classes, images_per_class) in sizes.items():
        tasks = images.tasks(split, ways=classes, shots=1, queries=images_per_class - 1)
        sampled = tasks.sample_indices(1, torch.Generator().manual_seed(seed))
        splits[split] = images.splits[split][sampled.classes[0]]
        rows.append(torch.cat([sampled.support[0], sampled.query[0]], 1).flatten())
    selected = torch.cat(rows)
    pixels = images.images[selected.to(images.images.device)]
    return replace(images, images=pixels, labels=images.labels[selected], splits=splits, load_arguments=None)


def hold_out_images(images: LabeledImages, minimum: int) -> LabeledImages:
    """Return images whose validation split has other images of the training classes, as in FS-CIFAR100.

    The training and validation classes of `images` become the training split. The last images of each, a quarter but
    at least `minimum`, become a new class in the validation split, which measures the accuracy on classes seen in
    training.

    Args:
        images: Labeled images with the splits "train", "validation" and "test".
        minimum: Smallest number of images to hold out of each class.

    Returns:
        The same images, with more classes.

    >>> from metabridge.datasets import load
    >>> hold_out_images(load("glyphs"), minimum=5)
    LabeledImages('glyphs', 22,500 images of 1×28×28, 863 train / 863 validation / 262 test classes)
    """
    seen = torch.cat([images.splits["train"], images.splits["validation"]])
    labels = images.labels.clone()
    for i, class_index in enumerate(seen.tolist()):
        image_indices = (images.labels == class_index).nonzero().squeeze(1)
        labels[image_indices[-max(len(image_indices) // 4, minimum) :]] = len(images.class_names) + i
    return replace(
        images,
        labels=labels,
        class_names=(*images.class_names, *(f"{images.class_names[i]} (held out)" for i in seen.tolist())),
        superclasses=torch.cat([images.superclasses, images.superclasses[seen]]),
        splits={
            "train": seen,
            "validation": len(images.class_names) + torch.arange(len(seen)),
            "test": images.splits["test"],
        },
    )
