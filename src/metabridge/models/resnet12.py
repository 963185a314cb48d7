"""ResNet-12 with DropBlock, the standard backbone of few-shot classification (A §5.2)."""

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
from metabridge.models.triton_support import fusible


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
    """Four residual blocks of three 3×3 convolutions, then global average pooling and a linear head.

    The last two blocks end in DropBlock, of size 5 for images of 84 pixels and 2 for 32, and the first
    two in plain `dropout` (0.1 in the public code of MetaOptNet and RFS, whose papers do not mention it).
    With `unit_norm` the features have length 1, in training too, as MTL is trained (A §5.2).

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
    """In training, zero squares of `size` × `size` in each channel and rescale what is left.

    Seeds of squares are drawn so that about `rate` of the map is dropped.

    >>> DropBlock(0.5, 2).eval()(torch.ones(1, 1, 4, 4)).sum()
    tensor(16.)
    """

    def __init__(self, rate: float, size: int) -> None:
        super().__init__(rate)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Drop squares from maps of shape (points, channels, height, width)."""
        if not self.training:
            return x
        height, width = x.shape[-2:]
        size = min(self.size, height, width)
        places = (height - size + 1) * (width - size + 1)
        chance = self.rate * (height * width) / (size**2 * places)
        noise = torch.rand_like(x[..., size - 1 :, size - 1 :], dtype=torch.float32)
        if fusible(x, x.shape[1]):
            from metabridge.models import fused_layers

            kept = fused_layers.kept(noise, chance, size, x.dtype)
        else:
            seeds = (noise < chance).to(x.dtype)
            kept = 1 - F.max_pool2d(F.pad(seeds, [size - 1] * 4), size, stride=1)
        # rescaled for each image, so that no value depends on the other images of the set
        share = kept.mean((-3, -2, -1), keepdim=True).clamp_min(1 / kept[0].numel())
        return x * (kept / share)


class UnitNorm(nn.Module):
    """Scale every point's features to length 1.

    >>> UnitNorm()(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Scale features of shape (points, dimension)."""
        return F.normalize(x, dim=-1)


SLOPE = 0.1  # of the rectifiers, where they are negative


class _Block(nn.Module):
    """Three convolutions with a shortcut; pooling stands before the last rectifier, as they commute."""

    def __init__(self, inputs: int, outputs: int, statistics: Statistics) -> None:
        super().__init__()
        self.outputs = outputs
        self.main = nn.Sequential(
            *_convolution(inputs, outputs, 3, statistics),
            nn.LeakyReLU(SLOPE),
            *_convolution(outputs, outputs, 3, statistics),
            nn.LeakyReLU(SLOPE),
            *_convolution(outputs, outputs, 3, statistics),
        )
        self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, statistics))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and fusible(x, self.outputs):
            return self._fused(x)
        return F.leaky_relu(F.max_pool2d(self.main(x) + self.shortcut(x), 2), SLOPE)

    def _fused(self, x: Tensor) -> Tensor:
        from metabridge.models.fused_layers import branches, merged, rectified

        layers: list[Any] = [*self.main, *self.shortcut]
        one, first, _, two, second, _, three, third, side, fourth = layers
        x, shortcut = branches(x, one.weight, side.weight)
        x = two(rectified(x, first.weight, first.bias, first.eps, SLOPE))
        x = three(rectified(x, second.weight, second.bias, second.eps, SLOPE))
        return merged(x, shortcut, third.weight, third.bias, fourth.weight, fourth.bias, third.eps, SLOPE)


def _convolution(inputs: int, outputs: int, size: int, statistics: Statistics) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="leaky_relu")
    return convolution, BatchNorm(outputs, statistics)
