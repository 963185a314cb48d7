"""Folders of images: one folder per class, optionally inside one folder per superclass.

A folder is a class if it contains images, or if it contains no folders (an empty class). The class is named by the path
of the folder, relative to the data set or to its split folder, and its superclass is the parent folder, or "all" if
there is none. For example, the image `animals/cat/1.jpg` has the class `animals/cat` and the superclass `animals`.
Images may have any size and mode, and any format in `image_decoding.FORMATS`. By default, the central square of each
image is resized to 84 × 84 pixels in RGB.

If at least two of the folders train, validation (or val, valid) and test exist, they are the splits of the classes. If
only one of them exists, it is the whole data set. Without splits, the classes are split at random: 64 % train, 16 %
validation and 20 % test. They are also split at random if two split folders share a class, because few-shot learning is
evaluated on classes that are not in the training set.
"""

from __future__ import annotations

from pathlib import Path

from metabridge.datasets.image_files import (
    IMAGE_SUFFIXES,
    ClassInfo,
    ImageSource,
    find_class_folders,
    list_tree,
    merge_image_splits,
    read_image_file,
    source_from_files,
    split_folders,
    walk_folders,
)
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError

DECODE_OPTIONS = DecodeOptions(size=84, channels=3, crop=True)


def matches(root: Path) -> bool:
    """Return whether any folder inside `root` contains images.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     matches(Path(root))
    False
    """
    if not root.is_dir():
        return False
    files_below = (files for folder, _, files in walk_folders([root]) if folder != root)
    return any(Path(name).suffix.lower() in IMAGE_SUFFIXES for files in files_below for name in files)


def list_files(root: Path) -> list[Path]:
    """Return all files and empty folders, except hidden ones, in the split folders or, if there are none, in `root`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "oak").mkdir()
    ...     [file.name for file in list_files(Path(root))]
    ['oak']
    """
    return [file for folder in list(split_folders(root).values()) or [root] for file in list_tree(folder)]


def open_source(root: Path) -> ImageSource:
    """Return the classes and images in a folder.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "trees", "oak").mkdir(parents=True)
    ...     Path(root, "trees", "oak", "1.jpg").touch()
    ...     open_source(Path(root)).classes
    (ClassInfo(name='trees/oak', superclass='trees', split=''),)
    """
    # Name of each split folder -> its split. If there are no split folders, the only entry is `root` itself (named "")
    # with no split (also written "").
    split_of = {folder.name: split for split, folder in split_folders(root).items()} or {"": ""}
    class_folders = find_class_folders(root, list(split_of))
    classes: dict[ClassInfo, list[str]] = {}
    for path, images in class_folders.images.items():
        split_folder, _, name = path.partition("/") if "" not in split_of else ("", "", path)
        classes[ClassInfo(name, name.rpartition("/")[0] or "all", split_of[split_folder])] = images
    if not classes:
        raise InputError(
            f"{root} has no folders of images. Make one subfolder per class there, and put the images of the class "
            "into it."
        )
    description = "folders of images" + (f", split into {', '.join(split_of.values())}" if "" not in split_of else "")
    source = source_from_files(description, classes, lambda name: read_image_file(root / name), class_folders.notes)
    return merge_image_splits(source)
