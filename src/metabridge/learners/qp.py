"""Batched quadratic programs by interior points, and the multi-class support vector machine built on them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CENTRE = 1e-13  # Complementarity at which iterations hold still: the gap is safely small, the factors still exact.
_PROXIMAL = 1e-12  # Relative weight of ‖step‖² that keeps factors of singular Q positive; the solution does not move.
_IMPLICIT = 1e-10  # The same, more of it, for derivatives, where nothing later corrects what a singular factor loses.
_INTERIOR = 0.995  # The part of the way to the boundary that a step may take.


class Solution(NamedTuple):
    """A minimiser α of a quadratic program, its multipliers, and how far from optimal it can be.

    `dual` belongs to the equalities; `lower` and `upper`, non-negative, to the bounds, and `slack` (..., 2, b, n) is
    how far α is from them. `gap` = Σ slack·multiplier is the duality gap once `residual`, the largest violation of
    stationarity or of an equality, vanishes.
    """

    alpha: Tensor
    dual: Tensor
    lower: Tensor
    upper: Tensor
    slack: Tensor
    gap: Tensor
    residual: Tensor


class _Reduced(NamedTuple):
    """Factors of [[H, −Aᵀ], [A, 0]], H = blockdiag(H_k): H_k = L_k L_kᵀ, V_k = L_k⁻¹A_kᵀ, and ΣVᵀV = SSᵀ."""

    L: Tensor
    V: Tensor
    S: Tensor

    @classmethod
    def factor(cls, H: Tensor, A: Tensor) -> _Reduced:
        L = torch.linalg.cholesky_ex(H).L
        V = torch.linalg.solve_triangular(L, A.mT, upper=False)
        return cls(L, V, torch.linalg.cholesky_ex((V.mT @ V).sum(-3)).L)

    def solve(self, slope: Tensor, excess: Tensor) -> tuple[Tensor, Tensor]:
        """Return α and ν with Hα − Aᵀν = slope and Σ A_k α_k = excess."""
        u = torch.linalg.solve_triangular(self.L, slope[..., None], upper=False)
        dual = torch.linalg.solve_triangular(self.S, excess[..., None] - (self.V.mT @ u).sum(-3), upper=False)
        dual = torch.linalg.solve_triangular(self.S.mT, dual, upper=True)
        alpha = torch.linalg.solve_triangular(self.L.mT, u + self.V @ dual[..., None, :, :], upper=True)
        return alpha[..., 0], dual[..., 0]


def solve(Q: Tensor, e: Tensor, A: Tensor, r: Tensor, lo: Tensor, hi: Tensor, *, iterations: int = 16) -> Solution:
    """Minimise Σ_k ½ α_kᵀ Q_k α_k − ⟨e, α⟩ subject to Σ_k A_k α_k = r and lo ≤ α ≤ hi, in float64.

    Q is (..., b, n, n), or (..., 1, n, n) where blocks share it, positive semi-definite; A is (..., b, m, n) of full
    row rank; r is (..., m); e, lo and hi are (..., b, n), lo < hi. A bound may be infinite. The problem should be
    scaled so that α is of order 1.

    Mehrotra's predictor and corrector: the reduced system is block diagonal, Q_k + diag(multiplier / slack), so that
    b matrices of n×n and one of m×m are factored. The number of iterations is fixed and nothing depends on values:
    it can be mapped by `torch.func.vmap` and captured in a CUDA graph.

    >>> import torch
    >>> one = torch.ones(1, 2)
    >>> found = solve(torch.eye(2)[None], 3 * one, one[None], torch.tensor([1.0]), 0 * one, torch.tensor([[0.3, 1.0]]))
    >>> found.alpha.round(decimals=6), bool(found.gap < 1e-8)
    (tensor([[0.3000, 0.7000]], dtype=torch.float64), True)
    """
    Q, e, A, r, lo, hi = (tensor.double() for tensor in (Q, e, A, r, lo, hi))
    sign = torch.arange(1, -2, -2, device=Q.device)[:, None, None]
    bound = torch.stack([lo, hi], -3)
    finite = bound.isfinite()
    wall = torch.where(finite, bound, 0)
    one_sided = finite.sum(-3) == 1
    alpha = torch.where(one_sided, (wall + sign * finite).sum(-3), wall.mean(-3))
    slack = torch.where(finite, sign * (alpha[..., None, :, :] - wall), 1)
    force = finite / slack
    dual = torch.zeros_like(r)
    pairs = finite.sum((-3, -2, -1)).clamp_min(1)
    small = _PROXIMAL * Q.diagonal(dim1=-2, dim2=-1).amax((-2, -1))[..., None, None]

    for _ in range(iterations):
        system = _Reduced.factor(Q + torch.diag_embed((force / slack).sum(-3) + small), A)
        tilt, excess = _residuals(Q, e, A, r, alpha, dual, sign * force)
        product = slack * force
        centre = product.sum((-3, -2, -1)) / pairs

        pull = -force
        aim, _ = system.solve((sign * pull).sum(-3) - tilt, -excess)
        slack_step = finite * sign * aim[..., None, :, :]
        force_step = pull - force / slack * slack_step
        reach = _reach(slack, slack_step, force + ~finite, force_step, 1.0)[..., None, None, None]
        ahead = ((slack + reach * slack_step) * (force + reach * force_step)).sum((-3, -2, -1)) / pairs
        target = (centre * (ahead / centre.clamp_min(_CENTRE)).pow(3)).clamp_min(_CENTRE)[..., None, None, None]

        pull = finite * (target - product - slack_step * force_step) / slack
        aim, dual_step = system.solve((sign * pull).sum(-3) - tilt, -excess)
        slack_step = finite * sign * aim[..., None, :, :]
        force_step = pull - force / slack * slack_step
        reach = _reach(slack, slack_step, force + ~finite, force_step, _INTERIOR)[..., None]
        alpha = alpha + reach[..., None] * aim
        dual = dual + reach * dual_step
        slack = slack + reach[..., None, None] * slack_step
        force = force + reach[..., None, None] * force_step

    tilt, excess = _residuals(Q, e, A, r, alpha, dual, sign * force)
    lower, upper = force.unbind(-3)
    residual = torch.maximum(tilt.abs().amax((-2, -1)), excess.abs().amax(-1))
    return Solution(alpha, dual, lower, upper, slack, (slack * force).sum((-3, -2, -1)), residual)


def _residuals(
    Q: Tensor, e: Tensor, A: Tensor, r: Tensor, alpha: Tensor, dual: Tensor, push: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Qα − e − Aᵀν − z_lo + z_hi and Aα − r."""
    tilt = (Q @ alpha[..., None] - A.mT @ dual[..., None, :, None])[..., 0] - e - push.sum(-3)
    return tilt, (A @ alpha[..., None])[..., 0].sum(-2) - r


def _reach(slack: Tensor, slack_step: Tensor, force: Tensor, force_step: Tensor, part: float) -> Tensor:
    """Return the step, at most 1, that goes `part` of the way to where a slack or a multiplier vanishes."""
    return part / torch.maximum(-slack_step / slack, -force_step / force).amax((-3, -2, -1)).clamp_min(part)


def crammer_singer(features: Tensor, labels: Tensor, outputs: int, C: float) -> Tensor:
    """Return the weight (..., outputs, d) of the multi-class support vector machine (Crammer and Singer, 2001).

    It minimises ½ Σ_k ‖w_k‖² + C Σ_n max_k(w_kᵀφ_n + 1[k ≠ y_n] − w_{y_n}ᵀφ_n), without bias, by its dual:
    min ½ Σ_k ‖Σ_n α_nk φ_n‖² − Σ_n α_{n,y_n} with α_nk ≤ C·1[k = y_n] and Σ_k α_nk = 0; w_k = Σ_n α_nk φ_n.

    `features` is (..., n, d), `labels` (..., n). The weight is differentiable in the features, once, by the implicit
    function theorem: a change dQ moves α by −P dQ α, where P solves the KKT system reduced to Σ_k α_nk = 0.

    >>> import torch
    >>> crammer_singer(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), outputs=2, C=0.1)
    tensor([[ 0.1000, -0.1000],
            [-0.1000,  0.1000]])
    """
    points = features.double()
    still = points.detach()
    truth = (labels[..., None, :] == torch.arange(outputs, device=labels.device)[:, None]).double()
    # In units of C every bound is 0 or 1.
    Q = C * (still @ still.mT)[..., None, :, :]
    A = torch.eye(still.shape[-2], dtype=still.dtype, device=still.device).expand(*truth.shape, -1)
    found = solve(Q, truth, A, torch.zeros_like(truth[..., 0, :]), torch.full_like(truth, -torch.inf), truth)
    stiffness = found.upper / found.slack[..., 1, :, :] + _IMPLICIT * Q.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None]
    system = _Reduced.factor(Q + torch.diag_embed(stiffness), A)

    tilt = C * (points @ (points.mT @ found.alpha.mT)).mT
    moved, _ = system.solve(tilt - tilt.detach(), torch.zeros_like(found.dual))
    return (C * (found.alpha - moved) @ points).to(features.dtype)


def one_against_one(gram: Tensor, labels: Tensor, outputs: int, C: float) -> tuple[Tensor, Tensor]:
    """Return the coefficients (tasks, pairs, n) and biases (tasks, pairs) of support vector machines between classes.

    For outputs i < j, in the order (0, 1), (0, 2), ..., with s = 1 on the points of i and −1 on those of j, each solves
    min ½ Σ α_p α_q s_p s_q K_pq − Σ α_p, 0 ≤ α ≤ C, Σ s_p α_p = 0; a point's coefficient is s_p α_p. As in libsvm the
    bias is the mean of what the points with 0 < α < C ask for, or without any the middle of what the others allow.
    `gram` K is (tasks, n, n), `labels` (tasks, n).

    >>> import torch
    >>> found = one_against_one(torch.tensor([[[4.0, 8.0], [8.0, 16.0]]]), torch.tensor([[0, 1]]), outputs=2, C=1.0)
    >>> [part.round(decimals=6).tolist() for part in found]
    [[[[0.5, -0.5]]], [[3.0]]]
    """
    members = (labels[:, None, :] == torch.arange(outputs, device=labels.device)[:, None]).double()
    present, place = members.topk(int(members.sum(-1).max()), -1)
    first, second = torch.triu_indices(outputs, outputs, 1, device=labels.device)
    place = torch.cat([place[:, first], place[:, second]], -1)
    sign = torch.cat([present[:, first], -present[:, second]], -1)
    # Classes differ in size: a point that is not there has sign 0, and is a variable by itself with its minimum at C/2.
    there = sign.abs()
    task = torch.arange(len(gram), device=gram.device)[:, None, None, None]
    K = gram.double()[task, place[..., :, None], place[..., None, :]]
    Q = C * K * sign[..., :, None] * sign[..., None, :] + torch.diag_embed(1 - there)
    e = ((1 + there) / 2)[..., None, :]
    found = solve(
        Q[..., None, :, :],
        e,
        sign[..., None, None, :],
        torch.zeros_like(e[..., 0, :1]),
        torch.zeros_like(e),
        torch.ones_like(e),
    )

    coefficient = C * sign * found.alpha[..., 0, :]
    wanted = sign - (K @ coefficient[..., None])[..., 0]
    off_zero = found.slack[..., 0, 0, :] > found.lower[..., 0, :]
    off_full = found.slack[..., 1, 0, :] > found.upper[..., 0, :]
    free = off_zero & off_full & (sign != 0)
    mean = (free * wanted).sum(-1) / free.sum(-1)
    # s(f + b) is at least 1 where α = 0 and at most 1 where α = C: a bound on b, from below where s = 1 and α = 0.
    above = torch.where(sign > 0, ~off_zero, ~off_full) & (sign != 0)
    below = torch.where(sign > 0, ~off_full, ~off_zero) & (sign != 0)
    least, most = wanted.where(above, -torch.inf).amax(-1), wanted.where(below, torch.inf).amin(-1)
    bias = torch.where(free.any(-1), mean, (least + most) / 2)
    spread = coefficient.new_zeros(*coefficient.shape[:-1], gram.shape[-1])
    return spread.scatter_add(-1, place, coefficient), bias
