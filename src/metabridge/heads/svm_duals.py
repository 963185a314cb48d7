"""Dual problems of linear support vector machines, solved for many tasks at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from metabridge.interior_point import solve_qp

_OPTIMALITY = 1e-9  # tolerance on the conditions of optimality of an active set
_MARGIN_TOLERANCE = 1e-6  # how far a point may miss its margin before it counts in the gap
_FAR_BOUND = 100.0  # an upper bound this large is rarely met, in units in which α would be about 1 without any bound
_MOST_EXCHANGES = 6  # of active sets; programs with fewer points than features rarely need more than five
INTERIOR_STEPS = 60  # the most interior-point iterations; about 20 are usual
MOST_POINTS = 1024  # the most points of a program that is solved in its dual


def one_against_one(gram: Tensor, labels: Tensor, outputs: int, C: float) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the hinge-loss support vector machine of each pair of classes.

    For outputs i < j, in the order (0, 1), (0, 2), ..., with s = 1 on the points of i and −1 on those of j, each solves
    min ½ Σ α_p α_q s_p s_q K_pq − Σ α_p, 0 ≤ α ≤ C, Σ s_p α_p = 0. As in libsvm, the bias is the mean over the points
    with 0 < α < C of the bias that puts them on their margin, or without such points the middle of the interval that
    the others allow.

    Args:
        gram: The Gram matrices K, (tasks, n, n).
        labels: The classes, (tasks, n).
        outputs: The number of classes.
        C: The upper bound of α.

    Returns:
        The coefficients s_p α_p, (tasks, pairs, n), the biases, (tasks, pairs), and the duality gaps relative to the
        objective, (tasks, pairs), which are 0 where all conditions of optimality are met.

    >>> import torch
    >>> gram, labels = torch.tensor([[[4.0, 8.0], [8.0, 16.0]]]), torch.tensor([[0, 1]])
    >>> [part.round(decimals=6).tolist() for part in one_against_one(gram, labels, outputs=2, C=1.0)]
    [[[[0.5, -0.5]]], [[3.0]], [[0.0]]]
    """
    members = (labels[:, None, :] == torch.arange(outputs, device=labels.device)[:, None]).double()
    present, index = members.topk(int(members.sum(-1).max()), -1)
    first, second = torch.triu_indices(outputs, outputs, 1, device=labels.device)
    index = torch.cat([index[:, first], index[:, second]], -1)
    sign = torch.cat([present[:, first], -present[:, second]], -1)
    entries = index[..., :, None] * gram.shape[-1] + index[..., None, :]
    K = gram.double().flatten(1).gather(1, entries.flatten(1)).view(entries.shape)
    # Measure points from the mean of the two classes and in units of their spread, α in units of its largest value.
    share = sign.abs() / sign.abs().sum(-1, keepdim=True)
    mean_product = (K @ share[..., None])[..., 0]
    K = K - mean_product[..., :, None] - (mean_product - (share * mean_product).sum(-1, keepdim=True))[..., None, :]
    spread = (share * K.diagonal(dim1=-2, dim2=-1)).sum(-1, keepdim=True)
    spread = spread.where(spread > 0, 1)
    unit = (C * spread).clamp_max(1) / spread
    Q = (unit * sign)[..., :, None] * K * sign[..., None, :]
    alpha, bias, gap = _solve_hinge(Q.flatten(0, 1), sign.flatten(0, 1), (C / unit).flatten(0, 1))
    coefficient = unit * sign * alpha.view_as(sign)
    bias = bias.view_as(sign[..., 0]) - (coefficient * mean_product).sum(-1)
    full = sign.new_zeros(*sign.shape[:-1], gram.shape[-1]).scatter_add(-1, index, coefficient)
    return full, bias, gap.view_as(bias)


def squared_hinge(
    gram: Tensor, sign: Tensor, bias_factor: Tensor, bias_penalty: Tensor, C: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve squared-hinge support vector machines in their duals.

    With scores f = Ka + level · bias_factor, each minimizes ½aᵀKa + ½ bias_penalty level² + C Σ max(0, 1 − s f)². The
    dual in α = s a has the bounds α ≥ 0 only.

    Args:
        gram: The Gram matrices K, (programs, n, n).
        sign: The signs s of the points, (programs, n).
        bias_factor: The factor of the level in each score, (programs, n).
        bias_penalty: The penalty on the level, (programs,).
        C: The weight of the losses.

    Returns:
        The coefficients a, (programs, n), the levels, (programs,), and the relative duality gaps, (programs,), which
        are 0 where all conditions of optimality are met.

    >>> import torch
    >>> one, sign = torch.ones(1, 2).double(), torch.tensor([[1.0, -1.0]]).double()
    >>> solution = squared_hinge(torch.eye(2).double()[None], sign, one, one[:, 0], C=1.0)
    >>> [part.round(decimals=6).tolist() for part in solution]
    [[[0.666667, -0.666667]], [-0.0], [0.0]]
    """
    spread = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    spread = spread.where(spread > 0, 1)
    unit = (C * spread).clamp_max(1) / spread
    K = (unit * sign)[..., :, None] * gram * sign[..., None, :]
    softness = unit / (2 * C)
    Q = K + torch.diag_embed(softness.expand_as(sign))
    signed_factor, bias_penalty = sign * bias_factor, bias_penalty / unit[:, 0]
    # unit · bias_penalty · level is one more variable of the interior-point method, without bounds.
    infinity = torch.full_like(unit, torch.inf)
    bordered = pad(Q, (0, 1, 0, 1))
    bordered[:, -1, -1] = bias_penalty.reciprocal()
    solution = solve_qp(
        bordered[:, None],
        pad(torch.ones_like(sign), (0, 1))[:, None],
        pad(signed_factor, (0, 1), value=-1.0)[:, None, None],
        torch.zeros_like(unit),
        torch.cat([torch.zeros_like(sign), -infinity], -1)[:, None],
        infinity.expand(-1, sign.shape[-1] + 1)[:, None],
        iterations=INTERIOR_STEPS,
        tolerance=1e-13,
    )
    free = (solution.slack[:, 0, 0] > solution.lower[:, 0])[:, :-1]
    alpha, level = solution.alpha[:, 0, :-1].clamp_min(0), solution.alpha[:, 0, -1] / bias_penalty
    margin = (K @ alpha[..., None])[..., 0] + signed_factor * level[:, None]
    square = (alpha * margin).sum(-1)
    losses = (1 - margin - _MARGIN_TOLERANCE).clamp_min(0).square().sum(-1) / (2 * softness[:, 0])
    dual_objective = (alpha - softness * alpha.square() / 2).sum(-1) - square / 2
    gap = (square / 2 + losses - dual_objective) / (square / 2 + losses).clamp_min(1e-300)
    for _ in range(_MOST_EXCHANGES):
        exact, exact_level, free, final = _exchange_free(Q, signed_factor, bias_penalty, free)
        solved = final & (gap != 0)
        alpha, level = exact.where(solved[:, None], alpha), exact_level.where(solved, level)
        gap = gap.where(~final, 0)
    return unit * sign * alpha, level, gap


def _exchange_free(
    Q: Tensor, signed_factor: Tensor, bias_penalty: Tensor, free: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return α and the level with α = 0 outside the set `free`, the next set, and where this one is optimal."""
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    system = pad(torch.where(free[:, :, None] & free[:, None, :], Q, eye), (0, 1, 0, 1))
    system[:, -1, :-1] = system[:, :-1, -1] = free * signed_factor
    system[:, -1, -1] = -bias_penalty
    solution = torch.linalg.solve_ex(system, pad(free.to(Q.dtype), (0, 1))).result
    alpha, level = solution[:, :-1], solution[:, -1]
    excess = (Q @ alpha[..., None])[..., 0] + signed_factor * level[:, None] - 1
    leaving = free & ~(alpha >= -_OPTIMALITY * alpha.abs().amax(-1, keepdim=True).clamp_min(1))
    entering = ~free & ~(excess >= -_OPTIMALITY)
    return alpha, level, (free & ~leaving) | entering, ~(leaving | entering).any(-1)


def _solve_hinge(Q: Tensor, sign: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minimize ½αᵀQα − Σα with 0 ≤ α ≤ upper and Σ s α = 0 for every Q (programs, n, n); return α, bias and gap.

    Classes differ in size: a point that is only padding has sign 0. The active set is guessed, α is solved for it, and
    the points that violate their conditions change sets. With fewer points than features, a few exchanges end with all
    conditions met; the remaining programs are solved by the interior-point method.
    """
    # At first the smaller class is at its bound and the other free, which is feasible; classes of one size are both
    # at their bounds. Without a bound that matters every point is free.
    low, high = sign == 0, (sign != 0) & (sign * sign.sum(-1, keepdim=True) <= 0) & (upper < _FAR_BOUND)
    alpha, bias, unsolved = _exchange_repeatedly(Q, sign, upper, low, high)
    gap = torch.zeros_like(bias)
    if len(unsolved):
        alpha[unsolved], bias[unsolved], gap[unsolved] = _solve_interior(Q[unsolved], sign[unsolved], upper[unsolved])
    return alpha, bias, gap


def _exchange_repeatedly(
    Q: Tensor, sign: Tensor, upper: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange points between active sets; return α, the bias, and the indices of programs that stay unsolved."""
    alpha, bias = torch.empty_like(sign), torch.empty_like(sign[:, 0])
    rows = torch.arange(len(sign), device=sign.device)
    for _ in range(_MOST_EXCHANGES):
        alpha[rows], bias[rows], low, high, unsolved = _exchange(Q, sign, upper, low, high)
        remaining = unsolved.nonzero()[:, 0]
        rows = rows[remaining]
        if not len(rows):
            break
        Q, sign, upper, low, high = Q[remaining], sign[remaining], upper[remaining], low[remaining], high[remaining]
    return alpha, bias, rows


def _exchange(
    Q: Tensor, sign: Tensor, upper: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return α and the bias with α at its bounds in the sets `low` and `high`, the next sets, and what is unsolved."""
    free = ~(low | high)
    top = upper * high
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    # The last row is the equality, the last unknown the bias; without free points it has no equation.
    system = pad(torch.where(free[:, :, None] & free[:, None, :], Q, eye), (0, 1, 0, 1))
    system[:, -1, :-1] = system[:, :-1, -1] = free * sign
    system[:, -1, -1] = ~free.any(-1)
    right = torch.where(free, 1 - (Q @ top[..., None])[..., 0], top)
    right = torch.cat([right, -(sign * top).sum(-1, keepdim=True)], -1)
    alpha = torch.linalg.solve_ex(system, right).result[:, :-1]
    # α is infinite if the system is singular. A comparison with NaN counts as violated.
    slack = _OPTIMALITY * torch.minimum(alpha.abs().amax(-1, keepdim=True).clamp_min(1), upper)
    under, over = free & (alpha <= slack), free & (alpha >= upper - slack)
    bias, excess = _bias(Q, sign, alpha, low | under, high | over)
    rising, falling = low & ~(excess >= -_OPTIMALITY), high & ~(excess <= _OPTIMALITY)
    at_upper = torch.where(high | over, excess <= _OPTIMALITY, excess.abs() <= _OPTIMALITY)
    met = torch.where(low | under, excess >= -_OPTIMALITY, at_upper)
    met &= (alpha >= -slack) & (alpha <= upper + slack)
    final = met.all(-1) & ((sign * alpha).sum(-1).abs() <= slack[:, 0])
    return alpha, bias, (low & ~rising) | under, (high & ~falling) | over, ~final


def _solve_interior(Q: Tensor, sign: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the programs of `_solve_hinge` by interior points, and exactly where these find the active set."""
    # A padding point is a separate variable with its minimum in the middle of its bounds.
    present = sign.abs()
    e = torch.where(sign != 0, 1, 0.5)[:, None]
    hi = torch.where(sign != 0, upper, 1)[:, None]
    solution = solve_qp(
        (Q + torch.diag_embed(1 - present))[:, None],
        e,
        sign[:, None, None],
        torch.zeros_like(e[..., 0]),
        torch.zeros_like(e),
        hi,
        iterations=INTERIOR_STEPS,
        tolerance=1e-13,
    )
    low = solution.slack[:, 0, 0] <= solution.lower[:, 0]
    high = solution.slack[:, 1, 0] <= solution.upper[:, 0]
    alpha = solution.alpha[:, 0] * present
    bias, excess = _bias(Q, sign, alpha, low, high)
    exact, exact_bias, unsolved = _exchange_repeatedly(Q, sign, upper, low, high)
    # Where the active set is uncertain, the gap ignores margins that are missed by less than the tolerance.
    shortfall = (-excess - _MARGIN_TOLERANCE).clamp_min(0)
    square = (alpha * (Q @ alpha[..., None])[..., 0]).sum(-1)
    losses = (upper * shortfall * present).sum(-1)
    gap = (square + losses - alpha.sum(-1)) / (square / 2 + losses).clamp_min(1e-300)
    solved = torch.ones_like(bias, dtype=torch.bool)
    solved[unsolved] = False
    return exact.where(solved[:, None], alpha), exact_bias.where(solved, bias), gap.where(~solved, 0)


def _bias(Q: Tensor, sign: Tensor, alpha: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return libsvm's bias b and by how much every point exceeds its margin, s(f + b) − 1."""
    present = sign != 0
    free = ~(low | high) & present
    on_margin = sign * (1 - (Q @ alpha[..., None])[..., 0])  # the bias that puts a point on its margin
    mean = (free * on_margin).sum(-1) / free.sum(-1)
    # s(f + b) is at least 1 where α = 0 and at most 1 where α = C: a bound on b, from below where s = 1 and α = 0.
    above = torch.where(sign > 0, low, high) & present
    below = torch.where(sign > 0, high, low) & present
    least, most = on_margin.where(above, -torch.inf).amax(-1), on_margin.where(below, torch.inf).amin(-1)
    bias = torch.where(free.any(-1), mean, (least + most) / 2)
    return bias, sign * (bias[:, None] - on_margin)
