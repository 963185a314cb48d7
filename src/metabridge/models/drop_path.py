"""Layers that set random parts of feature maps to zero in training, at a rate that can follow a schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metabridge.errors import InputError


class Drop(nn.Module):
    """Base class of layers that set random parts of feature maps to zero ("drop" them) in training.

    The attribute `full_rate` is the argument `rate`. The buffer `rate` is the fraction that is currently dropped; it
    equals `full_rate` until it is changed. A schedule, for example from 0 up to `full_rate`, changes the buffer in
    place with `layer.rate.fill_(…)`. This also takes effect in a captured CUDA graph.

    Args:
        rate: Fraction to drop, or the highest fraction if a schedule changes it.

    Raises:
        InputError: If `rate` is not in [0, 1).

    >>> Drop(0.2).rate
    tensor(0.2000)
    """

    rate: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        check_drop_rate("rate", rate)
        self.full_rate = float(rate)
        self.register_buffer("rate", torch.tensor(float(rate)))


def check_drop_rate(name: str, rate: float) -> None:
    """Raise `InputError` unless a rate is in [0, 1).

    >>> check_drop_rate("drop_rate", 1.0)
    Traceback (most recent call last):
    metabridge.errors.InputError: drop_rate is 1.0, but must be at least 0 and less than 1.
    """
    if not 0 <= rate < 1:
        raise InputError(f"{name} is {rate!r}, but must be at least 0 and less than 1.")


class DropPath(Drop):
    """In training, set all feature maps of an image to zero with probability `rate`, and rescale those of other images.

    Args:
        rate: Probability of dropping an image. A schedule can lower it during training (see `Drop`).

    >>> DropPath(0.5).eval()(torch.ones(1, 1, 4, 4)).sum()
    tensor(16.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drop the feature maps of some images if the layer is in training mode.

        Args:
            x: Feature maps of n images, of shape (n, channels, height, width).

        Returns:
            Feature maps of the same shape.
        """
        return x * self.factor(x).to(x.dtype) if self.training else x

    def factor(self, x: Tensor) -> Tensor:
        """Draw a random factor for each image: 0 with probability `rate`, otherwise 1 / (1 − rate).

        Args:
            x: Feature maps of n images, of shape (n, channels, height, width).

        Returns:
            Factors of shape (n, 1, 1, 1) in float32.
        """
        mask = torch.rand_like(x[:, :1, :1, :1], dtype=torch.float32) >= self.rate
        return mask / (1 - self.rate)
