"""Backbones from the timm library, which are selected by model names that start with `timm:`."""

from __future__ import annotations

import torch

from metabridge.errors import InputError
from metabridge.models.batch_norm import Statistics
from metabridge.models.network import Network, seeded, stores_build_arguments


@stores_build_arguments
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
    """Build an image model of timm with a new linear head.

    This needs the optional dependency timm: `pip install 'metabridge[timm]'`.

    Args:
        name: Name of the model in timm, such as "resnet18".
        channels: Number of channels of the images.
        size: Height and width of the images in pixels.
        outputs: Number of outputs of the head.
        pretrained: Whether to download pretrained weights.
        statistics: Statistics of the batch norms, see `BatchNorm`.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If timm is not installed or has no such model, or if the model does not accept images of this shape.

    >>> timm("resnet18").head  # doctest: +SKIP
    Linear(in_features=512, out_features=5, bias=True)
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
    # two images, because batch norms in training mode cannot normalize a single 1×1 map
    example = torch.zeros(2, channels, size, size)
    try:
        return Network.around(features, example, outputs, statistics=statistics, seed=seed)
    except InputError as error:
        raise InputError(
            f"model is 'timm:{name}', which does not accept images with channels={channels} and size={size} "
            f"({error.__cause__ or error}). Use another size or another model."
        ) from error
