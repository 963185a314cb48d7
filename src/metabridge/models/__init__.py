"""Networks for few-shot learning. Every builder returns a `Network`, which has `features` and a linear `head`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from metabridge.choices import alternatives, builder_modules, model_names
from metabridge.errors import InputError
from metabridge.models import cells
from metabridge.models.architecture import Architecture
from metabridge.models.batch_norm import BatchNorm, estimate_statistics
from metabridge.models.conv4 import conv4
from metabridge.models.drop_path import Drop, DropPath
from metabridge.models.mlp import mlp
from metabridge.models.network import Network, Params, with_group_norm
from metabridge.models.resnet12 import DropBlock, resnet12
from metabridge.models.size_limit import SizeLimit
from metabridge.models.timm_backbone import timm
from metabridge.models.wide_mlp import wide

__all__ = [
    "BatchNorm",
    "Drop",
    "DropBlock",
    "DropPath",
    "Network",
    "Params",
    "build",
    "builder",
    "cells",
    "conv4",
    "estimate_statistics",
    "mlp",
    "resnet12",
    "timm",
    "wide",
    "with_group_norm",
]

BUILDERS: dict[str, Callable[..., Network]] = {
    name: getattr(import_module(module), name) for name, module in builder_modules().items()
}
FORMER_NAMES = {"network": "cell_network"}  # from names in runs of version 0.1.0 to current names
ARCHITECTURE_SUFFIX = ".json"


def build(model: str, **options: object) -> Network:
    """Build a network by name.

    Args:
        model: "conv4", "resnet12", "mlp" or "wide"; "timm:NAME" for a timm model; or the path of an architecture file,
            which ends in .json. The names "timm" and "cell_network", which `Network.recipe` stores for the latter two,
            need the option `name` or `architecture`, respectively.
        **options: Options of the builder, such as `filters` of `conv4`.

    Returns:
        The network.

    Raises:
        InputError: If the model or an option is unknown or out of range, or if the network would be too large. The size
            is checked before memory is allocated, except for timm models, whose size is checked during the build.

    >>> build("conv4", channels=1, size=28, outputs=5).recipe["filters"]
    32
    """
    bound_builder = builder(model, **options)
    try:
        if bound_builder.func is timm:  # timm() runs the network, which is impossible on the meta device
            with SizeLimit():
                return bound_builder()
        with SizeLimit(), torch.device("meta"):
            bound_builder()  # only checks the size
        return bound_builder()
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError, MemoryError) as error:
        description = ", ".join(f"{option}={value!r}" for option, value in options.items())
        reason = str(error).partition("\n")[0]  # the other lines of PyTorch's message list function signatures
        raise InputError(f"{model} cannot be built with {description} ({reason}).") from error


def builder(model: str, **options: object) -> partial[Network]:
    """Return the builder of a model with its options, without calling it.

    Args:
        model: Name of a model or path of an architecture file, as in `build`.
        **options: Options of the builder.

    Returns:
        A function without arguments that builds the network.

    Raises:
        InputError: If the model or an option is unknown, or an architecture file cannot be read.

    >>> builder("mlp", inputs=4, outputs=2)().head
    Linear(in_features=40, out_features=2, bias=True)
    """
    if model.endswith(ARCHITECTURE_SUFFIX):
        return builder("cell_network", **{**options, "architecture": Architecture.load(model)})
    name, _, backbone = model.partition(":")
    name = FORMER_NAMES.get(name, name)
    # timm, and no other model, must have the name of a backbone
    if name not in BUILDERS or (name == "timm") != bool(backbone or "name" in options):
        raise InputError(f"model is {model!r}, but must be {alternatives(model_names())}.")
    if backbone:
        options = {"name": backbone, **options}
    parameters = inspect.signature(BUILDERS[name]).parameters
    for option in options:
        if option not in parameters:
            raise InputError(f"{model} has no option {option!r}. Its options are {', '.join(parameters)}.")
    return partial(BUILDERS[name], **options)
