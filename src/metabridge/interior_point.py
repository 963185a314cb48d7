"""Batched quadratic programs, solved by an interior-point method."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Smallest target of the mean complementarity (slack · multiplier). With smaller targets, the Cholesky factors would
# lose precision.
_MIN_COMPLEMENTARITY = 1e-13
# Weight of the proximal term ‖step‖², relative to the largest diagonal entry of Q. It makes the Cholesky factorization
# of a singular Q possible and does not change the solution.
_PROXIMAL = 1e-12
# Largest step, as a fraction of the distance to the boundary.
_BOUNDARY_FRACTION = 0.995


class QPSolution(NamedTuple):
    """A minimizer of a quadratic program, its multipliers, and a bound on its error.

    The program has b blocks of n variables and m equalities, see `solve_qp`.

    Args:
        alpha: The minimizer, (..., b, n).
        dual: The multipliers of the equalities, (..., m).
        lower: The non-negative multipliers of the lower bounds, (..., b, n).
        upper: The non-negative multipliers of the upper bounds, (..., b, n).
        slack: The distances of α from its lower and its upper bounds, (..., 2, b, n); 1 for infinite bounds.
        gap: Σ slack·multiplier, which is the duality gap if `residual` is 0.
        residual: The largest absolute residual of stationarity and of the equalities.
    """

    alpha: Tensor
    dual: Tensor
    lower: Tensor
    upper: Tensor
    slack: Tensor
    gap: Tensor
    residual: Tensor


class KKTFactors(NamedTuple):
    """Factors of the Karush–Kuhn–Tucker (KKT) matrix [[H, −Aᵀ], [A, 0]] with H = blockdiag(H_k) and A = [A_1, A_2, …].

    H_k = L_k L_kᵀ, V_k = L_k⁻¹A_kᵀ, and Σ_k V_kᵀV_k = SSᵀ.
    """

    L: Tensor
    V: Tensor
    S: Tensor

    @classmethod
    def factor(cls, H: Tensor, A: Tensor) -> KKTFactors:
        """Return the factors for H (..., b, n, n) and A (..., b, m, n)."""
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

    α consists of b blocks α_k of n variables, and there are m equalities. The method is Mehrotra's
    predictor-corrector. Eliminating the slacks and the multipliers of the bounds from the linear system of an iteration
    leaves the diagonal blocks Q_k + diag(multiplier / slack), so b matrices of n×n and one of m×m are factored.

    Without a `tolerance`, the number of iterations is fixed and no control flow depends on the values of tensors, so
    the function can be mapped by `torch.func.vmap` and captured in a CUDA graph. Scale the problem so that α is of
    order 1.

    Args:
        Q: Positive semi-definite matrices, (..., b, n, n), or (..., 1, n, n) shared by the blocks.
        e: The linear term, (..., b, n).
        A: The matrices of the equalities, (..., b, m, n), of full row rank.
        r: The right-hand side of the equalities, (..., m).
        lo: Lower bounds, (..., b, n); may be infinite.
        hi: Upper bounds above `lo`, (..., b, n); may be infinite.
        iterations: Maximum number of iterations.
        tolerance: Stop when the mean complementarity (slack · multiplier) and the residuals of every program are at
            most `tolerance` times the larger of 1 and its largest |α| (default: run all iterations).

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
    # Start at the point nearest to 0 whose distance from the bounds is at least 1, or half the distance between them.
    margin = ((bounds[..., 1, :, :] - bounds[..., 0, :, :]) / 2).clamp_max(1)
    alpha = torch.zeros_like(e).clamp(lo + margin, hi - margin)
    slack = torch.where(finite, sign * (alpha[..., None, :, :] - finite_bounds), 1)
    multiplier = finite / slack
    dual = torch.zeros_like(r)
    finite_count = finite.sum((-3, -2, -1)).clamp_min(1)
    proximal = _PROXIMAL * Q.diagonal(dim1=-2, dim2=-1).amax((-2, -1))[..., None, None]

    for _ in range(iterations):
        system = KKTFactors.factor(Q + torch.diag_embed((multiplier / slack).sum(-3) + proximal), A)
        stationarity, equality = _residuals(Q, e, A, r, alpha, dual, sign * multiplier)
        complementarity = slack * multiplier
        mean = complementarity.sum((-3, -2, -1)) / finite_count  # over the finite bounds
        if tolerance is not None:
            error = torch.maximum(torch.maximum(stationarity.abs().amax((-2, -1)), equality.abs().amax(-1)), mean)
            if (error <= tolerance * alpha.abs().amax((-2, -1)).clamp_min(1)).all():
                break

        # Predictor: a step towards zero complementarity. `constant` is the step of the multipliers for constant slacks.
        constant = -multiplier
        alpha_step, _ = system.solve((sign * constant).sum(-3) - stationarity, -equality)
        slack_step = finite * sign * alpha_step[..., None, :, :]
        multiplier_step = constant - multiplier / slack * slack_step
        length = _step_length(slack, slack_step, multiplier + ~finite, multiplier_step, 1.0)[..., None, None, None]
        predicted = (slack + length * slack_step) * (multiplier + length * multiplier_step)
        predicted_mean = predicted.sum((-3, -2, -1)) / finite_count
        decrease = predicted_mean / mean.clamp_min(_MIN_COMPLEMENTARITY)
        target = (mean * decrease.pow(3)).clamp_min(_MIN_COMPLEMENTARITY)

        # Corrector: a step towards the target complementarity, correct to second order.
        target = target[..., None, None, None]
        constant = finite * (target - complementarity - slack_step * multiplier_step) / slack
        alpha_step, dual_step = system.solve((sign * constant).sum(-3) - stationarity, -equality)
        slack_step = finite * sign * alpha_step[..., None, :, :]
        multiplier_step = constant - multiplier / slack * slack_step
        length = _step_length(slack, slack_step, multiplier + ~finite, multiplier_step, _BOUNDARY_FRACTION)[..., None]
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
    """Return the residuals of stationarity, Qα − e − Aᵀν − z_lo + z_hi, and of the equalities, Aα − r.

    ν is `dual`, and z_lo and z_hi are the multipliers of the lower and upper bounds.
    """
    gradient = (Q @ alpha[..., None] - A.mT @ dual[..., None, :, None])[..., 0] - e
    return gradient - signed_multiplier.sum(-3), (A @ alpha[..., None])[..., 0].sum(-2) - r


def _step_length(
    slack: Tensor, slack_step: Tensor, multiplier: Tensor, multiplier_step: Tensor, fraction: float
) -> Tensor:
    """Return `fraction` of the largest step length at which no slack or multiplier is negative, but at most 1."""
    largest_decrease = torch.maximum(-slack_step / slack, -multiplier_step / multiplier).amax((-3, -2, -1))
    return fraction / largest_decrease.clamp_min(fraction)
