"""Batched quadratic programs by interior points, and the support vector machines built on them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_CENTRE = 1e-13  # Complementarity at which iterations hold still: the gap is safely small, the factors still exact.
_PROXIMAL = 1e-12  # Relative weight of ‖step‖² that keeps factors of singular Q positive; the solution does not move.
_IMPLICIT = 1e-10  # The same, more of it, for derivatives, where nothing later corrects what a singular factor loses.
_MET = 1e-9  # How exactly an active set has to meet the conditions of optimality.
_SHORT = 1e-6  # What a point may miss its margin by before this counts.
_FAR = 100.0  # An upper bound, in units in which α would be about 1 without any, from which on it is rarely met.
_EXCHANGES = 6  # The most of active sets; programs with fewer points than features rarely need more than five.
INTERIOR_STEPS = 60  # The most of interior points for a head; about 20 are usual.
MOST = 1024  # The most points of a program that is solved for a head.
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


def solve(
    Q: Tensor,
    e: Tensor,
    A: Tensor,
    r: Tensor,
    lo: Tensor,
    hi: Tensor,
    *,
    iterations: int = 16,
    tolerance: float | None = None,
) -> Solution:
    """Minimise Σ_k ½ α_kᵀ Q_k α_k − ⟨e, α⟩ subject to Σ_k A_k α_k = r and lo ≤ α ≤ hi, in float64.

    Q is (..., b, n, n), or (..., 1, n, n) where blocks share it, positive semi-definite; A is (..., b, m, n) of full
    row rank; r is (..., m); e, lo and hi are (..., b, n), lo < hi. A bound may be infinite. The problem should be
    scaled so that α is of order 1.

    Mehrotra's predictor and corrector: the reduced system is block diagonal, Q_k + diag(multiplier / slack), so that
    b matrices of n×n and one of m×m are factored. The number of iterations is fixed and nothing depends on values:
    it can be mapped by `torch.func.vmap` and captured in a CUDA graph. With a `tolerance` it stops as soon as every
    program's mean complementarity and residuals, relative to its largest α, are below.

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
    # Start near 0, one unit or half the way between the bounds inside of them.
    inside = ((bound[..., 1, :, :] - bound[..., 0, :, :]) / 2).clamp_max(1)
    alpha = torch.zeros_like(e).clamp(lo + inside, hi - inside)
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
        if tolerance is not None:
            error = torch.maximum(torch.maximum(tilt.abs().amax((-2, -1)), excess.abs().amax(-1)), centre)
            if (error <= tolerance * alpha.abs().amax((-2, -1)).clamp_min(1)).all():
                break

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
    gram = (still @ still.mT)[..., None, :, :]
    # Every bound is 0 or C. Without the latter α would be about 1 / spread: take the smaller of the two as its unit.
    spread = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    unit = C / (C * spread).clamp_min(1)
    Q, top = unit[..., None] * gram, C / unit * truth
    A = torch.eye(still.shape[-2], dtype=still.dtype, device=still.device).expand(*truth.shape, -1)
    found = solve(Q, truth, A, torch.zeros_like(truth[..., 0, :]), torch.full_like(truth, -torch.inf), top)
    stiffness = found.upper / found.slack[..., 1, :, :] + _IMPLICIT * Q.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None]
    system = _Reduced.factor(Q + torch.diag_embed(stiffness), A)

    tilt = unit * (points @ (points.mT @ found.alpha.mT)).mT
    moved, _ = system.solve(tilt - tilt.detach(), torch.zeros_like(found.dual))
    return (unit * (found.alpha - moved) @ points).to(features.dtype)


def one_against_one(gram: Tensor, labels: Tensor, outputs: int, C: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients (tasks, pairs, n) and biases (tasks, pairs) of support vector machines between classes.

    With them comes the duality gap (tasks, pairs), relative to the objective; 0 where all conditions are met.

    For outputs i < j, in the order (0, 1), (0, 2), ..., with s = 1 on the points of i and −1 on those of j, each solves
    min ½ Σ α_p α_q s_p s_q K_pq − Σ α_p, 0 ≤ α ≤ C, Σ s_p α_p = 0; a point's coefficient is s_p α_p. As in libsvm the
    bias is the mean of what the points with 0 < α < C ask for, or without any the middle of what the others allow.
    `gram` K is (tasks, n, n), `labels` (tasks, n).

    >>> import torch
    >>> found = one_against_one(torch.tensor([[[4.0, 8.0], [8.0, 16.0]]]), torch.tensor([[0, 1]]), outputs=2, C=1.0)
    >>> [part.round(decimals=6).tolist() for part in found]
    [[[[0.5, -0.5]]], [[3.0]], [[0.0]]]
    """
    members = (labels[:, None, :] == torch.arange(outputs, device=labels.device)[:, None]).double()
    present, place = members.topk(int(members.sum(-1).max()), -1)
    first, second = torch.triu_indices(outputs, outputs, 1, device=labels.device)
    place = torch.cat([place[:, first], place[:, second]], -1)
    sign = torch.cat([present[:, first], -present[:, second]], -1)
    entries = place[..., :, None] * gram.shape[-1] + place[..., None, :]
    K = gram.double().flatten(1).gather(1, entries.flatten(1)).view(entries.shape)
    # Measure points from the mean of the two classes and in units of their spread, α in units of what it can be.
    share = sign.abs() / sign.abs().sum(-1, keepdim=True)
    level = (K @ share[..., None])[..., 0]
    K = K - level[..., :, None] - (level - (share * level).sum(-1, keepdim=True))[..., None, :]
    spread = (share * K.diagonal(dim1=-2, dim2=-1)).sum(-1, keepdim=True)
    spread = spread.where(spread > 0, 1)
    unit = (C * spread).clamp_max(1) / spread
    Q = (unit * sign)[..., :, None] * K * sign[..., None, :]
    alpha, bias, gap = _machines(Q.flatten(0, 1), sign.flatten(0, 1), (C / unit).flatten(0, 1))
    coefficient = unit * sign * alpha.view_as(sign)
    bias = bias.view_as(sign[..., 0]) - (coefficient * level).sum(-1)
    full = sign.new_zeros(*sign.shape[:-1], gram.shape[-1]).scatter_add(-1, place, coefficient)
    return full, bias, gap.view_as(bias)


def _machines(Q: Tensor, sign: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise ½αᵀQα − Σα with 0 ≤ α ≤ upper and Σ s α = 0 for every Q (programs, n, n); return α, bias and gap.

    Classes differ in size: a point that is not there has sign 0. The active set is guessed, α found for it, and the
    points that break their conditions change sides. Where there are fewer points than features that ends after a few
    exchanges with all conditions met; programs in which it does not are left to interior points.
    """
    # At first the smaller class is at its bound and the other free, which is feasible; classes of one size are both
    # at their bounds. Without a bound that matters every point is free.
    low, high = sign == 0, (sign != 0) & (sign * sign.sum(-1, keepdim=True) <= 0) & (upper < _FAR)
    alpha, bias, wrong = _exchanges(Q, sign, upper, low, high)
    gap = torch.zeros_like(bias)
    if len(wrong):
        alpha[wrong], bias[wrong], gap[wrong] = _interior(Q[wrong], sign[wrong], upper[wrong])
    return alpha, bias, gap


def _exchanges(Q: Tensor, sign: Tensor, upper: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange points between active sets; return α, the bias, and the programs that are not solved in the end."""
    alpha, bias = torch.empty_like(sign), torch.empty_like(sign[:, 0])
    rows = torch.arange(len(sign), device=sign.device)
    for _ in range(_EXCHANGES):
        alpha[rows], bias[rows], low, high, wrong = _exchange(Q, sign, upper, low, high)
        left = wrong.nonzero()[:, 0]
        rows = rows[left]
        if not len(rows):
            break
        Q, sign, upper, low, high = Q[left], sign[left], upper[left], low[left], high[left]
    return alpha, bias, rows


def _exchange(
    Q: Tensor, sign: Tensor, upper: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return α and the bias with α at its bounds at `low` and `high`, the next sets, and where these are not final."""
    free = ~(low | high)
    top = upper * high
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    # The last row is the equality, the last unknown the bias; where nothing is free it has no equation.
    system = pad(torch.where(free[:, :, None] & free[:, None, :], Q, eye), (0, 1, 0, 1))
    system[:, -1, :-1] = system[:, :-1, -1] = free * sign
    system[:, -1, -1] = ~free.any(-1)
    right = torch.where(free, 1 - (Q @ top[..., None])[..., 0], top)
    right = torch.cat([right, -(sign * top).sum(-1, keepdim=True)], -1)
    alpha = torch.linalg.solve_ex(system, right).result[:, :-1]
    # A comparison with NaN counts as broken.
    slack = _MET * torch.minimum(alpha.abs().amax(-1, keepdim=True).clamp_min(1), upper)  # α is infinite if singular
    under, over = free & (alpha <= slack), free & (alpha >= upper - slack)
    bias, excess = _bias(Q, sign, alpha, low | under, high | over)
    rising, falling = low & ~(excess >= -_MET), high & ~(excess <= _MET)
    met = torch.where(low | under, excess >= -_MET, torch.where(high | over, excess <= _MET, excess.abs() <= _MET))
    met &= (alpha >= -slack) & (alpha <= upper + slack)
    final = met.all(-1) & ((sign * alpha).sum(-1).abs() <= slack[:, 0])
    return alpha, bias, (low & ~rising) | under, (high & ~falling) | over, ~final


def _interior(Q: Tensor, sign: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve what `_machines` solves by interior points, and exactly where these find the active set."""
    # A point that is not there is a variable by itself with its minimum in the middle.
    there = sign.abs()
    e = torch.where(sign != 0, 1, 0.5)[:, None]
    Q_there = (Q + torch.diag_embed(1 - there))[:, None]
    hi = torch.where(sign != 0, upper, 1)[:, None]
    found = solve(
        Q_there,
        e,
        sign[:, None, None],
        torch.zeros_like(e[..., 0]),
        torch.zeros_like(e),
        hi,
        iterations=INTERIOR_STEPS,
        tolerance=1e-13,
    )
    low, high = found.slack[:, 0, 0] <= found.lower[:, 0], found.slack[:, 1, 0] <= found.upper[:, 0]
    alpha = found.alpha[:, 0] * there
    bias, excess = _bias(Q, sign, alpha, low, high)
    exact, exact_bias, wrong = _exchanges(Q, sign, upper, low, high)
    # Where the active set is not certain: a gap that does not count margins missed by less than _SHORT.
    short = (-excess - _SHORT).clamp_min(0)
    square = (alpha * (Q @ alpha[..., None])[..., 0]).sum(-1)
    missed = (upper * short * there).sum(-1)
    gap = (square + missed - alpha.sum(-1)) / (square / 2 + missed).clamp_min(1e-300)
    solved = torch.ones_like(bias, dtype=torch.bool)
    solved[wrong] = False
    return exact.where(solved[:, None], alpha), exact_bias.where(solved, bias), gap.where(~solved, 0)


def squared_hinge(gram: Tensor, sign: Tensor, along: Tensor, corner: Tensor, C: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients (programs, n) and level (programs,) of machines with the squared hinge, and their gaps.

    With scores f = Ka + b·along each minimises ½aᵀKa + ½ corner b² + C Σ max(0, 1 − s f)²: `gram` K is (programs, n,
    n), `sign` s and `along` (programs, n), `corner` (programs,). Its dual in α = s a has the bounds α ≥ 0 alone. The
    relative duality gap is 0 where all conditions are met.

    >>> import torch
    >>> one = torch.ones(1, 2).double()
    >>> found = squared_hinge(torch.eye(2).double()[None], torch.tensor([[1.0, -1.0]]).double(), one, one[:, 0], C=1.0)
    >>> [part.round(decimals=6).tolist() for part in found]
    [[[0.666667, -0.666667]], [-0.0], [0.0]]
    """
    spread = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    spread = spread.where(spread > 0, 1)
    unit = (C * spread).clamp_max(1) / spread
    K = (unit * sign)[..., :, None] * gram * sign[..., None, :]
    soft = unit / (2 * C)
    Q = K + torch.diag_embed(soft.expand_as(sign))
    slope, corner = sign * along, corner / unit[:, 0]
    # unit · corner · level is one more variable of the interior points, without bounds.
    everywhere = torch.full_like(unit, torch.inf)
    bordered = pad(Q, (0, 1, 0, 1))
    bordered[:, -1, -1] = corner.reciprocal()
    found = solve(
        bordered[:, None],
        pad(torch.ones_like(sign), (0, 1))[:, None],
        pad(slope, (0, 1), value=-1.0)[:, None, None],
        torch.zeros_like(unit),
        torch.cat([torch.zeros_like(sign), -everywhere], -1)[:, None],
        everywhere.expand(-1, sign.shape[-1] + 1)[:, None],
        iterations=INTERIOR_STEPS,
        tolerance=1e-13,
    )
    free = (found.slack[:, 0, 0] > found.lower[:, 0])[:, :-1]
    alpha, level = found.alpha[:, 0, :-1].clamp_min(0), found.alpha[:, 0, -1] / corner
    margin = (K @ alpha[..., None])[..., 0] + slope * level[:, None]
    square = (alpha * margin).sum(-1)
    missed = (1 - margin - _SHORT).clamp_min(0).square().sum(-1) / (2 * soft[:, 0])
    won = (alpha - soft * alpha.square() / 2).sum(-1) - square / 2
    gap = (square / 2 + missed - won) / (square / 2 + missed).clamp_min(1e-300)
    for _ in range(_EXCHANGES):
        exact, exact_level, free, final = _exchange_free(Q, slope, corner, free)
        solved = final & (gap != 0)
        alpha, level = exact.where(solved[:, None], alpha), exact_level.where(solved, level)
        gap = gap.where(~final, 0)
    return unit * sign * alpha, level, gap


def _exchange_free(Q: Tensor, slope: Tensor, corner: Tensor, free: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return α and the level with α = 0 but where it is `free`, the next set, and where this one is final."""
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    system = pad(torch.where(free[:, :, None] & free[:, None, :], Q, eye), (0, 1, 0, 1))
    system[:, -1, :-1] = system[:, :-1, -1] = free * slope
    system[:, -1, -1] = -corner
    found = torch.linalg.solve_ex(system, pad(free.to(Q.dtype), (0, 1))).result
    alpha, level = found[:, :-1], found[:, -1]
    excess = (Q @ alpha[..., None])[..., 0] + slope * level[:, None] - 1
    leaving = free & ~(alpha >= -_MET * alpha.abs().amax(-1, keepdim=True).clamp_min(1))
    entering = ~free & ~(excess >= -_MET)
    return alpha, level, (free & ~leaving) | entering, ~(leaving | entering).any(-1)


def _bias(Q: Tensor, sign: Tensor, alpha: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return libsvm's bias and by how much every point exceeds the margin with it, s(f + b) − 1."""
    there = sign != 0
    free = ~(low | high) & there
    wanted = sign * (1 - (Q @ alpha[..., None])[..., 0])
    mean = (free * wanted).sum(-1) / free.sum(-1)
    # s(f + b) is at least 1 where α = 0 and at most 1 where α = C: a bound on b, from below where s = 1 and α = 0.
    above = torch.where(sign > 0, low, high) & there
    below = torch.where(sign > 0, high, low) & there
    least, most = wanted.where(above, -torch.inf).amax(-1), wanted.where(below, torch.inf).amin(-1)
    bias = torch.where(free.any(-1), mean, (least + most) / 2)
    return bias, sign * (bias[:, None] - wanted)
