"""The inputs of pretrained backbones: normalization, channels and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metabridge.decode_options import MAX_SIDE, DecodeOptions, as_decode_options
from metabridge.errors import InputError


class Normalize(nn.Module):
    """Subtract a mean from each channel of an image, and divide by a standard deviation.

    A gray image gets one channel for each value of `mean`, as if it was stored as an RGB image.

    Args:
        mean: Mean of each channel, for images with values from 0 to 1. A single value applies to all channels.
        std: Standard deviation of each channel.

    Raises:
        InputError: If `mean` and `std` differ in length, or a value of `std` is not positive.

    >>> Normalize([0.5], [0.25])(torch.ones(1, 3, 2, 2)).unique()
    tensor([2.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if not len(mean) == len(std) > 0 or not all(value > 0 for value in std):
            raise InputError(
                f"mean is {list(mean)} and std is {list(std)}, but each must have one number per channel, and those of "
                "std must be positive."
            )
        # constants, which are not part of state_dict()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized images.

        Args:
            x: Images of shape (n, channels, height, width) with values from 0 to 1.

        Returns:
            The normalized images, in the same dtype.
        """
        return ((x - self.mean) / self.std).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the arguments that `repr` shows."""
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def input_options(
    decode_options: DecodeOptions | Mapping[str, Any] | None, channels: int, size: int | None, default_size: int
) -> tuple[DecodeOptions | None, int]:
    """Return the decode options that the user passed, if any, and the size of the images.

    Raises:
        InputError: If the size is out of range, or the options have another size or other channels.

    >>> input_options(None, 3, None, 224)
    (None, 224)
    """
    options = None if decode_options is None else as_decode_options(decode_options)
    if size is None:
        size = default_size if options is None else options.size
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= MAX_SIDE:
        raise InputError(f"size is {size!r}, but must be from 1 to {MAX_SIDE} pixels. Use a smaller size.")
    if options is not None and (options.size, options.channels) != (size, channels):
        raise InputError(
            f"decode_options is {options}, but size is {size} and channels is {channels}. Use equal values."
        )
    return options, size


def check_multiple(source: str, size: int, patch_size: int) -> None:
    """Raise an `InputError` if the patches of a vision transformer do not cover images of this size.

    >>> check_multiple("timm:vit_small_patch14_dinov2", 84, 14)
    """
    if size % patch_size:
        below = size // patch_size * patch_size
        sizes = [f"size={value}" for value in (below, below + patch_size) if value]
        raise InputError(
            f"model is {source!r}, whose patches have {patch_size} pixels, but size is {size}, which is not a multiple "
            f"of it. Use {' or '.join(sizes)}."
        )


def check_one_source(pretrained: bool, weights: str | Path | None) -> None:
    """Raise an `InputError` if weights are requested both from the cache and from a file.

    >>> check_one_source(True, None)
    """
    if pretrained and weights is not None:
        raise InputError(f"pretrained is True and weights is {weights}. Pass only one of them.")


def shape_error(source: str, channels: int, size: int, error: Exception) -> InputError:
    """Return the error for a model that cannot process images of this shape."""
    reason = str(error.__cause__ or error).partition("\n")[0]
    return InputError(
        f"model is {source!r}, which does not accept images with channels={channels} and size={size} ({reason}). "
        "Use another size or another model."
    )
