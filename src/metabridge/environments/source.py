"""What the files of a data set hold before any image is decoded: its classes and where its pictures are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metabridge.errors import InputError

READ = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
IMAGES = frozenset({*READ, ".heic", ".heif", ".avif", ".jxl"})  # the last only with what Pillow has learnt beside
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
SHARES = {"validation": 0.16, "test": 0.2}  # Of the classes, as in mini-ImageNet; the rest is for training.

Content = bytes | NDArray[np.uint8] | Callable[[], bytes]


class Picture(NamedTuple):
    """One image: the name it is known by, the index of its class, and its file or its pixels.

    Pixels are uint8 of shape (height, width) or (height, width, 3). What is still to be read comes as
    a function, so that a file that cannot be read is found out where images are decoded.
    """

    name: str
    label: int
    content: Content


class Category(NamedTuple):
    """A class: its name, its superclass, and its split, which is empty where none is given."""

    name: str
    superclass: str
    split: str


@dataclass(frozen=True)
class Source:
    """The classes of a data set and its pictures, one after the other.

    `form` says in words what the files are, and `notes` what a user should know of how they were read.
    """

    form: str
    classes: tuple[Category, ...]
    total: int
    pictures: Callable[[], Iterator[Picture]]
    notes: tuple[str, ...] = ()


def listed(form: str, classes: Mapping[Category, Sequence[str]], read: Callable[[str], bytes]) -> Source:
    """Return a source of named files; `read` gives the content of one of them.

    >>> source = listed("a toy", {Category("cat", "animals", "train"): ["cat/1.png"]}, read=str.encode)
    >>> [(picture.name, picture.label) for picture in source.pictures()]
    [('cat/1.png', 0)]
    """

    def pictures() -> Iterator[Picture]:
        for label, names in enumerate(classes.values()):
            for name in names:
                yield Picture(name, label, partial(read, name))

    return Source(form, tuple(classes), sum(map(len, classes.values())), pictures)


def class_folders(root: Path) -> dict[str, list[str]]:
    """Return the images of every class folder below `root`, all named relative to it.

    A folder that holds images is a class; so is one that holds nothing at all, and then it is empty.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "trees", "oak").mkdir(parents=True)
    ...     Path(root, "trees", "oak", "1.png").touch()
    ...     Path(root, "trees", "elm").mkdir()
    ...     class_folders(Path(root))
    {'trees/elm': [], 'trees/oak': ['trees/oak/1.png']}
    """
    found = {}
    for folder, inner, files in os.walk(root, followlinks=True):
        inner[:] = sorted(name for name in inner if not _hidden(name))
        images = sorted(name for name in files if not _hidden(name) and Path(name).suffix.lower() in IMAGES)
        name = Path(folder).relative_to(root).as_posix()
        if name != "." and (images or not inner):
            found[name] = [f"{name}/{image}" for image in images]
    return found


def split_folders(root: Path) -> dict[str, Path]:
    """Return the folders of `root` that are named after a split, by that split.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "val").mkdir()
    ...     [(split, folder.name) for split, folder in split_folders(Path(root)).items()]
    [('validation', 'val')]
    """
    return {split: root / name for name, split in SPLITS.items() if (root / name).is_dir()}


def tree(root: Path) -> list[Path]:
    """Return every file below `root` that is not hidden, and every empty folder, in order of name.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "b.png").touch(); Path(root, ".DS_Store").touch()
    ...     [file.name for file in tree(Path(root))]
    ['b.png']
    """
    found = []
    for folder, inner, files in os.walk(root, followlinks=True):
        inner[:] = sorted(name for name in inner if not _hidden(name))
        shown = sorted(name for name in files if not _hidden(name))
        found += [Path(folder, name) for name in shown] if shown or inner else [Path(folder)]
    return found


def split_by_class(classes: Sequence[Category], seed: int = 0) -> tuple[Category, ...]:
    """Give classes that have no split one by chance: 64 % train, 16 % validation, 20 % test.

    The choice rests on the seed and on the names alone. Three classes or more give every split one.

    >>> [split for *_, split in split_by_class([Category(name, "", "") for name in "abcdefghij"])].count("train")
    6
    """
    if all(category.split for category in classes):
        return tuple(classes)
    if seed < 0:
        raise InputError(f"seed is {seed}, but must not be negative. Use seed=0 or more.")
    order = sorted(range(len(classes)), key=lambda index: classes[index].name)
    order = [order[place] for place in np.random.default_rng(seed).permutation(len(order))]
    split_of: dict[int, str] = {}
    for split in ("test", "validation"):
        some = 1 if len(order) > 1 + (split == "test" and len(classes) > 2) else 0
        for _ in range(max(round(SHARES[split] * len(classes)), some)):
            split_of[order.pop()] = split
    return tuple(category._replace(split=split_of.get(index, "train")) for index, category in enumerate(classes))


def pooled(source: Source) -> Source:
    """Undo splits that are no splits of the classes, so that the classes can be split.

    A single split is the whole set. Splits that share a class are made for learning every class from
    many images: all images of a class are then one class, and `notes` says so.

    >>> classes = (Category("cat", "", "train"), Category("cat", "", "test"))
    >>> pooled(Source("a toy", classes, 0, lambda: iter(()))).classes
    (Category(name='cat', superclass='', split=''),)
    """
    splits_of: dict[tuple[str, str], list[str]] = {}
    for name, superclass, split in source.classes:
        splits_of.setdefault((name, superclass), []).append(split)
    shared = [name for (name, _), splits in splits_of.items() if len(splits) > 1]
    splits = {category.split for category in source.classes}
    if not shared and len(splits) > 1 and "" not in splits:
        return source
    merged = {key: label for label, key in enumerate(splits_of)}
    label_of = [merged[name, superclass] for name, superclass, _ in source.classes]
    notes = source.notes
    if shared:
        one, other, *_ = next(splits for splits in splits_of.values() if len(splits) > 1)
        notes += (
            f"class '{shared[0]}' is in split '{one}' and in '{other}', so these are splits of images, not of classes: "
            "all images of a class are put together, and the classes are split by the seed.",
        )
    return replace(
        source,
        classes=tuple(Category(*key, "") for key in merged),
        pictures=lambda: (picture._replace(label=label_of[picture.label]) for picture in source.pictures()),
        notes=notes,
    )


def read_bytes(file: Path) -> bytes:
    """Return the content of a file that the data set cannot do without.

    >>> read_bytes(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere cannot be read (No such file or directory).
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).") from error


def named(names: Iterable[str], most: int = 5) -> str:
    """List names for a sentence, and count those that would make it too long.

    >>> named(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    names = list(names)
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
