"""Images in folders: one folder a class, and the classes of one folder a superclass.

A folder that holds images is a class, named by its path, and the folder it lies in is its superclass
where there is such a level: `animals/cat/1.jpg` shows a cat, an animal. Images may have any format,
size and mode. The middle square of each is taken, in 84 × 84 pixels and RGB (`channels=1` gives grey).

Classes are split by folders train, validation (or val, valid) and test. Without these the classes are
split by chance, 64 % train, 16 % validation, 20 % test, and so they are when the folders share a
class, since few-shot learning is tested on classes that were not trained on.
"""

from __future__ import annotations

from pathlib import Path

from metabridge.datasets.image_decoding import Form
from metabridge.datasets.image_files import (
    IMAGES,
    Category,
    Source,
    class_folders,
    image_bytes,
    listed,
    pooled,
    split_folders,
    tree,
    walk,
)
from metabridge.errors import InputError

FORM = Form(size=84, channels=3, crop=True)


def holds(root: Path) -> bool:
    """Say whether some folder within a folder holds images.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     holds(Path(root))
    False
    """
    if not root.is_dir():
        return False
    below = (names for folder, _, names in walk([root]) if folder != root)
    return any(Path(name).suffix.lower() in IMAGES for names in below for name in names)


def files(root: Path) -> list[Path]:
    """Return every file below a folder or its splits, and every empty folder.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "oak").mkdir()
    ...     [file.name for file in files(Path(root))]
    ['oak']
    """
    return [file for part in list(split_folders(root).values()) or [root] for file in tree(part)]


def source(root: Path) -> Source:
    """Return the classes and images below a folder.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     Path(root, "trees", "oak").mkdir(parents=True)
    ...     Path(root, "trees", "oak", "1.jpg").touch()
    ...     source(Path(root)).classes
    (Category(name='trees/oak', superclass='trees', split=''),)
    """
    splits = {folder.name: split for split, folder in split_folders(root).items()} or {"": ""}
    folders = class_folders(root, list(splits))
    classes: dict[Category, list[str]] = {}
    for path, images in folders.images.items():
        part, _, name = path.partition("/") if "" not in splits else ("", "", path)
        classes[Category(name, name.rpartition("/")[0] or "all", splits[part])] = images
    if not classes:
        raise InputError(
            f"{root} has no folders of images. Make a folder for every class there, with its images inside."
        )
    form = "folders of images" + (f", split into {', '.join(splits.values())}" if "" not in splits else "")
    return pooled(listed(form, classes, lambda name: image_bytes(root / name), folders.notes))
