"""The four-block convolutional net of the few-shot literature."""

from __future__ import annotations

from torch import nn

from metabridge.errors import InputError, check_count
from metabridge.models.batch_norm import BatchNorm, Statistics
from metabridge.models.network import Network, records_recipe, seeded


@records_recipe
def conv4(
    channels: int = 3,
    size: int = 84,
    outputs: int = 5,
    *,
    filters: int = 32,
    statistics: Statistics = "batch",
    seed: int = 0,
) -> Network:
    """Four blocks of 3×3 convolution, batch norm, 2×2 max pooling and ReLU, then a linear head.

    Pooling stands before ReLU: the two commute, and a quarter of the values is left to rectify.

    >>> conv4(channels=1, size=28).head
    Linear(in_features=32, out_features=5, bias=True)
    """
    if size < 16:
        raise InputError(f"size is {size}, but four poolings need images of at least 16×16 pixels. Use mlp below that.")
    check_count("filters", filters)
    blocks: list[nn.Module] = []
    with seeded(seed):
        for inputs in (channels, filters, filters, filters):
            convolution = nn.Conv2d(inputs, filters, 3, padding=1, bias=False)  # batch norm would subtract it
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            blocks.append(nn.Sequential(convolution, BatchNorm(filters, statistics), nn.MaxPool2d(2), nn.ReLU()))
        return Network(nn.Sequential(*blocks, nn.Flatten()), nn.Linear(filters * (size // 16) ** 2, outputs))
