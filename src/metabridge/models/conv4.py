"""conv4, the network of four convolutional blocks that many papers on few-shot learning use."""

from __future__ import annotations

from torch import nn

from metabridge.errors import InputError, check_count
from metabridge.models.batch_norm import BatchNorm, Statistics
from metabridge.models.network import Network, seeded, stores_build_arguments


@stores_build_arguments
def conv4(
    channels: int = 3,
    size: int = 84,
    outputs: int = 5,
    *,
    filters: int = 32,
    statistics: Statistics = "batch",
    seed: int = 0,
) -> Network:
    """Build conv4: four blocks of 3×3 convolution, batch norm, 2×2 max pooling and ReLU, then a linear head.

    The convolutions have no bias, because the batch norms would subtract it. Pooling comes before ReLU, so that ReLU
    processes only a quarter of the elements. The reverse order gives the same result.

    Args:
        channels: Number of channels of the images.
        size: Height and width of the images in pixels, at least 16.
        outputs: Number of outputs of the head.
        filters: Number of output channels of every convolution.
        statistics: Statistics of the batch norms, see `BatchNorm`.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If an option is out of range.

    >>> conv4(channels=1, size=28).head
    Linear(in_features=32, out_features=5, bias=True)
    """
    if size < 16:
        raise InputError(
            f"size is {size}, but four pooling layers need at least 16×16 pixels. Use mlp for smaller images."
        )
    check_count("filters", filters)
    blocks: list[nn.Module] = []
    with seeded(seed):
        for in_channels in (channels, filters, filters, filters):
            convolution = nn.Conv2d(in_channels, filters, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            blocks.append(nn.Sequential(convolution, BatchNorm(filters, statistics), nn.MaxPool2d(2), nn.ReLU()))
        return Network(nn.Sequential(*blocks, nn.Flatten()), nn.Linear(filters * (size // 16) ** 2, outputs))
