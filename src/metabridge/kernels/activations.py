"""The Gaussian expectations E[φ(u)φ(v)] and E[φ'(u)φ'(v)] of the activations that have them in closed form."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.errors import InputError
from metabridge.kernels.layers import KernelState

# Pairs whose angle is below √(2⁵ε) ≈ 8e-8, the resolution of a covariance in double precision, count as parallel.
_PARALLEL = 2**5 * torch.finfo(torch.float64).eps


class Activation(ABC):
    """A function φ between layers: Σ ← E[φ(u)φ(v)] and Θ ← Θ·E[φ'(u)φ'(v)] for (u, v) ~ N(0, Σ)."""

    def propagate(self, state: KernelState) -> None:
        """Replace the covariances of u and v by those of φ(u) and φ(v)."""
        state.cov, slope = self.moments(state.cov, *state.variances(state))
        if state.ntk is not None:
            state.ntk.mul_(slope)

    @abstractmethod
    def moments(self, cov: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[φ(u)φ(v)] and E[φ'(u)φ'(v)] where cov = E[uv], left = E[u²], right = E[v²]; overwrites cov."""


@dataclass(frozen=True)
class ReLU(Activation):
    """max(x, 0) + slope·min(x, 0), leaky where slope is not 0; the arc-cosine kernels.

    With ρ = cos θ the correlation, a = (1 + slope²)/2 and b = (1 − slope)²/2π:
    E[φ'φ'] = a − bθ and E[φφ] = √(E[u²]E[v²])·(ρ(a − bθ) + b sin θ).
    θ is taken from its sine and cosine, which is exact at ±1 and loses nothing next to it.
    """

    slope: float = 0.0

    def moments(self, cov: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Compute in seven passes over the pairs, most of them in place."""
        a, b = (1 + self.slope**2) / 2, (1 - self.slope) ** 2 / (2 * math.pi)
        deviations = (left.sqrt(), right.sqrt())
        for deviation in deviations:  # a pixel that is 0 for every weight is uncorrelated to all
            cov.mul_(torch.where(deviation > 0, deviation.reciprocal(), 0))
        sine = torch.addcmul(cov.new_ones(()), cov, cov, value=-1)
        F.threshold(sine, _PARALLEL, 0.0, inplace=True).sqrt_()
        slope = torch.atan2(sine, cov).mul_(-b).add_(a)
        cov.mul_(slope).add_(sine, alpha=b)
        for deviation in deviations:
            cov.mul_(deviation)
        return cov, slope


@dataclass(frozen=True)
class Erf(Activation):
    """The error function, with s² = (1 + 2E[u²])(1 + 2E[v²]).

    E[φφ] = (2/π) arcsin(2E[uv]/s) and E[φ'φ'] = (4/π)/√(s² − 4E[uv]²).
    """

    def moments(self, cov: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both from s."""
        scales = ((1 + 2 * left).sqrt(), (1 + 2 * right).sqrt())
        slope = (scales[0] * scales[1]).square().addcmul_(cov, cov, value=-4).rsqrt_().mul_(4 / math.pi)
        for scale in scales:
            cov.div_(scale)
        return cov.mul_(2).asin_().mul_(2 / math.pi), slope


@dataclass(frozen=True)
class Gelu(Activation):
    """x·P(N(0, 1) < x), with s² = (1 + E[u²])(1 + E[v²]) and r² = s² − E[uv]²."""

    def moments(self, cov: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both from s, r and the angle arctan(E[uv]/r)."""
        product, s2 = left * right, (1 + left) * (1 + right)
        r2 = s2 - cov.square()
        r = r2.sqrt()
        angle = torch.atan2(cov, r)
        slope = 0.25 + (angle + cov / r * (1 / r2 + (1 - product) / s2 + 1)) / (2 * math.pi)
        value = 0.25 * cov + ((cov.square() + product * r2) / (s2 * r) + cov * angle) / (2 * math.pi)
        return value, slope


@dataclass(frozen=True)
class Sine(Activation):
    """sin x: E[φφ] = (e⁺ − e⁻)/2 and E[φ'φ'] = (e⁺ + e⁻)/2, where e^± is exp(±E[uv] − (E[u²] + E[v²])/2)."""

    def moments(self, cov: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both from exponentials that cannot overflow, since |E[uv]| is below the mean of the variances."""
        plus, minus = _exponentials(cov, left, right)
        return plus - minus, plus + minus


@dataclass(frozen=True)
class Cosine(Activation):
    """cos x: the two expectations of sin x, exchanged."""

    def moments(self, cov: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Compute as for the sine."""
        plus, minus = _exponentials(cov, left, right)
        return plus + minus, plus - minus


def _exponentials(cov: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    mean = (left + right) / 2
    return (cov - mean).exp_().div_(2), (-cov - mean).exp_().div_(2)


ACTIVATIONS: dict[str, tuple[Activation, ...]] = {
    "relu": (ReLU(),),
    "leaky-relu": (ReLU(slope=0.01),),  # torch.nn.LeakyReLU's default
    "erf": (Erf(),),
    "gelu": (Gelu(),),
    "sine": (Sine(),),
    "cosine": (Cosine(),),
    "identity": (),
}


def activation_layers(activation: str | Activation) -> tuple[Activation, ...]:
    """Return the layers that stand for an activation given by name; none for the identity.

    >>> activation_layers("leaky-relu")
    (ReLU(slope=0.01),)
    """
    if isinstance(activation, Activation):
        return (activation,)
    if activation not in ACTIVATIONS:
        raise InputError(f"activation is '{activation}', but must be one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[activation]
