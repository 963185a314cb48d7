"""Activations whose Gaussian expectations E[φ(u)φ(v)] and E[φ'(u)φ'(v)] have a closed form."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.errors import InputError
from metabridge.kernels.layers import KernelState

# Squared sines up to this value count as zero, since rounding errors of float64 covariances can be as large. The angles
# with such sines are within √(32ε) ≈ 8e-8 of 0 or π, where ε is the machine epsilon.
_MIN_SQUARED_SINE = 2**5 * torch.finfo(torch.float64).eps


class Activation(ABC):
    """An activation φ. It maps Σ to E[φ(u)φ(v)] and Θ to Θ·E[φ'(u)φ'(v)], where (u, v) ~ N(0, Σ)."""

    def propagate(self, state: KernelState) -> None:
        """Replace the kernels of the pre-activations with the kernels of the activations.

        Args:
            state: The kernels before the layer; updated in-place.
        """
        state.cov, derivative_moment = self.moments(state.cov, *state.get_variances(state))
        if state.ntk is not None:
            state.ntk.mul_(derivative_moment)

    @abstractmethod
    def moments(self, cov: Tensor, row_variance: Tensor, column_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two Gaussian expectations of the activation.

        Args:
            cov: E[uv]; may be overwritten.
            row_variance: E[u²], in a shape that broadcasts to `cov`.
            column_variance: E[v²], in a shape that broadcasts to `cov`.

        Returns:
            E[φ(u)φ(v)] and E[φ'(u)φ'(v)].
        """


@dataclass(frozen=True)
class ReLU(Activation):
    """The ReLU, or the leaky ReLU if `negative_slope` is not 0: max(x, 0) + negative_slope · min(x, 0).

    The expectations are those of the arc-cosine kernels. With c = negative_slope, the correlation ρ = cos θ of u and v,
    a = (1 + c²)/2 and b = (1 − c)²/(2π):

    - E[φ'(u)φ'(v)] = a − bθ
    - E[φ(u)φ(v)] = √(E[u²]E[v²]) · (ρ(a − bθ) + b sin θ)

    The angle θ is computed from its sine and cosine, which is exact at ρ = ±1. Angles within about 8e-8 of 0 or π are
    rounded to 0 or π.

    Args:
        negative_slope: Slope for negative inputs.

    Example:
        >>> import torch
        >>> from metabridge.kernels import ReLU, fully_connected_kernel
        >>> fully_connected_kernel(depth=2, activation=ReLU(negative_slope=1.0)).nngp(torch.ones(1, 4))
        tensor([[4.]])
    """

    negative_slope: float = 0.0

    def moments(self, cov: Tensor, row_variance: Tensor, column_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two Gaussian expectations; see `Activation.moments`."""
        # Operations are in-place where possible, since the computation is memory-bound.
        a, b = (1 + self.negative_slope**2) / 2, (1 - self.negative_slope) ** 2 / (2 * math.pi)
        stds = (row_variance.sqrt(), column_variance.sqrt())
        for std in stds:  # a pixel of variance 0 is uncorrelated with every pixel
            cov.mul_(torch.where(std > 0, std.reciprocal(), 0))
        sine = torch.addcmul(cov.new_ones(()), cov, cov, value=-1)
        F.threshold(sine, _MIN_SQUARED_SINE, 0.0, inplace=True).sqrt_()
        derivative_moment = torch.atan2(sine, cov).mul_(-b).add_(a)
        cov.mul_(derivative_moment).add_(sine, alpha=b)
        for std in stds:
            cov.mul_(std)
        return cov, derivative_moment


@dataclass(frozen=True)
class Erf(Activation):
    """The error function.

    With s² = (1 + 2E[u²])(1 + 2E[v²]):

    - E[φ(u)φ(v)] = (2/π) arcsin(2E[uv]/s)
    - E[φ'(u)φ'(v)] = (4/π)/√(s² − 4E[uv]²)

    Example:
        >>> import torch
        >>> from metabridge.kernels import Erf, fully_connected_kernel
        >>> fully_connected_kernel(depth=2, activation=Erf()).nngp(torch.ones(1, 4))
        tensor([[1.1807]])
    """

    def moments(self, cov: Tensor, row_variance: Tensor, column_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two Gaussian expectations; see `Activation.moments`."""
        scales = ((1 + 2 * row_variance).sqrt(), (1 + 2 * column_variance).sqrt())
        derivative_moment = (scales[0] * scales[1]).square().addcmul_(cov, cov, value=-4).rsqrt_().mul_(4 / math.pi)
        for scale in scales:
            cov.div_(scale)
        return cov.mul_(2).asin_().mul_(2 / math.pi), derivative_moment


@dataclass(frozen=True)
class GELU(Activation):
    """The Gaussian error linear unit x·P(N(0, 1) < x).

    With p = E[u²]E[v²], s² = (1 + E[u²])(1 + E[v²]), r² = s² − E[uv]² and α = arctan(E[uv]/r):

    - E[φ'(u)φ'(v)] = 1/4 + (α + (E[uv]/r) · (1/r² + (1 − p)/s² + 1))/(2π)
    - E[φ(u)φ(v)] = E[uv]/4 + ((E[uv]² + p·r²)/(s²·r) + α·E[uv])/(2π)

    Example:
        >>> import torch
        >>> from metabridge.kernels import GELU, fully_connected_kernel
        >>> fully_connected_kernel(depth=2, activation=GELU()).nngp(torch.ones(1, 4))
        tensor([[1.8442]])
    """

    def moments(self, cov: Tensor, row_variance: Tensor, column_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two Gaussian expectations; see `Activation.moments`."""
        product, s2 = row_variance * column_variance, (1 + row_variance) * (1 + column_variance)
        r2 = s2 - cov.square()
        r = r2.sqrt()
        angle = torch.atan2(cov, r)
        derivative_moment = 0.25 + (angle + cov / r * (1 / r2 + (1 - product) / s2 + 1)) / (2 * math.pi)
        moment = 0.25 * cov + ((cov.square() + product * r2) / (s2 * r) + cov * angle) / (2 * math.pi)
        return moment, derivative_moment


@dataclass(frozen=True)
class Sin(Activation):
    """The sine.

    With e⁺ = exp(E[uv] − (E[u²] + E[v²])/2) and e⁻ = exp(−E[uv] − (E[u²] + E[v²])/2):

    - E[φ(u)φ(v)] = (e⁺ − e⁻)/2
    - E[φ'(u)φ'(v)] = (e⁺ + e⁻)/2

    Example:
        >>> import torch
        >>> from metabridge.kernels import Sin, fully_connected_kernel
        >>> fully_connected_kernel(depth=2, activation=Sin()).nngp(torch.ones(1, 4))
        tensor([[0.9817]])
    """

    def moments(self, cov: Tensor, row_variance: Tensor, column_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two Gaussian expectations; see `Activation.moments`."""
        plus, minus = _exponentials(cov, row_variance, column_variance)
        return plus - minus, plus + minus


@dataclass(frozen=True)
class Cos(Activation):
    """The cosine.

    E[φ(u)φ(v)] and E[φ'(u)φ'(v)] are those of `Sin`, swapped.

    Example:
        >>> import torch
        >>> from metabridge.kernels import Cos, fully_connected_kernel
        >>> fully_connected_kernel(depth=2, activation=Cos()).nngp(torch.ones(1, 4))
        tensor([[1.0183]])
    """

    def moments(self, cov: Tensor, row_variance: Tensor, column_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two Gaussian expectations; see `Activation.moments`."""
        plus, minus = _exponentials(cov, row_variance, column_variance)
        return plus + minus, plus - minus


def _exponentials(cov: Tensor, row_variance: Tensor, column_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return e⁺/2 and e⁻/2 (see `Sin`). They cannot overflow, since |E[uv]| is at most the mean of the variances."""
    mean = (row_variance + column_variance) / 2
    return (cov - mean).exp_().div_(2), (-cov - mean).exp_().div_(2)


ACTIVATIONS: dict[str, tuple[Activation, ...]] = {
    "relu": (ReLU(),),
    "leaky-relu": (ReLU(negative_slope=0.01),),  # torch.nn.LeakyReLU's default
    "erf": (Erf(),),
    "gelu": (GELU(),),
    "sin": (Sin(),),
    "cos": (Cos(),),
    "identity": (),
}


def activation_layers(activation: str | Activation) -> tuple[Activation, ...]:
    """Return an activation as a tuple of layers.

    Args:
        activation: Name in `ACTIVATIONS`, or an instance.

    Returns:
        A tuple of one activation, or of none for the identity.

    Raises:
        InputError: If there is no activation of this name.

    >>> activation_layers("leaky-relu")
    (ReLU(negative_slope=0.01),)
    """
    if isinstance(activation, Activation):
        return (activation,)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise InputError(
            f"activation is {activation!r}, but must be one of {', '.join(ACTIVATIONS)}, or an instance such as "
            "ReLU(negative_slope=0.1)."
        )
    return ACTIVATIONS[activation]
