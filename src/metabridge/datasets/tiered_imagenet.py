"""tiered-ImageNet (Ren et al., 2018): 608 classes in 34 categories; no category is in two splits.

Read from `train_images_png.pkl`, `train_labels.pkl` and so on (val, test), or from folders train, val
and test with a folder of images for every class. Superclasses are the categories, of which the
pickles have their own names and of which a table here says the WordNet numbers for the folders.
Images are 84 × 84, RGB, their channels in the order of the files.

`*_images_png.pkl` is a list of PNG files as arrays of bytes. `*_labels.pkl` is a dictionary with
`label_specific` and `label_general`, the class and category of each image as numbers, and
`label_specific_str` and `label_general_str`, the names that these count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from metabridge.datasets.image_decoding import Form
from metabridge.datasets.image_files import (
    Category,
    Content,
    Picture,
    Source,
    as_text,
    class_folders,
    eight_bits,
    image_bytes,
    indices,
    listed,
    read_bytes,
    shortened,
    split_folders,
    texts,
    tree,
)
from metabridge.datasets.safe_unpickle import unpickle
from metabridge.datasets.splits import table
from metabridge.errors import InputError

FORM = Form(size=84, channels=3)
PARTS = {"train": "train", "val": "validation", "test": "test"}
MOST_CLASSES = 100_000  # Where the files do not name them.


def holds(root: Path) -> bool:
    """Say whether a folder has the pickles, or folders named as tiered-ImageNet's classes in its splits.

    >>> holds(Path("nowhere"))
    False
    """
    return bool(_pickles(root)) or _is_tree(root)


def files(root: Path) -> list[Path]:
    """Return the files that the data set is read from.

    >>> files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither train_images_png.pkl and its like nor folders train, ...
    """
    if pickles := _pickles(root):
        return [file for pair in pickles.values() for file in pair]
    if _is_tree(root):
        return [file for folder in split_folders(root).values() for file in tree(folder)]
    raise InputError(
        f"{root} has neither train_images_png.pkl and its like nor folders train, val and test "
        "of tiered-ImageNet's classes. Put one of these there."
    )


def source(root: Path) -> Source:
    """Return the classes and images of either form.

    >>> source(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither train_images_png.pkl and its like nor folders train, ...
    """
    files(root)
    pickles = _pickles(root)
    return _from_pickles(pickles) if pickles else _from_tree(root)


def _pickles(root: Path) -> dict[str, tuple[Path, Path]]:
    pairs = {split: (root / f"{part}_images_png.pkl", root / f"{part}_labels.pkl") for part, split in PARTS.items()}
    found = {split: pair for split, pair in pairs.items() if pair[0].is_file()}
    for images, labels in found.values():
        if not labels.is_file():
            raise InputError(f"{labels.name} is not beside {images}. Put it there.")
    return found


def _is_tree(root: Path) -> bool:
    known = {(split, name) for split, name, _ in table("tiered_imagenet")}
    folders = split_folders(root)
    found = {(split, inner.name) for split, folder in folders.items() for inner in folder.iterdir() if inner.is_dir()}
    return bool(found) and found <= known


def _from_tree(root: Path) -> Source:
    category = {name: general for _, name, general in table("tiered_imagenet")}
    splits = {folder.name: split for split, folder in split_folders(root).items()}
    folders = class_folders(root, list(splits))
    classes = {}
    for path, images in folders.images.items():
        part, _, name = path.partition("/")
        if name in category:
            classes[Category(name, category[name], splits[part])] = images
    return listed("tiered-ImageNet, folders", classes, lambda name: image_bytes(root / name), folders.notes)


def _from_pickles(pickles: dict[str, tuple[Path, Path]]) -> Source:
    labels = {split: _labels(file) for split, (_, file) in pickles.items()}
    classes: list[Category] = []
    label_of: dict[tuple[str, int], int] = {}
    for split, (specific, general, names, categories) in labels.items():
        first = {number: place for place, number in reversed(list(enumerate(specific)))}
        for number, name in enumerate(names):
            label_of[split, number] = len(classes)
            classes.append(Category(name, categories[general[first[number]]] if number in first else "none", split))

    def pictures() -> Iterator[Picture]:
        for split, (file, _) in pickles.items():
            images = unpickle(read_bytes(file), str(file))
            specific = labels[split][0]
            if not isinstance(images, list) or len(images) != len(specific):
                raise InputError(
                    f"{file} is not a list of {len(specific)} images, which is how many labels there are. "
                    "Get the two files from one place."
                )
            for row, (image, number) in enumerate(zip(images, specific)):
                yield Picture(f"{file.name}: row {row}", label_of[split, number], _png(file, row, image))

    total = sum(len(specific) for specific, *_ in labels.values())
    return Source("tiered-ImageNet, pickles", tuple(classes), total, pictures)


def _png(file: Path, row: int, image: Any) -> Content:
    if isinstance(image, np.ndarray):
        return eight_bits(file, f"row {row}", image).tobytes()
    if not isinstance(image, str | bytes):
        raise InputError(
            f"{file} has {shortened(image)} in row {row}, but a PNG file belongs there. Get the file again."
        )
    return image.encode("latin1", "replace") if isinstance(image, str) else image


def _labels(file: Path) -> tuple[list[int], list[int], list[str], list[str]]:
    """Class and category of each image, and the names that they count."""
    held = unpickle(read_bytes(file), str(file))
    held = {as_text(key): value for key, value in held.items()} if isinstance(held, dict) else {}
    if "label_specific" not in held:
        raise InputError(f"{file} is not a dictionary with label_specific in it. Get the file again.")
    specific, names = _numbered(file, held, "label_specific")
    general, categories = _numbered(file, {"label_general": [0] * len(specific), **held}, "label_general")
    if len(general) != len(specific):
        raise InputError(f"{file} has not a category for every image. Get the file again.")
    return specific, general, names, categories


def _numbered(file: Path, held: dict[str, Any], key: str) -> tuple[list[int], list[str]]:
    """The numbers of every image, and the names that they count: the numbers themselves if there are none."""
    if f"{key}_str" in held:
        names = texts(file, f"{key}_str", held[f"{key}_str"])
        return indices(file, key, held[key], len(names)), names
    numbers = indices(file, key, held[key], MOST_CLASSES)
    return numbers, [str(number) for number in range(max(numbers, default=-1) + 1)]
