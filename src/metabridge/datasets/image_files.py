"""What the files of a data set hold before any image is decoded: its classes and where its pictures are."""

from __future__ import annotations

import contextlib
import errno
import os
import reprlib
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metabridge.errors import InputError

READ = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
IMAGES = frozenset({*READ, ".heic", ".heif", ".avif", ".jxl"})  # the last only with what Pillow has learnt beside
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
SYSTEM_FOLDERS = frozenset({"__MACOSX", "lost+found", "System Volume Information", "$RECYCLE.BIN"})
SHARES = {"validation": 0.16, "test": 0.2}  # Of the classes, as in mini-ImageNet; the rest is for training.
LARGEST_IMAGE = 2**29  # Bytes of the file of an image.
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)  # What a link fails with that leads nowhere.

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


def listed(
    form: str,
    classes: Mapping[Category, Sequence[str]],
    read: Callable[[str], bytes],
    notes: tuple[str, ...] = (),
) -> Source:
    """Return a source of named files; `read` gives the content of one of them.

    >>> source = listed("a toy", {Category("cat", "animals", "train"): ["cat/1.png"]}, read=str.encode)
    >>> [(picture.name, picture.label) for picture in source.pictures()]
    [('cat/1.png', 0)]
    """

    def pictures() -> Iterator[Picture]:
        for label, names in enumerate(classes.values()):
            for name in names:
                yield Picture(name, label, partial(read, name))

    return Source(form, tuple(classes), sum(map(len, classes.values())), pictures, notes)


class ClassFolders(NamedTuple):
    """The images of every class folder, and notes on folders that are found a second time through a link."""

    images: dict[str, list[str]]
    notes: tuple[str, ...]


def class_folders(root: Path, parts: Sequence[str] = ("",)) -> ClassFolders:
    """Return the images of every class folder below the folders `parts` of `root`, all named relative to `root`.

    A folder that holds images is a class; so is one that holds nothing at all, and then it is empty.
    Links are followed, but every folder is read once, under its own name where that is below a part.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "trees", "oak").mkdir(parents=True)
    ...     Path(root, "trees", "oak", "1.png").touch()
    ...     Path(root, "trees", "elm").mkdir()
    ...     class_folders(Path(root)).images
    {'trees/elm': [], 'trees/oak': ['trees/oak/1.png']}
    """
    starts = [root / part for part in parts]
    repeated: list[tuple[Path, Path]] = []
    classes: dict[Path, list[str]] = {}
    for folder, inner, files in walk(starts, repeated):
        images = [name for name in files if Path(name).suffix.lower() in IMAGES]
        if folder not in starts and (images or not inner):
            classes[folder.relative_to(root)] = images
    order = {part: number for number, part in enumerate(parts)}
    found = {}
    for path in sorted(classes, key=lambda path: (order.get(path.parts[0], 0), path.parts)):
        name = path.as_posix()
        found[name] = [f"{name}/{image}" for image in classes[path]]
    same = [f"{link.relative_to(root)} (the same folder as {first.relative_to(root)})" for link, first in repeated]
    note = f"links to folders that are read already are left out: {named(same)}."
    return ClassFolders(found, (note,) if same else ())


def walk(
    starts: Iterable[Path], repeated: list[tuple[Path, Path]] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Visit every folder at or below `starts` once: its path, its folders and its other files that are not hidden.

    Links to folders are followed after all others, so a folder goes by its own name if that is below
    `starts`. A folder that is found again is skipped, and `repeated` is given its second and first path.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "again").symlink_to(root)
    ...     [folders for _, folders, _ in walk([Path(root)])]
    [['again']]
    """
    real, links = deque(starts), deque[Path]()
    visited: dict[tuple[int, int], Path] = {}
    while real or links:
        folder = real.popleft() if real else links.popleft()
        try:
            identity = os.stat(folder)
            first = visited.setdefault((identity.st_dev, identity.st_ino), folder)
            if first is not folder:
                if repeated is not None:
                    repeated.append((folder, first))
                continue
            with os.scandir(folder) as entries:
                shown = sorted((entry for entry in entries if not _hidden(entry.name)), key=lambda entry: entry.name)
            inner = [entry for entry in shown if _is_folder(entry)]
        except OSError as error:
            raise unreadable(folder, error) from error
        for entry in inner:
            (links if entry.is_symlink() else real).append(folder / entry.name)
        yield folder, [entry.name for entry in inner], [entry.name for entry in shown if entry not in inner]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder; a link that leads nowhere is none, and one of an image is told where it is read."""
    try:
        return entry.is_dir()
    except OSError as error:
        if entry.is_symlink() and (error.errno in _NOWHERE or Path(entry.name).suffix.lower() in IMAGES):
            return False
        raise


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
    for folder, inner, files in sorted(walk([root]), key=lambda visit: visit[0].parts):
        found += [folder / name for name in files] if files or inner else [folder]
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
    metabridge.errors.InputError: nowhere cannot be read (No such file or directory). Fix or remove it.
    """
    with readable(file), open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > (free := free_memory()):
            raise InputError(f"{file} is {size / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of memory are free.")
        return stream.read()


def image_bytes(file: Path) -> bytes:
    """Return the content of the file of one image, or raise an OSError.

    >>> image_bytes(Path("/dev/zero"))
    Traceback (most recent call last):
    OSError: it is not a regular file
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > LARGEST_IMAGE:
            raise OSError(f"it is {size / 2**20:.0f} MiB, but at most {LARGEST_IMAGE // 2**20} MiB are read")
        return stream.read(LARGEST_IMAGE)


def open_regular(file: str | Path) -> BufferedReader:
    """Open a file for reading, but no pipe or device, which might never end.

    >>> open_regular("/dev/zero")
    Traceback (most recent call last):
    OSError: it is not a regular file
    """
    check_regular(file)
    # A pipe that took the file's place in the meantime must not block.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        check_regular(descriptor)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def check_regular(file: str | Path | int) -> None:
    """Raise an OSError if a file, by its path or descriptor, is a folder, a pipe or a device.

    >>> check_regular("/")
    Traceback (most recent call last):
    OSError: it is not a regular file
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError("it is not a regular file")


@contextlib.contextmanager
def readable(place: str | Path) -> Iterator[None]:
    """Turn errors of the system while reading at `place` into errors for the user.

    >>> with readable("photographs"):
    ...     Path("photographs/cat.png").read_bytes()
    Traceback (most recent call last):
    metabridge.errors.InputError: photographs/cat.png cannot be read (No such file or directory). Fix or ...
    """
    try:
        yield
    except (OSError, MemoryError) as error:
        raise unreadable(getattr(error, "filename", None) or place, error) from error


def unreadable(place: object, error: OSError | MemoryError) -> InputError:
    """Return the error for a file or folder that the system does not let read.

    >>> unreadable("cat", PermissionError(13, "Permission denied"))
    InputError('cat cannot be read (Permission denied). Fix or remove it.')
    """
    if isinstance(error, MemoryError):
        return InputError(f"{place} cannot be read (not enough memory). Free some memory.")
    return InputError(f"{place} cannot be read ({error.strerror or error}). Fix or remove it.")


def inside(folder: Path, name: object, source: Path) -> Path:
    """Return the file that `source` names relative to a folder, if it lies in that folder.

    >>> inside(Path("images"), "../secret.png", Path("train.csv"))
    Traceback (most recent call last):
    metabridge.errors.InputError: train.csv names the image '../secret.png', which is not in images. Put it ...
    """
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise InputError(
            f"{source} names the image {shortened(name)}, which is not in {folder}. "
            "Put it there, and name it relative to that folder."
        )
    return folder / name


def indices(file: Path, key: str, values: Any, count: int) -> list[int]:
    """Return labels or row numbers as integers, or refuse the first that is not a whole number below `count`.

    >>> indices(Path("train"), "fine_labels", [0, -1], 100)
    Traceback (most recent call last):
    metabridge.errors.InputError: train has -1 in fine_labels, but whole numbers from 0 to 99 belong there. Get ...
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise InputError(f"{file} has no list {key}. Get the file again.")
    for value in values:
        if not (isinstance(value, int | float | np.number) and 0 <= value < count and value == int(value)):
            raise InputError(
                f"{file} has {shortened(value)} in {key}, but whole numbers from 0 to {count - 1} belong there. "
                "Get the file again."
            )
    return [int(value) for value in values]


def eight_bits(file: object, key: str, values: Any) -> NDArray[np.uint8]:
    """Return an array as uint8, or refuse it if a value would change.

    >>> eight_bits("train", "data", np.array([300]))
    Traceback (most recent call last):
    metabridge.errors.InputError: train has 300 in data, but whole numbers from 0 to 255 belong there. Get the ...
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
        raise InputError(f"{file} has no array of numbers {key}. Get the file again.")
    if values.dtype == np.uint8:
        return values
    wrong = ~((values >= 0) & (values <= 255) & (values == np.floor(values)))
    if wrong.any():
        raise InputError(
            f"{file} has {values[wrong][0]} in {key}, but whole numbers from 0 to 255 belong there. Get the file again."
        )
    return values.astype(np.uint8)


def texts(file: Path, key: str, values: Any) -> list[str]:
    """Return a list of names as text, of which Python 2 made bytes.

    >>> texts(Path("meta"), "fine_label_names", [b"apple", "bear"])
    ['apple', 'bear']
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, list | tuple) or not all(isinstance(value, str | bytes) for value in values):
        raise InputError(f"{file} has no list of names {key}. Get the file again.")
    return [as_text(value) for value in values]


def as_text(value: object) -> str:
    """Return a name as text, of which Python 2 made bytes.

    >>> as_text(b"apple")
    'apple'
    """
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def shortened(value: object) -> str:
    """Return a value as Python writes it, without the middle if that is long.

    >>> shortened("a" * 1000)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def free_memory() -> int:
    """Return the bytes of memory that are free, or a number that no data set reaches if that is not known.

    >>> free_memory() > 2**20
    True
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 2**62


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
    return name.startswith(".") or name in SYSTEM_FOLDERS
