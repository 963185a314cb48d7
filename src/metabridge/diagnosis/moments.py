"""Moments of sampled tasks, treated as linear regressions in a common feature space. All estimates use these moments.

The examples of each task are split into two halves with independent noise, so that noise does not bias the product of
an estimate from one half and an estimate from the other half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.errors import InputError, describe

FeatureMap = Callable[[Tensor], Tensor]
MIN_EXAMPLES_PER_DIMENSION = 2  # examples per dimension in a half of a task that make least squares reliable


@dataclass(frozen=True, eq=False)
class SplitMoments:
    """Moments of the features x and targets y of each task, separately for each half.

    Args:
        covariance: Σ = E[xxᵀ] (tasks, 2, d, d).
        fourth_moment: E[xxᵀΣxxᵀ] (tasks, 2, d, d), unbiased because Σ is estimated from the other half.
        cross_moment: E[xy] (tasks, 2, d).
        target_square: E[y²] (tasks, 2).
        fourth_powers: E‖x‖⁴ and E[y⁴] (tasks, 2, 2), to detect heavy tails.
        examples_per_dimension: Number of independent examples in a half, divided by the feature dimension. If the
            moments are those of pairs, both numbers refer to the single examples.
    """

    covariance: Tensor
    fourth_moment: Tensor
    cross_moment: Tensor
    target_square: Tensor
    fourth_powers: Tensor
    examples_per_dimension: float

    @classmethod
    def from_examples(cls, x: Tensor, y: Tensor, examples_per_dimension: float) -> SplitMoments:
        """Compute the moments of features x (tasks, 2, n, d) and targets y (tasks, 2, n)."""
        n = x.shape[-2]
        covariance = x.mT @ x / n
        weighted_x = (x @ covariance.flip(1) * x).sum(-1, keepdim=True) * x
        cross_moment = (y[..., None, :] @ x).squeeze(-2) / n
        fourth_powers = torch.stack([x.square().sum(-1).square().mean(-1), y.pow(4).mean(-1)], -1)
        fourth_moment = weighted_x.mT @ x / n
        target_square = y.square().mean(-1)
        return cls(covariance, fourth_moment, cross_moment, target_square, fourth_powers, examples_per_dimension)

    @classmethod
    def concatenate(cls, parts: list[SplitMoments]) -> SplitMoments:
        """Concatenate moments along the task dimension."""
        covariance, fourth_moment, cross_moment, target_square, fourth_powers = (
            torch.cat(tensors) for tensors in zip(*(part._tensors for part in parts))
        )
        examples_per_dimension = min(part.examples_per_dimension for part in parts)
        return cls(covariance, fourth_moment, cross_moment, target_square, fourth_powers, examples_per_dimension)

    def select(self, indices: Tensor) -> SplitMoments:
        """Return the moments of the tasks with the given indices, which may contain duplicates."""
        covariance, fourth_moment, cross_moment, target_square, fourth_powers = (
            tensor[indices] for tensor in self._tensors
        )
        return SplitMoments(
            covariance, fourth_moment, cross_moment, target_square, fourth_powers, self.examples_per_dimension
        )

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.covariance, self.fourth_moment, self.cross_moment, self.target_square, self.fourth_powers

    def __len__(self) -> int:
        return len(self.target_square)

    @property
    def dimension(self) -> int:
        """Feature dimension d."""
        return self.cross_moment.shape[-1]

    def solutions(self, group_covariances: Tensor) -> Tensor:
        """Return an unbiased estimate of the solution w* of each task from each half (tasks, 2, d).

        If a half has enough examples, the estimate is the least-squares solution Σ⁻¹E[xy]. Otherwise Σ is replaced by
        the covariance of the task's group (tasks, d, d), so that the estimate is unbiased for any number of examples.
        """
        uses_least_squares = self.examples_per_dimension >= MIN_EXAMPLES_PER_DIMENSION
        covariance = self.covariance if uses_least_squares else group_covariances[:, None]
        solutions, is_singular = torch.linalg.solve_ex(covariance, self.cross_moment[..., None])
        _check_not_singular(is_singular)
        return solutions.squeeze(-1)  # type: ignore[no-any-return]


def convergence_rates(moments: SplitMoments) -> Tensor:
    """Return the convergence rate ‖Σŵ‖²/⟨ŵ, Σŵ⟩ of gradient descent on each task (tasks,). Hard tasks have low rates.

    ŵ is the least-squares solution of the task. The rate is a weighted mean of the eigenvalues of Σ; the weight of an
    eigenvector is its contribution to the variance of the fitted function. Along an eigenvector, gradient descent
    reduces the error at the rate of the eigenvalue. If the fitted function is zero, the rate is tr Σ²/tr Σ.
    """
    covariance, cross_moment = moments.covariance.mean(1), moments.cross_moment.mean(1)
    inverse = torch.linalg.pinv(covariance, hermitian=True)
    explained_variance = (cross_moment[:, None] @ inverse @ cross_moment[..., None]).flatten()
    isotropic_rate = covariance.square().sum((-2, -1)) / covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(explained_variance > 0, cross_moment.square().sum(-1) / explained_variance, isotropic_rate)


def largest_curvatures(moments: SplitMoments) -> Tensor:
    """Estimate the largest eigenvalue λ_max of each task's covariance (tasks,).

    The eigenvector is estimated from one half and the curvature along it from the other half, and vice versa, because
    the largest eigenvalue of a sample covariance is biased upward if the sample is small.
    """
    eigenvectors = torch.linalg.eigh(moments.covariance).eigenvectors[..., -1]
    return torch.einsum("thi,thij,thj->th", eigenvectors, moments.covariance.flip(1), eigenvectors).mean(1)


def gaussian_deviances(moments: SplitMoments, covariances: Tensor) -> Tensor:
    """Return tr(Σ⁻¹Σ̂) + log det Σ for each task's covariance Σ̂ and each Σ in `covariances` (groups, d, d).

    The result has the shape (tasks, groups). Up to a constant, it is −2 times the log-likelihood per example of
    Gaussian features with covariance Σ.
    """
    inverses, is_singular = torch.linalg.inv_ex(covariances)
    _check_not_singular(is_singular)
    return torch.einsum("gij,tij->tg", inverses, moments.covariance.mean(1)) + torch.logdet(covariances)


def regression_moments(x: Tensor, y: Tensor) -> SplitMoments:
    """Return the moments of regression tasks from features x (tasks, examples, d) and targets (tasks, examples, 1)."""
    if y.shape[-1] != 1:
        raise InputError(
            f"targets are {describe(y)}, but a diagnosis of regression tasks needs a single output. "
            "Diagnose each output separately."
        )
    y = y.double().squeeze(-1)
    half_size = x.shape[1] // 2
    return SplitMoments.from_examples(_split(x, half_size), _split(y, half_size), half_size / x.shape[-1])


def pair_moments(φ: Tensor, labels: Tensor) -> SplitMoments:
    """Return the moments of classification tasks with features φ (tasks, examples, d) and labels (tasks, examples).

    The order of the classes in a task is arbitrary, so the solutions of two tasks cannot be compared directly. Whether
    two examples have the same class does not depend on this order. Each task is therefore converted to a regression of
    the same-class indicator on the products φ(x)φ(x')ᵀ. Its solution is a metric that separates the task's classes.
    """
    # Sort by class, so that both halves have similar class frequencies.
    sort_indices = labels.argsort(dim=1, stable=True)
    labels, φ = labels.gather(1, sort_indices), φ.gather(1, sort_indices[..., None].expand_as(φ))
    half_size = φ.shape[1] // 2
    φ, labels = _split(φ, half_size), _split(labels, half_size)
    # indices of the first and of the second example of each pair
    first, second = torch.triu_indices(half_size, half_size, offset=1, device=φ.device)
    same_class = (labels[..., first] == labels[..., second]).double()
    if not same_class.any():
        raise InputError(
            "one half of a task's examples has no two images of the same class, but tasks are compared through such "
            "pairs. Use queries=2 or more."
        )
    pairs = symmetric_products(φ[..., first, :], φ[..., second, :])
    # Center within each task, because a constant added to all similarities of a task does not affect its predictions.
    pairs, targets = pairs - pairs.mean(-2, keepdim=True), same_class - same_class.mean(-1, keepdim=True)
    return SplitMoments.from_examples(pairs, targets, half_size / φ.shape[-1])


def symmetric_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the symmetric part of abᵀ as a vector: its upper triangle, scaled to preserve the Frobenius norm.

    >>> symmetric_products(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]))
    tensor([1.0000, 1.4142, 0.0000])
    """
    size = a.shape[-1]
    rows, columns = torch.triu_indices(size, size, device=a.device)
    scale = torch.where(rows == columns, 0.5, 0.5**0.5).to(a)
    return scale * (a[..., rows] * b[..., columns] + a[..., columns] * b[..., rows])


def principal_projection(features: Tensor, dimension: int) -> FeatureMap:
    """Return the projection onto the first principal components of `features` (n, d), scaled to mean squared norm 1.

    Components without variance are omitted.
    """
    center = features.mean(0)
    eigenvalues, eigenvectors = torch.linalg.eigh((features - center).T @ (features - center) / len(features))
    has_variance = eigenvalues[-dimension:] > 1e-8 * eigenvalues[-1]
    if not has_variance.any():
        raise InputError("all inputs have the same features, so tasks cannot be compared. Use other features.")
    scale = eigenvalues[-dimension:][has_variance].sum().sqrt()
    basis = eigenvectors[:, -dimension:][:, has_variance] / scale
    return lambda x: (x - center) @ basis


def _check_not_singular(is_singular: Tensor) -> None:
    if is_singular.any():
        raise InputError(
            "the covariance of a task's features is singular, so the task has no unique solution. Remove features that "
            "are constant or linear combinations of other features."
        )


def _split(values: Tensor, half_size: int) -> Tensor:
    """Split the examples into those with even and those with odd indices (tasks, 2, half_size, ...)."""
    return torch.stack([values[:, : 2 * half_size : 2], values[:, 1 : 2 * half_size : 2]], 1)
