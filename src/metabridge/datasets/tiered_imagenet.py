"""tiered-ImageNet (Ren et al. 2018): 608 classes in 34 categories; no category is in two splits.

It is read from the pickles `train_images_png.pkl` and `train_labels.pkl`, with the same names for val and test, or from
folders train, val and test with a folder of images for each class. Superclasses are the categories: the pickles contain
their names, and for folders, a table in this package maps WordNet IDs to categories. Images are 84 × 84 pixels with
three channels, in the channel order of the files.

`*_images_png.pkl` is a list of PNG files as arrays of bytes. `*_labels.pkl` is a dictionary with the class and the
category of each image as numbers, `label_specific` and `label_general`, and the names that these numbers index,
`label_specific_str` and `label_general_str`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from metabridge.datasets.image_files import (
    ClassInfo,
    Content,
    ImageSource,
    RawImage,
    decode_text,
    find_class_folders,
    list_tree,
    parse_indices,
    parse_names,
    parse_uint8,
    read_file,
    read_image_file,
    short_repr,
    source_from_files,
    split_folders,
)
from metabridge.datasets.safe_unpickle import unpickle
from metabridge.datasets.splits import read_split_table
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError

DECODE_OPTIONS = DecodeOptions(size=84, channels=3)
SPLIT_OF_FILE = {"train": "train", "val": "validation", "test": "test"}  # split name in file names -> split
MAX_CLASSES = 100_000  # in files without class names


def matches(root: Path) -> bool:
    """Return whether a folder contains the pickles, or split folders that contain only classes of tiered-ImageNet.

    >>> matches(Path("nowhere"))
    False
    """
    return bool(_pickle_files(root)) or _has_class_folders(root)


def list_files(root: Path) -> list[Path]:
    """Return the files of the data set.

    >>> list_files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither pickles such as train_images_png.pkl nor folders train, ...
    """
    if pickles := _pickle_files(root):
        return [file for pair in pickles.values() for file in pair]
    if _has_class_folders(root):
        return [file for folder in split_folders(root).values() for file in list_tree(folder)]
    raise InputError(
        f"{root} has neither pickles such as train_images_png.pkl nor folders train, val and test "
        "of tiered-ImageNet's classes. Put one of these there."
    )


def open_source(root: Path) -> ImageSource:
    """Return the classes and images.

    >>> open_source(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither pickles such as train_images_png.pkl nor folders train, ...
    """
    list_files(root)  # raises an error if the data set is not there
    pickles = _pickle_files(root)
    return _source_from_pickles(pickles) if pickles else _source_from_folders(root)


def _pickle_files(root: Path) -> dict[str, tuple[Path, Path]]:
    """Return the image file and the label file of each split."""
    pairs = {
        split: (root / f"{name}_images_png.pkl", root / f"{name}_labels.pkl") for name, split in SPLIT_OF_FILE.items()
    }
    existing = {split: pair for split, pair in pairs.items() if pair[0].is_file()}
    for images, labels in existing.values():
        if not labels.is_file():
            raise InputError(f"{images} has no {labels.name} next to it. Put it there.")
    return existing


def _has_class_folders(root: Path) -> bool:
    known_classes = {(split, name) for split, name, _ in read_split_table("tiered_imagenet")}
    splits = split_folders(root)
    classes = {(split, path.name) for split, folder in splits.items() for path in folder.iterdir() if path.is_dir()}
    return bool(classes) and classes <= known_classes


def _source_from_folders(root: Path) -> ImageSource:
    category_of = {name: category for _, name, category in read_split_table("tiered_imagenet")}
    split_of = {folder.name: split for split, folder in split_folders(root).items()}
    class_folders = find_class_folders(root, list(split_of))
    classes = {}
    for path, images in class_folders.images.items():
        split_folder, _, name = path.partition("/")
        if name in category_of:
            classes[ClassInfo(name, category_of[name], split_of[split_folder])] = images
    return source_from_files(
        "tiered-ImageNet, folders", classes, lambda name: read_image_file(root / name), class_folders.notes
    )


def _source_from_pickles(pickles: dict[str, tuple[Path, Path]]) -> ImageSource:
    labels = {split: _read_labels(file) for split, (_, file) in pickles.items()}
    classes: list[ClassInfo] = []
    label_of: dict[tuple[str, int], int] = {}  # (split, class number in the pickle of the split) -> index in `classes`
    for split, (class_numbers, category_numbers, class_names, categories) in labels.items():
        # Class number -> first row of the class, from which its category is read.
        first_row = {number: row for row, number in reversed(list(enumerate(class_numbers)))}
        for number, name in enumerate(class_names):
            label_of[split, number] = len(classes)
            category = categories[category_numbers[first_row[number]]] if number in first_row else "none"
            classes.append(ClassInfo(name, category, split))

    def images() -> Iterator[RawImage]:
        for split, (file, _) in pickles.items():
            contents = unpickle(read_file(file), str(file))
            class_numbers = labels[split][0]
            if not isinstance(contents, list) or len(contents) != len(class_numbers):
                raise InputError(
                    f"{file} is not a list of {len(class_numbers)} images, one for each label. "
                    "Use images and labels of the same download."
                )
            for row, (content, number) in enumerate(zip(contents, class_numbers)):
                yield RawImage(f"{file.name}: row {row}", label_of[split, number], _png_bytes(file, row, content))

    total = sum(len(class_numbers) for class_numbers, *_ in labels.values())
    return ImageSource("tiered-ImageNet, pickles", tuple(classes), total, images)


def _png_bytes(file: Path, row: int, content: Any) -> Content:
    if isinstance(content, np.ndarray):
        return parse_uint8(file, f"row {row}", content).tobytes()
    if not isinstance(content, str | bytes):
        raise InputError(
            f"{file} has {short_repr(content)} in row {row}, but expected a PNG file. Download the file again."
        )
    return content.encode("latin1", "replace") if isinstance(content, str) else content


def _read_labels(file: Path) -> tuple[list[int], list[int], list[str], list[str]]:
    """Return the class and the category of each image as numbers, and the names that these numbers index."""
    content = unpickle(read_file(file), str(file))
    content = {decode_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    if "label_specific" not in content:
        raise InputError(f"{file} is not a dictionary with a key label_specific. Download the file again.")
    class_numbers, class_names = _read_numbers(file, content, "label_specific")
    # In a file without categories, all images get category 0.
    category_numbers, categories = _read_numbers(
        file, {"label_general": [0] * len(class_numbers), **content}, "label_general"
    )
    if len(category_numbers) != len(class_numbers):
        raise InputError(
            f"{file} has class numbers for {len(class_numbers)} images, but category numbers for "
            f"{len(category_numbers)}. Download the file again."
        )
    return class_numbers, category_numbers, class_names, categories


def _read_numbers(file: Path, content: dict[str, Any], key: str) -> tuple[list[int], list[str]]:
    """Return the class number or category number of each image, and the names that these numbers index.

    `key` is "label_specific" for classes and "label_general" for categories. If the file has no names,
    the numbers as text are the names.
    """
    if f"{key}_str" in content:
        names = parse_names(file, f"{key}_str", content[f"{key}_str"])
        return parse_indices(file, key, content[key], len(names)), names
    numbers = parse_indices(file, key, content[key], MAX_CLASSES)
    return numbers, [str(number) for number in range(max(numbers, default=-1) + 1)]
