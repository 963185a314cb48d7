"""mini-ImageNet (Vinyals et al., 2016), split as by Ravi & Larochelle: 64, 16 and 20 classes of 600 images.

Read from any of the forms in which it goes round: parquet files of the Hugging Face hub, `train.csv`,
`val.csv` and `test.csv` beside the folder `images`, or the pickles `mini-imagenet-cache-train.pkl` and
so on. Images are 84 × 84, RGB; larger ones are squeezed into that, as the published ones were. Classes
have their WordNet numbers as names, and no superclasses.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from metabridge.datasets import parquet
from metabridge.datasets.image_decoding import Form
from metabridge.datasets.image_files import (
    Category,
    Picture,
    Source,
    as_text,
    image_bytes,
    indices,
    inside,
    listed,
    read_bytes,
    shortened,
    tree,
)
from metabridge.datasets.safe_unpickle import unpickle
from metabridge.errors import InputError

FORM = Form(size=84, channels=3)
CLASSES = 100
PARTS = {"train": "train", "val": "validation", "test": "test"}


def holds(root: Path) -> bool:
    """Say whether a folder has mini-ImageNet in it; parquet files must name a hundred WordNet classes.

    >>> holds(Path("nowhere"))
    False
    """
    if _tables(root) or _pickles(root):
        return True
    shards = parquet.files(root) if root.is_dir() else []
    names = parquet.class_names(shards[0]) if shards else None
    return names is not None and len(names) == CLASSES and all(re.fullmatch(r"n\d{8}", name) for name in names)


def files(root: Path) -> list[Path]:
    """Return the files that the data set is read from.

    >>> files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has none of the forms of mini-ImageNet. Put there its parquet files, ...
    """
    tables, pickles, shards = _tables(root), _pickles(root), parquet.files(root)
    if tables:
        return [*tables.values(), *tree(root / "images")]
    if pickles or shards:
        return list(pickles.values()) or shards
    raise InputError(
        f"{root} has none of the forms of mini-ImageNet. Put there its parquet files, or train.csv, val.csv, "
        "test.csv and the folder images, or mini-imagenet-cache-train.pkl, -val.pkl and -test.pkl."
    )


def source(root: Path) -> Source:
    """Return the classes and images of any of the forms.

    >>> source(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has none of the forms of mini-ImageNet. Put there its parquet files, ...
    """
    files(root)
    if tables := _tables(root):
        return _from_tables(root, tables)
    if pickles := _pickles(root):
        return _from_pickles(pickles)
    return parquet.source(root)


def _tables(root: Path) -> dict[str, Path]:
    found = {split: root / f"{part}.csv" for part, split in PARTS.items() if (root / f"{part}.csv").is_file()}
    return found if (root / "images").is_dir() else {}


def _pickles(root: Path) -> dict[str, Path]:
    named = {split: root / f"mini-imagenet-cache-{part}.pkl" for part, split in PARTS.items()}
    return {split: file for split, file in named.items() if file.is_file()}


def _from_tables(root: Path, tables: dict[str, Path]) -> Source:
    classes: dict[Category, list[str]] = {}
    images = root / "images"
    for split, table in tables.items():
        reader, line = csv.reader(read_bytes(table).decode("utf-8", "replace").splitlines()), 0
        try:
            columns = {name: place for place, name in enumerate(next(reader, ()))}
            if not {"filename", "label"} <= set(columns):
                raise InputError(f"{table} has not the columns filename and label in its first line. Add that line.")
            line = reader.line_num
            for row in filter(None, reader):  # Not as dictionaries, which would repeat all columns for every line.
                line = reader.line_num
                name, label = (row[columns[key]] if columns[key] < len(row) else "" for key in ("filename", "label"))
                if not label:
                    raise InputError(f"{table} has no label in line {line}. Add it, or remove the line.")
                inside(images, name, table)
                classes.setdefault(Category(label, "all", split), []).append(name)
        except csv.Error as error:
            raise InputError(f"{table} is not a table after line {line} ({error}). Get the file again.") from error
    return listed("mini-ImageNet, CSV and folder", classes, lambda name: image_bytes(images / name))


def _from_pickles(pickles: dict[str, Path]) -> Source:
    """Each pickle is a dictionary: `image_data`, (n, 84, 84, 3), and `class_dict`, the rows of each class."""
    read = {split: _read(file) for split, file in pickles.items()}
    classes: list[Category] = []
    places: list[tuple[str, int, int]] = []  # split, row, label
    for split, (_, rows_of) in read.items():
        for name, rows in rows_of.items():
            places += [(split, row, len(classes)) for row in rows]
            classes.append(Category(name, "all", split))

    def pictures() -> Iterator[Picture]:
        for split, row, label in places:
            yield Picture(f"{pickles[split].name}: row {row}", label, read[split][0][row])

    return Source("mini-ImageNet, cached pickles", tuple(classes), len(places), pictures)


def _read(file: Path) -> tuple[NDArray[np.uint8], dict[str, list[int]]]:
    """The images, and the rows of each class."""
    held = unpickle(read_bytes(file), str(file))
    images, classes = (held.get("image_data"), held.get("class_dict")) if isinstance(held, dict) else (None, None)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4:
        raise InputError(f"{file} has no uint8 array image_data of shape (n, height, width, 3). Get the file again.")
    if not isinstance(classes, dict):
        raise InputError(f"{file} has no class_dict that gives rows of image_data. Get the file again.")
    rows_of: dict[str, list[int]] = {}
    left = len(images)
    for name, rows in classes.items():
        rows_of[as_text(name)] = found = indices(file, f"class_dict[{shortened(name)}]", rows, len(images))
        left -= len(found)
        if left < 0:  # A few bytes may refer to one long list many times.
            raise InputError(f"{file} has more rows in class_dict than the {len(images)} images. Get the file again.")
    return images, rows_of
