"""mini-ImageNet (Vinyals et al. 2016) with the splits of Ravi & Larochelle (2017): 64, 16 and 20 classes.

It is read from the parquet files of the Hugging Face hub; from `train.csv`, `val.csv` and `test.csv` next to the folder
`images`; or from the pickles `mini-imagenet-cache-train.pkl`, `-val.pkl` and `-test.pkl`. Each class has 600 images in
RGB. They are resized to 84 × 84 pixels without cropping, as in the published files. Classes are named by their WordNet
IDs and have no superclasses.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from metabridge.datasets import parquet
from metabridge.datasets.image_files import (
    ClassInfo,
    ImageSource,
    RawImage,
    decode_text,
    list_tree,
    parse_indices,
    path_inside,
    read_file,
    read_image_file,
    short_repr,
    source_from_files,
)
from metabridge.datasets.safe_unpickle import unpickle
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError

DECODE_OPTIONS = DecodeOptions(size=84, channels=3)
NUM_CLASSES = 100
SPLIT_OF_FILE = {"train": "train", "val": "validation", "test": "test"}  # split name in file names -> split


def matches(root: Path) -> bool:
    """Return whether a folder contains mini-ImageNet; parquet files must name 100 WordNet classes.

    >>> matches(Path("nowhere"))
    False
    """
    if _csv_files(root) or _pickle_files(root):
        return True
    shards = parquet.list_files(root) if root.is_dir() else []  # the parquet files
    names = parquet.class_names(shards[0]) if shards else None
    return names is not None and len(names) == NUM_CLASSES and all(re.fullmatch(r"n\d{8}", name) for name in names)


def list_files(root: Path) -> list[Path]:
    """Return the files of the data set.

    >>> list_files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has no files of mini-ImageNet. Put its parquet files there, ...
    """
    csv_files, pickles, shards = _csv_files(root), _pickle_files(root), parquet.list_files(root)
    if csv_files:
        return [*csv_files.values(), *list_tree(root / "images")]
    if pickles or shards:
        return list(pickles.values()) or shards
    raise InputError(
        f"{root} has no files of mini-ImageNet. Put its parquet files there, or train.csv, val.csv, test.csv and "
        "the folder images, or mini-imagenet-cache-train.pkl, -val.pkl and -test.pkl."
    )


def open_source(root: Path) -> ImageSource:
    """Return the classes and images.

    >>> open_source(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has no files of mini-ImageNet. Put its parquet files there, ...
    """
    list_files(root)  # raises an error if the data set is not there
    if csv_files := _csv_files(root):
        return _source_from_csv(root, csv_files)
    if pickles := _pickle_files(root):
        return _source_from_pickles(pickles)
    return parquet.open_source(root)


def _csv_files(root: Path) -> dict[str, Path]:
    files = {split: root / f"{name}.csv" for name, split in SPLIT_OF_FILE.items()}
    existing = {split: file for split, file in files.items() if file.is_file()}
    return existing if (root / "images").is_dir() else {}


def _pickle_files(root: Path) -> dict[str, Path]:
    files = {split: root / f"mini-imagenet-cache-{name}.pkl" for name, split in SPLIT_OF_FILE.items()}
    return {split: file for split, file in files.items() if file.is_file()}


def _source_from_csv(root: Path, csv_files: dict[str, Path]) -> ImageSource:
    classes: dict[ClassInfo, list[str]] = {}
    images = root / "images"
    for split, file in csv_files.items():
        reader, line_number = csv.reader(read_file(file).decode("utf-8", "replace").splitlines()), 0
        try:
            columns = {name: position for position, name in enumerate(next(reader, ()))}
            if not {"filename", "label"} <= set(columns):
                raise InputError(f"{file} has no columns filename and label in its first line. Add that line.")
            line_number = reader.line_num
            for row in filter(None, reader):  # a DictReader would copy all column names for every line
                line_number = reader.line_num
                name, label = (row[columns[key]] if columns[key] < len(row) else "" for key in ("filename", "label"))
                if not label:
                    raise InputError(f"{file} has no label in line {line_number}. Add it, or remove the line.")
                path_inside(images, name, file)
                classes.setdefault(ClassInfo(label, "all", split), []).append(name)
        except csv.Error as error:
            raise InputError(
                f"{file} is not a CSV file after line {line_number} ({error}). Download the file again."
            ) from error
    return source_from_files("mini-ImageNet, CSV and folder", classes, lambda name: read_image_file(images / name))


def _source_from_pickles(pickles: dict[str, Path]) -> ImageSource:
    """Return an `ImageSource` for pickled dictionaries.

    `image_data` has shape (n, 84, 84, 3), and `class_dict` maps each class to the rows of its images.
    """
    contents = {split: _read_pickle(file) for split, file in pickles.items()}
    classes: list[ClassInfo] = []
    entries: list[tuple[str, int, int]] = []  # (split, row, label)
    for split, (_, rows_of) in contents.items():
        for name, rows in rows_of.items():
            entries += [(split, row, len(classes)) for row in rows]
            classes.append(ClassInfo(name, "all", split))

    def images() -> Iterator[RawImage]:
        for split, row, label in entries:
            yield RawImage(f"{pickles[split].name}: row {row}", label, contents[split][0][row])

    return ImageSource("mini-ImageNet, cached pickles", tuple(classes), len(entries), images)


def _read_pickle(file: Path) -> tuple[NDArray[np.uint8], dict[str, list[int]]]:
    """Return the images and the rows of each class."""
    content = unpickle(read_file(file), str(file))
    is_dict = isinstance(content, dict)
    images, classes = (content.get("image_data"), content.get("class_dict")) if is_dict else (None, None)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4:
        raise InputError(
            f"{file} has no uint8 array image_data of shape (n, height, width, 3). Download the file again."
        )
    if not isinstance(classes, dict):
        raise InputError(f"{file} has no class_dict with the rows of each class. Download the file again.")
    rows_of: dict[str, list[int]] = {}
    images_left = len(images)
    for name, rows in classes.items():
        row_list = parse_indices(file, f"class_dict[{short_repr(name)}]", rows, len(images))
        rows_of[decode_text(name)] = row_list
        images_left -= len(row_list)
        if images_left < 0:  # a small pickle may refer to one long list many times
            raise InputError(
                f"{file} has more rows in class_dict than its {len(images)} images. Download the file again."
            )
    return images, rows_of
