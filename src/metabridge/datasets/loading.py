"""Labelled images by name or by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import NamedTuple

from metabridge.datasets import cifar, folder, mini_imagenet, omniglot, parquet, tiered_imagenet
from metabridge.datasets.glyphs import load_glyphs
from metabridge.datasets.image_cache import fingerprint, stored
from metabridge.datasets.image_decoding import PIXELS, Form
from metabridge.datasets.image_files import Source, readable, unreadable
from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError, check_count


class Dataset(NamedTuple):
    """How a data set is recognised and read, and the options that not all of them take."""

    form: Form
    holds: Callable[[Path], bool]
    files: Callable[[Path], list[Path]]
    source: Callable[[Path], Source]
    options: tuple[str, ...] = ()


def _cifar(name: str) -> Dataset:
    return Dataset(cifar.FORM, cifar.holds, cifar.files, partial(cifar.source, name=name))


# In the order in which `detect` asks them: what is particular before what is general.
DATASETS = {
    "omniglot": Dataset(omniglot.FORM, omniglot.holds, omniglot.files, omniglot.source, ("rotations",)),
    "mini-imagenet": Dataset(mini_imagenet.FORM, mini_imagenet.holds, mini_imagenet.files, mini_imagenet.source),
    "tiered-imagenet": Dataset(
        tiered_imagenet.FORM, tiered_imagenet.holds, tiered_imagenet.files, tiered_imagenet.source
    ),
    "cifar-fs": _cifar("cifar-fs"),
    "fc100": _cifar("fc100"),
    "fs-cifar100": _cifar("fs-cifar100"),
    "parquet": Dataset(parquet.FORM, parquet.holds, parquet.files, parquet.source, ("seed",)),
    "folder": Dataset(folder.FORM, folder.holds, folder.files, folder.source, ("seed",)),
}
NAMES = ("glyphs", *DATASETS)


def load(
    name: str | Path,
    root: str | Path | None = None,
    *,
    size: int | None = None,
    channels: int | None = None,
    strict: bool = False,
    min_images: int | None = None,
    rotations: bool = False,
    seed: int = 0,
) -> LabelledImages:
    """Return a data set by its name; `root` is the folder that holds it (for glyphs, the cache).

    `name` may also be a path, whose form is then detected, or both in one, "omniglot:data/omniglot".
    Images are decoded on first use and kept in the cache folder from then on. They are `size` pixels
    wide and high, in 1 or 3 `channels`; without these, as is usual for the data set. Images that
    cannot be read are left out with a warning, or refused if `strict`; classes with fewer images than
    `min_images` are in no split. `rotations` makes four classes of each character of Omniglot, and
    `seed` splits the classes of folders and parquet files that have no splits.

    >>> len(load("glyphs").superclass_names) >= 12
    True
    >>> load("omniglot", "nowhere")
    Traceback (most recent call last):
    metabridge.errors.InputError: there is nothing at nowhere. Name the folder or file that holds the data set.
    """
    name, root = parse_name(name, root)
    if min_images is not None:
        check_count("min_images", min_images)
    asked = {"size": size, "channels": channels, "strict": strict, "rotations": rotations, "seed": seed}
    if name == "glyphs":
        _refuse(name, asked, ("seed",))
        return _sourced(_leave_out(load_glyphs(seed=seed, cache=root), min_images), name, root, asked, min_images)
    dataset = DATASETS[name]
    _refuse(name, asked, ("size", "channels", "strict", *dataset.options))
    place = existing(name, root)
    form = formed(dataset.form, size, channels)
    with readable(place):
        base = place if place.is_dir() else place.parent
        key = fingerprint(dataset.files(place), base)
    held = stored(name, key, form, lambda: dataset.source(place))
    images = held.labelled(seed=seed, strict=strict, min_images=min_images)
    images = images.with_rotations() if rotations else images
    return _sourced(images, name, place.resolve(), asked, min_images)


def detect(path: str | Path) -> str:
    """Return the name of the data set that a path holds; CIFAR-100's files are taken for CIFAR-FS.

    >>> detect("nowhere")
    Traceback (most recent call last):
    metabridge.errors.InputError: there is nothing at nowhere. Name the folder or file that holds the data set.
    """
    place = existing("the data set", path)
    with readable(place):
        for name, dataset in DATASETS.items():
            if dataset.holds(place):
                return name
    raise InputError(
        f"{path} holds no data set that is known: no {', '.join(list(DATASETS)[:-2])}, no parquet files, "
        "and no folders of images. Make a folder for every class there, with its images inside."
    )


def parse_name(name: str | Path, root: str | Path | None = None) -> tuple[str, str | Path | None]:
    """Return a data set's name and place, out of either or of both in one.

    >>> parse_name("omniglot:data/omniglot")
    ('omniglot', 'data/omniglot')
    """
    text = str(name)
    if text in NAMES:
        return text, root
    before, colon, after = text.partition(":")
    if root is None and colon and before in NAMES:
        return before, after
    if root is None and _is_there(text):
        return detect(text), text
    known = ", ".join(f"'{known}'" for known in NAMES)
    path = ", and there is no such path either" if root is None else ""
    raise InputError(
        f"the data set is '{text}', but the known ones are {known}{path}. "
        "Use one of these, NAME:FOLDER for one in a folder, or the path of a folder of images."
    )


def _is_there(text: str) -> bool:
    """Whether a path leads to something; without permission to look, an error."""
    try:
        return bool(text) and Path(text).exists()
    except PermissionError as error:
        raise unreadable(text, error) from error
    except OSError:  # Such as a name that is too long.
        return False


def existing(name: str, root: str | Path | None) -> Path:
    """Return the place of a data set as a path, if there is something.

    >>> existing("omniglot", None)
    Traceback (most recent call last):
    metabridge.errors.InputError: omniglot is in no folder yet: say which one holds it, as in omniglot:FOLDER.
    """
    if root is None:
        raise InputError(f"{name} is in no folder yet: say which one holds it, as in {name}:FOLDER.")
    place = Path(root)
    with readable(place):
        if not place.exists():
            raise InputError(f"there is nothing at {root}. Name the folder or file that holds the data set.")
    return place


def formed(form: Form, size: int | None, channels: int | None) -> Form:
    """Return a form with another size or other channels.

    >>> formed(Form(size=84, channels=3), 32, None)
    Form(size=32, channels=3, crop=False, invert=False)
    """
    if size is not None:
        check_count("size", size)
        if size**2 > PIXELS:
            raise InputError(
                f"size is {size}, but images have at most {isqrt(PIXELS)} pixels a side. Use a smaller size."
            )
    if channels not in (None, 1, 3):
        raise InputError(f"channels is {channels}, but images have 1 (grey) or 3 (RGB). Use one of these.")
    return replace(form, size=size or form.size, channels=channels or form.channels)


def _sourced(
    images: LabelledImages, name: str, root: str | Path | None, asked: Mapping[str, object], min_images: int | None
) -> LabelledImages:
    """Note on the images how to load them again."""
    options = {**asked, "min_images": min_images}
    given = {option: value for option, value in options.items() if value not in (None, False, 0)}
    return replace(images, load_arguments={"name": name, "root": None if root is None else str(root), **given})


def _refuse(name: str, asked: Mapping[str, object], taken: tuple[str, ...]) -> None:
    for option, value in asked.items():
        if option not in taken and value not in (None, False, 0):
            raise InputError(f"{option} is {value}, but '{name}' does not take it. Leave {option} out.")


def _leave_out(images: LabelledImages, min_images: int | None) -> LabelledImages:
    if min_images is None:
        return images
    counts = images.labels.bincount(minlength=len(images.class_names))
    min_images = min(min_images, len(images.labels) + 1)  # A tensor cannot be compared with any integer.
    splits = {split: members[counts[members] >= min_images] for split, members in images.splits.items()}
    return replace(images, splits={split: members for split, members in splits.items() if len(members)})
