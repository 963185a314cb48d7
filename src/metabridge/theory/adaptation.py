"""What a linear net x ↦ ⟨Bw, x⟩ makes of a new task, and at what risk (D §3.1, §5, app. F).

Risks are ½E‖θ̂ − θ‖² over tasks, points x ~ N(0, I) and noise: what the loss exceeds the noise's own ½σ² by.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metabridge.errors import InputError, check_count, check_positive
from metabridge.ridge_regression import ridge_weight
from metabridge.theory.anil import AnilSettings, TaskMoments


def one_step_estimate(B: Tensor, w: Tensor, x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """θ̂ = B(w − α∇ℓ(w)), one step of gradient descent on each task's points (D eq. 11): (tasks, d).

    `x` is (tasks, points, d) and `y` (tasks, points).

    >>> eye = torch.eye(2)
    >>> one_step_estimate(eye, torch.zeros(2), eye[None], torch.tensor([[4.0, 6.0]]), alpha=0.5)
    tensor([[1.0000, 1.5000]])
    """
    errors = x @ (B @ w) - y
    slope = (errors[:, None] @ x)[:, 0] / x.shape[1]
    return (w - alpha * slope @ B) @ B.mT


def ridge(B: Tensor, x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """θ̂ = Bŵ where ŵ minimises ‖XBw − y‖² + penalty‖w‖², for each task: (tasks, d).

    With B = I it is the single-task baseline, with B = B* the oracle's (D §5).
    """
    check_positive("penalty", penalty)
    weight = ridge_weight(x @ B, y[..., None], torch.as_tensor(penalty, dtype=B.dtype, device=B.device))
    return weight[:, 0] @ B.mT


def one_step_risk(B: Tensor, w: Tensor, tasks: TaskMoments, alpha: float, points: float) -> Tensor:
    """Return the risk of `one_step_estimate`, exactly; with `points` = m_in it is the objective of ANIL (D eq. 1).

    With P = BBᵀ and E = E[eeᵀ] of e = Bw − θ it is
    ½(tr E − 2α tr PE + α²(1 + 1/m) tr P²E + (α²/m) tr P² (tr E + σ²)).
    """
    P = B @ B.mT
    _, errors = tasks.errors((B @ w[..., None])[..., 0])
    squared, share = P @ P, 1 / points
    total = _trace(errors)
    spread = (1 + share) * (squared * errors).sum((-2, -1)) + share * _trace(squared) * (total + tasks.noise)
    return (total - 2 * alpha * (P * errors).sum((-2, -1)) + alpha**2 * spread) / 2


def minimum_risk(tasks: TaskMoments, points: float) -> Tensor:
    """Return the least that `one_step_risk` can be over all B, w and α: theorem 1's limit attains it (D app. F).

    The risk is convex in P, and at P = (1/α)((1 + 1/m)E + (tr E + σ²)/m I)⁻¹E it is least: for each eigenvalue e of
    E the sum of ½(e − e²/((1 + 1/m)e + (tr E + σ²)/m)). It falls with E, which is least at Bw = E[θ]. D's app. F
    shows the same.
    """
    covariance = tasks.second - tasks.mean[..., :, None] * tasks.mean[..., None, :]
    values: Tensor = torch.linalg.eigvalsh(covariance).clamp_min(0)
    share = 1 / points
    total = share * (values.sum(-1, keepdim=True) + tasks.noise)
    kept = torch.where(values > 0, values**2 / ((1 + share) * values + total), 0.0)
    return (values - kept).sum(-1) / 2


def ridge_risks(B: Tensor, tasks: TaskMoments, x: Tensor, penalties: Tensor) -> Tensor:
    """Return the risk of `ridge` for each penalty, over tasks and noise exactly and over the designs `x` on average.

    With XBBᵀXᵀ = QΛQᵀ, D = (Λ + penalty)⁻¹, A = BBᵀXᵀQ and E[θθᵀ] = LLᵀ, the estimate is ADQᵀ(Xθ + z), and its
    mean squared error ‖ADQᵀXL − L‖² + σ²‖AD‖²: a quadratic in D, cheap for every penalty. `x` is (designs, points, d).
    """
    check_count("designs", len(x))
    for penalty in penalties.tolist():
        check_positive("penalty", penalty)
    P = B @ B.mT
    values, vectors = torch.linalg.eigh(x @ P @ x.mT)
    A = P @ x.mT @ vectors
    rotated = vectors.mT @ x
    linear = ((rotated @ tasks.second) * A.mT).sum(-1)
    overlap = A.mT @ A
    square = overlap * (rotated @ tasks.second @ rotated.mT)
    square = square + tasks.noise * torch.diag_embed(overlap.diagonal(dim1=-2, dim2=-1))
    weights = 1 / (values.clamp_min(0) + penalties[:, None, None])
    errors = (weights * (square @ weights[..., None])[..., 0] - 2 * weights * linear).sum(-1)
    risks: Tensor = (errors.mean(1) + _trace(tasks.second)) / 2
    return risks


def error_bound(norm: Tensor, covariance: Tensor, noise: float, rates: AnilSettings, points: int) -> Tensor:
    """Return proposition 1's bound on ‖θ̂ − θ‖ after one step at theorem 1's limit, up to its universal constant.

    (1 + σ̄²/λ_min(Σ*))/m_in ‖w*‖ + (‖w*‖ + σ)√(k/m_test), σ̄² = tr Σ* + σ², for a task of norm ‖w*‖. It holds
    with probability of at least 1 − 4e^{−k/2}, which says nothing for k < 3.
    """
    rank = covariance.shape[-1]
    if points < rank:
        raise InputError(f"points is {points}, but proposition 1 needs at least as many as dimensions, {rank}.")
    values = torch.linalg.eigvalsh(covariance)
    bias: Tensor = (1 + (values.sum() + noise) / values[0]) / rates.m_in
    return bias * norm + (norm + math.sqrt(noise)) * math.sqrt(rank / points)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
