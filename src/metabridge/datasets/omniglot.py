"""Omniglot (Lake et al., 2015): 1623 characters of 50 alphabets, each drawn by 20 people.

Read from `images_background.zip` and `images_evaluation.zip` or from the folders inside them. A class
is a character, named "Alphabet/character01", and its superclass is the alphabet. Images are
28 × 28, one channel, and ink is 255 on 0, the other way round than in the files.

The evaluation alphabets are for testing. Lake's background set has no validation part: here the last
sixth of its alphabets by name (5 of 30) is for validation and the rest for training.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from metabridge.datasets.image_decoding import Form
from metabridge.datasets.image_files import (
    Category,
    Source,
    check_regular,
    class_folders,
    image_bytes,
    listed,
    tree,
)
from metabridge.errors import InputError

FORM = Form(size=28, channels=1, invert=True)
PARTS = ("images_background", "images_evaluation")
LARGEST_DRAWING = 2**24  # Bytes of a file; those of Omniglot have a few hundred.
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
MOST_PACKED = 100  # An archive of drawings cannot be so many times smaller than what is in it.


def holds(root: Path) -> bool:
    """Say whether a folder has a part of Omniglot in it.

    >>> holds(Path("nowhere"))
    False
    """
    return any((root / part).is_dir() or (root / f"{part}.zip").is_file() for part in PARTS)


def files(root: Path) -> list[Path]:
    """Return the files that the data set is read from; the archives go before the folders.

    >>> files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither images_background.zip nor the folder images_background. ...
    """
    found = []
    for part in PARTS:
        if (root / f"{part}.zip").is_file():
            found.append(root / f"{part}.zip")
        elif (root / part).is_dir():
            found += tree(root / part)
        else:
            raise InputError(
                f"{root} has neither {part}.zip nor the folder {part}. "
                "Put both parts of Omniglot, images_background and images_evaluation, there."
            )
    return found


def source(root: Path) -> Source:
    """Return the characters and their drawings; `files` says which files they are.

    >>> source(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither images_background.zip nor the folder images_background. ...
    """
    files(root)
    archives = {part: _opened(root / f"{part}.zip") for part in PARTS if (root / f"{part}.zip").is_file()}
    trees = class_folders(root, [part for part in PARTS if part not in archives])
    folders: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
    folders.update({part: _classes(archive) for part, archive in archives.items()})
    for path, drawings in trees.images.items():
        part, _, name = path.partition("/")
        folders[part][name] = [drawing.removeprefix(f"{part}/") for drawing in drawings]
    alphabets = sorted({name.split("/")[0] for name in folders["images_background"]})
    validation = set(alphabets[len(alphabets) - max(len(alphabets) // 6, len(alphabets) > 1) :])
    classes = {}
    for part in PARTS:
        for name, drawings in folders[part].items():
            alphabet = name.split("/")[0]
            background = "validation" if alphabet in validation else "train"
            split = background if part == "images_background" else "test"
            classes[Category(name, alphabet, split)] = [f"{part}/{drawing}" for drawing in drawings]

    def read(name: str) -> bytes:
        part = name.split("/")[0]
        return _unpacked(archives[part], name) if part in archives else image_bytes(root / name)

    return listed(f"Omniglot, {'zip archives' if archives else 'folders'}", classes, read, trees.notes)


def _opened(file: Path) -> zipfile.ZipFile:
    try:
        check_regular(file)
        archive = zipfile.ZipFile(file)
    except Exception as error:  # A damaged archive can fail in every way.
        raise InputError(f"{file} is not a whole zip archive ({error}). Get the file again.") from error
    unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > LARGEST_DRAWING + MOST_PACKED * file.stat().st_size:
        raise InputError(
            f"{file} holds {unpacked / 2**20:.0f} MiB in {file.stat().st_size / 2**20:.1f} MiB, which no archive of "
            "drawings does. Do not trust this file."
        )
    if any(info.compress_type not in PACKINGS for info in archive.infolist()):  # Others unpack without a limit.
        raise InputError(f"{file} is packed in an unusual way. Pack it again with the method deflate.")
    return archive


def _unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    if size > LARGEST_DRAWING:
        raise ValueError(f"it is {size / 2**20:.0f} MiB, but a drawing has at most {LARGEST_DRAWING // 2**20} MiB")
    return archive.read(name)  # Never more than that size, whatever is packed.


def _classes(archive: zipfile.ZipFile) -> dict[str, list[str]]:
    """What `class_folders` says of the folder in the archive."""
    found: dict[str, list[str]] = {}
    for name in sorted(set(archive.namelist())):
        # Part/Alphabet/character/drawing: a folder's own name ends in a slash.
        _, *parts = name.split("/")
        if len(parts) == 3 and not name.startswith("__MACOSX"):
            drawings = found.setdefault(f"{parts[0]}/{parts[1]}", [])
            if parts[2].lower().endswith(".png") and not parts[2].startswith("."):
                drawings.append("/".join(parts))
    return found
