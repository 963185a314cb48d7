"""Teachers of one hidden layer: population losses without sampling, and which task MAML prefers (C theorem 1).

W are the neurons of a student and V those of a teacher, both (M, d), in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

from metabridge.autodiff import grad
from metabridge.environments.teacher_networks import Activation, neuron_sum
from metabridge.errors import InputError

NODES = 48  # of the quadrature along each axis
RESIDUAL = 1e-9  # the largest element of a gradient that counts as zero
APART = 1e-5  # stationary points nearer than this count as one
REACH = 10.0  # farther out sigmoid and tanh are so flat that every point seems stationary


@dataclass(frozen=True, eq=False)
class TeacherTask:
    """The task of a teacher with neurons V: x ~ N(0, ρI), y = Σ_k σ(⟨v^k, x⟩) (C §4)."""

    neurons: Tensor
    activation: Activation = "softplus"
    covariance: float = 1.0

    def loss(self, W: Tensor) -> Tensor:
        """f(W) = ½E(h_W(x) − h_V(x))², with the sums h of `neuron_sum`.

        ReLU has it in closed form, and needs that: its second derivative is lost at any finite set of inputs.
        The others take Gauss–Hermite quadrature over inputs of at most 3 dimensions. Its gradients are right to half a
        hundredth for tanh up to √ρ‖w‖ = 1.5 and for sigmoid up to 3; steeper neurons it does not resolve.

        >>> task = TeacherTask(torch.tensor([[1.0, 0.0]], dtype=torch.float64), "relu", 2.0)
        >>> task.loss(torch.tensor([[-1.0, 0.0]], dtype=torch.float64)).item()
        1.0
        """
        if self.activation == "relu":
            cross = _relu_products(W, self.neurons).sum()
            return self.covariance * (_relu_square(W) - 2 * cross + _relu_square(self.neurons)) / 2
        if W.shape[-1] > 3:
            raise InputError(
                f"neurons have {W.shape[-1]} dimensions, but the quadrature for {self.activation} covers 3 at most. "
                "Use activation='relu', or sample from environments.TeacherTasks."
            )
        points, weights = map(torch.from_numpy, _normal_points(W.shape[-1]))
        x = math.sqrt(self.covariance) * points
        gap = neuron_sum(self.activation, W, x) - neuron_sum(self.activation, self.neurons, x)
        return (weights @ gap.square().squeeze(-1)) / 2

    def gradient(self, W: Tensor) -> Tensor:
        """∇f(W), (M, d)."""
        return grad(self.loss, W)

    def curvatures(self, W: Tensor) -> Tensor:
        """The eigenvalues of ∇²f(W), smallest first: the first is β and the last is L at this point (C theorem 1)."""
        hessian = torch.func.hessian(self.loss)(W).reshape(W.numel(), W.numel())
        if self.activation == "relu" and (W == 0).all(-1).any():
            raise InputError(
                "W has a neuron with zero weights, where the loss of ReLU neurons has no second derivative. "
                "Give every neuron of W a nonzero weight."
            )
        values: Tensor = torch.linalg.eigvalsh(hessian)
        return values

    def adapted(self, W: Tensor, rate: float) -> Tensor:
        """W − α∇f(W): one step of gradient descent with infinitely many samples."""
        return W - rate * self.gradient(W)


def nal_loss(tasks: Sequence[TeacherTask]) -> Callable[[Tensor], Tensor]:
    """E_i f_i(W), what NAL minimises (C eq. 3)."""
    return lambda W: torch.stack([task.loss(W) for task in tasks]).mean()


def maml_loss(tasks: Sequence[TeacherTask], rate: float) -> Callable[[Tensor], Tensor]:
    """F_∞(W) = E_i f_i(W − α∇f_i(W)), what MAML minimises with infinitely many samples (C eq. 1, 30)."""
    return lambda W: torch.stack([task.loss(task.adapted(W, rate)) for task in tasks]).mean()


def stationary_points(loss: Callable[[Tensor], Tensor], starts: Iterable[Tensor]) -> list[Tensor]:
    """Return the points, no two the same, to which Newton-like steps on ∇loss lead from the starts, none far out.

    >>> [point.tolist() for point in stationary_points(lambda W: (W**4 - 2 * W**2).sum(), torch.tensor([[0.8], [1.2]]))]
    [[1.0]]
    """
    found: list[Tensor] = []
    for start in starts:
        shape = start.shape

        def slope(flat: NDArray[np.float64], shape: torch.Size = shape) -> NDArray[np.float64]:
            return grad(loss, torch.from_numpy(flat).reshape(shape)).numpy().ravel()

        end = optimize.root(slope, start.double().numpy().ravel(), tol=1e-12, options={"maxfev": 100})
        point = torch.from_numpy(end.x).reshape(shape)
        flat = abs(end.fun).max() < RESIDUAL and point.norm() < REACH
        if flat and all((point - other).norm() > APART for other in found):
            found.append(point)
    return found


@dataclass(frozen=True)
class Preference:
    """How much more a stationary point of MAML's loss favours the hard task 1 than the easy task 2 (C §4)."""

    rate: float  # α
    ratio: float  # ‖∇f₁(W)‖/‖∇f₂(W)‖; it is 1 where NAL's loss is stationary
    adapted_ratio: float  # ‖∇f₁(W₁)‖/‖∇f₂(W₂)‖, each after a step on its own task
    hard: tuple[float, float]  # the least and the largest curvature of f₁ at W: β₁ and L₁
    easy: tuple[float, float]  # those of f₂: β₂ and L₂

    @classmethod
    def at(cls, W: Tensor, hard: TeacherTask, easy: TeacherTask, rate: float) -> Preference:
        """Measure it at a point."""

        def norm(task: TeacherTask, W: Tensor) -> float:
            return float(task.gradient(W).norm())

        extremes = [(float(values[0]), float(values[-1])) for values in (hard.curvatures(W), easy.curvatures(W))]
        adapted = norm(hard, hard.adapted(W, rate)) / norm(easy, easy.adapted(W, rate))
        return cls(rate, norm(hard, W) / norm(easy, W), adapted, *extremes)

    @property
    def applies(self) -> bool:
        """Whether both losses are convex there and α < 1/L, which is what the proof rests on."""
        return min(self.hard[0], self.easy[0]) > 0 and self.rate * max(self.hard[1], self.easy[1]) < 1

    @property
    def adapted_bound(self) -> float:
        """(1 − αβ₂)/(1 − αL₁), which bounds the ratio after adaptation (C eq. 33)."""
        return (1 - self.rate * self.easy[0]) / (1 - self.rate * self.hard[1])

    @property
    def bound(self) -> float:
        """((1 − αβ₂)/(1 − αL₁))², which bounds the ratio up to O(α²) (C eq. 36)."""
        return self.adapted_bound**2

    @property
    def printed_bound(self) -> float:
        """(1 − 2αβ₂)/(1 − αL₁)², the same up to O(α²), which is how theorem 1 has it (C eq. 13)."""
        return (1 - 2 * self.rate * self.easy[0]) / (1 - self.rate * self.hard[1]) ** 2


def _relu_products(W: Tensor, V: Tensor) -> Tensor:
    """E[max(⟨w, x⟩, 0)·max(⟨v, x⟩, 0)] = (|w||v| sin θ + (π − θ)⟨w, v⟩)/2π for every pair, x ~ N(0, I)."""
    inner = W @ V.mT
    area = W.square().sum(-1)[:, None] * V.square().sum(-1) - inner.square()
    spread = area > 0  # at parallel neurons the root has no derivative, and the product does without
    area = torch.where(spread, torch.where(spread, area, 1.0).sqrt(), 0.0)
    return (area + (math.pi - torch.atan2(area, inner)) * inner) / (2 * math.pi)


def _relu_square(W: Tensor) -> Tensor:
    """E[h_W(x)²] for x ~ N(0, I)."""
    others = 1 - torch.eye(len(W), dtype=W.dtype)
    return W.square().sum() / 2 + (others * _relu_products(W, W)).sum()


@lru_cache
def _normal_points(dimension: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points and weights with Σ weight·g(point) ≈ E g(x) for x ~ N(0, I)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)

    def product(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack(np.meshgrid(*[values] * dimension, indexing="ij"), -1).reshape(-1, dimension)

    masses = product(weights).prod(-1)
    return product(nodes), masses / masses.sum()
