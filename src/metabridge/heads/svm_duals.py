"""Dual problems of linear support vector machines, solved for many tasks at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from metabridge.interior_point import solve_qp

_KKT_TOLERANCE = 1e-9  # tolerance of the KKT conditions in the active-set method
_MARGIN_TOLERANCE = 1e-6  # margin violations up to this value do not count in the duality gap
_LARGE_BOUND = 100.0  # larger upper bounds are initially inactive, since unconstrained α is of order 1
_MAX_ACTIVE_SET_STEPS = 6  # problems with fewer examples than features rarely need more than 5
MAX_INTERIOR_POINT_STEPS = 60  # about 20 are typical
MAX_EXAMPLES = 1024  # the duals of squared-hinge problems with more examples are not solved


def one_vs_one(gram: Tensor, labels: Tensor, outputs: int, C: float) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the hinge-loss support vector machine of each pair of classes.

    The pairs are outputs i < j in the order (0, 1), (0, 2), ... With s = 1 for examples of i and s = −1 for examples of
    j, the problem of a pair is min ½ Σ α_p α_q s_p s_q K_pq − Σ α_p over its examples p and q, subject to 0 ≤ α ≤ C and
    Σ s_p α_p = 0. The bias is chosen as in libsvm: the mean bias over the free support vectors (0 < α < C), where the
    bias of a support vector places it on its margin. If there are none, the bias is the midpoint of the interval of
    biases that satisfy the KKT conditions.

    Args:
        gram: The Gram matrices K, (tasks, n, n).
        labels: The class labels, (tasks, n).
        outputs: The number of outputs, one for each class.
        C: The upper bound of α.

    Returns:
        The coefficients s_p α_p, (tasks, pairs, n); the biases, (tasks, pairs); and the duality gaps relative to the
        objective, (tasks, pairs), which are 0 if all KKT conditions hold.

    >>> import torch
    >>> gram, labels = torch.tensor([[[4.0, 8.0], [8.0, 16.0]]]), torch.tensor([[0, 1]])
    >>> [result.round(decimals=6).tolist() for result in one_vs_one(gram, labels, outputs=2, C=1.0)]
    [[[[0.5, -0.5]]], [[3.0]], [[0.0]]]
    """
    class_mask = (labels[:, None, :] == torch.arange(outputs, device=labels.device)[:, None]).double()
    # `index` contains the indices of the examples of each class. Smaller classes are padded: there, `is_example` is 0.
    is_example, index = class_mask.topk(int(class_mask.sum(-1).max()), -1)
    i, j = torch.triu_indices(outputs, outputs, 1, device=labels.device)
    index = torch.cat([index[:, i], index[:, j]], -1)
    sign = torch.cat([is_example[:, i], -is_example[:, j]], -1)
    flat_index = index[..., :, None] * gram.shape[-1] + index[..., None, :]
    K = gram.double().flatten(1).gather(1, flat_index.flatten(1)).view(flat_index.shape)
    # Center the features of each pair, and rescale α to order 1.
    mean_weights = sign.abs() / sign.abs().sum(-1, keepdim=True)
    mean_product = (K @ mean_weights[..., None])[..., 0]  # inner products with the mean
    K = K - mean_product[..., :, None]
    K = K - (mean_product - (mean_weights * mean_product).sum(-1, keepdim=True))[..., None, :]
    variance = (mean_weights * K.diagonal(dim1=-2, dim2=-1)).sum(-1, keepdim=True)
    variance = variance.where(variance > 0, 1)
    alpha_scale = (C * variance).clamp_max(1) / variance
    Q = (alpha_scale * sign)[..., :, None] * K * sign[..., None, :]
    alpha, bias, gap = _solve_hinge(Q.flatten(0, 1), sign.flatten(0, 1), (C / alpha_scale).flatten(0, 1))
    pair_coefficients = alpha_scale * sign * alpha.view_as(sign)
    bias = bias.view_as(sign[..., 0]) - (pair_coefficients * mean_product).sum(-1)
    coefficients = sign.new_zeros(*sign.shape[:-1], gram.shape[-1]).scatter_add(-1, index, pair_coefficients)
    return coefficients, bias, gap.view_as(bias)


def solve_squared_hinge(
    gram: Tensor, sign: Tensor, intercept_factor: Tensor, intercept_penalty: Tensor, C: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve squared-hinge support vector machines in their duals.

    Each problem minimizes ½aᵀKa + ½ intercept_penalty · intercept² + C Σ max(0, 1 − s f)² over the coefficients a and
    the intercept, where the scores are f = Ka + intercept · intercept_factor. Its dual has the variables α = s a, with
    the only constraint α ≥ 0.

    Args:
        gram: The Gram matrices K, (problems, n, n).
        sign: The signs s of the examples, (problems, n).
        intercept_factor: The multiplier of the intercept in the score of each example, (problems, n).
        intercept_penalty: The L2 penalty of the intercept, (problems,).
        C: The weight of the losses.

    Returns:
        The coefficients a, (problems, n); the intercepts, (problems,); and the relative duality gaps, (problems,),
        which are 0 if all KKT conditions hold.

    >>> import torch
    >>> ones, sign = torch.ones(1, 2).double(), torch.tensor([[1.0, -1.0]]).double()
    >>> solution = solve_squared_hinge(torch.eye(2).double()[None], sign, ones, ones[:, 0], C=1.0)
    >>> [result.round(decimals=6).tolist() for result in solution]
    [[[0.666667, -0.666667]], [-0.0], [0.0]]
    """
    mean_square = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    mean_square = mean_square.where(mean_square > 0, 1)
    alpha_scale = (C * mean_square).clamp_max(1) / mean_square  # rescales α to order 1
    scaled_K = (alpha_scale * sign)[..., :, None] * gram * sign[..., None, :]
    loss_diagonal = alpha_scale / (2 * C)  # the squared hinge adds this to the diagonal of the dual
    Q = scaled_K + torch.diag_embed(loss_diagonal.expand_as(sign))
    signed_factor, intercept_penalty = sign * intercept_factor, intercept_penalty / alpha_scale[:, 0]
    # The quadratic program has intercept_penalty · intercept as an additional free variable, in the scale of α.
    infinity = torch.full_like(alpha_scale, torch.inf)
    bordered = pad(Q, (0, 1, 0, 1))
    bordered[:, -1, -1] = intercept_penalty.reciprocal()
    solution = solve_qp(
        bordered[:, None],
        pad(torch.ones_like(sign), (0, 1))[:, None],
        pad(signed_factor, (0, 1), value=-1.0)[:, None, None],
        torch.zeros_like(alpha_scale),
        torch.cat([torch.zeros_like(sign), -infinity], -1)[:, None],
        infinity.expand(-1, sign.shape[-1] + 1)[:, None],
        iterations=MAX_INTERIOR_POINT_STEPS,
        tolerance=1e-13,
    )
    # A variable counts as free if its distance from the bound 0 exceeds the multiplier of this bound.
    is_free = (solution.slack[:, 0, 0] > solution.lower[:, 0])[:, :-1]
    alpha, intercept = solution.alpha[:, 0, :-1].clamp_min(0), solution.alpha[:, 0, -1] / intercept_penalty
    margin = (scaled_K @ alpha[..., None])[..., 0] + signed_factor * intercept[:, None]
    squared_norm = (alpha * margin).sum(-1)  # αᵀKα + intercept_penalty · intercept²
    losses = (1 - margin - _MARGIN_TOLERANCE).clamp_min(0).square().sum(-1) / (2 * loss_diagonal[:, 0])
    dual_objective = (alpha - loss_diagonal * alpha.square() / 2).sum(-1) - squared_norm / 2
    gap = (squared_norm / 2 + losses - dual_objective) / (squared_norm / 2 + losses).clamp_min(1e-300)
    for _ in range(_MAX_ACTIVE_SET_STEPS):
        new_alpha, new_intercept, is_free, is_optimal = _squared_hinge_step(
            Q, signed_factor, intercept_penalty, is_free
        )
        newly_solved = is_optimal & (gap != 0)
        alpha = new_alpha.where(newly_solved[:, None], alpha)
        intercept = new_intercept.where(newly_solved, intercept)
        gap = gap.where(~is_optimal, 0)
    return alpha_scale * sign * alpha, intercept, gap


def _squared_hinge_step(
    Q: Tensor, signed_factor: Tensor, intercept_penalty: Tensor, is_free: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one active-set step: solve for the intercept and the free variables, with α = 0 for the others.

    Returns:
        α; the intercept; the next mask of free variables; and a mask of the problems that this solution solves.
    """
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    system = pad(torch.where(is_free[:, :, None] & is_free[:, None, :], Q, eye), (0, 1, 0, 1))
    system[:, -1, :-1] = system[:, :-1, -1] = is_free * signed_factor
    system[:, -1, -1] = -intercept_penalty
    solution = torch.linalg.solve_ex(system, pad(is_free.to(Q.dtype), (0, 1))).result
    alpha, intercept = solution[:, :-1], solution[:, -1]
    margin_excess = (Q @ alpha[..., None])[..., 0] + signed_factor * intercept[:, None] - 1
    # Comparisons with NaN, from a singular system, count as violations.
    becomes_bound = is_free & ~(alpha >= -_KKT_TOLERANCE * alpha.abs().amax(-1, keepdim=True).clamp_min(1))
    becomes_free = ~is_free & ~(margin_excess >= -_KKT_TOLERANCE)
    is_optimal = ~(becomes_bound | becomes_free).any(-1)
    return alpha, intercept, (is_free & ~becomes_bound) | becomes_free, is_optimal


def _solve_hinge(Q: Tensor, sign: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minimize ½αᵀQα − Σα subject to 0 ≤ α ≤ upper and Σ s α = 0, for every matrix Q (problems, n, n).

    Padding examples have sign 0. The active-set method solves for α with some variables at their bounds, then moves the
    variables that violate their KKT conditions to or from the bounds. With fewer examples than features, it usually
    converges in a few steps. The remaining problems are solved by the interior-point method.

    Returns:
        α, the biases and the relative duality gaps.
    """
    # A feasible start: α of the smaller class is at its upper bound, α of the other class is free, and for classes of
    # equal size all α are at their upper bounds. If upper ≥ _LARGE_BOUND, all variables start free.
    at_zero = sign == 0
    at_upper = (sign != 0) & (sign * sign.sum(-1, keepdim=True) <= 0) & (upper < _LARGE_BOUND)
    alpha, bias, unsolved = _active_set_method(Q, sign, upper, at_zero, at_upper)
    gap = torch.zeros_like(bias)
    if len(unsolved):
        alpha[unsolved], bias[unsolved], gap[unsolved] = _interior_point_method(
            Q[unsolved], sign[unsolved], upper[unsolved]
        )
    return alpha, bias, gap


def _active_set_method(
    Q: Tensor, sign: Tensor, upper: Tensor, at_zero: Tensor, at_upper: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat `_active_set_step`; return α, the biases, and the indices of the problems that remain unsolved.

    Args:
        Q: The matrices, as in `_solve_hinge`.
        sign: The signs s.
        upper: The upper bounds.
        at_zero: A mask of the variables that start at 0.
        at_upper: A mask of the variables that start at their upper bounds.
    """
    alpha, bias = torch.empty_like(sign), torch.empty_like(sign[:, 0])
    unsolved = torch.arange(len(sign), device=sign.device)
    for _ in range(_MAX_ACTIVE_SET_STEPS):
        alpha[unsolved], bias[unsolved], at_zero, at_upper, is_unsolved = _active_set_step(
            Q, sign, upper, at_zero, at_upper
        )
        remaining = is_unsolved.nonzero()[:, 0]
        unsolved = unsolved[remaining]
        if not len(unsolved):
            break
        Q, sign, upper = Q[remaining], sign[remaining], upper[remaining]
        at_zero, at_upper = at_zero[remaining], at_upper[remaining]
    return alpha, bias, unsolved


def _active_set_step(
    Q: Tensor, sign: Tensor, upper: Tensor, at_zero: Tensor, at_upper: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Solve for the free variables of α, with the others at 0 or at their upper bounds.

    Returns:
        α; the biases; the next masks `at_zero` and `at_upper`; and a mask of the problems that α does not solve.
    """
    is_free = ~(at_zero | at_upper)
    bound_alpha = upper * at_upper
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    # The last equation is Σ s α = 0, and the last unknown is the bias (a placeholder if no variable is free).
    system = pad(torch.where(is_free[:, :, None] & is_free[:, None, :], Q, eye), (0, 1, 0, 1))
    system[:, -1, :-1] = system[:, :-1, -1] = is_free * sign
    system[:, -1, -1] = ~is_free.any(-1)
    target = torch.where(is_free, 1 - (Q @ bound_alpha[..., None])[..., 0], bound_alpha)
    target = torch.cat([target, -(sign * bound_alpha).sum(-1, keepdim=True)], -1)
    alpha = torch.linalg.solve_ex(system, target).result[:, :-1]
    # If the system is singular, α is infinite or NaN. Comparisons with NaN count as violations.
    tolerance = _KKT_TOLERANCE * torch.minimum(alpha.abs().amax(-1, keepdim=True).clamp_min(1), upper)
    to_zero, to_upper = is_free & (alpha <= tolerance), is_free & (alpha >= upper - tolerance)
    bias, margin_excess = _bias(Q, sign, alpha, at_zero | to_zero, at_upper | to_upper)
    from_zero = at_zero & ~(margin_excess >= -_KKT_TOLERANCE)
    from_upper = at_upper & ~(margin_excess <= _KKT_TOLERANCE)
    is_optimal = torch.where(
        at_upper | to_upper, margin_excess <= _KKT_TOLERANCE, margin_excess.abs() <= _KKT_TOLERANCE
    )
    is_optimal = torch.where(at_zero | to_zero, margin_excess >= -_KKT_TOLERANCE, is_optimal)
    is_feasible = (alpha >= -tolerance) & (alpha <= upper + tolerance)
    solved = (is_optimal & is_feasible).all(-1) & ((sign * alpha).sum(-1).abs() <= tolerance[:, 0])
    return alpha, bias, (at_zero & ~from_zero) | to_zero, (at_upper & ~from_upper) | to_upper, ~solved


def _interior_point_method(Q: Tensor, sign: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the problems of `_solve_hinge` by the interior-point method, then refine with the active-set method."""
    # Padding variables are decoupled, with their optimum at 0.5 in [0, 1].
    is_example = sign.abs()
    linear = torch.where(sign != 0, 1, 0.5)[:, None]
    upper_bound = torch.where(sign != 0, upper, 1)[:, None]
    solution = solve_qp(
        (Q + torch.diag_embed(1 - is_example))[:, None],
        linear,
        sign[:, None, None],
        torch.zeros_like(linear[..., 0]),
        torch.zeros_like(linear),
        upper_bound,
        iterations=MAX_INTERIOR_POINT_STEPS,
        tolerance=1e-13,
    )
    # A variable counts as at a bound if its distance from it is at most the multiplier of the bound.
    at_zero = solution.slack[:, 0, 0] <= solution.lower[:, 0]
    at_upper = solution.slack[:, 1, 0] <= solution.upper[:, 0]
    alpha = solution.alpha[:, 0] * is_example
    bias, margin_excess = _bias(Q, sign, alpha, at_zero, at_upper)
    active_set_alpha, active_set_bias, unsolved = _active_set_method(Q, sign, upper, at_zero, at_upper)
    # Where the active-set method does not converge from here, keep the interior-point solution. Its gap ignores margin
    # violations below the tolerance.
    violation = (-margin_excess - _MARGIN_TOLERANCE).clamp_min(0)
    squared_norm = (alpha * (Q @ alpha[..., None])[..., 0]).sum(-1)
    losses = (upper * violation * is_example).sum(-1)
    gap = (squared_norm + losses - alpha.sum(-1)) / (squared_norm / 2 + losses).clamp_min(1e-300)
    solved = torch.ones_like(bias, dtype=torch.bool)
    solved[unsolved] = False
    return active_set_alpha.where(solved[:, None], alpha), active_set_bias.where(solved, bias), gap.where(~solved, 0)


def _bias(Q: Tensor, sign: Tensor, alpha: Tensor, at_zero: Tensor, at_upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias b, chosen as in libsvm, and s(f + b) − 1, the excess of each example over its margin."""
    is_example = sign != 0
    is_free = ~(at_zero | at_upper) & is_example
    margin_bias = sign * (1 - (Q @ alpha[..., None])[..., 0])  # the bias that places an example on its margin
    mean_bias = (is_free * margin_bias).sum(-1) / is_free.sum(-1)
    # s(f + b) is at least 1 if α = 0 and at most 1 if α = C. If s = 1 and α = 0, for example, this bounds b from below.
    bounds_below = torch.where(sign > 0, at_zero, at_upper) & is_example
    bounds_above = torch.where(sign > 0, at_upper, at_zero) & is_example
    min_bias = margin_bias.where(bounds_below, -torch.inf).amax(-1)
    max_bias = margin_bias.where(bounds_above, torch.inf).amin(-1)
    bias = torch.where(is_free.any(-1), mean_bias, (min_bias + max_bias) / 2)
    return bias, sign * (bias[:, None] - margin_bias)
