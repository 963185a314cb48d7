"""First-order ANIL of a linear net x ↦ ⟨Bw, x⟩ in the limit of many tasks (D §2.2, §3).

Tasks are y = ⟨θ, x⟩ + z with x ~ N(0, I_d) and z of variance σ². All that the limit knows of them are the moments
of θ. Every function takes any number of leading axes, so that runs go side by side: B is (..., d, k'), w (..., k').
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metabridge.environments.shared_representation import SharedRepresentation
from metabridge.errors import InputError, check_positive


@dataclass(frozen=True)
class AnilSettings:
    """The step sizes α of the inner and β of the outer loop, and the points of a task that adapt, possibly ∞."""

    alpha: float = 0.025
    beta: float = 0.025
    m_in: float = 20

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        check_positive("beta", self.beta)
        if not self.m_in >= 1:
            raise InputError(f"m_in is {self.m_in}, but adaptation needs at least one point. Use m_in=1 or more.")


class TaskMoments(NamedTuple):
    """What the limit of many tasks knows of them: E[θ] (..., d), E[θθᵀ] (..., d, d), and the noise's σ²."""

    mean: Tensor
    second: Tensor
    noise: float

    @classmethod
    def from_environment(cls, world: SharedRepresentation) -> TaskMoments:
        """Return the moments of infinitely many tasks of an environment."""
        mean = torch.zeros(world.rank, dtype=torch.float64)
        if world.mean is not None:
            mean += torch.tensor(world.mean, dtype=torch.float64)
        second = torch.diag(torch.tensor(world.variances, dtype=torch.float64)) + torch.outer(mean, mean)
        basis = world.representation
        return cls(basis @ mean, basis @ second @ basis.mT, world.noise)

    @classmethod
    def from_tasks(cls, slopes: Tensor, noise: float) -> TaskMoments:
        """Return the moments of the tasks with these slopes, (..., tasks, d)."""
        slopes = slopes.double()
        return cls(slopes.mean(-2), slopes.mT @ slopes / slopes.shape[-2], noise)

    def errors(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[e] and E[eeᵀ] of the errors e = u − θ of a slope u."""
        mean = u - self.mean
        cross = _outer(u, self.mean)
        return mean, _outer(u, u) - cross - cross.mT + self.second

    def to(self, device: torch.device | str) -> TaskMoments:
        """Move to a device."""
        return TaskMoments(self.mean.to(device), self.second.to(device), self.noise)


def stack_moments(moments: list[TaskMoments]) -> TaskMoments:
    """Put the moments of runs with the same noise side by side."""
    return TaskMoments(
        torch.stack([each.mean for each in moments]), torch.stack([each.second for each in moments]), moments[0].noise
    )


def initial_parameters(dimension: int, width: int, alpha: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return B₀ with B₀ᵀB₀ = I/4α, in a random direction, and w₀ on the sphere of squared radius α k'/100 (D §5)."""
    if width > dimension:
        raise InputError(f"width is {width}, but D's layers are no wider than the inputs. Use width={dimension}.")
    drawn = torch.randn(dimension, width, generator=generator, dtype=torch.float64)
    direction = torch.randn(width, generator=generator, dtype=torch.float64)
    B = torch.linalg.qr(drawn).Q / math.sqrt(4 * alpha)
    return B, math.sqrt(0.01 * width * alpha) * direction / direction.norm()


def adapted_head_moments(B: Tensor, w: Tensor, tasks: TaskMoments, rates: AnilSettings) -> tuple[Tensor, Tensor]:
    """Return E[wᵢ] and E[wᵢwᵢᵀ] of the heads after the inner step, over tasks and their points (D eq. 7, lemma 15).

    wᵢ = w − αBᵀ(Se − Xᵀz/m) with e = Bw − θ and S = XᵀX/m, for which E[S] = I and
    E[S A S] = A + (A + tr(A) I)/m. Unlike D's, the formula holds for tasks of any mean.
    """
    alpha, share = rates.alpha, 1 / rates.m_in
    mean, square = tasks.errors(_times(B, w))
    step = alpha * _times(B.mT, mean)
    scale = share * (_trace(square) + tasks.noise)
    spread = alpha**2 * (B.mT @ ((1 + share) * square @ B + scale[..., None, None] * B))
    cross = _outer(w, step)
    return w - step, _outer(w, w) - cross - cross.mT + spread


def population_step(B: Tensor, w: Tensor, tasks: TaskMoments, rates: AnilSettings) -> tuple[Tensor, Tensor]:
    """Take one outer step of FO-ANIL on infinitely many tasks (D eq. 5–7).

    With m_in = ∞ and the moments of sampled tasks, this is FO-ANIL with infinitely many points a task.

    >>> world = SharedRepresentation(dimension=8, variances=(1.0, 2.0))
    >>> B, w = initial_parameters(8, 8, 0.025, torch.Generator().manual_seed(0))
    >>> B, w = population_step(B, w, TaskMoments.from_environment(world), AnilSettings())
    >>> B.shape, w.shape
    (torch.Size([8, 8]), torch.Size([8]))
    """
    head, heads = adapted_head_moments(B, w, tasks, rates)
    # E[θwᵢᵀ] = E[θ](w − αBᵀBw)ᵀ + αE[θθᵀ]B
    start = w - rates.alpha * _times(B.mT, _times(B, w))
    slopes = _outer(tasks.mean, start) + rates.alpha * tasks.second @ B
    descent = _times(B.mT, _times(B, head) - tasks.mean)
    return B - rates.beta * (B @ heads - slopes), w - rates.beta * descent


def limiting_gram(covariance: Tensor, noise: float, rates: AnilSettings) -> Tensor:
    """Λ* = (1/α)(m/(m+1))(I − ((m+1)/σ̄² Σ* + I)⁻¹), σ̄² = tr Σ* + σ²: where B*ᵀBBᵀB* goes (D eq. 8).

    Written as (1/α)((1 + 1/m)Σ* + (σ̄²/m) I)⁻¹Σ*, which also holds for m = ∞. `covariance` is Σ*, (..., k, k),
    about the mean of the tasks.

    >>> limiting_gram(torch.eye(1), 0.0, AnilSettings(alpha=0.5, m_in=2))
    tensor([[1.]])
    """
    check_convergence(covariance, rates)
    share = 1 / rates.m_in
    total = share * (_trace(covariance) + noise)
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    solved: Tensor = torch.linalg.solve((1 + share) * covariance + total[..., None, None] * eye, covariance)
    return solved / rates.alpha


def check_convergence(covariance: Tensor, rates: AnilSettings, width: int | None = None) -> None:
    """Refuse a setting in which FO-ANIL does not go to theorem 1's limit.

    Along an eigenvector of Σ* of eigenvalue s, a step multiplies what is left to the limit by 1 − 2αβs.
    """
    values = torch.linalg.eigvalsh(covariance)
    low, high = float(values.amin()), float(values.amax())
    if low <= 1e-12 * high or high <= 0:
        raise InputError(
            f"covariance has the eigenvalue {low:.3g}, but theorem 1 needs tasks that differ in every direction "
            "of the representation. Leave out the directions in which they do not."
        )
    rank = covariance.shape[-1]
    if width is not None and width < rank:
        raise InputError(
            f"width is {width}, but the representation has {rank} dimensions, which a narrower layer cannot hold. "
            f"Use width={rank} or more."
        )
    if rates.beta > rates.alpha:
        raise InputError(
            f"beta is {rates.beta}, but theorem 1 needs it to be no larger than alpha, which is {rates.alpha}."
        )
    if rates.alpha * rates.beta * high >= 1:
        raise InputError(
            f"alpha · beta · the largest eigenvalue of Σ* is {rates.alpha * rates.beta * high:.3g}, but the limit is "
            "stable only below 1. Use a smaller alpha or beta."
        )


def unlearning_bound(start: float, steps: Tensor, total: float, rates: AnilSettings) -> Tensor:
    """Bound the largest squared singular value of B*⊥ᵀB after `steps`, from `start`: 1/(1/start + ct) (D app. H).

    c = βα²σ̄²/m, with `total` σ̄²: E[wᵢwᵢᵀ] is at least (α²σ̄²/m) BᵀB, so a step takes s² to at most s²(1 − cs²),
    as long as βE[wᵢwᵢᵀ] stays below I. Nothing is unlearned where m = ∞.

    >>> unlearning_bound(10.0, torch.tensor([0, 1000]), 8.0, AnilSettings(alpha=0.1, beta=0.1, m_in=20))
    tensor([10.0000,  2.0000])
    """
    return 1 / (1 / start + rates.beta * rates.alpha**2 * total / rates.m_in * steps)


class Spectrum(NamedTuple):
    """Squared singular values of B*ᵀB, which is to be learned, and of B*⊥ᵀB, which is to be unlearned (D §5)."""

    smallest: Tensor
    largest: Tensor
    orthogonal_mean: Tensor
    orthogonal_largest: Tensor


def spectrum(B: Tensor, basis: Tensor) -> Spectrum:
    """Measure a representation B (..., d, k') against the true one B* (..., d, k)."""
    inside = basis.mT @ B
    outside = B - basis @ inside
    learned = torch.linalg.eigvalsh(inside @ inside.mT)
    kept = torch.linalg.eigvalsh(outside @ outside.mT)
    directions = min(B.shape[-2] - basis.shape[-1], B.shape[-1])
    return Spectrum(learned[..., 0], learned[..., -1], _trace(outside @ outside.mT) / directions, kept[..., -1])


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
