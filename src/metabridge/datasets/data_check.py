"""What a data set on disk holds, what is wrong with it, and which tasks it allows, before anything is trained."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from metabridge.datasets.image_decoding import Unreadable, each, opened, plain
from metabridge.datasets.image_files import Content, readable, split_by_class
from metabridge.datasets.loading import DATASETS, detect, existing
from metabridge.errors import InputError, check_count


class SplitReport(NamedTuple):
    """Classes and images of one split, and what stands against the tasks asked for, if anything does."""

    name: str
    classes: int
    images: int
    fewest: int
    median: float
    most: int
    obstacle: str


class Look(NamedTuple):
    """What one picture looks like: width, height and mode in its file, and a digest of its pixels in RGB."""

    width: int
    height: int
    mode: str
    digest: bytes


@dataclass(frozen=True)
class DatasetReport:
    """What was found. `duplicates` has groups of the same picture in more than one split, by split and name."""

    data: str
    form: str
    splits: tuple[SplitReport, ...]
    sizes: dict[tuple[int, int], int]
    modes: dict[str, int]
    unreadable: tuple[tuple[str, str], ...]
    duplicates: tuple[tuple[tuple[str, str], ...], ...]
    empty: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong and the tasks asked for can be made in every split.

        Validation does with fewer ways and queries.
        """
        hindered = any(split.obstacle for split in self.splits if split.name != "validation" or split.classes < 2)
        return not (self.unreadable or self.duplicates or self.empty or hindered)


def look(content: Content) -> Look:
    """Decode one picture and describe it.

    >>> import numpy as np
    >>> look(np.zeros((4, 6), dtype=np.uint8))[:3]
    (6, 4, 'L')
    """
    image = opened(content)
    width, height, mode = *image.size, image.mode
    upright = plain(image, 3)
    digest = hashlib.blake2b(upright.tobytes(), digest_size=16, salt=str(upright.size).encode()[:16]).digest()
    return Look(width, height, mode, digest)


def check_dataset(
    path: str | Path, *, data: str | None = None, ways: int = 5, shots: int = 1, queries: int = 15, seed: int = 0
) -> DatasetReport:
    """Read every image of a data set and report; `data` is its name, detected if left out.

    Two pictures count as the same if their pixels do, at full size and in RGB, whatever their files.
    Classes without a split are split by the seed, as `load` does. Nothing is written.

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
    place = existing("the data set", path)
    if data is not None and data not in DATASETS:
        known = ", ".join(f"'{name}'" for name in DATASETS)
        raise InputError(f"data is '{data}', but the data sets on disk are {known}. Use one of these.")
    name = data or detect(place)
    with readable(place):
        source = DATASETS[name].source(place)

    counts: Counter[int] = Counter()
    sizes: Counter[tuple[int, int]] = Counter()
    modes: Counter[str] = Counter()
    unreadable = []
    seen: dict[bytes, list[tuple[int, str]]] = {}
    for picture, result in each(source, look, f"Checking {name}"):
        if isinstance(result, Unreadable):
            unreadable.append((picture.name, result.reason))
        else:
            counts[picture.label] += 1
            sizes[result.width, result.height] += 1
            modes[result.mode] += 1
            seen.setdefault(result.digest, []).append((picture.label, picture.name))
    if not counts:
        raise InputError(f"{path} has no image that can be read ({source.total} tried).")

    present = sorted(counts)
    split_of = {
        label: category.split
        for label, category in zip(present, split_by_class([source.classes[label] for label in present], seed))
    }
    large = [source.classes[label] for label in present if counts[label] >= shots + queries]
    left = Counter(category.split for category in split_by_class(large, seed))
    groups = ([(split_of[label], file) for label, file in group] for group in seen.values() if len(group) > 1)
    splits = {split: [counts[label] for label in present if split_of[label] == split] for split in _order(split_of)}
    smallest: dict[str, str] = {}
    for label in sorted(present, key=counts.__getitem__):
        smallest.setdefault(split_of[label], source.classes[label].name)
    return DatasetReport(
        data=name,
        form=source.form,
        splits=tuple(
            SplitReport(
                split,
                classes=len(images),
                images=sum(images),
                fewest=min(images),
                median=median(images),
                most=max(images),
                obstacle=_obstacle(images, smallest[split], ways, shots, queries, left.get(split, 0)),
            )
            for split, images in splits.items()
        ),
        sizes=dict(sizes.most_common()),
        modes=dict(modes.most_common()),
        unreadable=tuple(unreadable),
        duplicates=tuple(tuple(group) for group in groups if len({split for split, _ in group}) > 1),
        empty=tuple(category.name for label, category in enumerate(source.classes) if label not in counts),
        notes=source.notes,
    )


def _order(split_of: dict[int, str]) -> list[str]:
    return [split for split in ("train", "validation", "test") if split in split_of.values()]


def _obstacle(images: list[int], smallest: str, ways: int, shots: int, queries: int, left: int) -> str:
    """Why a split does not allow the tasks, and the way out; empty if it does.

    So many classes are `left` in it without those that are too small.
    """
    if len(images) < ways:
        if len(images) == 1:
            return f"{ways} ways need {ways} classes, but there is 1: add some"
        return f"{ways} ways need {ways} classes, but there are {len(images)}: use fewer ways, or more classes"
    needed = shots + queries
    if min(images) < needed:
        few = sum(count < needed for count in images)
        way_out = f"; --min-images {needed} leaves {left} classes" if left >= ways else ""
        classes = "1 class has" if few == 1 else f"{few} classes have"
        return (
            f"{shots}-shot tasks with {queries} queries need {needed} images a class, but {classes} fewer: "
            f"'{smallest}' has {min(images)}{way_out}"
        )
    return ""
