"""Omniglot (Lake et al. 2015): 1623 characters of 50 alphabets, each drawn by 20 people.

It is read from `images_background.zip` and `images_evaluation.zip`, or from the folders that they contain. A class is a
character, with a name such as "Greek/character01", and its superclass is the alphabet. Images are resized to 28 × 28
pixels with one channel and inverted, so ink is 255 on a background of 0.

The alphabets of the evaluation set are the test split. The published background set is not divided further; here, the
last sixth of its alphabets by name (5 of 30) is the validation split, and the others are the training split.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from metabridge.datasets.image_files import (
    ClassInfo,
    ImageSource,
    check_regular,
    find_class_folders,
    list_tree,
    read_image_file,
    source_from_files,
)
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError

DECODE_OPTIONS = DecodeOptions(size=28, channels=1, invert=True)
SUBSETS = ("images_background", "images_evaluation")
MAX_DRAWING_BYTES = 2**24  # the drawings of Omniglot are a few hundred bytes each
# With other compression methods, zipfile does not limit the unpacked size.
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
MAX_COMPRESSION = 100  # the largest plausible ratio of unpacked to packed size for an archive of drawings


def matches(root: Path) -> bool:
    """Return whether a folder contains the background or the evaluation set of Omniglot.

    >>> matches(Path("nowhere"))
    False
    """
    return any((root / subset).is_dir() or (root / f"{subset}.zip").is_file() for subset in SUBSETS)


def list_files(root: Path) -> list[Path]:
    """Return the files of the data set: for each subset its archive or, if there is none, the files of its folder.

    >>> list_files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither images_background.zip nor the folder images_background. ...
    """
    files = []
    for subset in SUBSETS:
        if (root / f"{subset}.zip").is_file():
            files.append(root / f"{subset}.zip")
        elif (root / subset).is_dir():
            files += list_tree(root / subset)
        else:
            raise InputError(
                f"{root} has neither {subset}.zip nor the folder {subset}. "
                "Put both subsets of Omniglot, images_background and images_evaluation, there."
            )
    return files


def open_source(root: Path) -> ImageSource:
    """Return the characters and their drawings.

    >>> open_source(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has neither images_background.zip nor the folder images_background. ...
    """
    list_files(root)  # raises an error if a subset is not there
    archives = {
        subset: _open_archive(root / f"{subset}.zip") for subset in SUBSETS if (root / f"{subset}.zip").is_file()
    }
    class_folders = find_class_folders(root, [subset for subset in SUBSETS if subset not in archives])
    drawings_of: dict[str, dict[str, list[str]]] = {subset: {} for subset in SUBSETS}
    drawings_of.update({subset: _list_drawings(archive) for subset, archive in archives.items()})
    for path, drawings in class_folders.images.items():
        subset, _, name = path.partition("/")
        drawings_of[subset][name] = [drawing.removeprefix(f"{subset}/") for drawing in drawings]
    alphabets = sorted({name.split("/")[0] for name in drawings_of["images_background"]})
    # The last sixth is for validation, but at least one alphabet if there are two or more.
    validation_alphabets = set(alphabets[len(alphabets) - max(len(alphabets) // 6, len(alphabets) > 1) :])
    classes = {}
    for subset in SUBSETS:
        for name, drawings in drawings_of[subset].items():
            alphabet = name.split("/")[0]
            background_split = "validation" if alphabet in validation_alphabets else "train"
            split = background_split if subset == "images_background" else "test"
            classes[ClassInfo(name, alphabet, split)] = [f"{subset}/{drawing}" for drawing in drawings]

    def read(name: str) -> bytes:
        subset = name.split("/")[0]
        return _read_drawing(archives[subset], name) if subset in archives else read_image_file(root / name)

    description = f"Omniglot, {'zip archives' if archives else 'folders'}"
    return source_from_files(description, classes, read, class_folders.notes)


def _open_archive(file: Path) -> zipfile.ZipFile:
    try:
        check_regular(file)
        archive = zipfile.ZipFile(file)
    except Exception as error:  # damaged archives raise exceptions of many types
        raise InputError(f"{file} is not a valid zip archive ({error}). Download the file again.") from error
    unpacked = sum(info.file_size for info in archive.infolist())
    # An archive that unpacks to at most `MAX_DRAWING_BYTES` is accepted, however small it is.
    if unpacked > MAX_DRAWING_BYTES + MAX_COMPRESSION * file.stat().st_size:
        raise InputError(
            f"{file} unpacks from {file.stat().st_size / 2**20:.1f} MiB to {unpacked / 2**20:.0f} MiB, which is too "
            "much for an archive of drawings. Do not trust this file."
        )
    if any(info.compress_type not in COMPRESSIONS for info in archive.infolist()):
        raise InputError(f"{file} uses an unsupported compression method. Pack it again with the method deflate.")
    return archive


def _read_drawing(archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    if size > MAX_DRAWING_BYTES:
        raise ValueError(f"it is {size / 2**20:.0f} MiB, but a drawing has at most {MAX_DRAWING_BYTES // 2**20} MiB")
    return archive.read(name)  # zipfile returns at most `file_size` bytes, whatever the archive contains


def _list_drawings(archive: zipfile.ZipFile) -> dict[str, list[str]]:
    """Return the drawings of each character "alphabet/character", as paths relative to the folder of the subset."""
    drawings_of: dict[str, list[str]] = {}
    for path in sorted(set(archive.namelist())):
        # Paths are subset/alphabet/character/drawing; the path of a folder ends with a slash.
        _, *names = path.split("/")
        if len(names) == 3 and not path.startswith("__MACOSX"):
            alphabet, character, file = names
            drawings = drawings_of.setdefault(f"{alphabet}/{character}", [])
            if file.lower().endswith(".png") and not file.startswith("."):
                drawings.append("/".join(names))
    return drawings_of
