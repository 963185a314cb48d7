"""Conversion of images (paths, Pillow images, arrays, tensors) to the input of a trained network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from metabridge.datasets.image_decoding import Unreadable, decode, map_images, to_8_bit
from metabridge.datasets.image_files import Content, ImageSource, RawImage, read_image_file
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError


def convert_images(X: Any, decode_options: DecodeOptions) -> NDArray[np.uint8]:
    """Convert images to uint8 of shape (n, channels, size, size).

    Args:
        X: Images, or a single image; see `read_images`.
        decode_options: The size, channels and preprocessing of the converted images.

    Returns:
        The converted images.

    Raises:
        InputError: If `X` contains no image, or if an image cannot be read.

    >>> convert_images(np.zeros((5, 40, 30)), DecodeOptions(size=8, channels=3)).shape
    (5, 3, 8, 8)
    """
    return np.stack([check_readable(name, image) for name, image in read_images(X, decode_options)])


def read_images(X: Any, decode_options: DecodeOptions) -> Iterator[tuple[str, NDArray[np.uint8] | Unreadable]]:
    """Decode images one after the other, in several threads, so that few of them are in memory at the same time.

    Args:
        X: An iterable of images, or a single image. Each image is the path of a file, a Pillow image, an array of shape
            (height, width) or (height, width, channels), or a tensor of shape (height, width) or (channels, height,
            width). Arrays and tensors have dtype uint8, or a floating-point dtype and values from 0 to 1, which are
            rounded to 8 bits. An array or tensor of images has the images along its first dimension. An array of three
            dimensions is a single image if its last dimension is 1, 3 or 4; a tensor of three dimensions is a single
            image if its first dimension is 1 or 3.
        decode_options: The size, channels and preprocessing of the decoded images.

    Yields:
        For each image, its name (its path, or `X[index]`) and the decoded image, uint8 (channels, size, size), or an
        `Unreadable` with the reason if it cannot be decoded.

    Raises:
        InputError: If `X` contains no image, or something that is not an image.

    >>> [(name, image.shape) for name, image in read_images(np.zeros((40, 30)), DecodeOptions(size=8, channels=1))]
    [('X[0]', (1, 8, 8))]
    """
    images = _iterate_images(X)
    raw_images = (
        RawImage(
            _image_name(image, f"X[{index}]"), index, _image_content(f"X[{index}]", image, decode_options.channels)
        )
        for index, image in enumerate(images)
    )
    # The total is shown in the progress bar only.
    source = ImageSource("images", (), len(images) if isinstance(images, Sized) else 0, lambda: raw_images)
    is_empty = True
    for raw_image, result in map_images(source, partial(decode, options=decode_options), "Reading images"):
        is_empty = False
        yield raw_image.name, result
    if is_empty:
        raise InputError("X is empty. Pass at least one image.")


def check_readable(name: str, image: NDArray[np.uint8] | Unreadable) -> NDArray[np.uint8]:
    """Return a decoded image; raise an `InputError` if it could not be decoded.

    >>> check_readable("a.png", Unreadable("it is not an image that Pillow reads"))
    Traceback (most recent call last):
    metabridge.errors.InputError: a.png cannot be read (it is not an image that Pillow reads). Fix or remove it.
    """
    if isinstance(image, Unreadable):
        raise InputError(f"{name} cannot be read ({image.reason}). Fix or remove it.")
    return image


def _iterate_images(X: Any) -> Iterable[Any]:
    """Return the images in `X`, which may be a single image."""
    from PIL import Image

    if isinstance(X, str | Path | Image.Image):
        return [X]
    if isinstance(X, Tensor):
        if X.ndim == 2 or (X.ndim == 3 and X.shape[0] in (1, 3)):
            return [X]
        if X.ndim not in (3, 4):
            raise InputError(
                f"X has shape {tuple(X.shape)}, but a tensor must have shape (n, channels, height, width) or "
                "(channels, height, width) with 1 or 3 channels, or (n, height, width) or (height, width)."
            )
    if isinstance(X, np.ndarray) and X.dtype.kind not in "OSU":
        is_one_image = X.ndim == 2 or (X.ndim == 3 and X.shape[2] in (1, 3, 4))
        if is_one_image:
            return [X]
    if isinstance(X, bytes) or not isinstance(X, Iterable) or (isinstance(X, np.ndarray) and X.ndim == 0):
        raise InputError(
            f"X has type {type(X).__name__}, but must be a list of images or a single image: a path, a Pillow image, "
            "an array or a tensor."
        )
    return X


def _image_name(image: Any, default: str) -> str:
    return str(image) if isinstance(image, str | Path) else default


def _image_content(name: str, image: Any, channels: int) -> Content:
    from PIL import Image

    if isinstance(image, str | Path):
        return partial(read_image_file, Path(image))
    if isinstance(image, Image.Image):
        try:
            return np.asarray(to_8_bit(image, channels))
        except Exception as error:  # decoders raise many types of exceptions for corrupted files
            raise InputError(f"{name} cannot be read ({error}). Fix or remove it.") from error
    if isinstance(image, Tensor):
        image = _tensor_to_array(name, image)
    if isinstance(image, np.ndarray):
        return _array_to_uint8(name, image)
    raise InputError(
        f"{name} has type {type(image).__name__}, but must be the path of an image, a Pillow image, a NumPy array or a "
        "tensor."
    )


def _tensor_to_array(name: str, image: Tensor) -> NDArray[Any]:
    """Return a tensor of shape (height, width) or (channels, height, width) as an array with the channels last."""
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[0] not in (1, 3)):
        raise InputError(
            f"{name} has shape {tuple(image.shape)}, but a tensor must have shape (height, width) or (channels, "
            "height, width) with 1 or 3 channels."
        )
    image = image.detach().cpu()
    array = (image.float() if image.is_floating_point() else image).numpy()
    return np.moveaxis(array, 0, -1) if array.ndim == 3 else array


def _array_to_uint8(name: str, image: NDArray[Any]) -> NDArray[np.uint8]:
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)) or 0 in image.shape:
        raise InputError(
            f"{name} has shape {image.shape}, but must have shape (height, width) or (height, width, channels) "
            "with 1, 3 or 4 channels."
        )
    if image.dtype != np.uint8:
        if not np.issubdtype(image.dtype, np.floating):
            raise InputError(
                f"{name} has dtype {image.dtype}, but must be uint8, or floating point with values from 0 to 1."
            )
        minimum, maximum = image.min(), image.max()
        if not (minimum >= 0 and maximum <= 1):  # this form also rejects NaN
            raise InputError(
                f"{name} has values from {minimum:g} to {maximum:g}, but floating-point values must be from 0 to 1. "
                "Scale them, or pass uint8 values from 0 to 255."
            )
        image = (255 * image).round().astype(np.uint8)
    return image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image
