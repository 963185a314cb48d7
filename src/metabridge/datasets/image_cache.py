"""A disk cache of decoded images: each data set is decoded once and memory-mapped on later loads.

The cache folder is `$METABRIDGE_CACHE` or `~/.cache/metabridge`. A cache entry consists of two files: the raw pixels,
and a JSON index with the classes, the labels and the unreadable images. The file names contain a fingerprint of the
data set's files, so a changed data set gets a new entry. The index is written after the pixels, so incomplete entries
of killed processes are never used. The index contains checksums of itself and of the pixels; if they do not match, the
data set is decoded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metabridge.datasets.image_decoding import (
    CHUNK_SIZE,
    Unreadable,
    decode,
    decoding_executor,
    decoding_threads,
    map_images,
)
from metabridge.datasets.image_files import (
    SPLIT_NAMES,
    ClassInfo,
    Content,
    ImageSource,
    assign_splits,
    free_memory,
    join_names,
    open_regular,
    reading_errors,
)
from metabridge.decode_options import DecodeOptions
from metabridge.environments.image_tasks import LabeledImages
from metabridge.errors import InputError
from metabridge.files import atomic_writer

FORMAT = 2  # version in the file names; increase it if the stored data changes, or data sets are read differently
# A fingerprint hashes file contents up to these limits, which takes about a second, and modification times above them.
MAX_HASHED_FILES, MAX_HASHED_BYTES = 64, 2**30
MAX_PART_AGE = 24 * 3600  # in seconds; older temporary files (*.part) are treated as abandoned
MAX_WRITES = 3  # number of attempts to write an entry, because other processes may write the same entry
CHECKSUM_BYTES = 2**24  # approximate number of bytes per checksum of the pixels

logger = logging.getLogger("metabridge")


@dataclass(frozen=True, eq=False)
class CachedImages:
    """A decoded data set: images, labels, classes, and the images and classes that were skipped.

    Args:
        images: The images, uint8 of shape (n, channels, size, size).
        labels: The class of each image as an index into `classes`, int64 of shape (n,).
        classes: The classes with at least one readable image.
        empty_classes: The names of classes without a readable image.
        skipped: The unreadable images, as pairs (name, reason).
        notes: Notes for the user on how the files were read.
        incomplete: Whether an image was skipped for a reason that may be temporary.
        duplicates: Groups of images with equal pixels that are in more than one class; each image is a pair of its
            index in `images` and its name.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[ClassInfo, ...]
    empty_classes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    incomplete: bool = False
    duplicates: tuple[tuple[tuple[int, str], ...], ...] = ()

    def to_labeled_images(self, *, seed: int = 0, strict: bool = False, min_images: int | None = None) -> LabeledImages:
        """Return the data set for training, and log warnings about what was skipped.

        Args:
            seed: The seed for splitting the classes if the data set does not define splits.
            strict: Raise `InputError` if an image or a class was skipped.
            min_images: Omit classes with fewer images from all splits.

        >>> classes = (ClassInfo("cat", "animals", "train"), ClassInfo("oak", "trees", "test"))
        >>> cached = CachedImages(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1]), classes)
        >>> sorted(cached.to_labeled_images(min_images=2).splits)
        ['train']
        """
        problems = self.problems()
        if strict and problems:
            raise InputError(f"{problems[0]} Fix or remove these, or load without strict.")
        for sentence in (*problems, *self.notes):
            logger.warning("%s", sentence)
        counts = torch.bincount(self.labels, minlength=len(self.classes)).tolist()
        large_classes = [index for index, count in enumerate(counts) if count >= (min_images or 1)]
        if not large_classes:
            raise InputError(
                f"min_images is {min_images}, but the largest class has {max(counts)} images. "
                f"Use min_images={max(counts)} or fewer."
            )
        splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
        for index, info in zip(large_classes, assign_splits([self.classes[index] for index in large_classes], seed)):
            splits[info.split].append(index)
        self._warn_of_duplicates(splits)
        superclass_index = {
            name: index for index, name in enumerate(dict.fromkeys(info.superclass for info in self.classes))
        }
        return LabeledImages(
            images=self.images,
            labels=self.labels,
            class_names=tuple(info.name for info in self.classes),
            superclasses=torch.tensor([superclass_index[info.superclass] for info in self.classes]),
            superclass_names=tuple(superclass_index),
            splits={split: torch.tensor(indices) for split, indices in splits.items() if indices},
        )

    def problems(self) -> list[str]:
        """Return sentences that list the skipped images and classes.

        >>> CachedImages(torch.empty(0), torch.empty(0), (), empty_classes=("oak",)).problems()
        ["Skipped 1 class without a readable image: 'oak'."]
        """
        sentences = []
        if self.skipped:
            names = join_names(f"{name} ({reason})" for name, reason in self.skipped)
            images = "1 unreadable image" if len(self.skipped) == 1 else f"{len(self.skipped)} unreadable images"
            retry = " Images that the system could not read are tried again on every load." if self.incomplete else ""
            sentences.append(f"Skipped {images}: {names}.{retry}")
        if self.empty_classes:
            names = join_names(f"'{name}'" for name in self.empty_classes)
            classes = "class" if len(self.empty_classes) == 1 else "classes"
            sentences.append(f"Skipped {len(self.empty_classes)} {classes} without a readable image: {names}.")
        return sentences

    def _warn_of_duplicates(self, splits: dict[str, list[int]]) -> None:
        split_of = {index: split for split, indices in splits.items() for index in indices}
        labels = self.labels.tolist()
        descriptions = []
        for group in self.duplicates:
            name_in_split = {split_of.get(labels[row]): name for row, name in group}
            name_in_split.pop(None, None)  # ignore classes that are in no split
            if len(name_in_split) > 1:
                descriptions.append(" and ".join(f"{name} in {split}" for split, name in name_in_split.items()))
        if descriptions:
            images = "1 image is" if len(descriptions) == 1 else f"{len(descriptions)} images are"
            logger.warning(
                "%s in more than one split, so accuracies may be too high: %s. `metabridge data check` lists them.",
                images,
                join_names(descriptions, limit=3),
            )


def cache_folder() -> Path:
    """Return the cache folder.

    >>> cache_folder() == Path(os.environ.get("METABRIDGE_CACHE") or Path.home() / ".cache" / "metabridge")
    True
    """
    return Path(os.environ.get("METABRIDGE_CACHE") or Path.home() / ".cache" / "metabridge")


def fingerprint(files: Iterable[Path], root: Path) -> str:
    """Return a hash of the names, sizes and contents of files below `root`.

    If there are more than `MAX_HASHED_FILES` files or `MAX_HASHED_BYTES` bytes, modification times are hashed instead
    of contents: reading 60,000 images from disk can take minutes, reading their modification times takes a second.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     file = Path(root, "a.png")
    ...     keys = [file.write_bytes(content) and fingerprint([file], Path(root)) for content in (b"1", b"2")]
    >>> keys[0] == keys[1]
    False
    """
    names = sorted(map(str, files))  # tens of thousands of Path objects would be slow
    stats = [_size_and_time(name) for name in names]
    hash_contents = len(names) <= MAX_HASHED_FILES and sum(size for size, _ in stats) <= MAX_HASHED_BYTES
    # Names are hashed relative to `root`: without its path and a slash. If `root` is ".", the names contain neither.
    root_length = len(str(root)) if str(root) != "." else -1
    key = hashlib.sha256()
    for name, (size, modified) in zip(names, stats):
        state = _digest(name) if hash_contents else str(modified)
        key.update(f"{name[root_length + 1 :]}\0{size}\0{state}\0".encode("utf-8", "surrogateescape"))
    return key.hexdigest()[:24]


def load_or_decode(
    name: str,
    key: str,
    options: DecodeOptions,
    open_source: Callable[[], ImageSource],
    path: str | Path | None = None,
) -> CachedImages:
    """Return the images of a data set from the cache, after decoding and storing them if necessary.

    The data set is decoded if its cache entry is missing or damaged, or if an image was skipped for a reason that may
    be temporary.

    Args:
        name: The name of the data set, used in file names.
        key: The fingerprint of the data set's files.
        options: Decoding options.
        open_source: Returns the undecoded images. Called only if they must be decoded.
        path: The path of the data set, for error messages. Default: `name`.

    >>> import numpy as np
    >>> from metabridge.datasets.image_files import RawImage
    >>> image = RawImage("dot", 0, np.zeros((9, 9), dtype=np.uint8))
    >>> toy = ImageSource("a toy", (ClassInfo("dots", "all", "train"),), 1, lambda: iter([image]))
    >>> load_or_decode("toy", "key", DecodeOptions(size=4, channels=1), lambda: toy).images.shape
    torch.Size([1, 1, 4, 4])
    """
    stem = f"{name}-v{FORMAT}-{options.size}px-{options.channels}-{key}"
    pixel_file, index_file = (cache_folder() / f"{stem}.{suffix}" for suffix in ("pixels", "json"))
    with contextlib.suppress(Exception):  # reading a damaged entry can raise exceptions of many types
        cached = _read_entry(pixel_file, index_file)
        if not cached.incomplete:
            return cached
    for _ in range(MAX_WRITES):
        _write_entry(name, path or name, open_source, options, pixel_file, index_file)
        with contextlib.suppress(Exception):  # another process may have replaced the pixels in the meantime
            return _read_entry(pixel_file, index_file)
    raise InputError(
        f"the images read from the cache {pixel_file.parent} differ from the images written to it: other processes are "
        "writing the same entry, or the disk is damaged. Wait for the other processes, or set METABRIDGE_CACHE to "
        "another folder."
    )


def _size_and_time(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
    except OSError:
        return 0, 0  # for example a broken symlink, which is reported during decoding
    return status.st_size, status.st_mtime_ns


def _digest(file: str) -> str:
    try:
        with open_regular(file) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return "unreadable"


# The keys of the index are those of version 0.1.0: "form" (description), "empty" (names of empty classes), "same"
# (duplicates), "blocks" (checksums of the pixels) and so on.


def _read_entry(pixel_file: Path, index_file: Path) -> CachedImages:
    with open_regular(index_file) as stream:
        entry = json.load(stream)
    if entry.pop("checksum") != _checksum(entry):
        raise ValueError(f"{index_file} does not match its checksum")
    shape = entry["shape"]
    size = math.prod(shape)
    if pixel_file.stat().st_size != size:
        raise ValueError(f"{pixel_file} is {pixel_file.stat().st_size} bytes, but its index says {size}")
    images = torch.from_file(str(pixel_file), shared=False, size=size, dtype=torch.uint8).view(shape)
    with decoding_executor() as executor:
        chunks = (chunk.numpy().data for chunk in images.split(_images_per_checksum(math.prod(shape[1:]))))
        if list(executor.map(zlib.crc32, chunks)) != entry["blocks"]:
            raise ValueError(f"{pixel_file} does not match its checksums")
    labels, classes = entry["labels"], tuple(ClassInfo(*info) for info in entry["classes"])
    duplicate_rows = [row for group in entry["same"] for row, _ in group]
    if not (
        len(labels) == len(images) > 0
        and all(isinstance(label, int) and 0 <= label < len(classes) for label in labels)
        and all(isinstance(row, int) and 0 <= row < len(images) for row in duplicate_rows)
        and all(isinstance(text, str) for info in classes for text in info)
        and {info.split for info in classes} <= {*SPLIT_NAMES.values(), ""}
    ):
        raise ValueError(f"{index_file} contains invalid labels, classes or duplicates")
    return CachedImages(
        images=images,
        labels=torch.tensor(labels),
        classes=classes,
        empty_classes=tuple(entry["empty"]),
        skipped=tuple((name, reason) for name, reason in entry["skipped"]),
        notes=tuple(entry["notes"]),
        incomplete=entry["incomplete"],
        duplicates=tuple(tuple((row, name) for row, name in group) for group in entry["same"]),
    )


def _checksum(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _write_entry(
    name: str,
    path: str | Path,
    open_source: Callable[[], ImageSource],
    options: DecodeOptions,
    pixel_file: Path,
    index_file: Path,
) -> None:
    with cache_writer(index_file) as index_stream:
        with cache_writer(pixel_file) as pixel_stream:
            with reading_errors(path):
                source = open_source()
            _check_free_space(source.total, options, pixel_file.parent)
            labels: list[int] = []
            skipped: list[tuple[str, str]] = []
            incomplete = False
            checksums: list[int] = []
            images_per_checksum = _images_per_checksum(options.channels * options.size**2)
            images_by_digest: dict[bytes, list[tuple[int, str]]] = {}
            for image, result in map_images(source, partial(_decode_with_digest, options=options), f"Decoding {name}"):
                if isinstance(result, Unreadable):
                    skipped.append((image.name, result.reason))
                    incomplete |= result.temporary
                else:
                    array, digest = result
                    images_by_digest.setdefault(digest, []).append((len(labels), image.name))
                    if len(labels) % images_per_checksum == 0:
                        checksums.append(0)  # start the checksum of the next images
                    checksums[-1] = zlib.crc32(array.data, checksums[-1])
                    labels.append(image.label)
                    pixel_stream.write(array.data)
            if not labels:
                first_reason = f"; {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
                raise InputError(f"{path} has no readable image ({source.total} tried{first_reason}).")
        nonempty_labels = sorted(set(labels))
        new_label = {label: index for index, label in enumerate(nonempty_labels)}
        entry = {
            "form": source.description,
            "shape": [len(labels), options.channels, options.size, options.size],
            "labels": [new_label[label] for label in labels],
            "classes": [source.classes[label] for label in nonempty_labels],
            "empty": [info.name for label, info in enumerate(source.classes) if label not in new_label],
            "skipped": skipped,
            "notes": source.notes,
            "incomplete": incomplete,
            "same": [group for group in images_by_digest.values() if len({labels[row] for row, _ in group}) > 1],
            "blocks": checksums,
        }
        index_stream.write(json.dumps({**entry, "checksum": _checksum(entry)}).encode())


def _images_per_checksum(image_bytes: int) -> int:
    return max(1, CHECKSUM_BYTES // image_bytes)


def _decode_with_digest(content: Content, options: DecodeOptions) -> tuple[NDArray[np.uint8], bytes]:
    array = decode(content, options)
    return array, hashlib.blake2b(array.data, digest_size=16).digest()


def _check_free_space(count: int, options: DecodeOptions, folder: Path) -> None:
    """Raise `InputError` if the decoded images do not fit on the disk, or decoding needs more than the free memory."""
    image_bytes = options.channels * options.size**2
    free = shutil.disk_usage(folder).free
    if count * image_bytes > free:
        raise InputError(
            f"{count} images of {options.size} × {options.size} pixels take {count * image_bytes / 2**30:.1f} GiB, but "
            f"{folder} has only {free / 2**30:.1f} GiB free. Use a smaller size, or set METABRIDGE_CACHE to another "
            "folder."
        )
    # `map_images` keeps two chunks per thread in memory, and the chunk whose results are being written.
    memory = min(count, (2 * decoding_threads() + 1) * CHUNK_SIZE) * image_bytes
    if memory > free_memory():
        raise InputError(
            f"decoding images of {options.size} × {options.size} pixels takes {memory / 2**30:.1f} GiB of memory, but "
            f"only {free_memory() / 2**30:.1f} GiB is free. Use a smaller size."
        )


@contextlib.contextmanager
def cache_writer(file: Path) -> Iterator[BinaryIO]:
    """Write a cache file with `atomic_writer`, and remove abandoned temporary files of the same cache file.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with cache_writer(Path(folder, "a.pixels")) as stream:
    ...         _ = stream.write(b"content")
    ...     Path(folder, "a.pixels").read_bytes()
    b'content'
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_parts(file)
        with atomic_writer(file) as stream:
            yield stream
    except OSError as error:
        raise InputError(
            f"images cannot be cached in {file.parent} ({error.strerror}). "
            "Free space there, or set METABRIDGE_CACHE to a writable folder."
        ) from error


def _remove_abandoned_parts(file: Path) -> None:
    """Remove the temporary files of a cache file that are older than `MAX_PART_AGE`.

    A newer file may belong to a process that is still writing it, possibly on another machine.
    """
    for pattern in (f".{file.name[:40]}.*.part", f"{file.name}.*.part"):  # version 0.1.0 used the second pattern
        for temporary_file in file.parent.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - temporary_file.stat().st_mtime > MAX_PART_AGE:
                    temporary_file.unlink()
