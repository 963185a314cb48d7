"""What a layer of infinite width does to the covariance of its inputs and to the NTK below it.

Layers are in NTK parameterisation: weights are σ_w/√fan_in times standard normal ones, biases σ_b times standard normal
ones, so that the gradients, and with them the NTK, have a limit as the width grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from metabridge.errors import InputError, check_not_negative, check_positive


@dataclass
class KernelState:
    """Covariances between points somewhere in the network; layers change it, in place where they can.

    `cov` and `ntk` are (rows, columns, *pixels), or (points, *pixels) for points with themselves. `space` counts the
    pixel dimensions: 0 in a dense layer, 2 where each pixel is held against the same pixel of the other image, 4 where
    it is held against every pixel. `ntk` is None where only the NNGP kernel is asked for.
    """

    cov: Tensor
    ntk: Tensor | None
    space: Literal[0, 2, 4]
    variances: Callable[[KernelState], tuple[Tensor, Tensor]]  # the variances of rows and columns, to be broadcast

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a linear map to the covariances and to the NTK."""
        self.cov = change(self.cov)
        if self.ntk is not None:
            self.ntk = change(self.ntk)

    def add_parameters(self, weight_variance: float, bias_variance: float) -> None:
        """Put weights and biases on top: Σ ← σ_w² Σ + σ_b² and Θ ← σ_w² Θ + Σ."""
        self.cov.mul_(weight_variance)
        if bias_variance:
            self.cov.add_(bias_variance)
        if self.ntk is not None:
            self.ntk.mul_(weight_variance).add_(self.cov)


class Layer(Protocol):
    """One layer of a network."""

    def propagate(self, state: KernelState) -> None:
        """Turn the state below the layer into the state above it."""
        ...


@dataclass(frozen=True)
class Dense:
    """A fully connected layer: Σ ← σ_w² Σ + σ_b², Θ ← σ_w² Θ + Σ."""

    weight_variance: float = 2.0
    bias_variance: float = 0.0

    def __post_init__(self) -> None:
        check_variances(self.weight_variance, self.bias_variance)

    def propagate(self, state: KernelState) -> None:
        """Take the mean over the inputs' features, as `state` holds it, to that of the outputs."""
        state.add_parameters(self.weight_variance, self.bias_variance)


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalisation of pre-activations: Σ and Θ are divided by the two standard deviations.

    Among infinitely many units the mean is 0 and the variance a constant, through which no gradient flows.
    """

    def propagate(self, state: KernelState) -> None:
        """Scale each point to variance 1."""
        left, right = (variance.rsqrt() for variance in state.variances(state))
        state.map(lambda values: values.mul_(left).mul_(right))


@dataclass(frozen=True)
class Residual:
    """x + f(x) for layers f that end in weights of their own: covariances and NTKs add up."""

    layers: tuple[Layer, ...]

    def propagate(self, state: KernelState) -> None:
        """Send a copy through the branch and add it."""
        branch = KernelState(
            state.cov.clone(), None if state.ntk is None else state.ntk.clone(), state.space, state.variances
        )
        for layer in self.layers:
            layer.propagate(branch)
        if branch.cov.shape != state.cov.shape:
            raise InputError("a residual branch changes the images' size. Use stride 1 and padding 'same' within it.")
        state.cov.add_(branch.cov)
        if state.ntk is not None and branch.ntk is not None:
            state.ntk.add_(branch.ntk)


def check_variances(weight_variance: float, bias_variance: float) -> None:
    """Refuse weights without variance, and biases with a negative one."""
    check_positive("weight_variance", weight_variance)
    check_not_negative("bias_variance", bias_variance)
