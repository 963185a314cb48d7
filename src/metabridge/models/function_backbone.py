"""Networks from a user's own function, which are selected by names such as `package.module:function`."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError
from metabridge.models.backbone_inputs import Normalize, input_options
from metabridge.models.backbone_weights import first_names, read_weights, without_wrappers
from metabridge.models.batch_norm import Statistics
from metabridge.models.network import Network

FUNCTION_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_DEFAULT_SIZE = 224


def function_network(
    name: str,
    channels: int = 3,
    size: int | None = None,
    outputs: int = 5,
    *,
    pretrained: bool = False,
    weights: str | Path | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    statistics: Statistics = "running",
    seed: int = 0,
) -> Network:
    """Build a network from the module that a function returns, with a new linear head.

    The module maps images with values from 0 to 1 to features of shape (n, dimension). `channels` and `size` are passed
    to the function if it has parameters of these names. If the module has an attribute `decode_options`, this is how
    image files become inputs; otherwise they are cropped to a square and resized. The network has no `recipe`: a saved
    run of it does not name the function, because reading a file must not run code. Pass the network to `load` instead.

    Args:
        name: Name of the function, such as "package.module:function". Modules of the current directory are also found.
        channels: Number of channels of the images.
        size: Height and width of the images in pixels. Default: 224, or the size in `decode_options` of the module.
        outputs: Number of outputs of the head.
        pretrained: Ignored, since the function determines the weights.
        weights: File of weights for the module: safetensors, or a PyTorch file without code.
        mean: Mean of each channel, which the network subtracts first. Default: the module gets the images unchanged.
        std: Standard deviation of each channel, by which the network divides.
        statistics: Statistics of the batch norms, see `BatchNorm`.
        seed: Seed of the initial weights of the head.

    Returns:
        The network.

    Raises:
        InputError: If the function cannot be imported or does not return a module, or the module does not map images
            of this size to features.

    >>> function_network("torch.nn:Flatten", size=8).head
    Linear(in_features=192, out_features=5, bias=True)
    """
    if (mean is None) != (std is None):
        raise InputError("mean and std belong together. Pass both or none of them.")
    module = _call(name, {"channels": channels, "size": size})
    decode_options, size = input_options(getattr(module, "decode_options", None), channels, size, _DEFAULT_SIZE)
    if isinstance(module, Network):
        module = module.features
    if weights is not None:
        _load(name, module, weights)
    features = module if mean is None or std is None else nn.Sequential(Normalize(mean, std), module)
    net = Network.around(features, torch.zeros(2, channels, size, size), outputs, statistics=statistics, seed=seed)
    if decode_options is None and channels in (1, 3):
        decode_options = DecodeOptions(size=size, channels=channels, crop=True)
    net.decode_options = decode_options
    return net


def _call(name: str, options: dict[str, int | None]) -> nn.Module:
    """Import a function, and call it with those options that it accepts."""
    module_name, _, function_name = name.partition(":")
    folder = os.getcwd()
    sys.path.append(folder)  # at the end, so that a file of the folder does not replace an installed package
    try:
        function = _import(name, module_name, function_name)
        accepted = inspect.signature(function).parameters
        module = function(**{key: value for key, value in options.items() if key in accepted and value is not None})
    finally:
        sys.path.remove(folder)
    if not isinstance(module, nn.Module):
        raise InputError(f"model is {name!r}, which returned a {type(module).__name__}, but must return an nn.Module.")
    return module


def _import(name: str, module_name: str, function_name: str) -> Callable[..., Any]:
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the module
        raise InputError(
            f"model is {name!r}, but there is no module {error.name!r}. Start Python in the folder that contains it, "
            "or install its package."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"model is {name!r}, but {module_name} has no function {function_name!r}. Check its name.")
    return function  # type: ignore[no-any-return]


def _load(name: str, module: nn.Module, weights: str | Path) -> None:
    expected = module.state_dict()
    tensors = without_wrappers(read_weights(weights), expected.keys)
    missing = [key for key in expected if key not in tensors]
    mismatched = [key for key, value in expected.items() if key in tensors and tensors[key].shape != value.shape]
    if missing or mismatched:
        reason = f"they lack {first_names(missing)}" if missing else f"{first_names(mismatched)} has another shape"
        raise InputError(f"weights do not belong to {name!r}: {reason}. Use the weights of this network.")
    module.load_state_dict({key: tensors[key] for key in expected})
