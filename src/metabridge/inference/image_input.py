"""Conversion of images (paths, Pillow images, arrays) to the input of a trained network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metabridge.datasets import DATASETS
from metabridge.datasets.image_decoding import Unreadable, decode, map_images, to_8_bit
from metabridge.datasets.image_files import Content, ImageSource, RawImage, read_image_file
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError
from metabridge.models.network import Network

if TYPE_CHECKING:
    from metabridge.training.evaluation import Model


def model_decode_options(model: Model) -> DecodeOptions:
    """Return the options for decoding the input images of a model.

    A pretrained network determines all options (`Network.decode_options`). Any other network determines the size and
    the channels, and its training data set determines cropping and inversion; if that is unknown, the options for
    folders of images are used.

    Args:
        model: The trained model.

    Returns:
        The options.

    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import mlp
    >>> from metabridge.training import Model
    >>> anil, net = method("anil"), mlp(784, 5)
    >>> model_decode_options(Model(anil, net, parameters(anil, net)))
    DecodeOptions(size=28, channels=1, crop=True, invert=False)
    """
    if model.net.decode_options is not None:
        return model.net.decode_options
    channels, size = image_shape(model.net)
    # A run stores the arguments of `datasets.load` for its training images; the name may be "NAME:PATH".
    load_arguments = getattr(model, "settings", {}).get("tasks", {}).get("data") or {}
    reader = DATASETS.get(str(load_arguments.get("name")).partition(":")[0], DATASETS["folder"])
    return replace(reader.decode_options, channels=channels, size=size)


def image_shape(net: Network) -> tuple[int, int]:
    """Return the number of channels and the size of the square input images of a network.

    Args:
        net: An image model of `metabridge.models`, or a fully connected network for square images.

    Returns:
        The number of channels, and the width and height in pixels.

    Raises:
        InputError: If the network's configuration (`recipe`) does not determine the image shape.

    >>> from metabridge.models import conv4
    >>> image_shape(conv4(1, 28))
    (1, 28)
    """
    if net.decode_options is not None:
        return net.decode_options.channels, net.decode_options.size
    recipe: dict[str, Any] = net.recipe or {}
    for key in ("image_channels", "channels"):  # in a recipe with both, "channels" is the number of feature maps
        if key in recipe:
            return recipe[key], recipe["size"]
    for channels in (1, 3):  # the recipe of a fully connected network contains only the number of inputs
        size = isqrt(recipe.get("inputs", 0) // channels)
        if size and channels * size**2 == recipe["inputs"]:
            return channels, size
    raise InputError(
        "the network's configuration does not contain the size of its input images. Use an image model of "
        "metabridge.models, or call metabridge.adapt with tensors."
    )


def convert_images(X: Iterable[Any], decode_options: DecodeOptions) -> NDArray[np.uint8]:
    """Convert images to uint8 of shape (n, channels, size, size).

    Args:
        X: Images. Each is the path of a file, a Pillow image, or an array of shape (height, width) or (height, width,
            channels). Arrays have dtype uint8, or a floating-point dtype and values from 0 to 1, which are rounded to 8
            bits.
        decode_options: The size, channels and preprocessing of the converted images.

    Returns:
        The converted images.

    Raises:
        InputError: If `X` is not a list of images, or if an image cannot be read.

    >>> convert_images(np.zeros((5, 40, 30)), DecodeOptions(size=8, channels=3)).shape
    (5, 3, 8, 8)
    """
    from PIL import Image

    if isinstance(X, str | Path | bytes):
        raise InputError(f"X is {X!r}, but must be a list of images. For a single image, use [{X!r}].")
    if isinstance(X, np.ndarray) and X.ndim == 3 and X.shape[2] in (3, 4):
        raise InputError(f"X is one array of shape {X.shape}, which looks like a single color image. Use X[None].")
    if isinstance(X, Image.Image):
        raise InputError("X is a single Pillow image, but must be a list of images. For a single image, use [X].")
    try:
        images = list(X)
    except TypeError:
        raise InputError(
            f"X has type {type(X).__name__}, but must be a list of images. For a single image, use [X]."
        ) from None
    if not images:
        raise InputError("X is empty. Pass at least one image.")
    contents = [_image_content(f"X[{index}]", image, decode_options.channels) for index, image in enumerate(images)]
    results = decode_all(contents, decode_options)
    for index, (image, result) in enumerate(zip(images, results)):
        if isinstance(result, Unreadable):
            name = image if isinstance(image, str | Path) else f"X[{index}]"
            raise InputError(f"{name} cannot be read ({result.reason}). Fix or remove it.")
    return np.stack(results)  # type: ignore[arg-type]


def decode_all(contents: Sequence[Content], decode_options: DecodeOptions) -> list[NDArray[np.uint8] | Unreadable]:
    """Decode images in several threads; an image that cannot be read gives an `Unreadable` with the reason.

    >>> decode_all([b"no image"], DecodeOptions(size=8, channels=3))
    [Unreadable(reason='it is not an image that Pillow reads')]
    """
    images = [RawImage("", 0, content) for content in contents]
    source = ImageSource("images", (), len(images), lambda: iter(images))
    return [result for _, result in map_images(source, partial(decode, options=decode_options), "Reading images")]


def _image_content(name: str, image: Any, channels: int) -> Content:
    from PIL import Image

    if isinstance(image, str | Path):
        return partial(read_image_file, Path(image))
    if isinstance(image, Image.Image):
        try:
            return np.asarray(to_8_bit(image, channels))
        except Exception as error:  # decoders raise many types of exceptions for corrupted files
            raise InputError(f"{name} cannot be read ({error}). Fix or remove it.") from error
    if isinstance(image, np.ndarray):
        return _array_to_uint8(name, image)
    raise InputError(
        f"{name} has type {type(image).__name__}, but must be the path of an image, a Pillow image or a NumPy array."
    )


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
