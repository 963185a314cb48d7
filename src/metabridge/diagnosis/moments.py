"""Sampled tasks as linear regressions in one feature space: the moments that all estimates are computed from.

The points of each task are split into two halves that have independent noise. The product of an estimate from one half
and an estimate from the other is therefore not biased by the noise of either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.errors import InputError, describe

FeatureMap = Callable[[Tensor], Tensor]
MIN_POINTS_PER_DIMENSION = 2  # in a half, for least squares on a single task to be reliable


@dataclass(frozen=True, eq=False)
class SplitMoments:
    """Moments of the features z and targets y of each task, separately over the points of each half.

    Args:
        covariance: Σ = E[zzᵀ] (tasks, 2, d, d).
        fourth: E[zzᵀΣzzᵀ] (tasks, 2, d, d), unbiased because Σ is that of the other half.
        cross: E[zy] (tasks, 2, d).
        target_square: E[y²] (tasks, 2).
        tails: E‖z‖⁴ and E[y⁴] (tasks, 2, 2), to detect heavy tails.
        points_per_dimension: Number of independent points in a half, divided by the dimension of the features.
    """

    covariance: Tensor
    fourth: Tensor
    cross: Tensor
    target_square: Tensor
    tails: Tensor
    points_per_dimension: float

    @classmethod
    def from_points(cls, z: Tensor, y: Tensor, points_per_dimension: float) -> SplitMoments:
        """Compute the moments of features z (tasks, 2, n, d) and targets y (tasks, 2, n)."""
        n = z.shape[-2]
        covariance = z.mT @ z / n
        weighted = (z @ covariance.flip(1) * z).sum(-1, keepdim=True) * z
        cross = (y[..., None, :] @ z).squeeze(-2) / n
        tails = torch.stack([z.square().sum(-1).square().mean(-1), y.pow(4).mean(-1)], -1)
        return cls(covariance, weighted.mT @ z / n, cross, y.square().mean(-1), tails, points_per_dimension)

    @classmethod
    def concatenate(cls, parts: list[SplitMoments]) -> SplitMoments:
        """Return the tasks of all parts."""
        covariance, fourth, cross, target_square, tails = (
            torch.cat(tensors) for tensors in zip(*(part._tensors for part in parts))
        )
        points_per_dimension = min(part.points_per_dimension for part in parts)
        return cls(covariance, fourth, cross, target_square, tails, points_per_dimension)

    def select(self, indices: Tensor) -> SplitMoments:
        """Return the tasks with these indices; an index may occur more than once."""
        covariance, fourth, cross, target_square, tails = (tensor[indices] for tensor in self._tensors)
        return SplitMoments(covariance, fourth, cross, target_square, tails, self.points_per_dimension)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.covariance, self.fourth, self.cross, self.target_square, self.tails

    def __len__(self) -> int:
        return len(self.target_square)

    @property
    def dimension(self) -> int:
        """Dimension d of the features."""
        return self.cross.shape[-1]

    def solutions(self, group_covariances: Tensor) -> Tensor:
        """Return an unbiased estimate of w* from each half (tasks, 2, d).

        Least squares on each half if it has enough points. Otherwise Σ is replaced by the covariance of the task's
        group (tasks, d, d), as Σ⁻¹E[zy] is unbiased for any number of points.
        """
        enough_points = self.points_per_dimension >= MIN_POINTS_PER_DIMENSION
        covariance = self.covariance if enough_points else group_covariances[:, None]
        solutions, singular = torch.linalg.solve_ex(covariance, self.cross[..., None])
        _refuse_singular(singular)
        return solutions.squeeze(-1)  # type: ignore[no-any-return]


def convergence_rates(moments: SplitMoments) -> Tensor:
    """Return the rate ‖Σŵ‖²/⟨ŵ, Σŵ⟩ of gradient descent on each task (tasks,); a low rate is a hard task.

    This is the mean of the eigenvalues of the task's covariance, weighted by how much of the fitted function lies
    along each eigenvector. Gradient descent reduces an error along an eigenvector at the rate of its eigenvalue. For a
    task whose fitted function is zero, all directions have the same weight.
    """
    covariance, cross = moments.covariance.mean(1), moments.cross.mean(1)
    explained = (cross[:, None] @ torch.linalg.pinv(covariance, hermitian=True) @ cross[..., None]).flatten()
    isotropic = covariance.square().sum((-2, -1)) / covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(explained > 0, cross.square().sum(-1) / explained, isotropic)


def largest_curvatures(moments: SplitMoments) -> Tensor:
    """Return an estimate of the largest eigenvalue λ_max of each task's covariance (tasks,).

    The direction is estimated from one half and the curvature along it from the other, and vice versa, because the
    largest eigenvalue of a covariance estimated from few points is too large.
    """
    steepest = torch.linalg.eigh(moments.covariance).eigenvectors[..., -1]
    return torch.einsum("thi,thij,thj->th", steepest, moments.covariance.flip(1), steepest).mean(1)


def gaussian_deviances(moments: SplitMoments, covariances: Tensor) -> Tensor:
    """Return tr(Σ⁻¹Σ̂) + log det Σ for each task's covariance Σ̂ and each Σ in `covariances` (groups, d, d).

    Up to a constant this is −2 times the log likelihood per point, if the inputs are normal with covariance Σ. The
    result has the shape (tasks, groups).
    """
    inverses, singular = torch.linalg.inv_ex(covariances)
    _refuse_singular(singular)
    return torch.einsum("gij,tij->tg", inverses, moments.covariance.mean(1)) + torch.logdet(covariances)


def regression_moments(z: Tensor, y: Tensor) -> SplitMoments:
    """Return the moments of regression tasks with features z (tasks, points, d) and targets y (tasks, points, 1)."""
    if y.shape[-1] != 1:
        raise InputError(
            f"targets are {describe(y)}, but a diagnosis of regression tasks needs one value per point. "
            "Diagnose each output separately."
        )
    y = y.double().squeeze(-1)
    half = z.shape[1] // 2
    return SplitMoments.from_points(_split(z, half), _split(y, half), half / z.shape[-1])


def pair_moments(φ: Tensor, labels: Tensor) -> SplitMoments:
    """Return the moments of classification tasks with features φ (tasks, points, d) and labels (tasks, points).

    The order of the classes in a task is arbitrary, so the solutions of two tasks cannot be compared directly. Whether
    two points have the same class does not depend on that order. It is a regression on the products φ(x)φ(x')ᵀ, and
    its solution is the metric that separates the task's classes.
    """
    order = labels.argsort(dim=1, stable=True)  # both halves get the same share of every class
    labels, φ = labels.gather(1, order), φ.gather(1, order[..., None].expand_as(φ))
    half = φ.shape[1] // 2
    φ, labels = _split(φ, half), _split(labels, half)
    first, second = torch.triu_indices(half, half, offset=1, device=φ.device)
    same_class = (labels[..., first] == labels[..., second]).double()
    if not same_class.any():
        raise InputError(
            "half of a task's points have no two images of the same class, but tasks are compared by such pairs. "
            "Use queries=2 or more."
        )
    pairs = symmetric_products(φ[..., first, :], φ[..., second, :])
    # Centered within each task, as a constant added to all similarities of a task changes no comparison.
    pairs, targets = pairs - pairs.mean(-2, keepdim=True), same_class - same_class.mean(-1, keepdim=True)
    return SplitMoments.from_points(pairs, targets, half / φ.shape[-1])


def symmetric_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the symmetric part of abᵀ as a vector with the same norm, with one entry per pair of coordinates.

    >>> symmetric_products(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]))
    tensor([1.0000, 1.4142, 0.0000])
    """
    size = a.shape[-1]
    rows, columns = torch.triu_indices(size, size, device=a.device)
    scale = torch.where(rows == columns, 0.5, 0.5**0.5).to(a)
    return scale * (a[..., rows] * b[..., columns] + a[..., columns] * b[..., rows])


def principal_projection(features: Tensor, dimension: int) -> FeatureMap:
    """Return the projection on the first principal directions of `features` (n, d), scaled to a mean squared norm of 1.

    Directions without variance are left out.
    """
    center = features.mean(0)
    values, vectors = torch.linalg.eigh((features - center).T @ (features - center) / len(features))
    varying = values[-dimension:] > 1e-8 * values[-1]
    if not varying.any():
        raise InputError("the features are the same at all points, so tasks cannot be compared. Use other features.")
    scale = values[-dimension:][varying].sum().sqrt()
    basis = vectors[:, -dimension:][:, varying] / scale
    return lambda x: (x - center) @ basis


def _refuse_singular(singular: Tensor) -> None:
    if singular.any():
        raise InputError(
            "the covariance of a task's features is singular, so the task has no unique solution. Leave out features "
            "that are constant or are linear combinations of others."
        )


def _split(values: Tensor, half: int) -> Tensor:
    """Return every second point and the points between them (tasks, 2, half, ...)."""
    return torch.stack([values[:, : 2 * half : 2], values[:, 1 : 2 * half : 2]], 1)
