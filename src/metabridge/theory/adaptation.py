"""Estimates of a new task's parameters by a linear network, and their risks (Yüksel et al. 2023, §3.1, §5, app. F).

The network is x ↦ ⟨Bw, x⟩ with k' hidden units. A task has targets y = ⟨θ, x⟩ + z with its parameters θ, points
x ~ N(0, I) and noise z of variance σ². The risk of an estimate θ̂ is ½E‖θ̂ − θ‖², the expectation over tasks, points and
noise. It is the expected loss without ½σ², the part due to noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metabridge.errors import InputError, check_count, check_positive
from metabridge.ridge_regression import ridge_weight
from metabridge.theory.anil import AnilSettings, TaskMoments, limiting_gram


def one_step_estimate(B: Tensor, w: Tensor, x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Return θ̂ = B(w − α∇ℓ(w)), the estimate after one step of gradient descent (Yüksel et al. 2023, eq. 11).

    The loss ℓ(w) is ½‖XBw − y‖²/m for the m points X of a task.

    Args:
        B: Representation, (d, k').
        w: Head, (k').
        x: Points of the tasks, (tasks, points, d).
        y: Targets, (tasks, points).
        alpha: Step size α.

    Returns:
        θ̂ of every task, (tasks, d).

    Example:
        >>> eye = torch.eye(2)
        >>> one_step_estimate(eye, torch.zeros(2), eye[None], torch.tensor([[4.0, 6.0]]), alpha=0.5)
        tensor([[1.0000, 1.5000]])
    """
    errors = x @ (B @ w) - y
    grad = (errors[:, None] @ x)[:, 0] / x.shape[1]
    return (w - alpha * grad @ B) @ B.mT


def ridge_estimate(B: Tensor, x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Return θ̂ = Bŵ where ŵ minimizes ‖XBw − y‖² + penalty‖w‖².

    B = I gives the single-task baseline, and the true representation B* the oracle (Yüksel et al. 2023, §5).

    Args:
        B: Representation, (d, k').
        x: Points of the tasks, (tasks, points, d).
        y: Targets, (tasks, points).
        penalty: Penalty on the squared norm of ŵ.

    Returns:
        θ̂ of every task, (tasks, d).

    Raises:
        InputError: If the penalty is not positive.

    Example:
        >>> eye = torch.eye(2)
        >>> ridge_estimate(eye, eye[None], torch.tensor([[4.0, 6.0]]), penalty=1.0)
        tensor([[2.0000, 3.0000]])
    """
    check_positive("penalty", penalty)
    weight = ridge_weight(x @ B, y[..., None], torch.as_tensor(penalty, dtype=B.dtype, device=B.device))
    return weight[:, 0] @ B.mT


def one_step_risk(B: Tensor, w: Tensor, tasks: TaskMoments, alpha: float, points: float) -> Tensor:
    """Return the exact risk of `one_step_estimate`.

    If `points` is `AnilSettings.m_in`, the risk is the objective of ANIL (Yüksel et al. 2023, eq. 1). With P = BBᵀ, the
    error e = Bw − θ and C = E[eeᵀ], it is ½(tr C − 2α tr PC + α²(1 + 1/m) tr P²C + (α²/m) tr P² (tr C + σ²)).

    Args:
        B: Representation, (..., d, k').
        w: Head, (..., k').
        tasks: Moments of the tasks.
        alpha: Step size α.
        points: Number of points m per task.

    Returns:
        The risk, (...).

    Example:
        >>> tasks = TaskMoments.from_tasks(torch.ones(1, 2), noise=0.0)
        >>> float(one_step_risk(torch.eye(2).double(), torch.zeros(2).double(), tasks, alpha=0.5, points=math.inf))
        0.25
    """
    P = B @ B.mT
    _, C = tasks.errors((B @ w[..., None])[..., 0])
    P_squared, inverse_m, trace = P @ P, 1 / points, _trace(C)
    quadratic = (1 + inverse_m) * (P_squared * C).sum((-2, -1)) + inverse_m * _trace(P_squared) * (trace + tasks.noise)
    return (trace - 2 * alpha * (P * C).sum((-2, -1)) + alpha**2 * quadratic) / 2


def minimum_risk(tasks: TaskMoments, points: float) -> Tensor:
    """Return the minimum of `one_step_risk` over all B, w and α, which ANIL attains in the limit of training.

    With C as in `one_step_risk`, the risk is convex in P = BBᵀ. It is minimal at
    P = (1/α)((1 + 1/m)C + (tr C + σ²)/m I)⁻¹C, where it is the sum of ½(c − c²/((1 + 1/m)c + (tr C + σ²)/m)) over the
    eigenvalues c of C. This sum is smallest if C is smallest, which is at Bw = E[θ], where C is the covariance of θ.
    Yüksel et al. 2023, app. F, derive the same result. ANIL attains it at the limit of their theorem 1, where
    `limiting_gram` gives B*ᵀBBᵀB*.

    Args:
        tasks: Moments of the tasks.
        points: Number of points m per task.

    Returns:
        The risk, (...).

    Example:
        >>> tasks = TaskMoments.from_tasks(torch.tensor([[1.0], [-1.0]]), noise=1.0)
        >>> float(minimum_risk(tasks, points=1))
        0.375
    """
    covariance = tasks.second - tasks.mean[..., :, None] * tasks.mean[..., None, :]
    eigenvalues: Tensor = torch.linalg.eigvalsh(covariance).clamp_min(0)
    inverse_m = 1 / points
    shift = inverse_m * (eigenvalues.sum(-1, keepdim=True) + tasks.noise)
    explained = torch.where(eigenvalues > 0, eigenvalues**2 / ((1 + inverse_m) * eigenvalues + shift), 0.0)
    return (eigenvalues - explained).sum(-1) / 2


def ridge_risks(B: Tensor, tasks: TaskMoments, x: Tensor, penalties: Tensor) -> Tensor:
    """Return the risk of `ridge_estimate` for each penalty.

    The risk is the exact expectation over tasks and noise, averaged over the design matrices X. With XBBᵀXᵀ = QΛQᵀ,
    D = (Λ + penalty)⁻¹, A = BBᵀXᵀQ and E[θθᵀ] = LLᵀ, the estimate is ADQᵀ(Xθ + z) and its mean squared error is
    ‖ADQᵀXL − L‖² + σ²‖AD‖². This is a quadratic function of D, so additional penalties cost little.

    Args:
        B: Representation, (d, k').
        tasks: Moments of the tasks.
        x: Design matrices X, (designs, points, d).
        penalties: The penalties, (penalties).

    Returns:
        The risks, (penalties).

    Raises:
        InputError: If there are no design matrices, or a penalty is not positive.

    Example:
        >>> tasks = TaskMoments.from_tasks(torch.ones(1, 2), noise=0.0)
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> ridge_risks(eye, tasks, eye[None], torch.tensor([1.0], dtype=torch.float64))
        tensor([0.2500], dtype=torch.float64)
    """
    check_count("designs", len(x))
    for penalty in penalties.tolist():
        check_positive("penalty", penalty)
    P = B @ B.mT
    eigenvalues, Q = torch.linalg.eigh(x @ P @ x.mT)
    A = P @ x.mT @ Q
    rotated_x = Q.mT @ x
    linear_coefficients = ((rotated_x @ tasks.second) * A.mT).sum(-1)
    gram = A.mT @ A
    quadratic_coefficients = gram * (rotated_x @ tasks.second @ rotated_x.mT)
    quadratic_coefficients = quadratic_coefficients + tasks.noise * torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    D = 1 / (eigenvalues.clamp_min(0) + penalties[:, None, None])
    variable_part = (D * (quadratic_coefficients @ D[..., None])[..., 0] - 2 * D * linear_coefficients).sum(-1)
    risks: Tensor = (variable_part.mean(1) + _trace(tasks.second)) / 2
    return risks


def selected_ridge_risk(
    B: Tensor, tasks: TaskMoments, points: int, penalties: Tensor, *, designs: int, generator: torch.Generator
) -> float:
    """Return the risk of `ridge_estimate` with the best penalty.

    The best penalty has the smallest risk on random design matrices. Its risk is then measured on new design matrices.

    Args:
        B: Representation, (d, k').
        tasks: Moments of the tasks.
        points: Number of points per task.
        penalties: Penalties to choose from, (penalties).
        designs: Number of random design matrices for the selection, and the same number for the risk.
        generator: Random generator on the CPU.

    Returns:
        The risk.

    Example:
        >>> tasks = TaskMoments.from_tasks(torch.ones(1, 2), noise=0.0)
        >>> eye, penalties = torch.eye(2, dtype=torch.float64), torch.tensor([1e-9, 1.0], dtype=torch.float64)
        >>> generator = torch.Generator().manual_seed(0)
        >>> selected_ridge_risk(eye, tasks, 5, penalties, designs=10, generator=generator) < 1e-9
        True
    """
    shape = (designs, points, len(B))
    validation_x, test_x = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    penalty = penalties[ridge_risks(B, tasks, validation_x, penalties).argmin()]
    return float(ridge_risks(B, tasks, test_x, penalty[None]))


def error_bound(norm: Tensor, covariance: Tensor, noise: float, settings: AnilSettings, points: int) -> Tensor:
    """Return the bound on ‖θ̂ − θ‖ after one step from ANIL's limit, `limiting_gram` (Yüksel et al. 2023, prop. 1).

    Up to a universal constant, which is left out, the bound for a task with parameters θ = B*w* is
    (1 + σ̄²/λ_min(Σ*))/m_in ‖w*‖ + (‖w*‖ + σ)√(k/m_test) with σ̄² = tr Σ* + σ². It holds with probability at least
    1 − 4e^{−k/2}, which is not positive for k < 3. k is the number of columns of the true representation B*.

    Args:
        norm: ‖w*‖ of the tasks.
        covariance: Covariance Σ* of w*, (k, k).
        noise: Variance σ² of the noise.
        settings: Settings of ANIL.
        points: Number of points m_test of a test task, at least k.

    Returns:
        The bound, in the shape of `norm`.

    Raises:
        InputError: If there are fewer points than dimensions of the representation.

    Example:
        >>> error_bound(torch.tensor([1.0]), torch.eye(1), 0.0, AnilSettings(m_in=2), points=4)
        tensor([1.5000])
    """
    rank = covariance.shape[-1]
    if points < rank:
        raise InputError(
            f"points is {points}, but proposition 1 needs at least one point per dimension of the representation, "
            f"{rank}. Use points={rank} or more."
        )
    eigenvalues = torch.linalg.eigvalsh(covariance)
    bias: Tensor = (1 + (eigenvalues.sum() + noise) / eigenvalues[0]) / settings.m_in
    return bias * norm + (norm + math.sqrt(noise)) * math.sqrt(rank / points)


def sample_error_bound_ratios(
    covariance: Tensor, noise: float, settings: AnilSettings, points: int, tasks: int, generator: torch.Generator
) -> Tensor:
    """Sample tasks and return ‖θ̂ − θ‖ after one step from ANIL's limit, divided by `error_bound`.

    At the limit of theorem 1, the network depends only on the projection of x onto the column space of B*, so only the
    k coordinates of the projection are sampled.

    Args:
        covariance: Covariance Σ* of the tasks, (k, k), diagonal and in float64.
        noise: Variance σ² of the noise.
        settings: Settings of ANIL.
        points: Number of points m_test of a test task, at least k.
        tasks: Number of tasks.
        generator: Random generator on the CPU.

    Returns:
        The ratios, (tasks).

    Raises:
        InputError: If there are fewer points than dimensions, or ANIL does not converge to the limit.

    Example:
        >>> covariance = torch.eye(2, dtype=torch.float64)
        >>> sample_error_bound_ratios(covariance, 1.0, AnilSettings(), 5, 3, torch.Generator().manual_seed(0)).shape
        torch.Size([3])
    """
    rank = len(covariance)
    root = torch.linalg.cholesky(limiting_gram(covariance, noise, settings))
    x = torch.randn(tasks, points, rank, generator=generator, dtype=torch.float64)
    w = torch.randn(tasks, rank, generator=generator, dtype=torch.float64) @ covariance.sqrt()
    z = math.sqrt(noise) * torch.randn(tasks, points, generator=generator, dtype=torch.float64)
    y = (x @ w[..., None])[..., 0] + z
    errors = (one_step_estimate(root, w.new_zeros(rank), x, y, settings.alpha) - w).norm(dim=-1)
    ratios: Tensor = errors / error_bound(w.norm(dim=-1), covariance, noise, settings, points)
    return ratios


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
