"""Convolution and pooling of images, as maps of the covariances between their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional as F

from metabridge.errors import InputError
from metabridge.kernels.layers import KernelState, check_variances

# Where height and width are among the dimensions of a tensor, for the two ways to hold pixels against each other.
_AXES = {2: ((-2,), (-1,)), 4: ((-4, -2), (-3, -1))}


@runtime_checkable
class Spatial(Protocol):
    """A layer that changes the images' size."""

    def span(self, length: int) -> int:
        """Return the largest length of an image's side within the layer, padding included."""
        ...

    def length(self, length: int) -> int:
        """Return the length of the outputs' side."""
        ...


@dataclass(frozen=True)
class Conv:
    """A size×size convolution: the mean over the patch, Σ'(a, b) = σ_w² mean_δ Σ(a+δ, b+δ) + σ_b².

    Padding is by zeros: a number of pixels at each side, 'valid' for none, or 'same' for as many as leave length/stride
    pixels, rounded up, the odd one at the end.
    """

    size: int = 3
    stride: int = 1
    padding: int | Literal["same", "valid"] = "same"
    weight_variance: float = 2.0
    bias_variance: float = 0.0

    def __post_init__(self) -> None:
        check_variances(self.weight_variance, self.bias_variance)
        _check_window(self.size, self.stride)
        if self.padding not in ("same", "valid") and not (isinstance(self.padding, int) and self.padding >= 0):
            raise InputError(f"padding is {self.padding!r}, but must be 'same', 'valid' or a number of pixels.")

    def propagate(self, state: KernelState) -> None:
        """Average each pair of patches, pixel by pixel, and put the parameters on top."""
        axes = _AXES[state.space]
        state.map(lambda values: self._patches(values, axes))
        state.add_parameters(self.weight_variance / self.size**2, self.bias_variance)

    def span(self, length: int) -> int:
        """Return the padded length."""
        return length + sum(self._pads(length))

    def length(self, length: int) -> int:
        """Return how many patches there are."""
        return (self.span(length) - self.size) // self.stride + 1

    def _pads(self, length: int) -> tuple[int, int]:
        if self.padding == "same":
            total = max((-(-length // self.stride) - 1) * self.stride + self.size - length, 0)
            return total // 2, total - total // 2
        pixels = 0 if self.padding == "valid" else int(self.padding)
        return pixels, pixels

    def _patches(self, values: Tensor, directions: Sequence[Sequence[int]]) -> Tensor:
        for axes in directions:
            pads = [0] * (-2 * min(axes))  # from the last dimension to the first, as F.pad has it
            for axis in axes:
                pads[-2 * axis - 2 : -2 * axis] = self._pads(values.shape[axis])
            values = _sum_windows(F.pad(values, pads) if any(pads) else values, axes, self.size, self.stride)
        return values


@dataclass(frozen=True)
class AveragePool:
    """The mean over size×size windows, on both sides: Σ'(a, b) = mean_δδ' Σ(a+δ, b+δ'). What does not fill one is left.

    It needs the covariance of every pixel with every other.
    """

    size: int = 2
    stride: int | None = None  # as the size

    def __post_init__(self) -> None:
        _check_window(self.size, self._stride)

    def propagate(self, state: KernelState) -> None:
        """Average over one side after the other."""

        def pool(values: Tensor) -> Tensor:
            for axis in (-4, -3, -2, -1):
                values = _sum_windows(values, (axis,), self.size, self._stride)
            return values.div_(self.size**4)

        state.map(pool)

    def span(self, length: int) -> int:
        """Return the length as it is."""
        return length

    def length(self, length: int) -> int:
        """Return how many windows there are."""
        return (length - self.size) // self._stride + 1

    @property
    def _stride(self) -> int:
        return self.size if self.stride is None else self.stride


@dataclass(frozen=True)
class GlobalAveragePool:
    """The mean over the image: Σ' = mean_ab Σ(a, b). It needs the covariance of every pixel with every other."""

    def propagate(self, state: KernelState) -> None:
        """Average over all pairs of pixels."""
        state.map(lambda values: values.mean((-4, -3, -2, -1)))
        state.space = 0


@dataclass(frozen=True)
class Flatten:
    """All pixels as features of a dense layer: Σ' = mean_a Σ(a, a)."""

    def propagate(self, state: KernelState) -> None:
        """Average over the pixels, each with itself."""
        state.map(lambda values: values.mean((-2, -1)))
        state.space = 0


def same_pixels(values: Tensor) -> Tensor:
    """Return the covariances of each pixel with itself, out of those of each with each."""
    *leading, height, width = values.shape[:-2]
    return (
        values.reshape(*leading, height * width, height * width).diagonal(dim1=-2, dim2=-1).reshape(values.shape[:-2])
    )


def _sum_windows(values: Tensor, axes: Sequence[int], size: int, stride: int) -> Tensor:
    """Sum over windows that move along all the axes at once."""

    def shifted(offset: int) -> Tensor:
        index = [slice(None)] * values.ndim
        for axis in axes:
            windows = (values.shape[axis] - size) // stride + 1
            index[axis] = slice(offset, offset + (windows - 1) * stride + 1, stride)
        return values[tuple(index)]

    total = shifted(0).clone()
    for offset in range(1, size):
        total += shifted(offset)
    return total


def _check_window(size: int, stride: int) -> None:
    for name, value in (("size", size), ("stride", stride)):
        if value < 1:
            raise InputError(f"{name} is {value}, but must be 1 pixel or more.")
