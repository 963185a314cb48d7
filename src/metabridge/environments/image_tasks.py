"""Labeled images, and the N-way K-shot classification tasks and ordinary mini-batches sampled from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count, describe
from metabridge.html_table import html_table

log = logging.getLogger("metabridge")

Superclass = Literal["any", "same", "different"]


@dataclass(frozen=True, eq=False, repr=False)
class LabeledImages:
    """Images with classes, superclasses and splits of the classes. Use `datasets.load` to load them from disk.

    Args:
        images: The images, uint8 of shape (n, channels, height, width).
        labels: The class of each image as an index into `class_names`, int64 of shape (n,).
        class_names: The names of the classes.
        superclasses: The superclass of each class as an index into `superclass_names`, int64 of shape (classes,).
        superclass_names: The names of the superclasses.
        splits: The class indices of each split, int64. A class is in at most one split.
        load_arguments: The arguments with which `datasets.load` returns these images. Saved runs store them.

    Raises:
        InputError: A shape or dtype is wrong, an index is out of range, or a class is in two splits.

    >>> import torch
    >>> import metabridge as mb
    >>> images = mb.LabeledImages(
    ...     images=torch.zeros(8, 1, 28, 28, dtype=torch.uint8),
    ...     labels=torch.arange(8) % 4,
    ...     class_names=("cat", "dog", "oak", "elm"),
    ...     superclasses=torch.tensor([0, 0, 1, 1]),
    ...     superclass_names=("animals", "trees"),
    ...     splits={"train": torch.tensor([0, 2]), "test": torch.tensor([1, 3])},
    ... )
    >>> images
    LabeledImages(8 images of 1×28×28, 2 train / 2 test classes)
    >>> images.tasks("test", ways=2, shots=1, queries=1).class_names
    ('dog', 'elm')
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    superclasses: Tensor
    superclass_names: tuple[str, ...]
    splits: dict[str, Tensor]
    load_arguments: dict[str, object] | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise InputError(
                f"images is {describe(self.images)}, but must be uint8 of shape (n, channels, height, width)."
            )
        num_classes = len(self.class_names)
        _check_indices("labels", self.labels, len(self.images), num_classes)
        _check_indices("superclasses", self.superclasses, num_classes, len(self.superclass_names))
        split_by_class: dict[int, str] = {}
        for split, class_indices in self.splits.items():
            _check_indices(f"splits[{split!r}]", class_indices, None, num_classes)
            if len(class_indices) == 0:
                raise InputError(f"split '{split}' has no classes. Add classes, or remove the split.")
            for index in class_indices.tolist():
                if index in split_by_class:
                    location = f"twice in split '{split}'"
                    if split_by_class[index] != split:
                        location = f"in the splits '{split_by_class[index]}' and '{split}'"
                    raise InputError(
                        f"class '{self.class_names[index]}' is {location}. List every class once, in one split."
                    )
                split_by_class[index] = split

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.images.shape[1:]))
        splits = " / ".join(f"{len(classes)} {split}" for split, classes in self.splits.items()) or "no"
        return f"LabeledImages({_data_name(self)}{len(self.images):,} images of {shape}, {splits} classes)"

    def _repr_html_(self) -> str:
        """Return a table of the splits, for notebooks."""
        counts = torch.bincount(self.labels, minlength=len(self.class_names))
        rows = [
            (split, f"{len(classes):,}", f"{int(counts[classes].sum()):,}") for split, classes in self.splits.items()
        ]
        return html_table(repr(self), ("split", "classes", "images"), rows)

    def tasks(
        self, split: str, *, ways: int = 5, shots: int = 1, queries: int = 15, superclass: Superclass = "any"
    ) -> ImageTasks:
        """Return an environment of tasks that are sampled from the classes of one split.

        Args:
            split: A key of `splits`, such as "train", "validation" or "test".
            ways: Number of classes per task.
            shots: Support images per class.
            queries: Query images per class.
            superclass: Whether the classes of a task have "any" superclasses, the "same" or "different" ones.

        Returns:
            The environment.

        Raises:
            InputError: The split does not exist, or has too few classes or images for the tasks.
        """
        return ImageTasks(self, split, ways=ways, shots=shots, queries=queries, superclass=superclass)

    def batches(self, split: str, *, size: int = 64) -> ImageBatches:
        """Return an environment of ordinary mini-batches, for training one classifier of all classes of a split.

        Args:
            split: A key of `splits`.
            size: Number of images per batch.

        Returns:
            The environment.
        """
        return ImageBatches(self, split, size=size)

    def with_rotations(self, splits: Collection[str] | None = None) -> LabeledImages:
        """Add copies of each class, rotated by 90°, 180° and 270°, as three new classes.

        A new class has the superclass and the split of the original class.

        Args:
            splits: The splits whose classes are rotated. Default: all splits.

        Returns:
            The original and the new images.

        Raises:
            InputError: A split does not exist, or the images are not square.
        """
        rotated_splits = set(self.splits if splits is None else splits)
        if not rotated_splits or not rotated_splits <= self.splits.keys():
            raise InputError(
                f"splits is {_quote(sorted(rotated_splits))}, but the splits of these images are {_quote(self.splits)}."
            )
        height, width = self.images.shape[-2:]
        if height != width:
            raise InputError(f"images are {height}×{width} pixels, but only square images can be rotated by 90°.")
        rotated_classes = torch.cat([classes for split, classes in self.splits.items() if split in rotated_splits])
        positions = torch.full((len(self.class_names),), -1)  # index of each class in `rotated_classes`, or -1
        positions[rotated_classes] = torch.arange(len(rotated_classes))
        image_indices = (positions[self.labels] >= 0).nonzero().squeeze(1)
        originals = self.images[image_indices.to(self.images.device)]
        offsets = [len(self.class_names) + copy * len(rotated_classes) for copy in range(3)]
        names = [self.class_names[index] for index in rotated_classes.tolist()]
        return replace(
            self,
            images=torch.cat(
                [self.images, *(torch.rot90(originals, quarter_turns, (2, 3)) for quarter_turns in (1, 2, 3))]
            ),
            labels=torch.cat([self.labels, *(positions[self.labels[image_indices]] + offset for offset in offsets)]),
            # Saved runs contain these class names, so the suffix must stay as in version 0.1.0.
            class_names=(*self.class_names, *(f"{name}/turned{angle}" for angle in (90, 180, 270) for name in names)),
            superclasses=torch.cat([self.superclasses, self.superclasses[rotated_classes].repeat(3)]),
            splits={
                split: torch.cat([classes, *(positions[classes] + offset for offset in offsets)])
                if split in rotated_splits
                else classes
                for split, classes in self.splits.items()
            },
        )

    def merge(self, other: LabeledImages, *, prefix: str = "") -> LabeledImages:
        """Return the images and classes of both data sets, split by split.

        Args:
            other: Images of the same size, with as many channels.
            prefix: Text to put in front of the names of the other classes.

        Returns:
            The images of this data set, followed by those of the other.

        Raises:
            InputError: The shapes of the images differ.

        >>> from metabridge.datasets import load
        >>> glyphs = load("glyphs")
        >>> len(glyphs.merge(glyphs, prefix="copy/").class_names) == 2 * len(glyphs.class_names)
        True
        """
        if self.images.shape[1:] != other.images.shape[1:]:
            raise InputError(
                f"the images have shapes {tuple(self.images.shape[1:])} and {tuple(other.images.shape[1:])}, but must "
                "have the same shape. Load both with the same size and channels."
            )
        offset = len(self.class_names)
        no_classes = torch.empty(0, dtype=torch.int64)
        return LabeledImages(
            images=torch.cat([self.images, other.images.to(self.images.device)]),
            labels=torch.cat([self.labels, other.labels + offset]),
            class_names=(*self.class_names, *(f"{prefix}{name}" for name in other.class_names)),
            superclasses=torch.cat([self.superclasses, other.superclasses + len(self.superclass_names)]),
            superclass_names=(*self.superclass_names, *other.superclass_names),
            splits={
                split: torch.cat([self.splits.get(split, no_classes), other.splits.get(split, no_classes) + offset])
                for split in {**self.splits, **other.splits}
            },
        )

    def downscaled(self, size: int) -> LabeledImages:
        """Downscale the images by averaging (area interpolation).

        Args:
            size: Height and width of the new images.

        Returns:
            The images, with the same classes and splits.

        Raises:
            InputError: The images are smaller than `size`.
        """
        height, width = self.images.shape[-2:]
        if not 1 <= size <= min(height, width):
            raise InputError(f"size is {size}, but must be from 1 to {min(height, width)}, the size of the images.")
        batches = [
            interpolate(batch.float(), size=(size, size), mode="area").round().byte()
            for batch in self.images.split(4096)  # in batches, since float images take four times the memory
        ]
        return replace(self, images=torch.cat(batches), load_arguments=None)

    def split_class_names(self, split: str) -> tuple[str, ...]:
        """Return the class names of a split.

        Args:
            split: A key of `splits`.

        Returns:
            The names, in the order of `splits[split]`.
        """
        return tuple(self.class_names[index] for index in self.splits[split].tolist())

    def float_images(self, indices: Tensor) -> Tensor:
        """Return the selected images as floats between 0 and 1.

        Args:
            indices: Indices of images, int64 of any shape.

        Returns:
            The images, of shape (*indices.shape, channels, height, width), on the device of `images`.
        """
        return self.images[copy_to_device(indices, self.images.device)].float() / 255

    def to(self, device: torch.device | str) -> LabeledImages:
        """Move the images to a device, unless they would take more than 70 % of a GPU's free memory.

        Labels and splits stay on the CPU, where tasks are sampled. If the images do not fit, they stay in main memory,
        each batch is copied to the GPU, and a warning is logged.

        Args:
            device: A PyTorch device.

        Returns:
            The images, on the device if they fit.
        """
        device = torch.device(device)
        if device.type == "cuda" and not self.images.is_cuda:
            free_bytes = torch.cuda.mem_get_info(device)[0]
            if self.images.nbytes > 0.7 * free_bytes:
                log.warning(
                    "%.1f GiB of images stay in main memory: the GPU has only %.1f GiB free. Training will be slower.",
                    self.images.nbytes / 2**30,
                    free_bytes / 2**30,
                )
                return self
        return replace(self, images=self.images.to(device))


@dataclass(frozen=True, eq=False, repr=False)
class ImageTasks:
    """N-way K-shot classification tasks, sampled from the classes of one split.

    Sampling runs on the CPU, so a seed gives the same tasks on every device.

    Args:
        data: The images.
        split: A key of `data.splits`.
        ways: Number of classes per task.
        shots: Support images per class.
        queries: Query images per class.
        superclass: With "same", the classes of a task share a superclass, which makes tasks hard. With "different",
            they have different superclasses, which makes tasks easy. With "any", superclasses play no role.

    Raises:
        InputError: The split does not exist, or has too few classes or images for the tasks.

    >>> from metabridge.datasets import load
    >>> environment = load("glyphs").tasks("test", ways=5, shots=1, queries=15)
    >>> environment
    ImageTasks('glyphs', 'test', 5-way 1-shot, 15 queries per class, 262 classes)
    >>> tasks = environment.sample(8, torch.Generator().manual_seed(0))
    >>> tasks.query_x.shape, tasks.support_y[0].tolist()
    (torch.Size([8, 75, 1, 28, 28]), [0, 1, 2, 3, 4])
    """

    data: LabeledImages
    split: str
    ways: int = 5
    shots: int = 1
    queries: int = 15
    superclass: Superclass = "any"

    def __post_init__(self) -> None:
        for name in ("ways", "shots", "queries"):
            check_count(name, getattr(self, name))
        if self.split not in self.data.splits:
            if not self.data.splits:
                raise InputError("no split has any classes. Use a smaller min_images, or add images.")
            raise InputError(f"split is '{self.split}', but must be one of {_quote(self.data.splits)}.")
        if self.superclass not in get_args(Superclass):
            raise InputError(f"superclass is '{self.superclass}', but must be one of {_quote(get_args(Superclass))}.")
        if self.ways > self.classes:
            suggestion = f"Use ways={self.classes} or fewer" if self.classes > 1 else "Add classes"
            available = _quantity(self.classes, "class", "classes")
            raise InputError(f"ways is {self.ways}, but split '{self.split}' has {available}. {suggestion}.")
        self._check_superclasses()
        self._check_image_counts()

    def __repr__(self) -> str:
        queries = _quantity(self.queries, "query", "queries")
        classes = _quantity(self.classes, "class", "classes")
        superclass = "" if self.superclass == "any" else f", superclass={self.superclass!r}"
        return (
            f"ImageTasks({_data_name(self.data)}{self.split!r}, {self.ways}-way {self.shots}-shot, "
            f"{queries} per class, {classes}{superclass})"
        )

    def _repr_html_(self) -> str:
        """Return a table of the task settings, for notebooks."""
        counts = self._image_mask.sum(dim=1)
        cells = (self.ways, self.shots, self.queries, self.classes, int(counts.sum()))
        columns = ("ways", "shots per class", "queries per class", "classes", "images")
        return html_table(repr(self), columns, [[f"{number:,}" for number in cells]])

    @property
    def outputs(self) -> int:
        """Number of network outputs: one per way."""
        return self.ways

    @property
    def classes(self) -> int:
        """Number of classes in the split."""
        return len(self.data.splits[self.split])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the split's classes, which the indices in `Episodes.classes` refer to."""
        return self.data.split_class_names(self.split)

    @property
    def image_indices(self) -> Tensor:
        """Indices of the split's images, int64."""
        return self._class_images[self._image_mask]

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks. The images of a task are ordered by class.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks, with the images on the device of `data.images`.
        """
        return self.sample_indices(tasks, generator).to_episodes(self.data.float_images)

    def sample_indices(self, tasks: int, generator: torch.Generator) -> TaskIndices:
        """Sample the same tasks as `sample`, but return indices of images instead of images.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The classes and the images of each task, as indices.
        """
        check_count("tasks", tasks)
        classes = self._sample_classes(tasks, generator)
        columns = _sample_columns(self._image_mask[classes], self.shots + self.queries, generator)
        image_indices = self._class_images[classes].gather(-1, columns)
        return TaskIndices(classes, image_indices[..., : self.shots], image_indices[..., self.shots :])

    def sample_unknown(self, classes: Tensor, images: int, generator: torch.Generator) -> Tensor:
        """Sample images of unknown classes: classes of the split that are not part of a task.

        Args:
            classes: The classes of each task, as in `TaskIndices.classes`, (tasks, ways).
            images: Number of images per task.
            generator: A random generator on the CPU.

        Returns:
            Indices of the images, (tasks, images). Each image is a random image of a random unknown class, so an image
            may occur more than once.

        Raises:
            InputError: If the tasks contain all classes of the split.
        """
        check_count("images", images)
        if classes.shape[1] >= self.classes:
            available = _quantity(self.classes, "class", "classes")
            raise InputError(
                f"ways is {classes.shape[1]}, but split '{self.split}' has {available}, so no class is unknown. "
                f"Use ways={self.classes - 1} or fewer, or add classes."
            )
        is_unknown = torch.ones(len(classes), self.classes).scatter(1, classes.cpu(), 0)
        unknown = torch.multinomial(is_unknown, images, replacement=True, generator=generator)
        counts = self._image_mask.sum(dim=1)[unknown]
        columns = (torch.rand(unknown.shape, generator=generator, dtype=torch.float64) * counts).long()
        return self._class_images[unknown, columns]

    def _sample_classes(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Return the classes of random tasks, in random order, as indices into the split, (tasks, ways)."""
        if self.superclass == "any":
            return _sample_columns(torch.ones(tasks, self.classes, dtype=torch.bool), self.ways, generator)
        if self.superclass == "same":
            candidates = self._large_superclasses
            superclasses = candidates[torch.randint(len(candidates), (tasks,), generator=generator)]
            return _sample_columns(self._class_masks[superclasses], self.ways, generator)
        superclasses = _sample_columns(
            torch.ones(tasks, len(self._class_masks), dtype=torch.bool), self.ways, generator
        )
        return _sample_columns(self._class_masks[superclasses], 1, generator).squeeze(-1)

    @cached_property
    def _padded_class_images(self) -> tuple[Tensor, Tensor]:
        """Image indices of each class, padded to the size of the largest class, and a mask that is false for padding.

        Both have shape (classes, images).
        """
        split_classes, labels = self.data.splits[self.split], self.data.labels
        image_order = torch.argsort(labels, stable=True)  # image indices sorted by class
        counts = torch.bincount(labels, minlength=len(self.data.class_names))
        starts = counts.cumsum(0) - counts
        columns = torch.arange(int(counts[split_classes].max()))
        is_image = columns < counts[split_classes][:, None]
        class_images = image_order[torch.where(is_image, starts[split_classes][:, None] + columns, 0)]
        return class_images, is_image

    @property
    def _class_images(self) -> Tensor:
        return self._padded_class_images[0]

    @property
    def _image_mask(self) -> Tensor:
        return self._padded_class_images[1]

    @cached_property
    def _class_masks(self) -> Tensor:
        """Boolean mask (superclasses, classes): whether each class of the split belongs to each superclass."""
        superclasses = self.data.superclasses[self.data.splits[self.split]]
        masks = superclasses == torch.arange(len(self.data.superclass_names))[:, None]
        return masks[masks.any(dim=1)]

    @cached_property
    def _large_superclasses(self) -> Tensor:
        """Superclasses with enough classes for a task, as rows of `_class_masks`."""
        return (self._class_masks.sum(dim=1) >= self.ways).nonzero().squeeze(1)

    def _check_superclasses(self) -> None:
        sizes = self._class_masks.sum(dim=1)
        if self.superclass == "same" and int(sizes.max()) < self.ways:
            raise InputError(
                f"superclass is 'same' with ways={self.ways}, but the largest superclass of split '{self.split}' "
                f"has {int(sizes.max())} classes. Use ways={int(sizes.max())} or fewer, or superclass='any'."
            )
        if self.superclass == "different" and len(sizes) < self.ways:
            raise InputError(
                f"superclass is 'different' with ways={self.ways}, but split '{self.split}' has {len(sizes)} "
                f"superclasses. Use ways={len(sizes)} or fewer, or superclass='any'."
            )

    def _check_image_counts(self) -> None:
        counts = self._image_mask.sum(dim=1)
        smallest_class, images_needed = int(counts.argmin()), self.shots + self.queries
        min_count = int(counts[smallest_class])
        if min_count < images_needed:
            suggestion = f"Use queries={min_count - self.shots} or fewer"
            if min_count <= self.shots:
                suggestion = f"Use shots=1 and queries={min_count - 1} or fewer" if min_count > 1 else "Add images"
            if int((counts >= images_needed).sum()) >= self.ways:
                suggestion += (
                    f", or omit classes with fewer than {images_needed} images (min_images={images_needed}, on the "
                    f"command line --min-images {images_needed})"
                )
            raise InputError(
                f"class '{self.class_names[smallest_class]}' has {_quantity(min_count, 'image')}, but "
                f"{_quantity(self.shots, 'shot')} + {_quantity(self.queries, 'query', 'queries')} need "
                f"{images_needed}. {suggestion}."
            )


class TaskIndices(NamedTuple):
    """Tasks as indices of classes and images.

    Args:
        classes: Indices into the classes of the split, (tasks, ways).
        support: Indices of the support images, (tasks, ways, shots).
        query: Indices of the query images, (tasks, ways, queries).
    """

    classes: Tensor
    support: Tensor
    query: Tensor

    def sort_classes(self, sort_keys: Tensor) -> TaskIndices:
        """Sort the classes of each task by the mean sort key of their support images, in ascending order.

        Args:
            sort_keys: One number per image, (images,).

        Returns:
            The tasks with sorted classes.
        """
        order = sort_keys[self.support].mean(-1).argsort(-1)
        tasks = torch.arange(len(order))[:, None]
        return TaskIndices(*(field[tasks, order] for field in self))

    def to_episodes(self, load_images: Callable[[Tensor], Tensor]) -> Episodes:
        """Load the images of the tasks.

        Args:
            load_images: Maps image indices (n,) to images or features (n, ...).

        Returns:
            The tasks.
        """
        tasks, ways = self.classes.shape
        sets = (self.support, self.query)
        # Load both sets in one call, which needs only one transfer to the GPU.
        images = load_images(torch.cat([indices.flatten() for indices in sets]))
        support_x, query_x = (x.unflatten(0, (tasks, -1)) for x in images.split([indices.numel() for indices in sets]))
        labels = torch.arange(ways, device=images.device)
        support_y, query_y = (labels.repeat_interleave(indices.shape[-1]).expand(tasks, -1).clone() for indices in sets)
        return Episodes(support_x, support_y, query_x, query_y, copy_to_device(self.classes, images.device))


@dataclass(frozen=True, eq=False, repr=False)
class ImageBatches:
    """Ordinary mini-batches of images, for training one classifier of all classes of a split.

    Each mini-batch is a task whose ways are all classes, and whose support and query set are the same images.

    Args:
        data: The images.
        split: A key of `data.splits`.
        size: Number of images per batch.

    Raises:
        InputError: The split does not exist, or a class has fewer than two images.

    >>> from metabridge.datasets import load
    >>> batches = load("glyphs").batches("train", size=64)
    >>> batches
    ImageBatches('glyphs', 'train', 64 images per batch, 709 classes)
    >>> batches.sample(1, torch.Generator().manual_seed(0)).support_x.shape
    torch.Size([1, 64, 1, 28, 28])
    """

    data: LabeledImages
    split: str
    size: int = 64

    def __post_init__(self) -> None:
        check_count("size", self.size)
        ImageTasks(self.data, self.split, ways=1, shots=1, queries=1)  # raises an InputError if the split is invalid

    def __repr__(self) -> str:
        return (
            f"ImageBatches({_data_name(self.data)}{self.split!r}, {_quantity(self.size, 'image')} per batch, "
            f"{_quantity(self.classes, 'class', 'classes')})"
        )

    def _repr_html_(self) -> str:
        """Return a table of the batch settings, for notebooks."""
        numbers = (self.size, self.classes, len(self._indices_and_labels[0]))
        columns = ("images per batch", "classes", "images")
        return html_table(repr(self), columns, [[f"{number:,}" for number in numbers]])

    @property
    def outputs(self) -> int:
        """Number of network outputs: one per class."""
        return self.classes

    @property
    def classes(self) -> int:
        """Number of classes in the split."""
        return len(self.data.splits[self.split])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the split's classes, in the order of the outputs."""
        return self.data.split_class_names(self.split)

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample mini-batches uniformly from the images of the split, with replacement.

        Args:
            tasks: Number of mini-batches.
            generator: A random generator on the CPU.

        Returns:
            The mini-batches, one per task.
        """
        check_count("tasks", tasks)
        image_indices, labels = self._indices_and_labels
        sample = torch.randint(len(image_indices), (tasks, self.size), generator=generator)
        x = self.data.float_images(image_indices[sample])
        y = copy_to_device(labels[sample], x.device)
        return Episodes(x, y, x, y, torch.arange(self.classes, device=x.device).expand(tasks, -1))

    @cached_property
    def _indices_and_labels(self) -> tuple[Tensor, Tensor]:
        """Indices of the split's images, and their labels as indices into the classes of the split."""
        positions = torch.full((len(self.data.class_names),), -1)  # index of each class in the split, or -1
        positions[self.data.splits[self.split]] = torch.arange(self.classes)
        labels = positions[self.data.labels]
        image_indices = (labels >= 0).nonzero().squeeze(1)
        return image_indices, labels[image_indices]


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device. Copies to a GPU are asynchronous, from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _sample_columns(allowed: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """For each row, sample `count` of the columns where `allowed` is true, without replacement.

    `allowed` has shape (..., columns), and the result (..., count). The columns with the largest random scores are a
    uniform sample in random order.
    """
    scores = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1)
    return scores.topk(count, dim=-1).indices


def _check_indices(name: str, indices: Tensor, length: int | None, bound: int) -> None:
    shape = "(any number,)" if length is None else f"({length},)"
    if indices.dtype != torch.int64 or indices.ndim != 1 or (length is not None and len(indices) != length):
        raise InputError(f"{name} is {describe(indices)}, but must be int64 of shape {shape}.")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < bound:
        raise InputError(
            f"{name} has indices from {int(indices.min())} to {int(indices.max())}, "
            f"but there are {bound} names. Use indices from 0 to {bound - 1}."
        )


def _data_name(data: LabeledImages) -> str:
    return f"{str(data.load_arguments['name'])!r}, " if data.load_arguments else ""


def _quantity(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
