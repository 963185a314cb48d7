"""N-way K-shot classification tasks out of a set of labelled images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count, describe

log = logging.getLogger("metabridge")

Superclass = Literal["any", "same", "different"]


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images with a class each, classes with a superclass each, and a split of the classes.

    `images` is uint8 of shape `(n, channels, height, width)` and `labels`, int64 of shape `(n,)`,
    says which of `class_names` each shows. `superclasses`, int64 of shape `(classes,)`, is the index
    of each class's superclass in `superclass_names`. `splits` gives each split's classes, int64.

    >>> images = LabelledImages(
    ...     images=torch.zeros(8, 1, 28, 28, dtype=torch.uint8),
    ...     labels=torch.arange(8) % 4,
    ...     class_names=("cat", "dog", "oak", "elm"),
    ...     superclasses=torch.tensor([0, 0, 1, 1]),
    ...     superclass_names=("animals", "trees"),
    ...     splits={"train": torch.tensor([0, 2]), "test": torch.tensor([1, 3])},
    ... )
    >>> images.tasks("test", ways=2, shots=1, queries=1).class_names
    ('dog', 'elm')
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    superclasses: Tensor
    superclass_names: tuple[str, ...]
    splits: dict[str, Tensor]
    load_arguments: dict[str, object] | None = None  # what `datasets.load` was given, so that a saved run can find them

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise InputError(
                f"images is {describe(self.images)}, but must be uint8 of shape (n, channels, height, width)."
            )
        classes = len(self.class_names)
        _check_indices("labels", self.labels, len(self.images), classes)
        _check_indices("superclasses", self.superclasses, classes, len(self.superclass_names))
        owner: dict[int, str] = {}
        for split, members in self.splits.items():
            _check_indices(f"splits[{split!r}]", members, None, classes)
            if len(members) == 0:
                raise InputError(f"split '{split}' has no classes. Give it some or leave it out.")
            for member in members.tolist():
                if member in owner:
                    raise InputError(
                        f"class '{self.class_names[member]}' is in split '{owner[member]}' and in '{split}'"
                        f"{' (twice)' if owner[member] == split else ''}. List every class once, in one split."
                    )
                owner[member] = split

    def tasks(
        self, split: str, *, ways: int = 5, shots: int = 1, queries: int = 15, superclass: Superclass = "any"
    ) -> ImageTasks:
        """Return the environment of tasks over the classes of one split."""
        return ImageTasks(self, split, ways=ways, shots=shots, queries=queries, superclass=superclass)

    def batches(self, split: str, *, size: int = 64) -> ImageBatches:
        """Return the environment of plain batches over all classes of one split."""
        return ImageBatches(self, split, size=size)

    def with_rotations(self, splits: Collection[str] | None = None) -> LabelledImages:
        """Add every class of the splits, or of all, turned by 90°, 180° and 270° as a class of its own.

        A turned class is in the superclass and the split of the one it was made of.
        """
        names = set(self.splits if splits is None else splits)
        if not names or not names <= self.splits.keys():
            raise InputError(f"splits is {_listed(sorted(names))}, but these images have {_listed(self.splits)}.")
        height, width = self.images.shape[-2:]
        if height != width:
            raise InputError(f"images are {height}×{width} pixels, but only squares keep their shape when turned.")
        members = torch.cat([classes for split, classes in self.splits.items() if split in names])
        place = torch.full((len(self.class_names),), -1)
        place[members] = torch.arange(len(members))  # where each class is among those that are turned
        rows = (place[self.labels] >= 0).nonzero().squeeze(1)
        chosen = self.images[rows.to(self.images.device)]
        first = len(self.class_names)  # of the turned classes
        offsets = [first + (quarter - 1) * len(members) for quarter in (1, 2, 3)]
        old = [self.class_names[index] for index in members.tolist()]
        return replace(
            self,
            images=torch.cat([self.images, *(torch.rot90(chosen, quarter, (2, 3)) for quarter in (1, 2, 3))]),
            labels=torch.cat([self.labels, *(place[self.labels[rows]] + offset for offset in offsets)]),
            class_names=(*self.class_names, *(f"{name}/turned{angle}" for angle in (90, 180, 270) for name in old)),
            superclasses=torch.cat([self.superclasses, self.superclasses[members].repeat(3)]),
            splits={
                split: torch.cat([own, *(place[own] + offset for offset in offsets)]) if split in names else own
                for split, own in self.splits.items()
            },
        )

    def split_class_names(self, split: str) -> tuple[str, ...]:
        """Names of a split's classes, in its order."""
        return tuple(self.class_names[index] for index in self.splits[split].tolist())

    def float_images(self, rows: Tensor) -> Tensor:
        """Return the images at the indices `rows`, of any shape, with values from 0 to 1."""
        return self.images[copy_to_device(rows, self.images.device)].float() / 255

    def to(self, device: torch.device | str) -> LabelledImages:
        """Put the images on a device if they fit; labels and splits stay on the CPU, where tasks are drawn.

        Images that would take more than most of a GPU's free memory stay, and go there batch by batch.
        """
        device = torch.device(device)
        if device.type == "cuda" and not self.images.is_cuda:
            free = torch.cuda.mem_get_info(device)[0]
            if self.images.nbytes > 0.7 * free:
                log.warning(
                    "%.1f GiB of images stay in memory, as the GPU has %.1f GiB free; training will be slower.",
                    self.images.nbytes / 2**30,
                    free / 2**30,
                )
                return self
        return replace(self, images=self.images.to(device))


@dataclass(frozen=True, eq=False)
class ImageTasks:
    """Tasks of `ways` classes with `shots` support and `queries` query images of each.

    With `superclass="same"` the classes of a task share a superclass, which makes it hard; with
    `"different"` no two of them do, which makes it easy. Tasks are drawn on the CPU and only looked
    up where the images are, so a seed gives the same tasks on every device.

    >>> from metabridge.datasets import load
    >>> environment = load("glyphs").tasks("test", ways=5, shots=1, queries=15)
    >>> tasks = environment.sample(8, torch.Generator().manual_seed(0))
    >>> tasks.query_x.shape, tasks.support_y[0].tolist()
    (torch.Size([8, 75, 1, 28, 28]), [0, 1, 2, 3, 4])
    """

    data: LabelledImages
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
                raise InputError("no class is left in any split. Lower min_images, or add images.")
            raise InputError(f"split is '{self.split}', but these images have {_listed(self.data.splits)}. Use one.")
        if self.superclass not in get_args(Superclass):
            raise InputError(f"superclass is '{self.superclass}', but must be one of {_listed(get_args(Superclass))}.")
        if self.ways > self.classes:
            way_out = f"Use ways={self.classes} or fewer" if self.classes > 1 else "Add classes"
            has = _count(self.classes, "class", "classes")
            raise InputError(f"ways is {self.ways}, but split '{self.split}' has {has}. {way_out}.")
        self._check_superclasses()
        self._check_image_counts()

    @property
    def outputs(self) -> int:
        """One output a way."""
        return self.ways

    @property
    def classes(self) -> int:
        """How many classes the split has."""
        return len(self.data.splits[self.split])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the split's classes, in the order that `Episodes.classes` counts them."""
        return self.data.split_class_names(self.split)

    @property
    def image_indices(self) -> Tensor:
        """Indices of the split's images, int64."""
        return self._rows[self._filled]

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks with the (CPU) generator; a task's points are ordered class by class."""
        return self.sample_indices(tasks, generator).to_episodes(self.data.float_images)

    def sample_indices(self, tasks: int, generator: torch.Generator) -> TaskIndices:
        """Draw tasks as `sample` does, but say only which images they are made of."""
        check_count("tasks", tasks)
        classes = self._draw_classes(tasks, generator)
        places = _draw(self._filled[classes], self.shots + self.queries, generator)
        rows = self._rows[classes].gather(-1, places)
        return TaskIndices(classes, rows[..., : self.shots], rows[..., self.shots :])

    def _draw_classes(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Indices within the split, (tasks, ways), in random order."""
        members = self._members
        if self.superclass == "any":
            return _draw(torch.ones(tasks, self.classes, dtype=torch.bool), self.ways, generator)
        if self.superclass == "same":
            chosen = self._large[torch.randint(len(self._large), (tasks,), generator=generator)]
            return _draw(members[chosen], self.ways, generator)
        chosen = _draw(torch.ones(tasks, len(members), dtype=torch.bool), self.ways, generator)
        return _draw(members[chosen], 1, generator).squeeze(-1)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """Image indices of each class, padded to the largest, and which of them are not padding."""
        split, labels = self.data.splits[self.split], self.data.labels
        by_class = torch.argsort(labels, stable=True)
        counts = torch.bincount(labels, minlength=len(self.data.class_names))
        starts = counts.cumsum(0) - counts
        places = torch.arange(int(counts[split].max()))
        filled = places < counts[split][:, None]
        rows = by_class[torch.where(filled, starts[split][:, None] + places, 0)]
        return rows, filled

    @property
    def _rows(self) -> Tensor:
        return self._table[0]

    @property
    def _filled(self) -> Tensor:
        return self._table[1]

    @cached_property
    def _members(self) -> Tensor:
        """Which of the split's classes (columns) each superclass present in it (rows) holds."""
        own = self.data.superclasses[self.data.splits[self.split]]
        members = own == torch.arange(len(self.data.superclass_names))[:, None]
        return members[members.any(dim=1)]

    @cached_property
    def _large(self) -> Tensor:
        """The superclasses (rows of `_members`) with enough classes for a task."""
        return (self._members.sum(dim=1) >= self.ways).nonzero().squeeze(1)

    def _check_superclasses(self) -> None:
        sizes = self._members.sum(dim=1)
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
        counts = self._filled.sum(dim=1)
        smallest, needed = int(counts.argmin()), self.shots + self.queries
        fewest = int(counts[smallest])
        if fewest < needed:
            way_out = f"Use queries={fewest - self.shots} or fewer" if fewest > self.shots else "Use fewer shots"
            if int((counts >= needed).sum()) >= self.ways:
                way_out += (
                    f", or leave out classes with fewer than {needed} images (min_images={needed}, on the command line "
                    f"--min-images {needed})"
                )
            raise InputError(
                f"class '{self.class_names[smallest]}' has {_count(fewest, 'image')}, but "
                f"{_count(self.shots, 'shot')} + {_count(self.queries, 'query', 'queries')} need {needed}. "
                f"{way_out}."
            )


class TaskIndices(NamedTuple):
    """Tasks as indices: the classes of each, counted within the split, and the images of each class."""

    classes: Tensor  # (tasks, ways)
    support: Tensor  # (tasks, ways, shots)
    query: Tensor  # (tasks, ways, queries)

    def to_episodes(self, float_images: Callable[[Tensor], Tensor]) -> Episodes:
        """Return the tasks with what `float_images` finds at the images' indices, (points,) -> (points, ...)."""
        tasks, ways = self.classes.shape
        sets = (self.support, self.query)
        found = float_images(torch.cat([rows.flatten() for rows in sets]))  # one copy to a GPU instead of two
        support_x, query_x = (each.unflatten(0, (tasks, -1)) for each in found.split([rows.numel() for rows in sets]))
        own = torch.arange(ways, device=found.device)
        support_y, query_y = (own.repeat_interleave(rows.shape[-1]).expand(tasks, -1).clone() for rows in sets)
        return Episodes(support_x, support_y, query_x, query_y, copy_to_device(self.classes, found.device))


@dataclass(frozen=True, eq=False)
class ImageBatches:
    """Batches of `size` images out of a whole split, for training one classifier over all of its classes.

    Each batch is a task of one set whose ways are all the classes.

    >>> from metabridge.datasets import load
    >>> batches = load("glyphs").batches("train", size=64)
    >>> batches.sample(1, torch.Generator().manual_seed(0)).support_x.shape
    torch.Size([1, 64, 1, 28, 28])
    """

    data: LabelledImages
    split: str
    size: int = 64

    def __post_init__(self) -> None:
        check_count("size", self.size)
        ImageTasks(self.data, self.split, ways=1, shots=1, queries=1)  # the same checks of the split

    @property
    def outputs(self) -> int:
        """One output a class."""
        return self.classes

    @property
    def classes(self) -> int:
        """How many classes the split has."""
        return len(self.data.splits[self.split])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the split's classes, in the order of the outputs."""
        return self.data.split_class_names(self.split)

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw batches with the (CPU) generator, each image as likely as any other."""
        check_count("tasks", tasks)
        rows, labels = self._members
        chosen = torch.randint(len(rows), (tasks, self.size), generator=generator)
        x = self.data.float_images(rows[chosen])
        y = copy_to_device(labels[chosen], x.device)
        return Episodes(x, y, x, y, torch.arange(self.classes, device=x.device).expand(tasks, -1))

    @cached_property
    def _members(self) -> tuple[Tensor, Tensor]:
        """Indices of the split's images, and the class of each, counted within the split."""
        place = torch.full((len(self.data.class_names),), -1)
        place[self.data.splits[self.split]] = torch.arange(self.classes)
        labels = place[self.data.labels]
        rows = (labels >= 0).nonzero().squeeze(1)
        return rows, labels[rows]


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor's copy on `device`, without waiting for what a GPU still has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _draw(allowed: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Choose `count` of the allowed places of each row, (..., places) -> (..., count), without replacement.

    The places with the highest random scores are a uniform choice in uniform order.
    """
    scores = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1)
    return scores.topk(count, dim=-1).indices


def _check_indices(name: str, indices: Tensor, length: int | None, bound: int) -> None:
    shape = "(any number,)" if length is None else f"({length},)"
    if indices.dtype != torch.int64 or indices.ndim != 1 or (length is not None and len(indices) != length):
        raise InputError(f"{name} is {describe(indices)}, but must be int64 of shape {shape}.")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < bound:
        raise InputError(
            f"{name} holds indices from {int(indices.min())} to {int(indices.max())}, "
            f"but there are {bound} names to point to. Use indices from 0 to {bound - 1}."
        )


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
