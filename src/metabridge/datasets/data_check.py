"""Check an image data set before training: sizes, unreadable and duplicate images, and which tasks are possible."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from metabridge.datasets.image_decoding import Unreadable, map_images, open_image, to_8_bit
from metabridge.datasets.image_files import Content, assign_splits, reading_errors
from metabridge.datasets.loading import DATASETS, detect, existing_path
from metabridge.errors import InputError, check_count
from metabridge.html_table import html_table


class SplitReport(NamedTuple):
    """The classes and images of one split.

    Args:
        name: "train", "validation" or "test".
        classes: Number of classes.
        images: Number of readable images.
        fewest: Number of readable images in the class that has the fewest.
        median: Median number of readable images per class.
        most: Number of readable images in the class that has the most.
        obstacle: The reason why the requested tasks cannot be sampled, with a fix or, for the validation split, the
            tasks that are sampled instead; empty if the requested tasks can be sampled.

    >>> SplitReport("test", classes=2, images=9, fewest=4, median=4.5, most=5, obstacle="").median
    4.5
    """

    name: str
    classes: int
    images: int
    fewest: int
    median: float
    most: int
    obstacle: str


class ImageSummary(NamedTuple):
    """The width, height and Pillow mode of an image file, and a digest of its RGB pixels."""

    width: int
    height: int
    mode: str
    digest: bytes


@dataclass(frozen=True)
class DatasetReport:
    """The result of `check_dataset`.

    Args:
        data: The kind of data set, as a key of `DATASETS`, such as "omniglot" or "folder".
        description: A description of the files, such as "folders of images".
        splits: The report of each split.
        sizes: Number of images of each size (width, height), most frequent first.
        modes: Number of images of each Pillow mode, such as "RGB", most frequent first.
        unreadable: The unreadable images, as pairs (name, reason).
        duplicates: Groups of equal images that are in more than one split. Each image is a pair (split, name).
        empty_classes: The names of classes without a readable image.
        notes: Remarks on how the files were read.

    >>> DatasetReport("folder", "folders of images", (), {}, {}, (), (), empty_classes=("oak",), notes=()).fine
    False
    """

    data: str
    description: str
    splits: tuple[SplitReport, ...]
    sizes: dict[tuple[int, int], int]
    modes: dict[str, int]
    unreadable: tuple[tuple[str, str], ...]
    duplicates: tuple[tuple[tuple[str, str], ...], ...]
    empty_classes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def fine(self) -> bool:
        """Whether there are no problems, and the requested tasks can be sampled from every split.

        If the validation split is too small, training validates on tasks with fewer ways or queries. An obstacle in the
        validation split is therefore ignored if that split has at least two classes.
        """
        obstacles = any(split.obstacle for split in self.splits if split.name != "validation" or split.classes < 2)
        return not (self.unreadable or self.duplicates or self.empty_classes or obstacles)

    def _repr_html_(self) -> str:
        """Return a table of the splits and the number of problems, for notebooks."""
        problems = {
            "unreadable images": self.unreadable,
            "groups of duplicates": self.duplicates,
            "empty classes": self.empty_classes,
        }
        counts = ", ".join(f"{len(entries):,} {name}" for name, entries in problems.items())
        rows = [
            (split.name, f"{split.classes:,}", f"{split.images:,}", split.obstacle or "none") for split in self.splits
        ]
        caption = f"{self.data}: {self.description}; {counts}"
        return html_table(caption, ("split", "classes", "images", "problem"), rows)


def summarize_image(content: Content) -> ImageSummary:
    """Decode an image and summarize it.

    >>> import numpy as np
    >>> summarize_image(np.zeros((4, 6), dtype=np.uint8))[:3]
    (6, 4, 'L')
    """
    image = open_image(content)
    width, height, mode = *image.size, image.mode
    rgb = to_8_bit(image, 3)
    # The salt distinguishes images of different shapes whose pixels are the same bytes.
    digest = hashlib.blake2b(rgb.tobytes(), digest_size=16, salt=str(rgb.size).encode()[:16]).digest()
    return ImageSummary(width, height, mode, digest)


def check_dataset(
    path: str | Path, *, data: str | None = None, ways: int = 5, shots: int = 1, queries: int = 15, seed: int = 0
) -> DatasetReport:
    """Read every image of a data set and report problems. Nothing is written.

    Images are duplicates if their RGB pixels at full size are equal, even if the file formats differ.

    Args:
        path: The folder or file of the data set.
        data: The kind of data set, as a key of `DATASETS`. Default: detected from the files.
        ways: Number of classes per task.
        shots: Support images per class.
        queries: Query images per class.
        seed: Seed of the random split of the classes, as in `load`. Unused if the data set defines splits.

    Returns:
        The report. Its property `fine` is true if there are no problems.

    Raises:
        InputError: The data set is unknown or damaged, or no image is readable.

    >>> import numpy as np
    >>> from PIL import Image
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     for split, name in [("train", "cat"), ("test", "oak")]:
    ...         Path(root, split, name).mkdir(parents=True)
    ...         Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(Path(root, split, name, "1.png"))
    ...     check_dataset(root, ways=1, shots=1, queries=1).duplicates
    ((('train', 'train/cat/1.png'), ('test', 'test/oak/1.png')),)
    """
    for option, value in (("ways", ways), ("shots", shots), ("queries", queries)):
        check_count(option, value)
    root = existing_path("the data set", path)
    if data is not None and data not in DATASETS:
        names = ", ".join(f"'{name}'" for name in DATASETS)
        raise InputError(f"data is '{data}', but must be one of {names}.")
    name = data or detect(root)
    with reading_errors(root):
        source = DATASETS[name].open_source(root)

    counts: Counter[int] = Counter()
    image_sizes: Counter[tuple[int, int]] = Counter()
    modes: Counter[str] = Counter()
    unreadable = []
    images_by_digest: dict[bytes, list[tuple[int, str]]] = {}
    for image, result in map_images(source, summarize_image, f"Checking {name}"):
        if isinstance(result, Unreadable):
            unreadable.append((image.name, result.reason))
        else:
            counts[image.label] += 1
            image_sizes[result.width, result.height] += 1
            modes[result.mode] += 1
            images_by_digest.setdefault(result.digest, []).append((image.label, image.name))
    if not counts:
        raise InputError(f"None of the {source.total} images in {path} can be read. Convert them to PNG or JPEG.")

    labels = sorted(counts)
    split_of = {
        label: info.split
        for label, info in zip(labels, assign_splits([source.classes[label] for label in labels], seed))
    }
    # `large_class_counts`: the number of classes that each split would have with --min-images. Without the small
    # classes, a random split is a different one, so the remaining classes are split again.
    large_classes = [source.classes[label] for label in labels if counts[label] >= shots + queries]
    large_class_counts = Counter(info.split for info in assign_splits(large_classes, seed))
    groups_of_equal_images = (
        [(split_of[label], name) for label, name in group] for group in images_by_digest.values() if len(group) > 1
    )
    class_sizes_of = {
        split: [counts[label] for label in labels if split_of[label] == split]
        for split in ("train", "validation", "test")
        if split in split_of.values()
    }
    smallest_class: dict[str, str] = {}  # split -> name of its smallest class
    for label in sorted(labels, key=counts.__getitem__):
        smallest_class.setdefault(split_of[label], source.classes[label].name)
    return DatasetReport(
        data=name,
        description=source.description,
        splits=tuple(
            SplitReport(
                split,
                classes=len(class_sizes),
                images=sum(class_sizes),
                fewest=min(class_sizes),
                median=median(class_sizes),
                most=max(class_sizes),
                obstacle=_obstacle(
                    split, class_sizes, smallest_class[split], ways, shots, queries, large_class_counts.get(split, 0)
                ),
            )
            for split, class_sizes in class_sizes_of.items()
        ),
        sizes=dict(image_sizes.most_common()),
        modes=dict(modes.most_common()),
        unreadable=tuple(unreadable),
        duplicates=tuple(tuple(group) for group in groups_of_equal_images if len({split for split, _ in group}) > 1),
        empty_classes=tuple(info.name for label, info in enumerate(source.classes) if label not in counts),
        notes=source.notes,
    )


def _obstacle(
    split: str,
    class_sizes: list[int],
    smallest_class: str,
    ways: int,
    shots: int,
    queries: int,
    large_class_count: int,
) -> str:
    """Return the reason why tasks cannot be sampled from a split, with a fix; an empty string if they can be sampled.

    During training, validation uses fewer ways and queries if necessary. For the validation split, the returned text
    therefore describes the tasks that are used instead.

    `class_sizes` contains the number of images of each class, `smallest_class` is the name of the smallest class, and
    `large_class_count` is the number of classes that the split would have if classes with too few images were omitted.
    """
    if len(class_sizes) < ways:
        if len(class_sizes) == 1:
            return f"{ways} ways need {ways} classes, but there is 1: add more classes"
        if split == "validation":
            return f"{len(class_sizes)} classes, so validation tasks will have {len(class_sizes)} ways"
        return f"{ways} ways need {ways} classes, but there are {len(class_sizes)}: use fewer ways, or add more classes"
    needed = shots + queries
    if min(class_sizes) < needed:
        if split == "validation":
            return (
                f"{shots}-shot tasks with {queries} queries need {needed} images per class, but '{smallest_class}' has "
                f"{min(class_sizes)}, so validation tasks will have fewer queries if necessary"
            )
        small_classes = sum(size < needed for size in class_sizes)
        suggestion = f"; --min-images {needed} leaves {large_class_count} classes" if large_class_count >= ways else ""
        classes = "1 class has" if small_classes == 1 else f"{small_classes} classes have"
        return (
            f"{shots}-shot tasks with {queries} queries need {needed} images per class, but {classes} fewer: "
            f"'{smallest_class}' has {min(class_sizes)}{suggestion}"
        )
    return ""
