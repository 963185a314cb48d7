"""The files of an image data set before decoding: classes, image paths, splits, and safe reading of files."""

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

READABLE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
# Pillow reads the four formats added here only with plugins or optional libraries.
IMAGE_SUFFIXES = frozenset({*READABLE_SUFFIXES, ".heic", ".heif", ".avif", ".jxl"})
# Name of a split in paths -> split.
SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
SYSTEM_FOLDERS = frozenset({"__MACOSX", "lost+found", "System Volume Information", "$RECYCLE.BIN"})
SPLIT_FRACTIONS = {"validation": 0.16, "test": 0.2}  # of the classes, as in mini-ImageNet; the others are for training
MAX_IMAGE_BYTES = 2**29
_BROKEN_LINK_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

Content = bytes | NDArray[np.uint8] | Callable[[], bytes]  # see `RawImage`


class RawImage(NamedTuple):
    """An image before decoding.

    Args:
        name: The name shown in messages, such as its path.
        label: The index of its class.
        content: The bytes of the image file, a function that reads them, or pixels. With a function, errors in reading
            the file occur during decoding, which reports them with the name of the image. Pixels are uint8 of shape
            (height, width) or (height, width, 3).
    """

    name: str
    label: int
    content: Content


class ClassInfo(NamedTuple):
    """A class: its name, its superclass, and its split, which is empty if the data set does not define splits."""

    name: str
    superclass: str
    split: str


@dataclass(frozen=True)
class ImageSource:
    """The classes and the undecoded images of a data set.

    Args:
        description: A description of the files, such as "folders of images".
        classes: The classes; the label of an image is an index into this tuple.
        total: The number of images.
        images: A function that iterates over the images.
        notes: Remarks for the user on how the files were read.
    """

    description: str
    classes: tuple[ClassInfo, ...]
    total: int
    images: Callable[[], Iterator[RawImage]]
    notes: tuple[str, ...] = ()


def source_from_files(
    description: str,
    classes: Mapping[ClassInfo, Sequence[str]],
    read: Callable[[str], bytes],
    notes: tuple[str, ...] = (),
) -> ImageSource:
    """Return an `ImageSource` for image files.

    `classes` maps each class to the names of its files, and `read` returns the content of a file, given its name.

    >>> source = source_from_files("a toy", {ClassInfo("cat", "animals", "train"): ["cat/1.png"]}, read=str.encode)
    >>> [(image.name, image.label) for image in source.images()]
    [('cat/1.png', 0)]
    """

    def images() -> Iterator[RawImage]:
        for label, names in enumerate(classes.values()):
            for name in names:
                yield RawImage(name, label, partial(read, name))

    return ImageSource(description, tuple(classes), sum(map(len, classes.values())), images, notes)


class ClassFolders(NamedTuple):
    """The paths of the images in every class folder, by the path of the folder, and notes on skipped links."""

    images: dict[str, list[str]]
    notes: tuple[str, ...]


def find_class_folders(root: Path, subfolders: Sequence[str] = ("",)) -> ClassFolders:
    """Return the images of every class folder below the `subfolders` of `root`, as paths relative to `root`.

    A class folder contains images, or it contains no folders (an empty class). Links are followed, but each folder is
    read once; a folder below `subfolders` is named by its path, not by a link to it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "trees", "oak").mkdir(parents=True)
    ...     Path(root, "trees", "oak", "1.png").touch()
    ...     Path(root, "trees", "elm").mkdir()
    ...     find_class_folders(Path(root)).images
    {'trees/elm': [], 'trees/oak': ['trees/oak/1.png']}
    """
    start_folders = [root / subfolder for subfolder in subfolders]
    repeated_paths: list[tuple[Path, Path]] = []
    classes: dict[Path, list[str]] = {}
    for folder, inner_folders, files in walk_folders(start_folders, repeated_paths):
        images = [name for name in files if Path(name).suffix.lower() in IMAGE_SUFFIXES]
        if folder not in start_folders and (images or not inner_folders):
            classes[folder.relative_to(root)] = images
    position_of = {subfolder: position for position, subfolder in enumerate(subfolders)}
    paths = {}
    for folder in sorted(classes, key=lambda path: (position_of.get(path.parts[0], 0), path.parts)):
        name = folder.as_posix()
        paths[name] = [f"{name}/{image}" for image in classes[folder]]
    skipped = [
        f"{link.relative_to(root)} (the same folder as {path.relative_to(root)})" for link, path in repeated_paths
    ]
    note = f"skipped links to folders that are read under another path: {join_names(skipped)}."
    return ClassFolders(paths, (note,) if skipped else ())


def walk_folders(
    start_folders: Iterable[Path], repeated_paths: list[tuple[Path, Path]] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield the path, the names of subfolders and the names of files of each folder at or below `start_folders`.

    Hidden files and folders are omitted. Each folder is visited once, and links to folders are followed last, so
    a folder below `start_folders` is visited under its path rather than through a link. If another path leads to the
    same folder, `(other path, first path)` is appended to `repeated_paths`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "again").symlink_to(root)
    ...     [subfolders for _, subfolders, _ in walk_folders([Path(root)])]
    [['again']]
    """
    folders, links = deque(start_folders), deque[Path]()
    visited: dict[tuple[int, int], Path] = {}
    while folders or links:
        folder = folders.popleft() if folders else links.popleft()
        try:
            status = os.stat(folder)
            first_path = visited.setdefault((status.st_dev, status.st_ino), folder)
            if first_path is not folder:
                if repeated_paths is not None:
                    repeated_paths.append((folder, first_path))
                continue
            with os.scandir(folder) as entries:
                visible_entries = sorted(
                    (entry for entry in entries if not _is_hidden(entry.name)), key=lambda entry: entry.name
                )
            subfolders = [entry for entry in visible_entries if _is_folder(entry)]
        except OSError as error:
            raise reading_error(folder, error) from error
        for entry in subfolders:
            (links if entry.is_symlink() else folders).append(folder / entry.name)
        yield (
            folder,
            [entry.name for entry in subfolders],
            [entry.name for entry in visible_entries if entry not in subfolders],
        )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder. Broken links, and unreadable links with an image suffix, count as files."""
    try:
        return entry.is_dir()
    except OSError as error:
        if entry.is_symlink() and (
            error.errno in _BROKEN_LINK_ERRORS or Path(entry.name).suffix.lower() in IMAGE_SUFFIXES
        ):
            return False
        raise


def split_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each split, for the splits that have a folder in `root`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "val").mkdir()
    ...     [(split, folder.name) for split, folder in split_folders(Path(root)).items()]
    [('validation', 'val')]
    """
    return {split: root / name for name, split in SPLIT_NAMES.items() if (root / name).is_dir()}


def list_tree(root: Path) -> list[Path]:
    """Return all files below `root` that are not hidden, and all empty folders, sorted by path.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "b.png").touch(); Path(root, ".DS_Store").touch()
    ...     [file.name for file in list_tree(Path(root))]
    ['b.png']
    """
    paths = []
    for folder, subfolders, files in sorted(walk_folders([root]), key=lambda visit: visit[0].parts):
        paths += [folder / name for name in files] if files or subfolders else [folder]
    return paths


def assign_splits(classes: Sequence[ClassInfo], seed: int = 0) -> tuple[ClassInfo, ...]:
    """Split classes at random, 64 % train, 16 % validation and 20 % test, unless all of them have a split.

    The result depends only on the seed and the class names. With three or more classes, no split is empty.

    >>> [split for *_, split in assign_splits([ClassInfo(name, "", "") for name in "abcdefghij"])].count("train")
    6
    """
    if all(info.split for info in classes):
        return tuple(classes)
    if seed < 0:
        raise InputError(f"seed is {seed}, but must not be negative. Use seed=0 or more.")
    order = sorted(range(len(classes)), key=lambda index: classes[index].name)
    order = [order[position] for position in np.random.default_rng(seed).permutation(len(order))]
    split_of: dict[int, str] = {}
    for split in ("test", "validation"):
        # At least one class, if that leaves one for training and, given three or more classes, one for validation.
        minimum = 1 if len(order) > 1 + (split == "test" and len(classes) > 2) else 0
        for _ in range(max(round(SPLIT_FRACTIONS[split] * len(classes)), minimum)):
            split_of[order.pop()] = split
    return tuple(info._replace(split=split_of.get(index, "train")) for index, info in enumerate(classes))


def merge_image_splits(source: ImageSource) -> ImageSource:
    """Remove splits that are not splits of the classes, so that `assign_splits` can split the classes.

    A single split is treated as the whole data set. If only some classes have a split, all splits are ignored. Splits
    that share a class are splits of the images, made for ordinary classification: the images of each class are merged,
    with a remark in `notes`.

    >>> classes = (ClassInfo("cat", "", "train"), ClassInfo("cat", "", "test"))
    >>> merge_image_splits(ImageSource("a toy", classes, 0, lambda: iter(()))).classes
    (ClassInfo(name='cat', superclass='', split=''),)
    """
    splits_of: dict[tuple[str, str], list[str]] = {}
    for name, superclass, split in source.classes:
        splits_of.setdefault((name, superclass), []).append(split)
    shared_names = [name for (name, _), splits in splits_of.items() if len(splits) > 1]
    splits = {info.split for info in source.classes}
    if not shared_names and len(splits) > 1 and "" not in splits:
        return source
    merged_label = {key: label for label, key in enumerate(splits_of)}
    new_labels = [merged_label[name, superclass] for name, superclass, _ in source.classes]
    notes = source.notes
    if shared_names:
        first_split, second_split, *_ = next(splits for splits in splits_of.values() if len(splits) > 1)
        notes += (
            f"class '{shared_names[0]}' is in the splits '{first_split}' and '{second_split}', so these are "
            "splits of images, not of classes: the images of each class are merged, and the classes are split at "
            "random by the seed.",
        )
    return replace(
        source,
        classes=tuple(ClassInfo(*key, "") for key in merged_label),
        images=lambda: (image._replace(label=new_labels[image.label]) for image in source.images()),
        notes=notes,
    )


def read_file(file: Path) -> bytes:
    """Return the content of a file; raise `InputError` if it cannot be read or does not fit into memory.

    >>> read_file(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere cannot be read (No such file or directory). Fix or remove it.
    """
    with reading_errors(file), open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > (free := free_memory()):
            raise InputError(
                f"{file} is {size / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of memory are free. Free some memory."
            )
        return stream.read()


def read_image_file(file: Path) -> bytes:
    """Return the content of an image file; raise `OSError` if it cannot be read or is too large.

    >>> read_image_file(Path("/dev/zero"))
    Traceback (most recent call last):
    OSError: it is not a regular file
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_IMAGE_BYTES:
            raise OSError(f"it is {size / 2**20:.0f} MiB, but at most {MAX_IMAGE_BYTES // 2**20} MiB are read")
        return stream.read(MAX_IMAGE_BYTES)


def open_regular(file: str | Path) -> BufferedReader:
    """Open a regular file for reading; raise `OSError` for a pipe or a device, which might never end.

    >>> open_regular("/dev/zero")
    Traceback (most recent call last):
    OSError: it is not a regular file
    """
    check_regular(file)
    # O_NONBLOCK: if a pipe replaced the file since the check, opening it must not block.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        check_regular(descriptor)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def check_regular(file: str | Path | int) -> None:
    """Raise `OSError` if a path or a file descriptor is a folder, a pipe or a device.

    >>> check_regular("/")
    Traceback (most recent call last):
    OSError: it is not a regular file
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError("it is not a regular file")


@contextlib.contextmanager
def reading_errors(path: str | Path) -> Iterator[None]:
    """Convert system errors in the block into `InputError`, naming the file of the error, or else `path`.

    >>> with reading_errors("photographs"):
    ...     Path("photographs/cat.png").read_bytes()
    Traceback (most recent call last):
    metabridge.errors.InputError: photographs/cat.png cannot be read (No such file or directory). Fix or ...
    """
    try:
        yield
    except (OSError, MemoryError) as error:
        raise reading_error(getattr(error, "filename", None) or path, error) from error


def reading_error(path: object, error: OSError | MemoryError) -> InputError:
    """Return the `InputError` for a file or folder that the system cannot read.

    >>> reading_error("cat", PermissionError(13, "Permission denied"))
    InputError('cat cannot be read (Permission denied). Fix or remove it.')
    """
    if isinstance(error, MemoryError):
        return InputError(f"{path} cannot be read (not enough memory). Free some memory.")
    return InputError(f"{path} cannot be read ({error.strerror or error}). Fix or remove it.")


def path_inside(folder: Path, name: object, source: Path) -> Path:
    """Return the path of the image `name` in `folder`; raise `InputError` for an invalid name or one outside `folder`.

    `source` is the file that contains the name.

    >>> path_inside(Path("images"), "../secret.png", Path("train.csv"))
    Traceback (most recent call last):
    metabridge.errors.InputError: train.csv names the image '../secret.png', which is not in images. Put it ...
    """
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise InputError(
            f"{source} names the image {short_repr(name)}, which is not in {folder}. "
            "Put it there, and name it relative to that folder."
        )
    return folder / name


def parse_indices(file: Path, key: str, values: Any, count: int) -> list[int]:
    """Return labels or row numbers as integers; raise `InputError` unless all are integers from 0 to count - 1.

    >>> parse_indices(Path("train"), "fine_labels", [0, -1], 100)
    Traceback (most recent call last):
    metabridge.errors.InputError: train has -1 in fine_labels, but expected integers from 0 to 99. Download ...
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise InputError(f"{file} has no list {key}. Download the file again.")
    for value in values:
        if not (isinstance(value, int | float | np.number) and 0 <= value < count and value == int(value)):
            raise InputError(
                f"{file} has {short_repr(value)} in {key}, but expected integers from 0 to {count - 1}. "
                "Download the file again."
            )
    return [int(value) for value in values]


def parse_uint8(file: object, key: str, values: Any) -> NDArray[np.uint8]:
    """Return an array as uint8; raise `InputError` if the conversion would change a value.

    >>> parse_uint8("train", "data", np.array([300]))
    Traceback (most recent call last):
    metabridge.errors.InputError: train has 300 in data, but expected integers from 0 to 255. Download ...
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
        raise InputError(f"{file} has no numeric array {key}. Download the file again.")
    if values.dtype == np.uint8:
        return values
    is_invalid = ~((values >= 0) & (values <= 255) & (values == np.floor(values)))
    if is_invalid.any():
        raise InputError(
            f"{file} has {values[is_invalid][0]} in {key}, but expected integers from 0 to 255. "
            "Download the file again."
        )
    return values.astype(np.uint8)


def parse_names(file: Path, key: str, values: Any) -> list[str]:
    """Return a list of names as text; pickles of Python 2 store them as bytes.

    >>> parse_names(Path("meta"), "fine_label_names", [b"apple", "bear"])
    ['apple', 'bear']
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, list | tuple) or not all(isinstance(value, str | bytes) for value in values):
        raise InputError(f"{file} has no list of names {key}. Download the file again.")
    return [decode_text(value) for value in values]


def decode_text(value: object) -> str:
    """Return a name as text; pickles of Python 2 store names as bytes.

    >>> decode_text(b"apple")
    'apple'
    """
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def short_repr(value: object) -> str:
    """Return the `repr` of a value, with the middle replaced by "..." if it is long.

    >>> short_repr("a" * 1000)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"
    """
    formatter = reprlib.Repr()
    formatter.maxstring = formatter.maxother = formatter.maxlong = 80
    return formatter.repr(value)


def free_memory() -> int:
    """Return the free memory in bytes, or 2**62 if the system does not report it.

    >>> free_memory() > 2**20
    True
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 2**62


def join_names(names: Iterable[str], limit: int = 5) -> str:
    """Join at most `limit` names with commas for a message, followed by the number of the other names.

    >>> join_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    names = list(names)
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:limit])} and {len(names) - limit} more"


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in SYSTEM_FOLDERS
