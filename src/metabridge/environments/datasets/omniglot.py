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

from metabridge.environments.decode import Form
from metabridge.environments.source import Category, Source, class_folders, listed, tree
from metabridge.errors import InputError

FORM = Form(size=28, channels=1, invert=True)
PARTS = ("images_background", "images_evaluation")


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
    folders = {part: _classes(archives[part]) if part in archives else class_folders(root / part) for part in PARTS}
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
        return archives[part].read(name) if part in archives else (root / name).read_bytes()

    return listed(f"Omniglot, {'zip archives' if archives else 'folders'}", classes, read)


def _opened(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"{file} is not a whole zip archive ({error}). Get the file again.") from error


def _classes(archive: zipfile.ZipFile) -> dict[str, list[str]]:
    """What `class_folders` says of the folder in the archive."""
    found: dict[str, list[str]] = {}
    for name in sorted(archive.namelist()):
        # Part/Alphabet/character/drawing: a folder's own name ends in a slash.
        _, *parts = name.split("/")
        if len(parts) == 3 and not name.startswith("__MACOSX"):
            drawings = found.setdefault(f"{parts[0]}/{parts[1]}", [])
            if parts[2].lower().endswith(".png") and not parts[2].startswith("."):
                drawings.append("/".join(parts))
    return found
