"""Parquet files of images, as the Hugging Face hub keeps them.

A column of images (`image` or `img`: the file's bytes, alone or beside its path) and one of labels
(`label`, `labels` or `fine_label`: numbers or names). Numbers are named by the schema's Hugging Face
metadata where it is there. The middle square of each image is taken, 84 × 84 and RGB.

Files with train, validation (or val, valid) and test in their names make those splits. A single set,
or splits that share classes, is split by class, as folders of images are.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from metabridge.datasets.image_decoding import Form
from metabridge.datasets.image_files import (
    SPLITS,
    Category,
    Picture,
    Source,
    check_regular,
    image_bytes,
    inside,
    named,
    pooled,
    shortened,
    tree,
    unreadable,
)
from metabridge.errors import InputError

FORM = Form(size=84, channels=3, crop=True)
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
BATCH = 32  # Rows read at once, or fewer
ROOM = 2**28  # if so many could take more bytes than this.
MOST_PACKED = 100  # A file of images cannot be so many times smaller than what is in it,
UNPACKED = 2**26  # unless it has no more than so many bytes in it.


def holds(root: Path) -> bool:
    """Say whether a path is a parquet file, or a folder with some in it.

    >>> holds(Path("photographs.zip"))
    False
    """
    return bool(files(root))


def files(root: Path) -> list[Path]:
    """Return the parquet files at or below a path.

    >>> files(Path("photographs.zip"))
    []
    """
    if root.is_file():
        return [root] if root.suffix == ".parquet" else []
    return [file for file in tree(root) if file.suffix == ".parquet"] if root.is_dir() else []


def source(root: Path) -> Source:
    """Return the classes and images of the parquet files at a path.

    >>> source(Path("photographs.zip"))
    Traceback (most recent call last):
    metabridge.errors.InputError: photographs.zip has no parquet files.
    """
    shards = files(root)
    if not shards:
        raise InputError(f"{root} has no parquet files.")
    base = root if root.is_dir() else root.parent
    labels: dict[Category, int] = {}
    rows: list[list[int | None]] = []
    for shard in shards:
        names = _label_names(shard)
        split = _split(shard.relative_to(base).as_posix())
        categories = [None if name is None else Category(name, "all", split) for name in names]
        for category in sorted({category for category in categories if category is not None}):
            labels.setdefault(category, len(labels))
        rows.append([None if category is None else labels[category] for category in categories])

    def pictures() -> Iterator[Picture]:
        for shard, own in zip(shards, rows):
            yield from _pictures(shard, shard.relative_to(base).as_posix(), own)

    total = sum(label is not None for own in rows for label in own)
    splits = dict.fromkeys(category.split for category in labels)
    form = f"{len(shards)} parquet files" + (f", split into {', '.join(splits)}" if len(splits) > 1 else "")
    return pooled(Source(form, tuple(labels), total, pictures))


def class_names(shard: Path) -> tuple[str, ...] | None:
    """Return the names of the classes that a file's Hugging Face metadata gives, if any.

    >>> import pyarrow, pyarrow.parquet
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     pyarrow.parquet.write_table(pyarrow.table({"label": [0, 1]}), Path(root, "train.parquet"))
    ...     class_names(Path(root, "train.parquet")) is None
    True
    """
    schema = _opened(shard).schema_arrow
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[_column(shard, schema, LABEL_COLUMNS)]["names"]))
    except (KeyError, ValueError, TypeError, RecursionError):
        return None


def _pictures(shard: Path, name: str, labels: list[int | None]) -> Iterator[Picture]:
    file = _opened(shard)
    column = _column(shard, file.schema_arrow, IMAGE_COLUMNS)
    row = 0
    with _whole(shard):
        groups = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
        rows = max(1, min(BATCH, ROOM // max(1, *groups, 1)))  # An image may be stored once for many rows.
        left = UNPACKED + MOST_PACKED * shard.stat().st_size
        for batch in file.iter_batches(rows, columns=[column]):
            for value in batch.column(0).to_pylist():
                label, content = labels[row], value
                path = f"row {row}"
                if isinstance(value, dict):
                    path = value.get("path") or path
                    content = value.get("bytes")
                    if content is None and value.get("path"):
                        content = partial(image_bytes, _beside(shard, value["path"]))
                left -= len(content) if isinstance(content, bytes) else 0
                if left < 0:
                    raise ValueError("its images take far more than its own size")
                if label is not None:
                    yield Picture(f"{name}: {path}", label, content if isinstance(content, bytes | partial) else b"")
                row += 1


def _beside(shard: Path, name: object) -> Path:
    """The file that a row names. It must be there: the key of the data set does not cover it."""
    file = inside(shard.parent, name, shard)
    if not file.exists():
        raise InputError(f"{shard} names the image {shortened(name)}, which is not in {shard.parent}. Put it there.")
    return file


def _label_names(shard: Path) -> list[str | None]:
    """The name of every row's class; None where it has none."""
    schema = _opened(shard).schema_arrow
    column = _column(shard, schema, LABEL_COLUMNS)
    nested = schema.field(schema.names.index(column)).type.num_fields > 0
    known = class_names(shard)
    values: list[Any] = []
    with _whole(shard):
        # A long name that is repeated is kept once.
        file = _opened(shard, read_dictionary=[] if nested else [column])
        for chunk in file.read(columns=[column]).column(0).chunks:
            if hasattr(chunk, "dictionary"):
                distinct = chunk.dictionary.to_pylist()
                values += [None if place is None else distinct[place] for place in chunk.indices.to_pylist()]
            else:
                values += chunk.to_pylist()
    for value in values:
        if not (value is None or isinstance(value, str | int)):
            raise InputError(
                f"{shard} has {shortened(value)} in column {column}, but labels are whole numbers or names. "
                "Get the file again."
            )
    names: dict[Any, str | None] = {None: None}
    for value in set(values) - {None}:
        if isinstance(value, str):
            names[value] = value
        elif value < 0:  # The hub's habit for images whose label is kept secret.
            names[value] = None
        elif known is not None and value >= len(known):
            raise InputError(
                f"{shard} has {value} in column {column}, but whole numbers from 0 to {len(known) - 1} belong there, "
                "as many as it names classes. Get the file again."
            )
        else:
            names[value] = str(value) if known is None else known[value]
    return [names[value] for value in values]


def _opened(shard: Path, read_dictionary: Sequence[str] = ()) -> Any:
    import pyarrow.parquet

    with _whole(shard):
        check_regular(shard)
        file, size = pyarrow.parquet.ParquetFile(shard, read_dictionary=list(read_dictionary)), shard.stat().st_size
        rows, groups = file.metadata.num_rows, range(file.metadata.num_row_groups)
        unpacked = sum(file.metadata.row_group(group).total_byte_size for group in groups)
        if not 0 <= rows <= size or not 0 <= unpacked <= UNPACKED + MOST_PACKED * size:
            raise ValueError(f"it has {size} bytes, but says that it holds {rows} rows of {unpacked} bytes")
        return file


@contextlib.contextmanager
def _whole(shard: Path) -> Iterator[None]:
    """Turn every error of a damaged file into one for the user."""
    try:
        yield
    except InputError:
        raise
    except PermissionError as error:
        raise unreadable(shard, error) from error
    except Exception as error:  # A damaged file can fail in every way.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{shard} is not a whole parquet file ({reason}). Get the file again.") from error


def _column(shard: Path, schema: Any, wanted: tuple[str, ...]) -> str:
    for name in wanted:
        if name in schema.names:
            return name
    raise InputError(
        f"{shard} has the columns {named(schema.names)}, but none is called {' or '.join(wanted)}. Rename one."
    )


def _split(name: str) -> str:
    """The split that a file's path speaks of; the last word of it counts."""
    words = [SPLITS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLITS]
    return words[-1] if words else ""
