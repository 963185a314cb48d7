"""Networks for few-shot learning. Every builder returns a `Network`, which has `features` and a linear `head`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

from metabridge.choices import alternatives, builder_modules, model_names
from metabridge.errors import InputError
from metabridge.models import cells
from metabridge.models.architecture import Architecture
from metabridge.models.batch_norm import BatchNorm, estimate_statistics
from metabridge.models.conv4 import conv4
from metabridge.models.drop_path import Drop, DropPath
from metabridge.models.function_backbone import FUNCTION_NAME, function_network
from metabridge.models.hf_backbone import hf
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
    "function_network",
    "hf",
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
LIBRARIES = ("timm", "hf")  # builders of models that a library names, such as "timm:resnet18"
_WEIGHT_SOURCES = ("pretrained", "weights", "download")


def build(model: str, **options: object) -> Network:
    """Build a network by name.

    Args:
        model: "conv4", "resnet12", "mlp" or "wide"; "timm:NAME" or "hf:NAME" for a model of timm or transformers;
            "package.module:function" for a function that returns a module, see `function_network`; or the path of an
            architecture file, which ends in .json. The names "timm", "hf" and "cell_network", which `Network.recipe`
            stores, need the option `name` or `architecture`.
        **options: Options of the builder, such as `filters` of `conv4`.

    Returns:
        The network.

    Raises:
        InputError: If the model or an option is unknown or out of range, or if the network would be too large. The size
            is checked before memory is allocated, or during the build for models of libraries. It is not checked for
            pretrained models and for functions, whose own errors are raised unchanged.

    >>> build("conv4", channels=1, size=28, outputs=5).recipe["filters"]
    32
    """
    bound_builder = builder(model, **options)
    try:
        if bound_builder.func is function_network:
            return bound_builder()
        if bound_builder.func.__name__ in LIBRARIES:  # they run the network, which is impossible on the meta device
            has_weights = options.get("pretrained") or options.get("weights") is not None
            with contextlib.nullcontext() if has_weights else SizeLimit():
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
    if name not in BUILDERS and FUNCTION_NAME.fullmatch(model):
        return _with_options(model, function_network, {"name": model, **options})
    # models of libraries, and no others, must have the name of a backbone
    if name not in BUILDERS or (name in LIBRARIES) != bool(backbone or "name" in options):
        raise InputError(f"model is {model!r}, but must be {alternatives(model_names())}.")
    if backbone:
        options = {"name": backbone, **options}
    return _with_options(model, BUILDERS[name], options)


def rebuild(recipe: Mapping[str, Any]) -> Network:
    """Build a network from a recipe that was read from a file, without opening other files or importing other modules.

    Args:
        recipe: The recipe, as in `Network.recipe`. Sources of pretrained weights are ignored, since the weights are
            stored with the recipe.

    Returns:
        The network.

    Raises:
        InputError: If the recipe does not describe a network that can be built in this way.

    >>> rebuild({"model": "mlp", "inputs": 4, "outputs": 2, "weights": "/etc/passwd"}).head.out_features
    2
    """
    recipe = {name: value for name, value in recipe.items() if name not in _WEIGHT_SOURCES}
    # `build` would also open a file whose path is the model, or import the module of a function
    if FORMER_NAMES.get(recipe["model"], recipe["model"]) not in BUILDERS:
        raise InputError(f"its model is {recipe['model']!r}")
    if recipe["model"] == "timm":
        recipe = {"normalize": False, **recipe}  # version 0.2 did not normalize
    if recipe["model"] == "hf" and recipe.get("config") is None:
        raise InputError("its model is 'hf' without a configuration")
    return build(**recipe)


def _with_options(model: str, function: Callable[..., Network], options: Mapping[str, object]) -> partial[Network]:
    """Return a builder with options, or raise an `InputError` if it has no such option."""
    parameters = inspect.signature(function).parameters
    for option in options:
        if option not in parameters:
            raise InputError(f"{model} has no option {option!r}. Its options are {', '.join(parameters)}.")
    return partial(function, **options)
