"""Infinitely wide layers. Each maps the NNGP kernel and NTK of its input to those of its output.

Layers use the NTK parameterization: weights are σ_w/√fan_in times standard normal variables and biases are σ_b times
standard normal variables, so the NTK has a limit as the width grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from metabridge.errors import InputError, check_not_negative, check_positive


@dataclass
class KernelState:
    """The kernels of a network up to some layer. The next layer updates them, in-place if possible.

    Args:
        cov: Covariances Σ of the (pre-)activations of row points and column points, (rows, columns, *pixels); or of
            each point with itself, (points, *pixels).
        ntk: The NTK Θ up to this layer, with the shape of `cov`; None if only the NNGP kernel is computed.
        pixel_dims: Number of pixel dimensions of `cov`: 0 in dense layers, 2 for covariances of pixels at the same
            position of two images, 4 for covariances of all pairs of pixels of two images.
        get_variances: Function that takes this state and returns Σ(x, x) of the row points x and Σ(z, z) of the column
            points z, in shapes that broadcast to `cov`.
    """

    cov: Tensor
    ntk: Tensor | None
    pixel_dims: Literal[0, 2, 4]
    get_variances: Callable[[KernelState], tuple[Tensor, Tensor]]

    def map(self, linear_map: Callable[[Tensor], Tensor]) -> None:
        """Apply a linear map to Σ and Θ."""
        self.cov = linear_map(self.cov)
        if self.ntk is not None:
            self.ntk = linear_map(self.ntk)

    def apply_weights_and_biases(self, weight_variance: float, bias_variance: float) -> None:
        """Replace Σ with Σ' = σ_w² Σ + σ_b² and Θ with Θ' = σ_w² Θ + Σ'."""
        self.cov.mul_(weight_variance)
        if bias_variance:
            self.cov.add_(bias_variance)
        if self.ntk is not None:
            self.ntk.mul_(weight_variance).add_(self.cov)


class Layer(Protocol):
    """One layer of an infinitely wide network."""

    def propagate(self, state: KernelState) -> None:
        """Replace the kernels of the layer's input with the kernels of its output.

        Args:
            state: The kernels before the layer; updated in-place.
        """
        ...


@dataclass(frozen=True)
class Dense:
    """A fully connected layer: Σ' = σ_w² Σ + σ_b² and Θ' = σ_w² Θ + Σ'.

    Args:
        weight_variance: σ_w², must be positive. The default is He initialization for ReLU.
        bias_variance: σ_b²; 0 for a layer without bias.

    Raises:
        InputError: If a variance is out of range.

    Example:
        >>> import torch
        >>> from metabridge.kernels import AnalyticKernel, Dense
        >>> AnalyticKernel((Dense(1.0, bias_variance=0.5),)).nngp(torch.ones(1, 4))
        tensor([[1.5000]])
    """

    weight_variance: float = 2.0
    bias_variance: float = 0.0

    def __post_init__(self) -> None:
        check_variances(self.weight_variance, self.bias_variance)

    def propagate(self, state: KernelState) -> None:
        """Update Σ and Θ.

        Args:
            state: The kernels before the layer; updated in-place.
        """
        state.apply_weights_and_biases(self.weight_variance, self.bias_variance)


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalization of pre-activations: Σ(x, z) and Θ(x, z) are divided by √(Σ(x, x)·Σ(z, z)).

    In an infinitely wide layer, the mean of the units is 0 and their variance is Σ(x, x). Neither depends on the
    parameters, so no gradient flows through them.

    Example:
        >>> import torch
        >>> from metabridge.kernels import AnalyticKernel, Dense, LayerNorm
        >>> AnalyticKernel((Dense(), LayerNorm(), Dense(1.0))).nngp(torch.ones(1, 4))
        tensor([[1.]])
    """

    def propagate(self, state: KernelState) -> None:
        """Divide Σ and Θ by the standard deviations of both points.

        Args:
            state: The kernels before the layer; updated in-place.
        """
        row_scale, column_scale = (variance.rsqrt() for variance in state.get_variances(state))
        state.map(lambda values: values.mul_(row_scale).mul_(column_scale))


@dataclass(frozen=True)
class Residual:
    """A residual connection x + f(x): the kernel of the sum is the sum of the kernels of x and f(x).

    Args:
        layers: The layers of f. The last one must have weights, so that x and f(x) are independent.

    Example:
        >>> import torch
        >>> from metabridge.kernels import AnalyticKernel, Dense, ReLU, Residual
        >>> AnalyticKernel((Dense(), Residual((ReLU(), Dense())), Dense(1.0))).nngp(torch.ones(1, 4))
        tensor([[4.]])
    """

    layers: tuple[Layer, ...]

    def propagate(self, state: KernelState) -> None:
        """Propagate a copy of the kernels through the branch, and add the result to the kernels.

        Args:
            state: The kernels before the layer; updated in-place.

        Raises:
            InputError: If the branch changes the size of the images.
        """
        branch = KernelState(
            state.cov.clone(), None if state.ntk is None else state.ntk.clone(), state.pixel_dims, state.get_variances
        )
        for layer in self.layers:
            layer.propagate(branch)
        if branch.cov.shape != state.cov.shape:
            raise InputError(
                "a residual branch changes the size of the images, but must keep it. Use stride=1 and padding='same' "
                "in all of its layers."
            )
        state.cov.add_(branch.cov)
        if state.ntk is not None and branch.ntk is not None:
            state.ntk.add_(branch.ntk)


def check_variances(weight_variance: float, bias_variance: float) -> None:
    """Raise InputError unless the weight variance is positive and the bias variance is not negative."""
    check_positive("weight_variance", weight_variance)
    check_not_negative("bias_variance", bias_variance)
