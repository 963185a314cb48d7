"""Backbones of the timm library, whose names start with `timm:`."""

from __future__ import annotations

import torch

from metabridge.errors import InputError
from metabridge.models.batch_norm import Statistics
from metabridge.models.network import Network, records_recipe, seeded


@records_recipe
def timm(
    name: str,
    channels: int = 3,
    size: int = 84,
    outputs: int = 5,
    *,
    pretrained: bool = False,
    statistics: Statistics = "running",
    seed: int = 0,
) -> Network:
    """Put a head on any image model of timm; `pretrained` downloads its weights.

    `timm("resnet18")` gives features of 512 dimensions. Needs the optional dependency:
    `pip install metabridge[timm]`.
    """
    try:
        from timm import create_model
        from timm.models import is_model
    except ModuleNotFoundError as error:
        raise InputError(
            f"model is 'timm:{name}', but {error.name} is not installed. "
            "Install it with: pip install 'metabridge[timm]'"
        ) from error
    if not is_model(name):
        raise InputError(f"model is 'timm:{name}', but timm has no model {name!r}. See timm.list_models().")
    with seeded(seed):
        features = create_model(name, pretrained=pretrained, in_chans=channels, num_classes=0)
    # Two images: normalising over a single one is undefined for some models in training.
    example = torch.zeros(2, channels, size, size)
    try:
        return Network.around(features, example, outputs, statistics=statistics, seed=seed)
    except InputError as error:
        raise InputError(
            f"model is 'timm:{name}', which cannot compute images with channels={channels} and size={size} "
            f"({error.__cause__ or error}). Use another size, or another model."
        ) from error
