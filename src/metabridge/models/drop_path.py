"""Layers that drop random parts of their input in training, at a rate that can follow a schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metabridge.errors import InputError


class Drop(nn.Module):
    """Base class of layers that drop parts of their input in training.

    The buffer `rate` is the current rate. A schedule can raise it to `full_rate` step by step with
    `layer.rate.fill_(…)`, which a captured CUDA graph also respects.

    Args:
        rate: The full rate. The current rate is initially the same.

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
    """In training, set all feature maps of an input to zero with probability `rate`, and rescale the other inputs.

    Args:
        rate: The full rate, see `Drop`.

    >>> DropPath(0.5).eval()(torch.ones(1, 1, 4, 4)).sum()
    tensor(16.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drop the feature maps of some inputs if the layer is in training mode.

        Args:
            x: Feature maps of shape (n, channels, height, width).

        Returns:
            Feature maps of the same shape.
        """
        return x * self.factor(x).to(x.dtype) if self.training else x

    def factor(self, x: Tensor) -> Tensor:
        """Draw a random factor for each input: 0 with probability `rate`, otherwise 1 / (1 − rate).

        Args:
            x: Feature maps of shape (n, channels, height, width).

        Returns:
            Factors of shape (n, 1, 1, 1) in float32.
        """
        mask = torch.rand_like(x[:, :1, :1, :1], dtype=torch.float32) >= self.rate
        return mask / (1 - self.rate)
