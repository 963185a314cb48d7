"""Parquet files of images in the layout of the Hugging Face hub.

A data set consists of one or more files, called shards. They have a column of images (`image` or `img`: the bytes of
the image file, either alone or with its path) and a column of labels (`label`, `labels` or `fine_label`: numbers or
names). The Hugging Face metadata in the schema, if present, contain the class names for the numbers. By default, the
central square of each image is resized to 84 × 84 pixels in RGB.

Files with train, validation (or val, valid) or test in their paths define splits. Classes are split at random, as for
folders of images, if there are no splits or only one, if splits share a class, or if a file belongs to no split.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from metabridge.datasets.image_files import (
    SPLIT_NAMES,
    ClassInfo,
    ImageSource,
    RawImage,
    check_regular,
    join_names,
    list_tree,
    merge_image_splits,
    path_inside,
    read_image_file,
    reading_error,
    short_repr,
)
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError

DECODE_OPTIONS = DecodeOptions(size=84, channels=3, crop=True)
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
MAX_BATCH_ROWS = 32  # rows read at once
MAX_BATCH_BYTES = 2**28  # memory that these rows may take
MAX_COMPRESSION = 100  # the largest plausible ratio of unpacked to packed size for files of images
BASE_UNPACKED_BYTES = 2**26  # the unpacked size is limited to this plus `MAX_COMPRESSION` times the packed size


def matches(root: Path) -> bool:
    """Return whether a path is a parquet file or a folder that contains one.

    >>> matches(Path("photographs.zip"))
    False
    """
    return bool(list_files(root))


def list_files(root: Path) -> list[Path]:
    """Return the parquet files at or below a path.

    >>> list_files(Path("photographs.zip"))
    []
    """
    if root.is_file():
        return [root] if root.suffix == ".parquet" else []
    return [file for file in list_tree(root) if file.suffix == ".parquet"] if root.is_dir() else []


def open_source(root: Path) -> ImageSource:
    """Return the classes and images of the parquet files at a path.

    >>> open_source(Path("photographs.zip"))
    Traceback (most recent call last):
    metabridge.errors.InputError: photographs.zip has no parquet files. Use the path of a parquet file or a folder ...
    """
    shards = list_files(root)
    if not shards:
        raise InputError(f"{root} has no parquet files. Use the path of a parquet file or a folder of parquet files.")
    base = root if root.is_dir() else root.parent
    label_of: dict[ClassInfo, int] = {}
    labels_by_shard: list[list[int | None]] = []
    for shard in shards:
        names = _row_class_names(shard)
        split = _split_from_name(shard.relative_to(base).as_posix())
        row_classes = [None if name is None else ClassInfo(name, "all", split) for name in names]
        for info in sorted({info for info in row_classes if info is not None}):
            label_of.setdefault(info, len(label_of))
        labels_by_shard.append([None if info is None else label_of[info] for info in row_classes])

    def images() -> Iterator[RawImage]:
        for shard, labels in zip(shards, labels_by_shard):
            yield from _read_images(shard, shard.relative_to(base).as_posix(), labels)

    total = sum(label is not None for labels in labels_by_shard for label in labels)
    splits = dict.fromkeys(info.split for info in label_of)
    description = f"{len(shards)} parquet files" + (f", split into {', '.join(splits)}" if len(splits) > 1 else "")
    return merge_image_splits(ImageSource(description, tuple(label_of), total, images))


def class_names(shard: Path) -> tuple[str, ...] | None:
    """Return the class names in the Hugging Face metadata of a file, or None.

    >>> import pyarrow, pyarrow.parquet
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     pyarrow.parquet.write_table(pyarrow.table({"label": [0, 1]}), Path(root, "train.parquet"))
    ...     class_names(Path(root, "train.parquet")) is None
    True
    """
    schema = _open_parquet(shard).schema_arrow
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[_find_column(shard, schema, LABEL_COLUMNS)]["names"]))
    except (KeyError, ValueError, TypeError, RecursionError):
        return None


def _read_images(shard: Path, shard_name: str, labels: list[int | None]) -> Iterator[RawImage]:
    file = _open_parquet(shard)
    column = _find_column(shard, file.schema_arrow, IMAGE_COLUMNS)
    row = 0
    with _parquet_errors(shard):
        group_bytes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
        # A row may be as large as its row group, because all rows of a group may share one stored image.
        batch_rows = max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // max([1, *group_bytes])))
        bytes_left = BASE_UNPACKED_BYTES + MAX_COMPRESSION * shard.stat().st_size
        for batch in file.iter_batches(batch_rows, columns=[column]):
            for value in batch.column(0).to_pylist():
                label, content = labels[row], value
                image_name = f"row {row}"
                if isinstance(value, dict):
                    image_name = value.get("path") or image_name
                    content = value.get("bytes")
                    if content is None and value.get("path"):
                        content = partial(read_image_file, _external_image(shard, value["path"]))
                bytes_left -= len(content) if isinstance(content, bytes) else 0
                if bytes_left < 0:
                    raise ValueError("its images are far larger than the file itself")
                if label is not None:
                    is_content = isinstance(content, bytes | partial)  # b"" is reported as an unreadable image
                    yield RawImage(f"{shard_name}: {image_name}", label, content if is_content else b"")
                row += 1


def _external_image(shard: Path, name: object) -> Path:
    """Return the path of an image file that a row refers to; raise `InputError` if it does not exist.

    A missing image is an error rather than skipped: if it were added later, the fingerprint of the data set would not
    change, and the cached data set would still lack the image.
    """
    file = path_inside(shard.parent, name, shard)
    if not file.exists():
        raise InputError(f"{shard} names the image {short_repr(name)}, which is not in {shard.parent}. Put it there.")
    return file


def _row_class_names(shard: Path) -> list[str | None]:
    """Return the class name of every row, or None for a row without a label."""
    schema = _open_parquet(shard).schema_arrow
    column = _find_column(shard, schema, LABEL_COLUMNS)
    is_nested = schema.field(schema.names.index(column)).type.num_fields > 0
    declared_names = class_names(shard)
    values: list[Any] = []
    with _parquet_errors(shard):
        # Read labels as a dictionary, so that a long name that many rows share is in memory only once. Nested values,
        # such as lists, are read as they are and rejected below.
        file = _open_parquet(shard, read_dictionary=[] if is_nested else [column])
        for chunk in file.read(columns=[column]).column(0).chunks:
            if hasattr(chunk, "dictionary"):
                distinct_labels = chunk.dictionary.to_pylist()
                values += [None if index is None else distinct_labels[index] for index in chunk.indices.to_pylist()]
            else:
                values += chunk.to_pylist()
    for value in values:
        if not (value is None or isinstance(value, str | int)):
            raise InputError(
                f"{shard} has {short_repr(value)} in column {column}, but labels are integers or names. "
                "Download the file again."
            )
    name_of: dict[Any, str | None] = {None: None}
    for value in set(values) - {None}:
        if isinstance(value, str):
            name_of[value] = value
        elif value < 0:  # on the hub, a negative label marks an image whose label is not published
            name_of[value] = None
        elif declared_names is not None and value >= len(declared_names):
            raise InputError(
                f"{shard} has {value} in column {column}, but expected integers from 0 to "
                f"{len(declared_names) - 1}, since its metadata names {len(declared_names)} classes. "
                "Download the file again."
            )
        else:
            name_of[value] = str(value) if declared_names is None else declared_names[value]
    return [name_of[value] for value in values]


def _open_parquet(shard: Path, read_dictionary: Sequence[str] = ()) -> Any:
    import pyarrow.parquet

    with _parquet_errors(shard):
        check_regular(shard)
        file, size = pyarrow.parquet.ParquetFile(shard, read_dictionary=list(read_dictionary)), shard.stat().st_size
        rows, groups = file.metadata.num_rows, range(file.metadata.num_row_groups)
        unpacked = sum(file.metadata.row_group(group).total_byte_size for group in groups)
        if not 0 <= rows <= size or not 0 <= unpacked <= BASE_UNPACKED_BYTES + MAX_COMPRESSION * size:
            raise ValueError(f"it has {size} bytes, but declares {rows} rows of {unpacked} bytes in total")
        return file


@contextlib.contextmanager
def _parquet_errors(shard: Path) -> Iterator[None]:
    """Convert errors that a damaged file causes in the block into `InputError`."""
    try:
        yield
    except InputError:
        raise
    except PermissionError as error:
        raise reading_error(shard, error) from error
    except Exception as error:  # damaged files raise exceptions of many types
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{shard} is not a valid parquet file ({reason}). Download the file again.") from error


def _find_column(shard: Path, schema: Any, candidates: tuple[str, ...]) -> str:
    for name in candidates:
        if name in schema.names:
            return name
    raise InputError(
        f"{shard} has the columns {join_names(schema.names)}, but none is called {' or '.join(candidates)}. Rename one."
    )


def _split_from_name(path: str) -> str:
    """Return the last split name in the path of a file, or an empty string if there is none."""
    splits = [SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", path.lower()) if word in SPLIT_NAMES]
    return splits[-1] if splits else ""
