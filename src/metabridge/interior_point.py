"""Batched quadratic programs, solved by an interior-point method."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Smallest target of the mean complementarity: the gap is small enough, and the factors are still precise.
_LEAST_COMPLEMENTARITY = 1e-13
# Weight of ‖step‖², relative to Q, that keeps the factors of a singular Q positive. It does not move the solution.
_PROXIMAL = 1e-12
# Share of the way to the boundary that a step may take.
_STEP_SHARE = 0.995


class QPSolution(NamedTuple):
    """A minimizer of a quadratic program, its multipliers, and a bound on its error.

    Args:
        alpha: The minimizer, (..., b, n).
        dual: The multipliers of the equalities, (..., m).
        lower: The non-negative multipliers of the lower bounds, (..., b, n).
        upper: The non-negative multipliers of the upper bounds, (..., b, n).
        slack: The distances of α from its lower and upper bounds, (..., 2, b, n).
        gap: Σ slack·multiplier, which is the duality gap if `residual` vanishes.
        residual: The largest violation of stationarity or of an equality.
    """

    alpha: Tensor
    dual: Tensor
    lower: Tensor
    upper: Tensor
    slack: Tensor
    gap: Tensor
    residual: Tensor


class KKTFactors(NamedTuple):
    """Factors of [[H, −Aᵀ], [A, 0]], H = blockdiag(H_k): H_k = L_k L_kᵀ, V_k = L_k⁻¹A_kᵀ, and ΣVᵀV = SSᵀ."""

    L: Tensor
    V: Tensor
    S: Tensor

    @classmethod
    def factor(cls, H: Tensor, A: Tensor) -> KKTFactors:
        """Factor the system of H (..., b, n, n) and A (..., b, m, n)."""
        L = torch.linalg.cholesky_ex(H).L
        V = torch.linalg.solve_triangular(L, A.mT, upper=False)
        return cls(L, V, torch.linalg.cholesky_ex((V.mT @ V).sum(-3)).L)

    def solve(self, linear: Tensor, equality: Tensor) -> tuple[Tensor, Tensor]:
        """Return α and ν with Hα − Aᵀν = linear and Σ A_k α_k = equality."""
        u = torch.linalg.solve_triangular(self.L, linear[..., None], upper=False)
        dual = torch.linalg.solve_triangular(self.S, equality[..., None] - (self.V.mT @ u).sum(-3), upper=False)
        dual = torch.linalg.solve_triangular(self.S.mT, dual, upper=True)
        alpha = torch.linalg.solve_triangular(self.L.mT, u + self.V @ dual[..., None, :, :], upper=True)
        return alpha[..., 0], dual[..., 0]


def solve_qp(
    Q: Tensor,
    e: Tensor,
    A: Tensor,
    r: Tensor,
    lo: Tensor,
    hi: Tensor,
    *,
    iterations: int = 16,
    tolerance: float | None = None,
) -> QPSolution:
    """Minimize Σ_k ½ α_kᵀ Q_k α_k − ⟨e, α⟩ subject to Σ_k A_k α_k = r and lo ≤ α ≤ hi, in float64.

    The method is Mehrotra's predictor-corrector. The reduced system is block diagonal, Q_k + diag(multiplier / slack),
    so b matrices of n×n and one of m×m are factored. Without a `tolerance` the number of iterations is fixed and
    nothing depends on values, so the function can be mapped by `torch.func.vmap` and captured in a CUDA graph. Scale
    the problem so that α is of order 1.

    Args:
        Q: Positive semi-definite matrices, (..., b, n, n), or (..., 1, n, n) shared by the blocks.
        e: The linear term, (..., b, n).
        A: The matrices of the equalities, (..., b, m, n), of full row rank.
        r: The right-hand side of the equalities, (..., m).
        lo: Lower bounds, (..., b, n); may be infinite.
        hi: Upper bounds above `lo`, (..., b, n); may be infinite.
        iterations: The largest number of iterations.
        tolerance: Stop when the mean complementarity and the residuals of every program, relative to its largest α,
            are at most this.

    >>> import torch
    >>> one = torch.ones(1, 2)
    >>> hi = torch.tensor([[0.3, 1.0]])
    >>> solution = solve_qp(torch.eye(2)[None], 3 * one, one[None], torch.tensor([1.0]), 0 * one, hi)
    >>> solution.alpha.round(decimals=6), bool(solution.gap < 1e-8)
    (tensor([[0.3000, 0.7000]], dtype=torch.float64), True)
    """
    Q, e, A, r, lo, hi = (tensor.double() for tensor in (Q, e, A, r, lo, hi))
    sign = torch.arange(1, -2, -2, device=Q.device)[:, None, None]  # 1 for lower bounds, −1 for upper ones
    bounds = torch.stack([lo, hi], -3)
    finite = bounds.isfinite()
    finite_bounds = torch.where(finite, bounds, 0)
    # Start near 0, but one unit, or half the distance between the bounds, away from them.
    margin = ((bounds[..., 1, :, :] - bounds[..., 0, :, :]) / 2).clamp_max(1)
    alpha = torch.zeros_like(e).clamp(lo + margin, hi - margin)
    slack = torch.where(finite, sign * (alpha[..., None, :, :] - finite_bounds), 1)
    multiplier = finite / slack
    dual = torch.zeros_like(r)
    count = finite.sum((-3, -2, -1)).clamp_min(1)
    proximal = _PROXIMAL * Q.diagonal(dim1=-2, dim2=-1).amax((-2, -1))[..., None, None]

    for _ in range(iterations):
        system = KKTFactors.factor(Q + torch.diag_embed((multiplier / slack).sum(-3) + proximal), A)
        stationarity, equality = _residuals(Q, e, A, r, alpha, dual, sign * multiplier)
        complementarity = slack * multiplier
        mean = complementarity.sum((-3, -2, -1)) / count
        if tolerance is not None:
            error = torch.maximum(torch.maximum(stationarity.abs().amax((-2, -1)), equality.abs().amax(-1)), mean)
            if (error <= tolerance * alpha.abs().amax((-2, -1)).clamp_min(1)).all():
                break

        # Predictor: a step towards zero complementarity.
        constant = -multiplier
        alpha_step, _ = system.solve((sign * constant).sum(-3) - stationarity, -equality)
        slack_step = finite * sign * alpha_step[..., None, :, :]
        multiplier_step = constant - multiplier / slack * slack_step
        length = _step_length(slack, slack_step, multiplier + ~finite, multiplier_step, 1.0)[..., None, None, None]
        predicted = ((slack + length * slack_step) * (multiplier + length * multiplier_step)).sum((-3, -2, -1)) / count
        target = (mean * (predicted / mean.clamp_min(_LEAST_COMPLEMENTARITY)).pow(3)).clamp_min(_LEAST_COMPLEMENTARITY)

        # Corrector: a step towards the target, to second order.
        target = target[..., None, None, None]
        constant = finite * (target - complementarity - slack_step * multiplier_step) / slack
        alpha_step, dual_step = system.solve((sign * constant).sum(-3) - stationarity, -equality)
        slack_step = finite * sign * alpha_step[..., None, :, :]
        multiplier_step = constant - multiplier / slack * slack_step
        length = _step_length(slack, slack_step, multiplier + ~finite, multiplier_step, _STEP_SHARE)[..., None]
        alpha = alpha + length[..., None] * alpha_step
        dual = dual + length * dual_step
        slack = slack + length[..., None, None] * slack_step
        multiplier = multiplier + length[..., None, None] * multiplier_step

    stationarity, equality = _residuals(Q, e, A, r, alpha, dual, sign * multiplier)
    lower, upper = multiplier.unbind(-3)
    residual = torch.maximum(stationarity.abs().amax((-2, -1)), equality.abs().amax(-1))
    return QPSolution(alpha, dual, lower, upper, slack, (slack * multiplier).sum((-3, -2, -1)), residual)


def _residuals(
    Q: Tensor, e: Tensor, A: Tensor, r: Tensor, alpha: Tensor, dual: Tensor, signed_multiplier: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Qα − e − Aᵀν − z_lo + z_hi and Aα − r."""
    gradient = (Q @ alpha[..., None] - A.mT @ dual[..., None, :, None])[..., 0] - e
    return gradient - signed_multiplier.sum(-3), (A @ alpha[..., None])[..., 0].sum(-2) - r


def _step_length(
    slack: Tensor, slack_step: Tensor, multiplier: Tensor, multiplier_step: Tensor, share: float
) -> Tensor:
    """Return the step length, at most 1, that goes `share` of the way to where a slack or a multiplier vanishes."""
    largest = torch.maximum(-slack_step / slack, -multiplier_step / multiplier).amax((-3, -2, -1))
    return share / largest.clamp_min(share)
