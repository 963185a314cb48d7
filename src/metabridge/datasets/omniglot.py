"""Omniglot (Lake et al. 2015): 1623 characters of 50 alphabets, each drawn by 20 people.

Read from `images_background.zip` and `images_evaluation.zip`, or from the folders that they contain. A class is a
character, named "Alphabet/character01", and its superclass is the alphabet. Images are 28 × 28 with one channel;
they are inverted, so that ink is 255 on a background of 0.

The evaluation alphabets are the test split. The published background set has no validation part: the last sixth of
its alphabets by name (5 of 30) is the validation split, and the rest is the training split.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from metabridge.datasets.image_decoding import DecodeOptions
from metabridge.datasets.image_files import (
    ClassInfo,
    ImageSource,
    check_regular,
    find_class_folders,
    list_tree,
    read_image_file,
    source_from_files,
)
from metabridge.errors import InputError

DECODE_OPTIONS = DecodeOptions(size=28, channels=1, invert=True)
PARTS = ("images_background", "images_evaluation")
MAX_DRAWING_BYTES = 2**24  # the files of Omniglot have a few hundred bytes
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
MAX_COMPRESSION = 100  # the largest plausible ratio of unpacked to packed size for an archive of drawings


def matches(root: Path) -> bool:
    """Return whether a folder contains a part of Omniglot.

    >>> matches(Path("nowhere"))
    False
    """
    return any((root / part).is_dir() or (root / f"{part}.zip").is_file() for part in PARTS)


def list_files(root: Path) -> list[Path]:
    """Return the files of the data set: for each part its archive or, if there is none, the files of its folder.

    >>> list_files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither images_background.zip nor the folder images_background. ...
    """
    files = []
    for part in PARTS:
        if (root / f"{part}.zip").is_file():
            files.append(root / f"{part}.zip")
        elif (root / part).is_dir():
            files += list_tree(root / part)
        else:
            raise InputError(
                f"{root} has neither {part}.zip nor the folder {part}. "
                "Put both parts of Omniglot, images_background and images_evaluation, there."
            )
    return files


def open_source(root: Path) -> ImageSource:
    """Return the characters and their drawings.

    >>> open_source(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither images_background.zip nor the folder images_background. ...
    """
    list_files(root)
    archives = {part: _open_archive(root / f"{part}.zip") for part in PARTS if (root / f"{part}.zip").is_file()}
    class_folders = find_class_folders(root, [part for part in PARTS if part not in archives])
    drawings_of: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
    drawings_of.update({part: _drawings_in(archive) for part, archive in archives.items()})
    for path, drawings in class_folders.images.items():
        part, _, name = path.partition("/")
        drawings_of[part][name] = [drawing.removeprefix(f"{part}/") for drawing in drawings]
    alphabets = sorted({name.split("/")[0] for name in drawings_of["images_background"]})
    validation = set(alphabets[len(alphabets) - max(len(alphabets) // 6, len(alphabets) > 1) :])
    classes = {}
    for part in PARTS:
        for name, drawings in drawings_of[part].items():
            alphabet = name.split("/")[0]
            background_split = "validation" if alphabet in validation else "train"
            split = background_split if part == "images_background" else "test"
            classes[ClassInfo(name, alphabet, split)] = [f"{part}/{drawing}" for drawing in drawings]

    def read(name: str) -> bytes:
        part = name.split("/")[0]
        return _read_drawing(archives[part], name) if part in archives else read_image_file(root / name)

    description = f"Omniglot, {'zip archives' if archives else 'folders'}"
    return source_from_files(description, classes, read, class_folders.notes)


def _open_archive(file: Path) -> zipfile.ZipFile:
    try:
        check_regular(file)
        archive = zipfile.ZipFile(file)
    except Exception as error:  # damaged archives raise exceptions of many types
        raise InputError(f"{file} is not a complete zip archive ({error}). Download the file again.") from error
    unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > MAX_DRAWING_BYTES + MAX_COMPRESSION * file.stat().st_size:
        raise InputError(
            f"{file} unpacks from {file.stat().st_size / 2**20:.1f} MiB to {unpacked / 2**20:.0f} MiB, which is too "
            "much for an archive of drawings. Do not trust this file."
        )
    if any(info.compress_type not in COMPRESSIONS for info in archive.infolist()):  # others unpack without a limit
        raise InputError(f"{file} uses an unsupported compression method. Pack it again with the method deflate.")
    return archive


def _read_drawing(archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    if size > MAX_DRAWING_BYTES:
        raise ValueError(f"it is {size / 2**20:.0f} MiB, but a drawing has at most {MAX_DRAWING_BYTES // 2**20} MiB")
    return archive.read(name)  # zipfile returns at most `file_size` bytes, whatever the archive contains


def _drawings_in(archive: zipfile.ZipFile) -> dict[str, list[str]]:
    """Return the paths of the drawings of each character, as `find_class_folders` does for folders."""
    drawings_of: dict[str, list[str]] = {}
    for path in sorted(set(archive.namelist())):
        # Part/Alphabet/character/drawing; the path of a folder ends with a slash.
        _, *parts = path.split("/")
        if len(parts) == 3 and not path.startswith("__MACOSX"):
            drawings = drawings_of.setdefault(f"{parts[0]}/{parts[1]}", [])
            if parts[2].lower().endswith(".png") and not parts[2].startswith("."):
                drawings.append("/".join(parts))
    return drawings_of
