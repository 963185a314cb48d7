"""Moments of sampled tasks, seen as linear regressions in one feature space. All estimates are computed from them.

The examples of each task are split into two halves with independent noise. The product of an estimate from one half and
an estimate from the other is therefore not biased by the noise of either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.errors import InputError, describe

FeatureMap = Callable[[Tensor], Tensor]
MIN_EXAMPLES_PER_DIMENSION = 2  # examples of a half that least squares on a single task needs to be reliable


@dataclass(frozen=True, eq=False)
class SplitMoments:
    """Moments of the features z and targets y of each task, separately for each half.

    Args:
        covariance: Σ = E[zzᵀ] (tasks, 2, d, d).
        fourth: E[zzᵀΣzzᵀ] (tasks, 2, d, d), unbiased because Σ is estimated from the other half.
        cross: E[zy] (tasks, 2, d).
        target_square: E[y²] (tasks, 2).
        fourth_powers: E‖z‖⁴ and E[y⁴] (tasks, 2, 2), to detect heavy tails.
        examples_per_dimension: Number of independent examples in a half, divided by the dimension of the features. For
            pairs, the number of single examples, divided by the dimension of the features of one example.
    """

    covariance: Tensor
    fourth: Tensor
    cross: Tensor
    target_square: Tensor
    fourth_powers: Tensor
    examples_per_dimension: float

    @classmethod
    def from_examples(cls, z: Tensor, y: Tensor, examples_per_dimension: float) -> SplitMoments:
        """Compute the moments of features z (tasks, 2, n, d) and targets y (tasks, 2, n)."""
        n = z.shape[-2]
        covariance = z.mT @ z / n
        weighted = (z @ covariance.flip(1) * z).sum(-1, keepdim=True) * z
        cross = (y[..., None, :] @ z).squeeze(-2) / n
        fourth_powers = torch.stack([z.square().sum(-1).square().mean(-1), y.pow(4).mean(-1)], -1)
        return cls(covariance, weighted.mT @ z / n, cross, y.square().mean(-1), fourth_powers, examples_per_dimension)

    @classmethod
    def concatenate(cls, parts: list[SplitMoments]) -> SplitMoments:
        """Return the moments of the tasks of all parts."""
        covariance, fourth, cross, target_square, fourth_powers = (
            torch.cat(tensors) for tensors in zip(*(part._tensors for part in parts))
        )
        examples_per_dimension = min(part.examples_per_dimension for part in parts)
        return cls(covariance, fourth, cross, target_square, fourth_powers, examples_per_dimension)

    def select(self, indices: Tensor) -> SplitMoments:
        """Return the moments of the tasks with these indices; an index may occur more than once."""
        covariance, fourth, cross, target_square, fourth_powers = (tensor[indices] for tensor in self._tensors)
        return SplitMoments(covariance, fourth, cross, target_square, fourth_powers, self.examples_per_dimension)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.covariance, self.fourth, self.cross, self.target_square, self.fourth_powers

    def __len__(self) -> int:
        return len(self.target_square)

    @property
    def dimension(self) -> int:
        """Dimension d of the features."""
        return self.cross.shape[-1]

    def solutions(self, group_covariances: Tensor) -> Tensor:
        """Return an unbiased estimate of the solution w* of each task from each half (tasks, 2, d).

        If a half has enough examples, the estimate is the least squares solution Σ⁻¹E[zy]. Otherwise Σ is replaced by
        the covariance of the task's group (tasks, d, d), which makes the estimate unbiased for any number of examples.
        """
        uses_least_squares = self.examples_per_dimension >= MIN_EXAMPLES_PER_DIMENSION
        covariance = self.covariance if uses_least_squares else group_covariances[:, None]
        solutions, is_singular = torch.linalg.solve_ex(covariance, self.cross[..., None])
        _check_not_singular(is_singular)
        return solutions.squeeze(-1)  # type: ignore[no-any-return]


def convergence_rates(moments: SplitMoments) -> Tensor:
    """Return the convergence rate ‖Σŵ‖²/⟨ŵ, Σŵ⟩ of gradient descent on each task (tasks,). Hard tasks have low rates.

    ŵ is the least squares solution of the task. The rate is a mean of the eigenvalues of the task's covariance,
    weighted by the share of each eigenvector in the variance of the fitted function. Gradient descent reduces an error
    along an eigenvector at the rate of its eigenvalue. If the fitted function is zero, the rate is tr Σ²/tr Σ.
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

    The result has the shape (tasks, groups). Up to a constant it is −2 times the log-likelihood per example, if the
    features are normal with covariance Σ.
    """
    inverses, is_singular = torch.linalg.inv_ex(covariances)
    _check_not_singular(is_singular)
    return torch.einsum("gij,tij->tg", inverses, moments.covariance.mean(1)) + torch.logdet(covariances)


def regression_moments(z: Tensor, y: Tensor) -> SplitMoments:
    """Return the moments of regression tasks from features z (tasks, examples, d) and targets (tasks, examples, 1)."""
    if y.shape[-1] != 1:
        raise InputError(
            f"targets are {describe(y)}, but a diagnosis of regression tasks needs a single output. "
            "Diagnose each output separately."
        )
    y = y.double().squeeze(-1)
    half = z.shape[1] // 2
    return SplitMoments.from_examples(_split(z, half), _split(y, half), half / z.shape[-1])


def pair_moments(φ: Tensor, labels: Tensor) -> SplitMoments:
    """Return the moments of classification tasks with features φ (tasks, examples, d) and labels (tasks, examples).

    The order of the classes in a task is arbitrary, so the solutions of two tasks cannot be compared directly. But
    whether two examples have the same class does not depend on the order. Predicting this is a regression on the
    products φ(x)φ(x')ᵀ, whose solution is the metric that separates the task's classes.
    """
    order = labels.argsort(dim=1, stable=True)  # so that both halves have similar shares of every class
    labels, φ = labels.gather(1, order), φ.gather(1, order[..., None].expand_as(φ))
    half = φ.shape[1] // 2
    φ, labels = _split(φ, half), _split(labels, half)
    first, second = torch.triu_indices(half, half, offset=1, device=φ.device)
    same_class = (labels[..., first] == labels[..., second]).double()
    if not same_class.any():
        raise InputError(
            "half of a task's examples have no two images of the same class, but tasks are compared by such pairs. "
            "Use queries=2 or more."
        )
    pairs = symmetric_products(φ[..., first, :], φ[..., second, :])
    # Centered within each task, as adding a constant to all similarities of a task has no effect on its predictions.
    pairs, targets = pairs - pairs.mean(-2, keepdim=True), same_class - same_class.mean(-1, keepdim=True)
    return SplitMoments.from_examples(pairs, targets, half / φ.shape[-1])


def symmetric_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the symmetric part of abᵀ as a vector with one entry per pair of coordinates and the same norm.

    >>> symmetric_products(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]))
    tensor([1.0000, 1.4142, 0.0000])
    """
    size = a.shape[-1]
    rows, columns = torch.triu_indices(size, size, device=a.device)
    scale = torch.where(rows == columns, 0.5, 0.5**0.5).to(a)
    return scale * (a[..., rows] * b[..., columns] + a[..., columns] * b[..., rows])


def principal_projection(features: Tensor, dimension: int) -> FeatureMap:
    """Return the projection on the first principal directions of `features` (n, d), scaled to a mean squared norm of 1.

    Directions without variance are omitted.
    """
    center = features.mean(0)
    values, vectors = torch.linalg.eigh((features - center).T @ (features - center) / len(features))
    has_variance = values[-dimension:] > 1e-8 * values[-1]
    if not has_variance.any():
        raise InputError("all inputs have the same features, so tasks cannot be compared. Use other features.")
    scale = values[-dimension:][has_variance].sum().sqrt()
    basis = vectors[:, -dimension:][:, has_variance] / scale
    return lambda x: (x - center) @ basis


def _check_not_singular(is_singular: Tensor) -> None:
    if is_singular.any():
        raise InputError(
            "the covariance of a task's features is singular, so the task has no unique solution. Remove features that "
            "are constant or linear combinations of others."
        )


def _split(values: Tensor, half: int) -> Tensor:
    """Return the examples with even indices and those with odd indices as two halves (tasks, 2, half, ...)."""
    return torch.stack([values[:, : 2 * half : 2], values[:, 1 : 2 * half : 2]], 1)
