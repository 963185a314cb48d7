"""Layers that drop at random in training, at a rate that is reached little by little."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metabridge.errors import InputError


class Drop(nn.Module):
    """What they share: the full rate, and the present one.

    `rate` is a buffer, so that it can follow a schedule, inside a captured graph too: `layer.rate.fill_(0.05)`.
    """

    rate: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise InputError(f"drop_rate is {rate}, but must be at least 0 and less than 1.")
        self.full_rate = float(rate)
        self.register_buffer("rate", torch.tensor(float(rate)))


class DropPath(Drop):
    """In training, zero all of a sample's maps with the chance `rate`, and rescale those that are left.

    >>> DropPath(0.5).eval()(torch.ones(1, 1, 4, 4)).sum()
    tensor(16.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drop among maps of shape (points, channels, height, width)."""
        return x * self.factor(x).to(x.dtype) if self.training else x

    def factor(self, x: Tensor) -> Tensor:
        """Draw what to multiply each point's maps by in training, as (points, 1, 1, 1) in float32."""
        kept = torch.rand_like(x[:, :1, :1, :1], dtype=torch.float32) >= self.rate
        return kept / (1 - self.rate)
