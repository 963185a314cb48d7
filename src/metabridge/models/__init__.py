"""Networks: each a `Network` of `features` and a linear `head`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch

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
    "conv4": conv4,
    "resnet12": resnet12,
    "mlp": mlp,
    "timm": timm,
    "wide": wide,
    "cell_network": cells.cell_network,
}
FORMER_NAMES = {"network": "cell_network"}  # names of builders in the runs of version 0.1.0
ARCHITECTURE = ".json"  # how the path of one ends


def build(model: str, **options: object) -> Network:
    """Make a network by its builder's name, such as "conv4" or "timm:resnet18", with that builder's options.

    The path of an architecture, a file that ends in .json, makes the network of its cells. A network that is too large
    is refused before memory is taken for it.

    >>> build("conv4", channels=1, size=28, outputs=5).recipe["filters"]
    32
    """
    make = builder(model, **options)
    try:
        if make.func is timm:  # which computes with the weights, so that it cannot be made without
            with SizeLimit():
                return make()
        with SizeLimit(), torch.device("meta"):
            make()
        return make()
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError, MemoryError) as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise InputError(f"{model} cannot be made with {given} ({error}).") from error


def builder(model: str, **options: object) -> partial[Network]:
    """Return what makes a network, refusing a model or an option that there is not, before anything is made."""
    if model.endswith(ARCHITECTURE):
        return builder("cell_network", **{**options, "architecture": Architecture.load(model)})
    name, _, backbone = model.partition(":")
    name = FORMER_NAMES.get(name, name)
    if name not in BUILDERS or (name == "timm") != bool(backbone or "name" in options):
        raise InputError(f"model is {model!r}, but must be one of conv4, resnet12, mlp, timm:NAME or FILE.json.")
    if backbone:
        options = {"name": backbone, **options}
    known = inspect.signature(BUILDERS[name]).parameters
    for option in options:
        if option not in known:
            raise InputError(f"{model} has no option {option!r}. Its options are {', '.join(known)}.")
    return partial(BUILDERS[name], **options)
