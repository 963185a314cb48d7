"""Infinitely wide convolution and pooling layers, which average covariances over pairs of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional as F

from metabridge.errors import InputError
from metabridge.kernels.layers import KernelState, check_variances

# For each number of pixel dimensions: the axes of the height, and the axes of the width.
_AXES = {2: ((-2,), (-1,)), 4: ((-4, -2), (-3, -1))}


@runtime_checkable
class SpatialLayer(Protocol):
    """A layer that can change the size of images."""

    def padded_length(self, length: int) -> int:
        """Return the height or width of the padded images.

        Args:
            length: Height or width of the input images, in pixels.

        Returns:
            The length in pixels.
        """
        ...

    def output_length(self, length: int) -> int:
        """Return the height or width of the output images.

        Args:
            length: Height or width of the input images, in pixels.

        Returns:
            The length in pixels.
        """
        ...


@dataclass(frozen=True)
class Conv:
    """A size×size convolution.

    For the windows at pixels a and b, Σ'(a, b) = σ_w² mean_δ Σ(a+δ, b+δ) + σ_b², with the mean over the offsets δ
    within a window.

    Args:
        size: Height and width of the convolution window, in pixels.
        stride: Distance between windows, in pixels.
        padding: Number of zero pixels added on each side; "valid" for none; "same" for an output height and width of
            input/stride pixels, rounded up. If "same" needs an odd number of pixels, the extra one is added at the
            right or at the bottom.
        weight_variance: σ_w², must be positive.
        bias_variance: σ_b²; 0 for a layer without bias.

    Raises:
        InputError: If a setting is out of range.

    Example:
        >>> import torch
        >>> from metabridge.kernels import Conv, Dense, Flatten, ReLU, convolutional_kernel
        >>> kernel = convolutional_kernel([Conv(3, padding="valid"), ReLU(), Flatten(), Dense()])
        >>> kernel.nngp(torch.ones(1, 3, 8, 8))
        tensor([[2.]])
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
            raise InputError(
                f"padding is {self.padding!r}, but must be 'same', 'valid' or a number of pixels, 0 or more."
            )

    def propagate(self, state: KernelState) -> None:
        """Average over the offsets of the window and apply weights and biases.

        Args:
            state: The kernels before the layer; updated in-place.
        """
        axis_groups = _AXES[state.pixel_dims]
        state.map(lambda values: self._pad_and_sum_windows(values, axis_groups))
        state.apply_weights_and_biases(self.weight_variance / self.size**2, self.bias_variance)

    def padded_length(self, length: int) -> int:
        """Return the height or width of the padded images.

        Args:
            length: Height or width of the input images, in pixels.

        Returns:
            The length in pixels.
        """
        return length + sum(self._pad_sizes(length))

    def output_length(self, length: int) -> int:
        """Return the height or width of the output images.

        Args:
            length: Height or width of the input images, in pixels.

        Returns:
            The length in pixels.
        """
        return (self.padded_length(length) - self.size) // self.stride + 1

    def _pad_sizes(self, length: int) -> tuple[int, int]:
        """Return the number of zero pixels before and after an axis of this length."""
        if self.padding == "same":
            total = max((-(-length // self.stride) - 1) * self.stride + self.size - length, 0)
            return total // 2, total - total // 2
        pixels = 0 if self.padding == "valid" else int(self.padding)
        return pixels, pixels

    def _pad_and_sum_windows(self, values: Tensor, axis_groups: Sequence[Sequence[int]]) -> Tensor:
        for axes in axis_groups:
            pads = [0] * (-2 * min(axes))  # F.pad counts dimensions from the last one
            for axis in axes:
                pads[-2 * axis - 2 : -2 * axis] = self._pad_sizes(values.shape[axis])
            values = _sum_windows(F.pad(values, pads) if any(pads) else values, axes, self.size, self.stride)
        return values


@dataclass(frozen=True)
class AveragePool:
    """Average pooling over size×size windows.

    For the windows at pixels a and b, Σ'(a, b) = mean_δδ' Σ(a+δ, b+δ'), with the mean over all pairs of offsets δ, δ'
    within a window. Pixels at the right and bottom edges that do not fill a window are ignored. Pooling needs the
    covariances of all pairs of pixels and is therefore much more expensive than convolution alone.

    Args:
        size: Height and width of a window, in pixels.
        stride: Distance between windows, in pixels; equal to `size` if None.

    Raises:
        InputError: If a setting is below 1.

    Example:
        >>> import torch
        >>> from metabridge.kernels import AveragePool, Conv, Dense, Flatten, ReLU, convolutional_kernel
        >>> kernel = convolutional_kernel([Conv(3), ReLU(), AveragePool(2), Flatten(), Dense()])
        >>> kernel.nngp(torch.ones(1, 3, 8, 8)).shape
        torch.Size([1, 1])
    """

    size: int = 2
    stride: int | None = None

    def __post_init__(self) -> None:
        _check_window(self.size, self._stride)

    def propagate(self, state: KernelState) -> None:
        """Average over the windows of both images.

        Args:
            state: The kernels before the layer; updated in-place.
        """

        def pool(values: Tensor) -> Tensor:
            for axis in (-4, -3, -2, -1):
                values = _sum_windows(values, (axis,), self.size, self._stride)
            return values.div_(self.size**4)  # number of pairs of pixels of two windows

        state.map(pool)

    def padded_length(self, length: int) -> int:
        """Return `length`, since there is no padding.

        Args:
            length: Height or width of the input images, in pixels.

        Returns:
            The length in pixels.
        """
        return length

    def output_length(self, length: int) -> int:
        """Return the height or width of the output images.

        Args:
            length: Height or width of the input images, in pixels.

        Returns:
            The length in pixels.
        """
        return (length - self.size) // self._stride + 1

    @property
    def _stride(self) -> int:
        return self.size if self.stride is None else self.stride


@dataclass(frozen=True)
class GlobalAveragePool:
    """Global average pooling: Σ' is the mean of Σ(a, b) over all pairs of pixels a and b.

    Example:
        >>> import torch
        >>> from metabridge.kernels import Conv, Dense, GlobalAveragePool, ReLU, convolutional_kernel
        >>> kernel = convolutional_kernel([Conv(3, padding="valid"), ReLU(), GlobalAveragePool(), Dense()])
        >>> kernel.nngp(torch.ones(1, 3, 8, 8)).shape
        torch.Size([1, 1])
    """

    def propagate(self, state: KernelState) -> None:
        """Average over all pairs of pixels.

        Args:
            state: The kernels before the layer; updated in-place.
        """
        state.map(lambda values: values.mean((-4, -3, -2, -1)))
        state.pixel_dims = 0


@dataclass(frozen=True)
class Flatten:
    """Flatten images to the input features of a dense layer: Σ' is the mean of Σ(a, a) over all pixels a.

    Example:
        >>> import torch
        >>> from metabridge.kernels import Dense, Flatten, convolutional_kernel
        >>> convolutional_kernel([Flatten(), Dense(1.0)]).nngp(torch.ones(1, 3, 8, 8))
        tensor([[1.]])
    """

    def propagate(self, state: KernelState) -> None:
        """Average over the pairs of pixels at the same position.

        Args:
            state: The kernels before the layer; updated in-place.
        """
        state.map(lambda values: values.mean((-2, -1)))
        state.pixel_dims = 0


def same_pixel_covariances(values: Tensor) -> Tensor:
    """Return the covariances of pixels at the same position, (..., h, w), from all covariances (..., h, w, h, w)."""
    *leading, height, width = values.shape[:-2]
    return (
        values.reshape(*leading, height * width, height * width).diagonal(dim1=-2, dim2=-1).reshape(values.shape[:-2])
    )


def _sum_windows(values: Tensor, axes: Sequence[int], size: int, stride: int) -> Tensor:
    """Sum the elements in each window. The offset within the window is the same along all axes."""

    def elements_at(offset: int) -> Tensor:
        index = [slice(None)] * values.ndim
        for axis in axes:
            window_count = (values.shape[axis] - size) // stride + 1
            index[axis] = slice(offset, offset + (window_count - 1) * stride + 1, stride)
        return values[tuple(index)]

    total = elements_at(0).clone()
    for offset in range(1, size):
        total += elements_at(offset)
    return total


def _check_window(size: int, stride: int) -> None:
    for name, value in (("size", size), ("stride", stride)):
        if value < 1:
            raise InputError(f"{name} is {value}, but must be at least 1 pixel.")
