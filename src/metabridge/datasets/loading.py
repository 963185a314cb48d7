"""Load image data sets by name or by path."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from metabridge.datasets import cifar, folder, mini_imagenet, omniglot, parquet, tiered_imagenet
from metabridge.datasets.glyphs import load_glyphs
from metabridge.datasets.image_cache import fingerprint, load_or_decode
from metabridge.datasets.image_decoding import MAX_PIXELS
from metabridge.datasets.image_files import ImageSource, reading_error, reading_errors
from metabridge.decode_options import DecodeOptions, as_decode_options
from metabridge.environments.image_tasks import LabeledImages
from metabridge.errors import InputError, check_count


class DatasetReader(NamedTuple):
    """How a data set is recognized and read.

    Args:
        decode_options: The usual size, channels and preprocessing of the data set's images.
        matches: Returns whether a path contains the data set.
        list_files: Returns the files of the data set, for its fingerprint.
        open_source: Returns the classes and undecoded images of the data set.
        options: The names of the arguments of `load` that this data set accepts but some others reject.
    """

    decode_options: DecodeOptions
    matches: Callable[[Path], bool]
    list_files: Callable[[Path], list[Path]]
    open_source: Callable[[Path], ImageSource]
    options: tuple[str, ...] = ()


def _cifar_reader(name: str) -> DatasetReader:
    return DatasetReader(cifar.DECODE_OPTIONS, cifar.matches, cifar.list_files, partial(cifar.open_source, name=name))


# `detect` returns the first match, so specific formats come before general ones.
DATASETS = {
    "omniglot": DatasetReader(
        omniglot.DECODE_OPTIONS, omniglot.matches, omniglot.list_files, omniglot.open_source, ("rotations",)
    ),
    "mini-imagenet": DatasetReader(
        mini_imagenet.DECODE_OPTIONS, mini_imagenet.matches, mini_imagenet.list_files, mini_imagenet.open_source
    ),
    "tiered-imagenet": DatasetReader(
        tiered_imagenet.DECODE_OPTIONS, tiered_imagenet.matches, tiered_imagenet.list_files, tiered_imagenet.open_source
    ),
    "cifar-fs": _cifar_reader("cifar-fs"),
    "fc100": _cifar_reader("fc100"),
    "fs-cifar100": _cifar_reader("fs-cifar100"),
    "parquet": DatasetReader(
        parquet.DECODE_OPTIONS, parquet.matches, parquet.list_files, parquet.open_source, ("seed",)
    ),
    "folder": DatasetReader(folder.DECODE_OPTIONS, folder.matches, folder.list_files, folder.open_source, ("seed",)),
}
DATASET_NAMES = ("glyphs", *DATASETS)


def load(
    name: str | Path,
    root: str | Path | None = None,
    *,
    size: int | None = None,
    channels: int | None = None,
    decode_options: DecodeOptions | Mapping[str, Any] | None = None,
    strict: bool = False,
    min_images: int | None = None,
    rotations: bool = False,
    seed: int = 0,
) -> LabeledImages:
    """Load an image data set by name or by path.

    Images are decoded on first use and cached on disk. Unreadable images are skipped with a warning.

    Args:
        name: The name of a data set ("glyphs" or a key of `DATASETS`), a path, whose format is detected, or both as
            "NAME:PATH", such as "omniglot:data/omniglot".
        root: The folder or file of the data set; needed only if `name` contains no path. For "glyphs", the cache
            folder.
        size: Width and height of the images in pixels. Default: the usual size of the data set.
        channels: 1 (gray) or 3 (RGB). Default: the usual number for the data set.
        decode_options: How to decode the images, such as `net.decode_options` of a pretrained network, or a dictionary
            of these options; not together with `size` and `channels`. Default: the usual options of the data set.
        strict: If an image is unreadable, or a class has no readable image, raise an error instead of skipping it.
        min_images: Omit classes with fewer images from all splits.
        rotations: Add each class of Omniglot rotated by 90°, 180° and 270° as three further classes.
        seed: For folders and parquet files without splits, the seed of the random split of the classes. For "glyphs",
            the seed for drawing the images.

    Returns:
        The images, with their classes and splits.

    Raises:
        InputError: The data set is unknown, missing or damaged, or does not accept an option.

    >>> len(load("glyphs").superclass_names) >= 12
    True
    >>> load("omniglot", "nowhere")
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere does not exist. Check the path.
    """
    name, root = parse_name(name, root)
    if min_images is not None:
        check_count("min_images", min_images)
    if decode_options is not None:
        if size is not None or channels is not None:
            raise InputError("decode_options determines size and channels. Omit size and channels.")
        decode_options = as_decode_options(decode_options)
    options = {
        "size": size,
        "channels": channels,
        "decode_options": None if decode_options is None else decode_options.to_json(),
        "strict": strict,
        "rotations": rotations,
        "seed": seed,
    }
    if name == "glyphs":
        _check_options(name, options, ("seed",))
        glyphs = _drop_small_classes(load_glyphs(seed=seed, cache=root), min_images)
        return _with_load_arguments(glyphs, name, root, options, min_images)
    reader = DATASETS[name]
    _check_options(name, options, ("size", "channels", "decode_options", "strict", *reader.options))
    path = existing_path(name, root)
    if decode_options is None:
        decode_options = override_options(reader.decode_options, size, channels)
    with reading_errors(path):
        key = fingerprint(reader.list_files(path), path if path.is_dir() else path.parent)
    usual_options = override_options(reader.decode_options, decode_options.size, decode_options.channels)
    if decode_options != usual_options:
        key += f"-{zlib.crc32(json.dumps(decode_options.to_json()).encode()):08x}"
    cached = load_or_decode(name, key, decode_options, lambda: reader.open_source(path), path)
    images = cached.to_labeled_images(seed=seed, strict=strict, min_images=min_images)
    images = images.with_rotations() if rotations else images
    return _with_load_arguments(images, name, path.resolve(), options, min_images)


def detect(path: str | Path) -> str:
    """Return the name of the data set at a path. CIFAR-100's files are reported as "cifar-fs".

    Args:
        path: A folder or file.

    Returns:
        A key of `DATASETS`.

    Raises:
        InputError: The path does not exist or contains no recognized data set.

    >>> detect("nowhere")
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere does not exist. Check the path.
    """
    existing = existing_path("the data set", path)
    with reading_errors(existing):
        for name, reader in DATASETS.items():
            if reader.matches(existing):
                return name
        is_file = existing.is_file()
    formats = ", ".join(list(DATASETS)[:-2])  # all but "parquet" and "folder", which the messages explain
    if is_file:
        raise InputError(
            f"{path} is not a recognized file. Supported formats: {formats} and parquet. "
            "You can also pass a folder with one subfolder of images per class."
        )
    raise InputError(
        f"{path} contains no recognized data set. Supported formats: {formats}, parquet and folders of images. "
        "To use single images, make one subfolder per class there, and put the images of the class into it."
    )


def parse_name(name: str | Path, root: str | Path | None = None) -> tuple[str, str | Path | None]:
    """Return the name and the path of a data set from the first two arguments of `load`.

    >>> parse_name("omniglot:data/omniglot")
    ('omniglot', 'data/omniglot')
    """
    text = str(name)
    if text in DATASET_NAMES:
        return text, root
    prefix, colon, path = text.partition(":")
    if root is None and colon and prefix in DATASET_NAMES:
        return prefix, path
    if root is None and _exists(text):
        return detect(text), text
    if root is not None:
        raise InputError(f"the data set is '{text}', but must be one of {', '.join(DATASET_NAMES)}.")
    raise InputError(
        f"the data set is '{text}', which is neither the name of a data set nor an existing path. Pass glyphs, the "
        f"path of a folder of images, or NAME:PATH with one of the names {', '.join(DATASETS)}."
    )


def _exists(path: str) -> bool:
    """Return whether a path exists; raise `InputError` if permissions prevent the check."""
    try:
        return bool(path) and Path(path).exists()
    except PermissionError as error:
        raise reading_error(path, error) from error
    except OSError:  # for example a name that is too long
        return False


def existing_path(name: str, root: str | Path | None) -> Path:
    """Return the path `root` of the data set `name`; raise `InputError` if it is None or does not exist.

    >>> existing_path("omniglot", None)
    Traceback (most recent call last):
    metabridge.errors.InputError: the path of omniglot is missing. Use omniglot:FOLDER.
    """
    if root is None:
        raise InputError(f"the path of {name} is missing. Use {name}:FOLDER.")
    path = Path(root)
    with reading_errors(path):
        if not path.exists():
            raise InputError(f"{root} does not exist. Check the path.")
    return path


def override_options(options: DecodeOptions, size: int | None, channels: int | None) -> DecodeOptions:
    """Return the decoding options with `size` and `channels` replaced if they are not None.

    >>> override_options(DecodeOptions(size=84, channels=3), 32, None)
    DecodeOptions(size=32, channels=3, crop=False, invert=False)
    """
    if size is not None:
        check_count("size", size)
        if size**2 > MAX_PIXELS:
            raise InputError(f"size is {size}, but must be at most {isqrt(MAX_PIXELS)} pixels. Use a smaller size.")
    if channels not in (None, 1, 3):
        raise InputError(f"channels is {channels}, but images have 1 (gray) or 3 (RGB). Use one of these.")
    return replace(options, size=size or options.size, channels=channels or options.channels)


def _with_load_arguments(
    images: LabeledImages, name: str, root: str | Path | None, options: Mapping[str, object], min_images: int | None
) -> LabeledImages:
    """Store the arguments of `load` in the images, so that the same images can be loaded again later."""
    nondefault = {
        option: value
        for option, value in {**options, "min_images": min_images}.items()
        if value not in (None, False, 0)
    }
    return replace(images, load_arguments={"name": name, "root": None if root is None else str(root), **nondefault})


def _check_options(name: str, options: Mapping[str, object], accepted: tuple[str, ...]) -> None:
    for option, value in options.items():  # the default of every option is None, False or 0
        if option not in accepted and value not in (None, False, 0):
            raise InputError(f"{option} is {value}, but '{name}' does not accept it. Leave {option} out.")


def _drop_small_classes(images: LabeledImages, min_images: int | None) -> LabeledImages:
    if min_images is None:
        return images
    counts = images.labels.bincount(minlength=len(images.class_names))
    # A tensor cannot be compared with an arbitrarily large integer.
    min_images = min(min_images, len(images.labels) + 1)
    splits = {split: classes[counts[classes] >= min_images] for split, classes in images.splits.items()}
    return replace(images, splits={split: classes for split, classes in splits.items() if len(classes)})
