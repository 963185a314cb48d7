"""Sampled tasks as linear regressions in one space: the second moments that everything else is estimated from.

Each task's points are divided into two halves, which share nothing but the task. What is estimated from one half
and multiplied by what is estimated from the other has no bias from the noise of either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.errors import InputError, describe

Features = Callable[[Tensor], Tensor]
ENOUGH = 2  # points in a half for each dimension, above which a task's own least squares can be trusted


@dataclass(frozen=True, eq=False)
class Moments:
    """Σ = E[zzᵀ], E[zzᵀΣzzᵀ], E[zy], E[y²] and what tells of tails, over the points of each half of each task.

    `points` is how many independent points a half has for each dimension of the features.
    """

    covariance: Tensor  # (tasks, 2, d, d)
    fourth: Tensor  # (tasks, 2, d, d), with the Σ of the other half and so without bias
    pull: Tensor  # (tasks, 2, d)
    square: Tensor  # (tasks, 2)
    tails: Tensor  # (tasks, 2, 2), E‖z‖⁴ and E[y⁴]
    points: float

    @classmethod
    def of(cls, z: Tensor, y: Tensor, points: float) -> Moments:
        """Measure points z (tasks, 2, n, d) with their targets y (tasks, 2, n)."""
        n = z.shape[-2]
        covariance = z.mT @ z / n
        weighted = (z @ covariance.flip(1) * z).sum(-1, keepdim=True) * z
        pull = (y[..., None, :] @ z).squeeze(-2) / n
        tails = torch.stack([z.square().sum(-1).square().mean(-1), y.pow(4).mean(-1)], -1)
        return cls(covariance, weighted.mT @ z / n, pull, y.square().mean(-1), tails, points)

    @classmethod
    def joined(cls, parts: list[Moments]) -> Moments:
        """Return the tasks of all parts."""
        covariance, fourth, pull, square, tails = (torch.cat(same) for same in zip(*(part._tensors for part in parts)))
        return cls(covariance, fourth, pull, square, tails, min(part.points for part in parts))

    def of_tasks(self, tasks: Tensor) -> Moments:
        """Return the tasks of these numbers, of which some may be the same."""
        covariance, fourth, pull, square, tails = (tensor[tasks] for tensor in self._tensors)
        return Moments(covariance, fourth, pull, square, tails, self.points)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.covariance, self.fourth, self.pull, self.square, self.tails

    def __len__(self) -> int:
        return len(self.square)

    @property
    def dimension(self) -> int:
        """Of the space."""
        return self.pull.shape[-1]

    def solutions(self, shared: Tensor) -> Tensor:
        """Return w* of each half (tasks, 2, d), each without bias.

        By least squares where a half has points enough. Otherwise from the covariance that tasks of a kind share,
        `shared` (tasks, d, d): E[Σ⁻¹ẑy] is w* however few the points are.
        """
        metric = self.covariance if self.points >= ENOUGH else shared[:, None]
        found, failed = torch.linalg.solve_ex(metric, self.pull[..., None])
        _refuse_singular(failed)
        return found.squeeze(-1)  # type: ignore[no-any-return]


def rates(moments: Moments) -> Tensor:
    """‖Σŵ‖²/⟨ŵ, Σŵ⟩ of each task: the eigenvalues of its covariance, weighted by how much of the fit lies along each.

    Gradient descent reduces an error along an eigenvector at the rate of its eigenvalue. A small number is a hard task.
    Of a task with nothing to fit it is that of a fit in all directions alike.
    """
    covariance, pull = moments.covariance.mean(1), moments.pull.mean(1)
    fitted = (pull[:, None] @ torch.linalg.pinv(covariance, hermitian=True) @ pull[..., None]).flatten()
    alike = covariance.square().sum((-2, -1)) / covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(fitted > 0, pull.square().sum(-1) / fitted, alike)


def curvatures(moments: Moments) -> Tensor:
    """Return λ_max of each task's covariance (tasks,).

    The steepest direction is found in one half and its curvature measured in the other, both ways. The largest
    eigenvalue of a covariance of few points would be too large.
    """
    steepest = torch.linalg.eigh(moments.covariance).eigenvectors[..., -1]
    return torch.einsum("thi,thij,thj->th", steepest, moments.covariance.flip(1), steepest).mean(1)


def misfits(moments: Moments, shared: Tensor) -> Tensor:
    """tr(Σ⁻¹Σ̂) + log det Σ of each task's Σ̂ and each Σ of `shared` (groups, d, d), (tasks, groups).

    Up to a constant this is −2 times the log likelihood of Σ, for a point of the task and normal inputs.
    """
    inverses, failed = torch.linalg.inv_ex(shared)
    _refuse_singular(failed)
    return torch.einsum("gij,tij->tg", inverses, moments.covariance.mean(1)) + torch.logdet(shared)


def regression_moments(z: Tensor, y: Tensor) -> Moments:
    """Measure tasks with features z (tasks, points, d) and one value at each point, y (tasks, points, 1)."""
    if y.shape[-1] != 1:
        raise InputError(
            f"targets are {describe(y)}, but a diagnosis of a regression looks at one value at each point. "
            "Diagnose the outputs one by one."
        )
    y = y.double().squeeze(-1)
    half = z.shape[1] // 2
    return Moments.of(_halves(z, half), _halves(y, half), half / z.shape[-1])


def pair_moments(φ: Tensor, labels: Tensor) -> Moments:
    """Measure tasks with features φ (tasks, points, d) and class labels (tasks, points), in the space of pairs.

    Which class a task calls its first is arbitrary, so solutions of two tasks cannot be compared as they stand.
    Whether two points are of one class is not arbitrary: that is a regression on the products φ(x)φ(x')ᵀ, whose
    solution is the metric that tells the task's classes apart, and no order of the classes changes it.
    """
    order = labels.argsort(dim=1, stable=True)  # so that each half has its share of every class
    labels, φ = labels.gather(1, order), φ.gather(1, order[..., None].expand_as(φ))
    half = φ.shape[1] // 2
    φ, labels = _halves(φ, half), _halves(labels, half)
    first, second = torch.triu_indices(half, half, offset=1, device=φ.device)
    same = (labels[..., first] == labels[..., second]).double()
    if not same.any():
        raise InputError(
            "a half of a task has no two images of one class, but tasks are told apart by pairs of them. "
            "Use queries=2 or more."
        )
    pairs = products(φ[..., first, :], φ[..., second, :])
    # what is added to all similarities of a task changes no comparison in it
    return Moments.of(pairs - pairs.mean(-2, keepdim=True), same - same.mean(-1, keepdim=True), half / φ.shape[-1])


def products(a: Tensor, b: Tensor) -> Tensor:
    """The symmetric part of abᵀ, an entry for each pair of coordinates, with the length that the matrix has.

    >>> products(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]))
    tensor([1.0000, 1.4142, 0.0000])
    """
    size = a.shape[-1]
    rows, columns = torch.triu_indices(size, size, device=a.device)
    scale = torch.where(rows == columns, 0.5, 0.5**0.5).to(a)
    return scale * (a[..., rows] * b[..., columns] + a[..., columns] * b[..., rows])


def principal(found: Tensor, directions: int) -> Features:
    """Return the map of features to their principal directions over those found (n, d), scaled to mean length 1.

    Directions in which nothing varies are left out.
    """
    centre = found.mean(0)
    values, vectors = torch.linalg.eigh((found - centre).T @ (found - centre) / len(found))
    kept = values[-directions:] > 1e-8 * values[-1]
    if not kept.any():
        raise InputError("the features are the same at all points, so they tell no task from another. Use others.")
    scale = values[-directions:][kept].sum().sqrt()
    basis = vectors[:, -directions:][:, kept] / scale
    return lambda features: (features - centre) @ basis


def _refuse_singular(failed: Tensor) -> None:
    if failed.any():
        raise InputError(
            "the covariance of a task's features is singular: they do not vary in every direction, so the task has "
            "no single solution. Leave out features that are constant or follow from others."
        )


def _halves(values: Tensor, half: int) -> Tensor:
    """Every second point, and the others: (tasks, 2, half, ...)."""
    return torch.stack([values[:, : 2 * half : 2], values[:, 1 : 2 * half : 2]], 1)
