"""ResNet-12 with DropBlock, the standard backbone of few-shot classification (Wang et al. 2021, §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.errors import InputError, check_count
from metabridge.models.batch_norm import BatchNorm, Statistics
from metabridge.models.drop_path import Drop, check_drop_rate
from metabridge.models.network import Network, seeded, stores_build_arguments
from metabridge.models.triton_support import can_fuse


@stores_build_arguments
def resnet12(
    channels: int = 3,
    size: int = 84,
    outputs: int = 5,
    *,
    widths: Sequence[int] = (64, 160, 320, 640),
    drop_rate: float = 0.1,
    dropout: float = 0.0,
    unit_norm: bool = False,
    statistics: Statistics = "running",
    seed: int = 0,
) -> Network:
    """Build ResNet-12: four residual blocks of three 3×3 convolutions, global average pooling and a linear head.

    DropBlock follows the last two blocks. It drops squares of 5×5 pixels if the images have at least 64×64 pixels, and
    of 2×2 pixels otherwise. If `dropout` is not 0, a dropout layer follows each block before the last two; the public
    code of MetaOptNet (Lee et al. 2019) and of RFS (Tian et al. 2020) uses dropout with rate 0.1, but the papers do not
    mention it.

    Args:
        channels: Number of channels of the images.
        size: Height and width of the images in pixels, at least 16.
        outputs: Number of outputs of the head.
        widths: Number of output channels of each block.
        drop_rate: Fraction of the pixels that DropBlock drops, at the end of a schedule if there is one (see `Drop`).
        dropout: Probability of dropout after each block before the last two.
        unit_norm: Whether to scale the features to length 1, as in multi-task learning (Wang et al. 2021, §5.2).
        statistics: Statistics of the batch norms, see `BatchNorm`.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If an option is out of range.

    >>> resnet12(size=32).head
    Linear(in_features=640, out_features=5, bias=True)
    """
    if size < 16:
        raise InputError(
            f"size is {size}, but four pooling layers need at least 16×16 pixels. Use mlp for smaller images."
        )
    for width in widths:
        check_count("widths", width)
    check_drop_rate("drop_rate", drop_rate)
    block_size = 5 if size >= 64 else 2
    blocks: list[nn.Module] = []
    with seeded(seed):
        for index, (in_channels, width) in enumerate(zip((channels, *widths), widths)):
            blocks.append(_ResidualBlock(in_channels, width, statistics))
            if index >= len(widths) - 2:
                blocks.append(DropBlock(drop_rate, block_size))
            elif dropout:
                blocks.append(nn.Dropout(dropout))
        return Network(
            nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *[UnitNorm()] * unit_norm),
            nn.Linear(widths[-1], outputs),
        )


class DropBlock(Drop):
    """In training, set squares of `size` × `size` pixels in each channel to zero, and rescale the other pixels.

    The upper left corners of the squares are drawn at random so that about a fraction `rate` of each map is dropped.

    Args:
        rate: Fraction of each map to drop. A schedule can lower it during training (see `Drop`).
        size: Height and width of the squares in pixels. If the height or width of a map is smaller than `size`, the
            smaller of the two is used instead.

    >>> DropBlock(0.5, 2).eval()(torch.ones(1, 1, 4, 4)).sum()
    tensor(16.)
    """

    def __init__(self, rate: float, size: int) -> None:
        super().__init__(rate)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Drop squares of the feature maps if the layer is in training mode.

        Args:
            x: Feature maps of shape (n, channels, height, width).

        Returns:
            Feature maps of the same shape.
        """
        if not self.training:
            return x
        height, width = x.shape[-2:]
        size = min(self.size, height, width)
        num_corners = (height - size + 1) * (width - size + 1)  # possible upper left corners of a square
        corner_probability = self.rate * (height * width) / (size**2 * num_corners)
        # one number for each possible upper left corner
        noise = torch.rand_like(x[..., size - 1 :, size - 1 :], dtype=torch.float32)
        if can_fuse(x, x.shape[1]):
            from metabridge.models import fused_layers

            mask = fused_layers.drop_block_mask(noise, corner_probability, size, x.dtype)
        else:
            dropped_corners = (noise < corner_probability).to(x.dtype)
            mask = 1 - F.max_pool2d(F.pad(dropped_corners, [size - 1] * 4), size, stride=1)
        # rescale each image separately, so that no value depends on the other images of the batch; the minimum avoids a
        # division by zero if all pixels are dropped
        kept_fraction = mask.mean((-3, -2, -1), keepdim=True).clamp_min(1 / mask[0].numel())
        return x * (mask / kept_fraction)


class UnitNorm(nn.Module):
    """Scale the features of every input to length 1.

    >>> UnitNorm()(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled features, of shape (n, dimension)."""
        return F.normalize(x, dim=-1)


NEGATIVE_SLOPE = 0.1  # of every LeakyReLU


class _ResidualBlock(nn.Module):
    """Three convolutions with a shortcut.

    Pooling comes before the last LeakyReLU, so that the latter processes only a quarter of the elements. The reverse
    order gives the same result.
    """

    def __init__(self, in_channels: int, out_channels: int, statistics: Statistics) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.main = nn.Sequential(
            *_conv_norm(in_channels, out_channels, 3, statistics),
            nn.LeakyReLU(NEGATIVE_SLOPE),
            *_conv_norm(out_channels, out_channels, 3, statistics),
            nn.LeakyReLU(NEGATIVE_SLOPE),
            *_conv_norm(out_channels, out_channels, 3, statistics),
        )
        self.shortcut = nn.Sequential(*_conv_norm(in_channels, out_channels, 1, statistics))

    def forward(self, x: Tensor) -> Tensor:
        # the fused layers normalize by the statistics of the batch, which frozen layers do not
        if can_fuse(x, self.out_channels) and all(layer.training for layer in self.modules()):
            return self._fused_forward(x)
        return F.leaky_relu(F.max_pool2d(self.main(x) + self.shortcut(x), 2), NEGATIVE_SLOPE)

    def _fused_forward(self, x: Tensor) -> Tensor:
        from metabridge.models.fused_layers import first_convolutions, norm_leaky_relu, residual_pool

        layers: list[Any] = [*self.main, *self.shortcut]
        conv1, norm1, _, conv2, norm2, _, conv3, norm3, conv4, norm4 = layers
        x, shortcut = first_convolutions(x, conv1.weight, conv4.weight)
        x = conv2(norm_leaky_relu(x, norm1.weight, norm1.bias, norm1.eps, NEGATIVE_SLOPE))
        x = conv3(norm_leaky_relu(x, norm2.weight, norm2.bias, norm2.eps, NEGATIVE_SLOPE))
        return residual_pool(x, shortcut, norm3.weight, norm3.bias, norm4.weight, norm4.bias, norm3.eps, NEGATIVE_SLOPE)


def _conv_norm(
    in_channels: int, out_channels: int, kernel_size: int, statistics: Statistics
) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="leaky_relu")
    return convolution, BatchNorm(out_channels, statistics)
