"""ResNet-12 with DropBlock, the standard backbone of few-shot classification (Wang et al. 2021, §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.errors import InputError, check_count
from metabridge.models.batch_norm import BatchNorm, Statistics
from metabridge.models.drop_path import Drop
from metabridge.models.network import Network, records_recipe, seeded
from metabridge.models.triton_support import can_fuse


@records_recipe
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

    The last two blocks end with DropBlock, of size 5 for images of 84 pixels and size 2 for 32 pixels. The others end
    with dropout, which the public code of MetaOptNet and RFS uses at a rate of 0.1 and their papers do not mention.

    Args:
        channels: Channels of the images.
        size: Height and width of the images in pixels, at least 16.
        outputs: Outputs of the head.
        widths: Channels of the blocks.
        drop_rate: Rate of DropBlock.
        dropout: Rate of dropout.
        unit_norm: Whether to scale the features to length 1, as in MTL (Wang et al. 2021, §5.2).
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
        raise InputError(f"size is {size}, but four poolings need images of at least 16×16 pixels. Use mlp below that.")
    for width in widths:
        check_count("widths", width)
    block_size = 5 if size >= 64 else 2
    blocks: list[nn.Module] = []
    with seeded(seed):
        for index, width in enumerate(widths):
            blocks.append(_Block(channels if index == 0 else widths[index - 1], width, statistics))
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

    The corners of the squares are drawn so that about `rate` of the map is dropped.

    Args:
        rate: The full rate.
        size: Side of the squares in pixels.

    >>> DropBlock(0.5, 2).eval()(torch.ones(1, 1, 4, 4)).sum()
    tensor(16.)
    """

    def __init__(self, rate: float, size: int) -> None:
        super().__init__(rate)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of shape (points, channels, height, width), some squares of them zero."""
        if not self.training:
            return x
        height, width = x.shape[-2:]
        size = min(self.size, height, width)
        corners = (height - size + 1) * (width - size + 1)
        chance = self.rate * (height * width) / (size**2 * corners)
        noise = torch.rand_like(x[..., size - 1 :, size - 1 :], dtype=torch.float32)
        if can_fuse(x, x.shape[1]):
            from metabridge.models import fused_layers

            mask = fused_layers.drop_block_mask(noise, chance, size, x.dtype)
        else:
            dropped = (noise < chance).to(x.dtype)
            mask = 1 - F.max_pool2d(F.pad(dropped, [size - 1] * 4), size, stride=1)
        # rescaled per image, so that no value depends on the other images of the set
        share = mask.mean((-3, -2, -1), keepdim=True).clamp_min(1 / mask[0].numel())
        return x * (mask / share)


class UnitNorm(nn.Module):
    """Scale the features of every point to length 1.

    >>> UnitNorm()(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (points, dimension) with length 1."""
        return F.normalize(x, dim=-1)


SLOPE = 0.1  # negative slope of the LeakyReLUs


class _Block(nn.Module):
    """Three convolutions with a shortcut; pooling comes before the last LeakyReLU, because the two commute."""

    def __init__(self, inputs: int, outputs: int, statistics: Statistics) -> None:
        super().__init__()
        self.outputs = outputs
        self.main = nn.Sequential(
            *_conv_norm(inputs, outputs, 3, statistics),
            nn.LeakyReLU(SLOPE),
            *_conv_norm(outputs, outputs, 3, statistics),
            nn.LeakyReLU(SLOPE),
            *_conv_norm(outputs, outputs, 3, statistics),
        )
        self.shortcut = nn.Sequential(*_conv_norm(inputs, outputs, 1, statistics))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and can_fuse(x, self.outputs):
            return self._fused(x)
        return F.leaky_relu(F.max_pool2d(self.main(x) + self.shortcut(x), 2), SLOPE)

    def _fused(self, x: Tensor) -> Tensor:
        from metabridge.models.fused_layers import norm_leaky_relu, residual_pool, stem_convolutions

        layers: list[Any] = [*self.main, *self.shortcut]
        conv1, norm1, _, conv2, norm2, _, conv3, norm3, conv4, norm4 = layers
        x, shortcut = stem_convolutions(x, conv1.weight, conv4.weight)
        x = conv2(norm_leaky_relu(x, norm1.weight, norm1.bias, norm1.eps, SLOPE))
        x = conv3(norm_leaky_relu(x, norm2.weight, norm2.bias, norm2.eps, SLOPE))
        return residual_pool(x, shortcut, norm3.weight, norm3.bias, norm4.weight, norm4.bias, norm3.eps, SLOPE)


def _conv_norm(inputs: int, outputs: int, size: int, statistics: Statistics) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="leaky_relu")
    return convolution, BatchNorm(outputs, statistics)
