"""Layers that drop parts of their input at random in training, with a rate that can follow a schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metabridge.errors import InputError


class Drop(nn.Module):
    """Base class of layers that drop parts of their input in training.

    The buffer `rate` is the current rate. Training can raise it step by step to `full_rate`, also inside a captured
    CUDA graph: `layer.rate.fill_(0.05)`.

    Args:
        rate: The full rate, which is also the initial current rate.

    Raises:
        InputError: If `rate` is not at least 0 and less than 1.

    >>> Drop(0.2).rate
    tensor(0.2000)
    """

    rate: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise InputError(f"drop_rate is {rate}, but must be at least 0 and less than 1.")
        self.full_rate = float(rate)
        self.register_buffer("rate", torch.tensor(float(rate)))


class DropPath(Drop):
    """In training, set all maps of a point to zero with probability `rate`, and rescale those of the other points.

    Args:
        rate: The full rate.

    >>> DropPath(0.5).eval()(torch.ones(1, 1, 4, 4)).sum()
    tensor(16.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of shape (points, channels, height, width), some of them zero."""
        return x * self.factor(x).to(x.dtype) if self.training else x

    def factor(self, x: Tensor) -> Tensor:
        """Draw the factor of each point's maps in training, of shape (points, 1, 1, 1) and in float32."""
        mask = torch.rand_like(x[:, :1, :1, :1], dtype=torch.float32) >= self.rate
        return mask / (1 - self.rate)
