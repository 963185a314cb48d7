"""Dual problems of linear support vector machines, solved for many tasks at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from metabridge.interior_point import solve_qp

_OPTIMALITY = 1e-9  # tolerance of the optimality conditions of an active set
_MARGIN_TOLERANCE = 1e-6  # margin violations up to this value do not count in the duality gap
_LARGE_BOUND = 100.0  # an upper bound that is rarely active, if α without bounds would be about 1
_MAX_EXCHANGES = 6  # steps of the active-set method; problems with fewer examples than features rarely need more than 5
INTERIOR_STEPS = 60  # the largest number of interior-point iterations; about 20 are usual
MAX_EXAMPLES = 1024  # the largest number of examples of a problem that is solved in its dual


def one_against_one(gram: Tensor, labels: Tensor, outputs: int, C: float) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the hinge-loss support vector machine of each pair of classes.

    The pairs are outputs i < j in the order (0, 1), (0, 2), ... With s = 1 for examples of i and s = −1 for examples of
    j, the problem of a pair is min ½ Σ α_p α_q s_p s_q K_pq − Σ α_p, subject to 0 ≤ α ≤ C and Σ s_p α_p = 0. The bias
    is chosen as in libsvm: the mean, over the examples with 0 < α < C, of the bias for which the example is on its
    margin. Without such examples, it is the middle of the interval that the optimality conditions of the others allow.

    Args:
        gram: The Gram matrices K, (tasks, n, n).
        labels: The class labels, (tasks, n).
        outputs: The number of outputs, one for each class.
        C: The upper bound of α.

    Returns:
        The coefficients s_p α_p, (tasks, pairs, n), the biases, (tasks, pairs), and the duality gaps relative to the
        objective, (tasks, pairs), which are 0 if all optimality conditions are met.

    >>> import torch
    >>> gram, labels = torch.tensor([[[4.0, 8.0], [8.0, 16.0]]]), torch.tensor([[0, 1]])
    >>> [result.round(decimals=6).tolist() for result in one_against_one(gram, labels, outputs=2, C=1.0)]
    [[[[0.5, -0.5]]], [[3.0]], [[0.0]]]
    """
    in_class = (labels[:, None, :] == torch.arange(outputs, device=labels.device)[:, None]).double()
    # The indices of the examples of each class. Smaller classes are padded with indices for which `present` is 0.
    present, index = in_class.topk(int(in_class.sum(-1).max()), -1)
    first, second = torch.triu_indices(outputs, outputs, 1, device=labels.device)
    index = torch.cat([index[:, first], index[:, second]], -1)
    sign = torch.cat([present[:, first], -present[:, second]], -1)
    entries = index[..., :, None] * gram.shape[-1] + index[..., None, :]
    K = gram.double().flatten(1).gather(1, entries.flatten(1)).view(entries.shape)
    # Center the features of each pair, and measure α in units in which it is of order 1.
    averaging = sign.abs() / sign.abs().sum(-1, keepdim=True)
    mean_product = (K @ averaging[..., None])[..., 0]  # inner products with the mean
    K = K - mean_product[..., :, None] - (mean_product - (averaging * mean_product).sum(-1, keepdim=True))[..., None, :]
    variance = (averaging * K.diagonal(dim1=-2, dim2=-1)).sum(-1, keepdim=True)
    variance = variance.where(variance > 0, 1)
    alpha_unit = (C * variance).clamp_max(1) / variance
    Q = (alpha_unit * sign)[..., :, None] * K * sign[..., None, :]
    alpha, bias, gap = _solve_hinge(Q.flatten(0, 1), sign.flatten(0, 1), (C / alpha_unit).flatten(0, 1))
    pair_coefficient = alpha_unit * sign * alpha.view_as(sign)
    bias = bias.view_as(sign[..., 0]) - (pair_coefficient * mean_product).sum(-1)
    coefficient = sign.new_zeros(*sign.shape[:-1], gram.shape[-1]).scatter_add(-1, index, pair_coefficient)
    return coefficient, bias, gap.view_as(bias)


def squared_hinge(
    gram: Tensor, sign: Tensor, bias_factor: Tensor, bias_penalty: Tensor, C: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve squared-hinge support vector machines in their duals.

    Each problem minimizes ½aᵀKa + ½ bias_penalty · level² + C Σ max(0, 1 − s f)² over the coefficients a and the number
    `level`, with the scores f = Ka + level · bias_factor. In its dual, the only bounds on α = s a are α ≥ 0.

    Args:
        gram: The Gram matrices K, (problems, n, n).
        sign: The signs s of the examples, (problems, n).
        bias_factor: The factor of the level in each score, (problems, n).
        bias_penalty: The penalty on the level, (problems,).
        C: The weight of the losses.

    Returns:
        The coefficients a, (problems, n), the levels, (problems,), and the relative duality gaps, (problems,), which
        are 0 if all optimality conditions are met.

    >>> import torch
    >>> one, sign = torch.ones(1, 2).double(), torch.tensor([[1.0, -1.0]]).double()
    >>> solution = squared_hinge(torch.eye(2).double()[None], sign, one, one[:, 0], C=1.0)
    >>> [result.round(decimals=6).tolist() for result in solution]
    [[[0.666667, -0.666667]], [-0.0], [0.0]]
    """
    mean_square = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    mean_square = mean_square.where(mean_square > 0, 1)
    alpha_unit = (C * mean_square).clamp_max(1) / mean_square  # in this unit, α is of order 1
    K = (alpha_unit * sign)[..., :, None] * gram * sign[..., None, :]
    loss_diagonal = alpha_unit / (2 * C)  # the squared hinge adds this to the diagonal of the dual
    Q = K + torch.diag_embed(loss_diagonal.expand_as(sign))
    signed_factor, bias_penalty = sign * bias_factor, bias_penalty / alpha_unit[:, 0]
    # The interior-point method has bias_penalty · level, in the same unit, as one more variable without bounds.
    infinity = torch.full_like(alpha_unit, torch.inf)
    bordered = pad(Q, (0, 1, 0, 1))
    bordered[:, -1, -1] = bias_penalty.reciprocal()
    solution = solve_qp(
        bordered[:, None],
        pad(torch.ones_like(sign), (0, 1))[:, None],
        pad(signed_factor, (0, 1), value=-1.0)[:, None, None],
        torch.zeros_like(alpha_unit),
        torch.cat([torch.zeros_like(sign), -infinity], -1)[:, None],
        infinity.expand(-1, sign.shape[-1] + 1)[:, None],
        iterations=INTERIOR_STEPS,
        tolerance=1e-13,
    )
    free = (solution.slack[:, 0, 0] > solution.lower[:, 0])[:, :-1]
    alpha, level = solution.alpha[:, 0, :-1].clamp_min(0), solution.alpha[:, 0, -1] / bias_penalty
    margin = (K @ alpha[..., None])[..., 0] + signed_factor * level[:, None]
    squared_norm = (alpha * margin).sum(-1)  # αᵀKα + bias_penalty · level²
    losses = (1 - margin - _MARGIN_TOLERANCE).clamp_min(0).square().sum(-1) / (2 * loss_diagonal[:, 0])
    dual_objective = (alpha - loss_diagonal * alpha.square() / 2).sum(-1) - squared_norm / 2
    gap = (squared_norm / 2 + losses - dual_objective) / (squared_norm / 2 + losses).clamp_min(1e-300)
    for _ in range(_MAX_EXCHANGES):
        exact, exact_level, free, optimal = _exchange_free(Q, signed_factor, bias_penalty, free)
        solved = optimal & (gap != 0)
        alpha, level = exact.where(solved[:, None], alpha), exact_level.where(solved, level)
        gap = gap.where(~optimal, 0)
    return alpha_unit * sign * alpha, level, gap


def _exchange_free(
    Q: Tensor, signed_factor: Tensor, bias_penalty: Tensor, free: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve for α and the level with α = 0 outside the set `free`.

    Returns:
        α, the level, the next set `free`, and which problems are solved by α.
    """
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
    """Minimize ½αᵀQα − Σα with 0 ≤ α ≤ upper and Σ s α = 0 for every Q (problems, n, n); return α, bias and gap.

    Padding examples have sign 0. The active-set method solves for α with some variables at their bounds, and exchanges
    the variables that violate their optimality conditions. With fewer examples than features, it usually ends after a
    few exchanges. The remaining problems are solved by the interior-point method.
    """
    # Initially, α of the smaller class is at its upper bound and α of the other class is free, which is feasible. For
    # classes of equal size, both are at their upper bounds. If the upper bound is large, all variables are free.
    low, high = sign == 0, (sign != 0) & (sign * sign.sum(-1, keepdim=True) <= 0) & (upper < _LARGE_BOUND)
    alpha, bias, unsolved = _exchange_repeatedly(Q, sign, upper, low, high)
    gap = torch.zeros_like(bias)
    if len(unsolved):
        alpha[unsolved], bias[unsolved], gap[unsolved] = _solve_interior(Q[unsolved], sign[unsolved], upper[unsolved])
    return alpha, bias, gap


def _exchange_repeatedly(
    Q: Tensor, sign: Tensor, upper: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat `_exchange`; return α, the bias, and the indices of the problems that remain unsolved."""
    alpha, bias = torch.empty_like(sign), torch.empty_like(sign[:, 0])
    problems = torch.arange(len(sign), device=sign.device)
    for _ in range(_MAX_EXCHANGES):
        alpha[problems], bias[problems], low, high, unsolved = _exchange(Q, sign, upper, low, high)
        remaining = unsolved.nonzero()[:, 0]
        problems = problems[remaining]
        if not len(problems):
            break
        Q, sign, upper, low, high = Q[remaining], sign[remaining], upper[remaining], low[remaining], high[remaining]
    return alpha, bias, problems


def _exchange(
    Q: Tensor, sign: Tensor, upper: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Solve for α with the variables in `low` at 0 and those in `high` at their upper bounds.

    Returns:
        α, the bias, the next sets `low` and `high`, and which problems are not solved by α.
    """
    free = ~(low | high)
    bound_alpha = upper * high
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    # The last row is the equality Σ s α = 0, and the last unknown is the bias (a placeholder if no variable is free).
    system = pad(torch.where(free[:, :, None] & free[:, None, :], Q, eye), (0, 1, 0, 1))
    system[:, -1, :-1] = system[:, :-1, -1] = free * sign
    system[:, -1, -1] = ~free.any(-1)
    target = torch.where(free, 1 - (Q @ bound_alpha[..., None])[..., 0], bound_alpha)
    target = torch.cat([target, -(sign * bound_alpha).sum(-1, keepdim=True)], -1)
    alpha = torch.linalg.solve_ex(system, target).result[:, :-1]
    # α is infinite or NaN if the system is singular, and comparisons with NaN count as violated conditions.
    tolerance = _OPTIMALITY * torch.minimum(alpha.abs().amax(-1, keepdim=True).clamp_min(1), upper)
    to_low, to_high = free & (alpha <= tolerance), free & (alpha >= upper - tolerance)
    bias, excess = _bias(Q, sign, alpha, low | to_low, high | to_high)
    from_low, from_high = low & ~(excess >= -_OPTIMALITY), high & ~(excess <= _OPTIMALITY)
    optimal = torch.where(high | to_high, excess <= _OPTIMALITY, excess.abs() <= _OPTIMALITY)
    optimal = torch.where(low | to_low, excess >= -_OPTIMALITY, optimal)
    feasible = (alpha >= -tolerance) & (alpha <= upper + tolerance)
    solved = (optimal & feasible).all(-1) & ((sign * alpha).sum(-1).abs() <= tolerance[:, 0])
    return alpha, bias, (low & ~from_low) | to_low, (high & ~from_high) | to_high, ~solved


def _solve_interior(Q: Tensor, sign: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the problems of `_solve_hinge` by the interior-point method, then try the active set that it finds."""
    # A padding example is a separate variable with its minimum in the middle of its bounds.
    present = sign.abs()
    linear = torch.where(sign != 0, 1, 0.5)[:, None]
    upper_bound = torch.where(sign != 0, upper, 1)[:, None]
    solution = solve_qp(
        (Q + torch.diag_embed(1 - present))[:, None],
        linear,
        sign[:, None, None],
        torch.zeros_like(linear[..., 0]),
        torch.zeros_like(linear),
        upper_bound,
        iterations=INTERIOR_STEPS,
        tolerance=1e-13,
    )
    low = solution.slack[:, 0, 0] <= solution.lower[:, 0]
    high = solution.slack[:, 1, 0] <= solution.upper[:, 0]
    alpha = solution.alpha[:, 0] * present
    bias, excess = _bias(Q, sign, alpha, low, high)
    exact, exact_bias, unsolved = _exchange_repeatedly(Q, sign, upper, low, high)
    # If the active set is uncertain, the gap ignores margin violations below the tolerance.
    shortfall = (-excess - _MARGIN_TOLERANCE).clamp_min(0)
    squared_norm = (alpha * (Q @ alpha[..., None])[..., 0]).sum(-1)
    losses = (upper * shortfall * present).sum(-1)
    gap = (squared_norm + losses - alpha.sum(-1)) / (squared_norm / 2 + losses).clamp_min(1e-300)
    solved = torch.ones_like(bias, dtype=torch.bool)
    solved[unsolved] = False
    return exact.where(solved[:, None], alpha), exact_bias.where(solved, bias), gap.where(~solved, 0)


def _bias(Q: Tensor, sign: Tensor, alpha: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias b, chosen as in libsvm, and the excess of every example over its margin, s(f + b) − 1."""
    present = sign != 0
    free = ~(low | high) & present
    margin_bias = sign * (1 - (Q @ alpha[..., None])[..., 0])  # the bias for which an example is on its margin
    mean_bias = (free * margin_bias).sum(-1) / free.sum(-1)
    # s(f + b) is at least 1 if α = 0 and at most 1 if α = C. This bounds b from below if s = 1 and α = 0, for example.
    bounds_below = torch.where(sign > 0, low, high) & present
    bounds_above = torch.where(sign > 0, high, low) & present
    min_bias = margin_bias.where(bounds_below, -torch.inf).amax(-1)
    max_bias = margin_bias.where(bounds_above, torch.inf).amin(-1)
    bias = torch.where(free.any(-1), mean_bias, (min_bias + max_bias) / 2)
    return bias, sign * (bias[:, None] - margin_bias)
