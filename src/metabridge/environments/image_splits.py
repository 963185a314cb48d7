"""New splits of labeled images: by superclass, by random selection, or with held-out images of training classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from metabridge.environments.image_tasks import ImageTasks, LabeledImages, Superclass


def classes_by_superclass(images: LabeledImages) -> dict[str, Tensor]:
    """Group the classes of all splits by superclass. Superclasses without classes are omitted.

    Args:
        images: Labeled images.

    Returns:
        A dict from superclass name to class indices in ascending order.

    >>> from metabridge.datasets import load
    >>> len(classes_by_superclass(load("glyphs"))["Latin"])
    45
    """
    classes = torch.cat(list(images.splits.values())).sort().values
    superclasses = images.superclasses[classes]
    groups = {name: classes[superclasses == index] for index, name in enumerate(images.superclass_names)}
    return {name: group for name, group in groups.items() if len(group)}


def superclass_tasks(
    images: LabeledImages,
    names: Iterable[str],
    *,
    superclass: Superclass,
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
) -> ImageTasks:
    """Return an environment of tasks whose classes belong to the named superclasses, regardless of their split.

    Args:
        images: Labeled images.
        names: Names of the superclasses.
        superclass: Whether the classes of a task have "any", the "same" or "different" superclasses.
        ways: Number of classes per task.
        shots: Support images per class.
        queries: Query images per class.

    Returns:
        The environment.

    >>> from metabridge.datasets import load
    >>> superclass_tasks(load("glyphs"), ["Latin", "Greek"], superclass="same")
    ImageTasks('glyphs', 'superclasses', 5-way 1-shot, 15 queries per class, 86 classes, superclass='same')
    """
    classes = classes_by_superclass(images)
    splits = {"superclasses": torch.cat([classes[name] for name in names])}
    return replace(images, splits=splits).tasks(
        "superclasses", ways=ways, shots=shots, queries=queries, superclass=superclass
    )


def tasks_by_superclass(
    images: LabeledImages, *, ways: int = 5, shots: int = 1, queries: int = 15
) -> dict[str, ImageTasks]:
    """Return an environment of tasks for each superclass that has enough classes for a task.

    Args:
        images: Labeled images.
        ways: Number of classes per task.
        shots: Support images per class.
        queries: Query images per class.

    Returns:
        A dict from superclass name to environment.

    >>> from metabridge.datasets import load
    >>> tasks_by_superclass(load("glyphs"), ways=40)["Latin"]
    ImageTasks('glyphs', 'Latin', 40-way 1-shot, 15 queries per class, 45 classes)
    """
    classes = {name: members for name, members in classes_by_superclass(images).items() if len(members) >= ways}
    split_images = replace(images, splits=classes)
    return {name: split_images.tasks(name, ways=ways, shots=shots, queries=queries) for name in classes}


def random_subset(images: LabeledImages, sizes: Mapping[str, tuple[int, int]], *, seed: int = 0) -> LabeledImages:
    """Select random classes of some splits, and random images of each class.

    Args:
        images: Labeled images.
        sizes: For each split, the number of classes and the number of images per class (at least 2). The selection
            in one split does not depend on the sizes of the other splits.
        seed: Seed of the selection.

    Returns:
        The selected images, with only these splits.

    >>> from metabridge.datasets import load
    >>> random_subset(load("glyphs"), {"train": (50, 5), "test": (8, 6)})
    LabeledImages(298 images of 1×28×28, 50 train / 8 test classes)
    """
    image_indices, splits = [], {}
    for split, (num_classes, images_per_class) in sizes.items():
        # a random task with these numbers of classes and images is a random subset of the split
        environment = images.tasks(split, ways=num_classes, shots=1, queries=images_per_class - 1)
        task = environment.sample_indices(1, torch.Generator().manual_seed(seed))
        splits[split] = images.splits[split][task.classes[0]]
        image_indices.append(torch.cat([task.support[0], task.query[0]], 1).flatten())
    selected = torch.cat(image_indices)
    pixels = images.images[selected.to(images.images.device)]
    return replace(images, images=pixels, labels=images.labels[selected], splits=splits, load_arguments=None)


def hold_out_images(images: LabeledImages, min_held_out: int) -> LabeledImages:
    """Replace the validation classes by held-out images of the training classes, as in FS-CIFAR100.

    The training and validation classes of `images` become the training split. The last quarter of the images of each
    of these classes, but at least `min_held_out` images, are moved to a new class of the validation split. Validation
    then measures the accuracy on new images of the training classes.

    Args:
        images: Labeled images with the splits "train", "validation" and "test".
        min_held_out: Minimum number of images of each class to hold out.

    Returns:
        The same images, with the splits "train", "validation" (the new classes) and "test" (unchanged).

    >>> from metabridge.datasets import load
    >>> hold_out_images(load("glyphs"), min_held_out=5)
    LabeledImages('glyphs', 22,500 images of 1×28×28, 863 train / 863 validation / 262 test classes)
    """
    training_classes = torch.cat([images.splits["train"], images.splits["validation"]])
    labels = images.labels.clone()
    for i, class_index in enumerate(training_classes.tolist()):
        image_indices = (images.labels == class_index).nonzero().squeeze(1)
        labels[image_indices[-max(len(image_indices) // 4, min_held_out) :]] = len(images.class_names) + i
    return replace(
        images,
        labels=labels,
        class_names=(*images.class_names, *(f"{images.class_names[i]} (held out)" for i in training_classes.tolist())),
        superclasses=torch.cat([images.superclasses, images.superclasses[training_classes]]),
        splits={
            "train": training_classes,
            "validation": len(images.class_names) + torch.arange(len(training_classes)),
            "test": images.splits["test"],
        },
    )
