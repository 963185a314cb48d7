"""How the input images of a trained model are decoded."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

from metabridge.datasets import DATASETS
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError
from metabridge.models.network import Network
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
