"""Decoded images on disk: decoded once, mapped into memory from then on.

A data set is two files in the cache folder, `$METABRIDGE_CACHE` or `~/.cache/metabridge`: the pixels
as they lie in memory, and an index in JSON of classes, labels and of what could not be read. Their
names hold a key of the files that they were made from, so other files make another entry. The index
is written last, and pixels are only believed beside it, so what a killed process leaves is not used.
The index has checksums of itself and of the pixels. An entry that does not match them is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metabridge.datasets.image_decoding import CHUNK, Form, Unreadable, decoded, each, workers
from metabridge.datasets.image_files import (
    SPLITS,
    Category,
    Content,
    Source,
    free_memory,
    named,
    open_regular,
    readable,
    split_by_class,
)
from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError

FORMAT = 2  # Raise it with every change to what is stored, or to how a data set's files are read.
HASHED_FILES, HASHED_BYTES = 64, 2**30  # So much is keyed by its contents: a second's work. Beyond it, by its dates.
STALE = 24 * 3600
ATTEMPTS = 3  # To write an entry while others write the same.
BLOCK = 2**24  # Bytes of pixels that have one checksum, about.

logger = logging.getLogger("metabridge")


@dataclass(frozen=True, eq=False)
class Stored:
    """Images in the store with a label each, the classes, and what the files lacked.

    `empty` names classes without a readable image; `skipped` has name and reason of unreadable images,
    of which some could not be read for a reason that may pass if `incomplete`. `same` has groups of
    images with equal pixels in more than one class, each by row and name.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[Category, ...]
    empty: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    incomplete: bool = False
    same: tuple[tuple[tuple[int, str], ...], ...] = ()

    def labelled(self, *, seed: int = 0, strict: bool = False, min_images: int | None = None) -> LabelledImages:
        """Return the images as a data set, with a warning of what was left out, or an error if `strict`.

        Classes without a split are split by the seed. With `min_images`, smaller classes are in no split.

        >>> classes = (Category("cat", "animals", "train"), Category("oak", "trees", "test"))
        >>> stored = Stored(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1]), classes)
        >>> sorted(stored.labelled(min_images=2).splits)
        ['train']
        """
        troubles = self.troubles()
        if strict and troubles:
            raise InputError(f"{troubles[0]} Mend or remove what is named, or load without strict.")
        for sentence in (*troubles, *self.notes):
            logger.warning("%s", sentence)
        counts = torch.bincount(self.labels, minlength=len(self.classes)).tolist()
        kept = [index for index, count in enumerate(counts) if count >= (min_images or 1)]
        if not kept:
            raise InputError(
                f"min_images is {min_images}, but the largest class has {max(counts)} images. "
                f"Use min_images={max(counts)} or fewer."
            )
        members: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
        for index, category in zip(kept, split_by_class([self.classes[index] for index in kept], seed)):
            members[category.split].append(index)
        self._warn_of_duplicates(members)
        superclasses = {name: place for place, name in enumerate(dict.fromkeys(c.superclass for c in self.classes))}
        return LabelledImages(
            images=self.images,
            labels=self.labels,
            class_names=tuple(category.name for category in self.classes),
            superclasses=torch.tensor([superclasses[category.superclass] for category in self.classes]),
            superclass_names=tuple(superclasses),
            splits={split: torch.tensor(indices) for split, indices in members.items() if indices},
        )

    def troubles(self) -> list[str]:
        """Say what was left out, a sentence for each kind.

        >>> Stored(torch.empty(0), torch.empty(0), (), empty=("oak",)).troubles()
        ["1 class without a readable image is left out: 'oak'."]
        """
        sentences = []
        if self.skipped:
            which = named(f"{name} ({reason})" for name, reason in self.skipped)
            images = "1 unreadable image is" if len(self.skipped) == 1 else f"{len(self.skipped)} unreadable images are"
            retried = " What the system did not let read is tried again on every load." if self.incomplete else ""
            sentences.append(f"{images} left out: {which}.{retried}")
        if self.empty:
            which = named(f"'{name}'" for name in self.empty)
            classes, verb = ("class", "is") if len(self.empty) == 1 else ("classes", "are")
            sentences.append(f"{len(self.empty)} {classes} without a readable image {verb} left out: {which}.")
        return sentences

    def _warn_of_duplicates(self, members: dict[str, list[int]]) -> None:
        split_of = {index: split for split, indices in members.items() for index in indices}
        labels = self.labels.tolist()
        found = []
        for group in self.same:
            splits = {split_of.get(labels[row]): name for row, name in group}
            splits.pop(None, None)
            if len(splits) > 1:
                found.append(" and ".join(f"{name} in {split}" for split, name in splits.items()))
        if found:
            pictures = "1 picture is" if len(found) == 1 else f"{len(found)} pictures are"
            logger.warning(
                "%s in more than one split, so that accuracies may be too high: %s. "
                "`metabridge data check` lists them.",
                pictures,
                named(found, most=3),
            )


def cache_folder() -> Path:
    """Return the folder where decoded images are kept.

    >>> cache_folder() == Path(os.environ.get("METABRIDGE_CACHE") or Path.home() / ".cache" / "metabridge")
    True
    """
    return Path(os.environ.get("METABRIDGE_CACHE") or Path.home() / ".cache" / "metabridge")


def fingerprint(files: Iterable[Path], root: Path) -> str:
    """Return a key of files below `root`: of their names and contents if that is quick to read.

    More than 64 files or 1 GiB are keyed by names, sizes and times of change instead: to read the
    contents of a tree of 60 000 images takes minutes from a cold disk, and to ask for their dates a
    second or less.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     file = Path(root, "a.png")
    ...     one, two = (file.write_bytes(content) and fingerprint([file], Path(root)) for content in (b"1", b"2"))
    >>> one == two
    False
    """
    names = sorted(map(str, files))  # Paths are slow to handle by the ten thousand.
    facts = [_size_and_time(name) for name in names]
    by_content = len(names) <= HASHED_FILES and sum(size for size, _ in facts) <= HASHED_BYTES
    above = len(str(root)) if str(root) != "." else -1
    key = hashlib.sha256()
    for name, (size, changed) in zip(names, facts):
        fact = _digest(name) if by_content else str(changed)
        key.update(f"{name[above + 1 :]}\0{size}\0{fact}\0".encode("utf-8", "surrogateescape"))
    return key.hexdigest()[:24]


def stored(name: str, key: str, form: Form, gather: Callable[[], Source]) -> Stored:
    """Return the images of a data set from the store, decoded into it if they are not there.

    `key` stands for the files, and `gather` reads what they hold; it is called on first use alone.

    >>> import numpy as np
    >>> from metabridge.datasets.image_files import Picture
    >>> picture = Picture("dot", 0, np.zeros((9, 9), dtype=np.uint8))
    >>> toy = Source("a toy", (Category("dots", "all", "train"),), 1, lambda: iter([picture]))
    >>> stored("toy", "key", Form(size=4, channels=1), lambda: toy).images.shape
    torch.Size([1, 1, 4, 4])
    """
    stem = f"{name}-v{FORMAT}-{form.size}px-{form.channels}-{key}"
    pixels, index = (cache_folder() / f"{stem}.{end}" for end in ("pixels", "json"))
    with contextlib.suppress(Exception):  # A damaged entry can fail in every way.
        held = _read(pixels, index)
        if not held.incomplete:
            return held
    for _ in range(ATTEMPTS):
        _write(name, gather, form, pixels, index)
        with contextlib.suppress(Exception):  # Another process may have put its pixels in place of these.
            return _read(pixels, index)
    raise InputError(
        f"images kept in {pixels.parent} are not what was written there: other processes write the same, or the disk "
        "is damaged. Wait for the others, or name another folder in METABRIDGE_CACHE."
    )


def _size_and_time(file: str) -> tuple[int, int]:
    try:
        fact = os.stat(file)
    except OSError:
        return 0, 0  # Such as a link to nothing: found out when it is to be decoded.
    return fact.st_size, fact.st_mtime_ns


def _digest(file: str) -> str:
    try:
        with open_regular(file) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return "unreadable"


def _read(pixels: Path, index: Path) -> Stored:
    with open_regular(index) as stream:
        held = json.load(stream)
    if held.pop("checksum") != _checksum(held):
        raise ValueError(f"{index} does not match its checksum")
    shape = held["shape"]
    if pixels.stat().st_size != math.prod(shape):
        raise ValueError(f"{pixels} is {pixels.stat().st_size} bytes, but its index says {math.prod(shape)}")
    flat = torch.from_file(str(pixels), shared=False, size=math.prod(shape), dtype=torch.uint8)
    images = flat.view(shape)
    with ThreadPoolExecutor(workers()) as executor:
        blocks = (block.numpy().data for block in images.split(_block(math.prod(shape[1:]))))
        if list(executor.map(zlib.crc32, blocks)) != held["blocks"]:
            raise ValueError(f"{pixels} does not match its checksums")
    labels, classes = held["labels"], tuple(Category(*category) for category in held["classes"])
    rows = [row for group in held["same"] for row, _ in group]
    if not (
        len(labels) == len(images) > 0
        and all(isinstance(label, int) and 0 <= label < len(classes) for label in labels)
        and all(isinstance(row, int) and 0 <= row < len(images) for row in rows)
        and all(isinstance(text, str) for category in classes for text in category)
        and {category.split for category in classes} <= {*SPLITS.values(), ""}
    ):
        raise ValueError(f"{index} does not fit {pixels}")
    return Stored(
        images=images,
        labels=torch.tensor(labels),
        classes=classes,
        empty=tuple(held["empty"]),
        skipped=tuple((name, reason) for name, reason in held["skipped"]),
        notes=tuple(held["notes"]),
        incomplete=held["incomplete"],
        same=tuple(tuple((row, name) for row, name in group) for group in held["same"]),
    )


def _checksum(held: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _write(name: str, gather: Callable[[], Source], form: Form, pixels: Path, index: Path) -> None:
    with written_whole(index) as index_stream:
        with written_whole(pixels) as pixel_stream:
            with readable(name):
                source = gather()
            _check_space(source.total, form, pixels.parent)
            labels: list[int] = []
            skipped: list[tuple[str, str]] = []
            incomplete = False
            blocks: list[int] = []
            rows = _block(form.channels * form.size**2)
            seen: dict[bytes, list[tuple[int, str]]] = {}
            for picture, result in each(source, partial(_pixels, form=form), f"Decoding {name}"):
                if isinstance(result, Unreadable):
                    skipped.append((picture.name, result.reason))
                    incomplete |= result.may_pass
                else:
                    image, digest = result
                    seen.setdefault(digest, []).append((len(labels), picture.name))
                    if len(labels) % rows == 0:
                        blocks.append(0)
                    blocks[-1] = zlib.crc32(image.data, blocks[-1])
                    labels.append(picture.label)
                    pixel_stream.write(image.data)
            if not labels:
                first = f"; {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
                raise InputError(f"{name} has no image that can be read ({source.total} tried{first}).")
        present = sorted(set(labels))
        place = {label: number for number, label in enumerate(present)}
        held = {
            "form": source.form,
            "shape": [len(labels), form.channels, form.size, form.size],
            "labels": [place[label] for label in labels],
            "classes": [source.classes[label] for label in present],
            "empty": [category.name for label, category in enumerate(source.classes) if label not in place],
            "skipped": skipped,
            "notes": source.notes,
            "incomplete": incomplete,
            "same": [group for group in seen.values() if len({labels[row] for row, _ in group}) > 1],
            "blocks": blocks,
        }
        index_stream.write(json.dumps({**held, "checksum": _checksum(held)}).encode())


def _block(image_bytes: int) -> int:
    """How many images have one checksum."""
    return max(1, BLOCK // image_bytes)


def _pixels(content: Content, form: Form) -> tuple[NDArray[np.uint8], bytes]:
    image = decoded(content, form)
    return image, hashlib.blake2b(image.data, digest_size=16).digest()


def _check_space(total: int, form: Form, folder: Path) -> None:
    """Refuse a size for which the disk or the memory is too small, before anything is decoded."""
    image = form.channels * form.size**2
    free = shutil.disk_usage(folder).free
    if total * image > free:
        raise InputError(
            f"{total} images of {form.size} × {form.size} pixels take {total * image / 2**30:.1f} GiB, but "
            f"{folder} has {free / 2**30:.1f} GiB free. Use a smaller size, or name another folder in METABRIDGE_CACHE."
        )
    working = min(total, (2 * workers() + 1) * CHUNK) * image
    if working > free_memory():
        raise InputError(
            f"decoding images of {form.size} × {form.size} pixels takes {working / 2**30:.1f} GiB of memory, but "
            f"{free_memory() / 2**30:.1f} GiB are free. Use a smaller size."
        )


@contextlib.contextmanager
def written_whole(file: Path) -> Iterator[BinaryIO]:
    """Write a file of the cache under another name, which becomes its own only when all of it is on the disk.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with written_whole(Path(folder, "a.pixels")) as stream:
    ...         _ = stream.write(b"whole")
    ...     Path(folder, "a.pixels").read_bytes()
    b'whole'
    """
    part = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob(f"{file.name}.*.part"):  # Left by a process that was killed.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - old.stat().st_mtime > STALE:
                    old.unlink()
        with part.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except OSError as error:
        raise InputError(
            f"images cannot be kept in {file.parent} ({error.strerror}). "
            "Free space there, or name a folder that can be written to in METABRIDGE_CACHE."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
