"""Convert images (paths, Pillow images, arrays) into the input of a trained network."""

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
from metabridge.datasets.image_decoding import DecodeOptions, Unreadable, decode, map_images, to_8_bit
from metabridge.datasets.image_files import Content, ImageSource, RawImage, read_image_file
from metabridge.errors import InputError
from metabridge.models.network import Network

if TYPE_CHECKING:
    from metabridge.training.evaluation import Model


def form_of(model: Model) -> DecodeOptions:
    """Return the size, channels and preprocessing of a model's input images, as in training.

    Args:
        model: The trained model.

    Returns:
        The image format that `pixels` converts to.

    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import mlp
    >>> from metabridge.training import Model
    >>> anil, net = method("anil"), mlp(784, 5)
    >>> form_of(Model(anil, net, parameters(anil, net)))
    DecodeOptions(size=28, channels=1, crop=True, invert=False)
    """
    channels, size = image_shape(model.net)
    trained_on = getattr(model, "settings", {}).get("tasks", {}).get("data") or {}
    dataset = DATASETS.get(str(trained_on.get("name")).partition(":")[0], DATASETS["folder"])
    return replace(dataset.decode_options, channels=channels, size=size)


def image_shape(net: Network) -> tuple[int, int]:
    """Return the number of channels and the side length of a network's input images.

    Args:
        net: The network; its recipe must describe an image model, or a fully connected net for square images.

    Returns:
        The number of channels and the side length in pixels.

    Raises:
        InputError: The recipe does not describe image inputs.

    >>> from metabridge.models import conv4
    >>> image_shape(conv4(1, 28))
    (1, 28)
    """
    recipe: dict[str, Any] = net.recipe or {}
    for key in ("image_channels", "channels"):  # networks of cells have both; their "channels" counts feature maps
        if key in recipe:
            return recipe[key], recipe["size"]
    for channels in (1, 3):  # a fully connected net stores only the number of input values
        size = isqrt(recipe.get("inputs", 0) // channels)
        if size and channels * size**2 == recipe["inputs"]:
            return channels, size
    raise InputError(
        "the run's network does not record the size of its input images. Use an image model of metabridge.models, "
        "or call metabridge.adapt with tensors."
    )


def pixels(X: Iterable[Any], form: DecodeOptions) -> NDArray[np.uint8]:
    """Convert images to uint8 of shape (n, channels, size, size).

    Args:
        X: Images. Each is the path of a file, a Pillow image, or an array of shape (height, width) or (height, width,
            channels) that holds uint8, or floats from 0 to 1, which are rounded to 8 bits.
        form: The size, channels and preprocessing to convert to.

    Returns:
        The converted images.

    Raises:
        InputError: `X` is not a list of images, or an image cannot be read; the message names it.

    >>> pixels(np.zeros((5, 40, 30)), DecodeOptions(size=8, channels=3)).shape
    (5, 3, 8, 8)
    """
    from PIL import Image

    if isinstance(X, str | Path | bytes):
        raise InputError(f"X is {X!r}, but must be a list of images. For a single one use [{X!r}].")
    if isinstance(X, np.ndarray) and X.ndim == 3 and X.shape[2] in (3, 4):
        raise InputError(f"X is one array of shape {X.shape}, which looks like a single color image. Use X[None].")
    if isinstance(X, Image.Image):
        raise InputError("X is a single Pillow image, but must be a list of images. For a single one use [X].")
    try:
        images = list(X)
    except TypeError:
        raise InputError(
            f"X is a {type(X).__name__}, but must be a list of images. For a single one use [X]."
        ) from None
    if not images:
        raise InputError("X holds no images. Give at least one.")
    results = read([_content(f"X[{index}]", image, form) for index, image in enumerate(images)], form)
    for index, (image, result) in enumerate(zip(images, results)):
        if isinstance(result, Unreadable):
            name = image if isinstance(image, str | Path) else f"X[{index}]"
            raise InputError(f"{name} cannot be read ({result.reason}). Fix or remove it.")
    return np.stack(results)  # type: ignore[arg-type]


def read(contents: Sequence[Content], form: DecodeOptions) -> list[NDArray[np.uint8] | Unreadable]:
    """Decode images on all cores, in order. The result of an image that cannot be read is an `Unreadable`.

    >>> read([b"no image"], DecodeOptions(size=8, channels=3))
    [Unreadable(reason='it is not an image that Pillow reads')]
    """
    images = [RawImage("", 0, content) for content in contents]
    source = ImageSource("images", (), len(images), lambda: iter(images))
    return [result for _, result in map_images(source, partial(decode, options=form), "Reading images")]


def _content(name: str, image: Any, form: DecodeOptions) -> Content:
    from PIL import Image

    if isinstance(image, str | Path):
        return partial(read_image_file, Path(image))
    if isinstance(image, Image.Image):
        try:
            return np.asarray(to_8_bit(image, form.channels))
        except Exception as error:  # decoders raise exceptions of many types for damaged files
            raise InputError(f"{name} cannot be read ({error}). Fix or remove it.") from error
    if isinstance(image, np.ndarray):
        return _eight_bits(name, image)
    raise InputError(
        f"{name} is a {type(image).__name__}, but must be the path of an image, a Pillow image or a NumPy array."
    )


def _eight_bits(name: str, image: NDArray[Any]) -> NDArray[np.uint8]:
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)) or 0 in image.shape:
        raise InputError(
            f"{name} has the shape {image.shape}, but an image is (height, width) or (height, width, channels) "
            "with 1, 3 or 4 channels."
        )
    if image.dtype != np.uint8:
        if not np.issubdtype(image.dtype, np.floating):
            raise InputError(f"{name} holds {image.dtype}, but must be uint8, or floats from 0 to 1.")
        least, most = image.min(), image.max()
        if not (least >= 0 and most <= 1):  # also true of NaN
            raise InputError(
                f"{name} holds values from {least:g} to {most:g}, but floats must be from 0 to 1. "
                "Scale them, or give uint8 from 0 to 255."
            )
        image = (255 * image).round().astype(np.uint8)
    return image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image
