"""Newton's method with conjugate gradients for many small convex problems at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metabridge.conjugate_gradients import Matvec, conjugate_gradients

STEPS = 60  # the largest number of Newton steps
HINGE_STEPS = 20  # as STEPS, for the squared hinge; unsolved problems are then solved in their duals
_LAST_DECREMENT = 1e-10  # Newton decrement, relative to the objective, at or below which a step is the last one
_DERIVATIVE_RATIO = 0.1  # the line search stops at a derivative below this fraction of the initial one
_CG_STEPS = 60  # conjugate-gradient steps before a Cholesky factor replaces the diagonal preconditioner
_MAX_FACTORED = 2048  # the largest number of rows of a Hessian that is factored


class Expansion(NamedTuple):
    """A second-order expansion of a loss around some scores (tasks, n, outputs).

    Args:
        value: The loss, (tasks, 1, problems).
        grad: The gradient, shaped like the scores.
        hvp: The function that multiplies the Hessian by a direction shaped like the scores.
        diagonal: The diagonal of the Hessian, shaped like the scores.
    """

    value: Tensor
    grad: Tensor
    hvp: Callable[[Tensor], Tensor]
    diagonal: Tensor


class Loss(NamedTuple):
    """A loss of one-hot labels and scores.

    Args:
        expand: The function that expands the loss around scores.
        separate: Whether every output is a separate problem.
        cg_tolerance: The relative tolerance on the squared residual of the linear system of a Newton step. For a
            piecewise quadratic loss, precise steps pay off.
    """

    expand: Callable[[Tensor, Tensor], Expansion]
    separate: bool
    cg_tolerance: float

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions over which the loss of one problem sums, in a tensor (tasks, n, outputs)."""
        return (-2,) if self.separate else (-2, -1)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of the values of every problem, with the summed dimensions kept with size 1."""
        return values.sum(self.dims, keepdim=True)


def _cross_entropy(targets: Tensor, scores: Tensor) -> Expansion:
    # Subtract the score of the true class, so that small probabilities of the other classes keep their precision.
    margin = scores - (targets * scores).sum(-1, keepdim=True)
    max_margin = margin.amax(-1, keepdim=True)
    odds = (margin - max_margin).exp()
    wrong = odds - targets * odds
    wrong_sum = wrong.sum(-1, keepdim=True)
    wrong_probability = wrong_sum / odds.sum(-1, keepdim=True)
    p = odds / odds.sum(-1, keepdim=True)

    def hvp(direction: Tensor) -> Tensor:
        weighted = p * (direction - (targets * direction).sum(-1, keepdim=True))
        return weighted - p * weighted.sum(-1, keepdim=True)

    value = (max_margin + (wrong_sum + torch.expm1(-max_margin)).log1p()).sum((-2, -1), keepdim=True)
    diagonal = torch.where(targets > 0, p * wrong_probability, p - p.square())
    return Expansion(value, torch.where(targets > 0, -wrong_probability, p), hvp, diagonal)


def _squared_hinge(targets: Tensor, scores: Tensor) -> Expansion:
    sign = 2 * targets - 1
    shortfall = (1 - sign * scores).clamp_min(0)
    diagonal = 2.0 * (shortfall > 0).to(scores.dtype)
    return Expansion(shortfall.square().sum(-2, keepdim=True), -2 * sign * shortfall, diagonal.mul, diagonal)


# Σ_n −log softmax(f_n)[y_n], with the Hessian diag(p) − ppᵀ for each n, where p = softmax(f_n).
CROSS_ENTROPY = Loss(_cross_entropy, separate=False, cg_tolerance=1e-4)
# Σ_n Σ_k max(0, 1 − s_nk f_nk)² with s_nk = 1 if k = y_n and −1 otherwise: one-vs-rest.
SQUARED_HINGE = Loss(_squared_hinge, separate=True, cg_tolerance=1e-12)


def minimize(loss: Loss, labels: Tensor, X: Tensor, penalty: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Return V (tasks, r, outputs) that minimizes ½ Σ_j penalty_j ‖V_j‖² + loss(XV), and its relative excess.

    Args:
        loss: The loss.
        labels: The class labels, (tasks, n).
        X: The design matrices, (tasks, n, r), in float64, best with orthogonal columns.
        penalty: The penalty on each row of V, (tasks, r).
        outputs: The number of outputs, one for each class.

    Returns:
        V, and an estimate of the excess of each objective over its minimum, relative to the objective, (tasks,
        problems). It is half the Newton decrement −⟨gradient, step⟩ before the last step. For a loss with separate
        problems, rounding can hide an excess in directions without curvature. If the loss has such directions, the
        estimate is at least the bound ½ Σ_j gradient_j² / penalty_j after the last step.

    >>> import torch
    >>> X, labels = torch.tensor([[[1.0], [-1.0]]]).double(), torch.tensor([[0, 1]])
    >>> solution, excess = minimize(SQUARED_HINGE, labels, X, torch.ones(1, 1).double(), outputs=2)
    >>> solution.round(decimals=6), bool((excess < 1e-8).all())
    (tensor([[[ 0.8000, -0.8000]]], dtype=torch.float64), True)
    """
    targets = all_targets = one_hot(labels, outputs).to(X.dtype)
    penalty = all_penalty = penalty[..., None]
    all_X = X
    solution = X.new_zeros(len(X), X.shape[-1], outputs)
    active = torch.arange(len(X), device=X.device)  # indices of iterated tasks; if half are solved, those are dropped
    V, scores = solution, X @ solution
    expansion = loss.expand(targets, scores)
    objective = expansion.value
    excess = torch.zeros_like(objective)
    for _ in range(HINGE_STEPS if loss.separate else STEPS):
        grad = penalty * V + X.mT @ expansion.grad
        step = _newton_step(loss, targets, scores, expansion, X, penalty, grad, 1e-20 * objective)
        decrement = -loss.total(grad * step)
        score_step = X @ step
        # After a step of length t, the penalty is constant + t · (linear + t · quadratic / 2).
        constant = loss.total(penalty * V.square()) / 2
        linear, quadratic = loss.total(penalty * V * step), loss.total(penalty * step.square())
        # Bisect the step length until the objective has decreased and its derivative along the step is small.
        length = torch.ones_like(decrement)
        min_length, max_length = torch.zeros_like(length), torch.full_like(length, torch.inf)
        is_last = decrement <= _LAST_DECREMENT * objective
        for _ in range(40):
            new_V, new_scores = V + length * step, scores + length * score_step
            new_expansion = loss.expand(targets, new_scores)
            new_objective = new_expansion.value + (constant + length * (linear + length * quadratic / 2))
            derivative = loss.total(new_expansion.grad * score_step) + linear + length * quadratic
            sufficient = new_objective <= objective - 1e-4 * length * decrement + 1e-12 * objective
            too_long = ~sufficient | (derivative > _DERIVATIVE_RATIO * decrement)
            too_short = ~too_long & (derivative < -_DERIVATIVE_RATIO * decrement) & ~is_last
            too_long &= ~(is_last & (new_objective <= objective))
            if not (too_long | too_short).any():
                break
            min_length = torch.where(too_short, length, min_length)
            max_length = torch.where(too_long, length, max_length)
            bisected = torch.where(max_length.isinf(), 2 * length, (min_length + max_length) / 2)
            length = torch.where(too_long | too_short, bisected, length)
        else:
            new_V = torch.where(too_long, V, new_V)  # any decrease left is below rounding errors
            new_scores = torch.where(too_long, scores, new_scores)
            new_expansion = loss.expand(targets, new_scores)
            new_objective = torch.where(too_long, objective, new_objective)
        solution[active], excess[active] = new_V, decrement / (2 * objective).clamp_min(1e-300)
        solved = (decrement <= _LAST_DECREMENT * objective) | (objective - new_objective <= 1e-12 * objective)
        unsolved = ~solved.all(-1).all(-1)
        if not unsolved.any():
            break
        V, scores, expansion, objective = new_V, new_scores, new_expansion, new_objective
        if 2 * int(unsolved.sum()) <= len(active):
            active, targets, X, penalty = active[unsolved], targets[unsolved], X[unsolved], penalty[unsolved]
            V, scores, objective = V[unsolved], scores[unsolved], objective[unsolved]
            expansion = loss.expand(targets, scores)
    if loss.separate:
        excess = torch.maximum(excess, _excess_bound(loss, all_targets, all_X, all_penalty, solution))
    return solution, excess[:, 0]


def _excess_bound(loss: Loss, targets: Tensor, X: Tensor, penalty: Tensor, solution: Tensor) -> Tensor:
    """Return a bound on the relative excess of each objective over its minimum, or 0 if the loss has full curvature."""
    expansion = loss.expand(targets, X @ solution)
    grad = penalty * solution + X.mT @ expansion.grad
    objective = expansion.value + loss.total(penalty * solution.square()) / 2
    is_flat = (expansion.diagonal > 0).sum(-2, keepdim=True) < X.shape[-1]
    return torch.where(is_flat, loss.total(grad.square() / penalty) / (2 * objective).clamp_min(1e-300), 0)


def _newton_step(
    loss: Loss,
    targets: Tensor,
    scores: Tensor,
    expansion: Expansion,
    X: Tensor,
    penalty: Tensor,
    grad: Tensor,
    squared_atol: Tensor,
) -> Tensor:
    """Solve (penalty + Xᵀ·Hessian·X) v = −grad approximately.

    The preconditioner is the diagonal penalty_j + w̄ ‖X_j‖², with columns X_j and the mean curvature w̄ of an output.
    Tasks that remain unsolved use a Cholesky factor of the matrix instead, if it has at most `_MAX_FACTORED` rows.
    """
    unknowns = grad.shape[-2] * (1 if loss.separate else grad.shape[-1])
    mean_curvature = expansion.diagonal.mean(-2, keepdim=True)
    diagonal = (penalty + X.square().sum(-2)[..., None] * mean_curvature).clamp_min(1e-300)
    step, solved = conjugate_gradients(
        _hessian_product(expansion, X, penalty),
        -grad,
        diagonal.reciprocal().mul,
        dim=loss.dims,
        squared_rtol=loss.cg_tolerance,
        squared_atol=squared_atol,
        max_steps=_CG_STEPS if unknowns <= _MAX_FACTORED else unknowns,
    )
    unsolved = (~solved).any(-1).any(-1).nonzero()[:, 0]
    if unknowns <= _MAX_FACTORED and len(unsolved):
        for chunk in unsolved.split(max(1, 2**24 // unknowns**2)):
            chunk_expansion = loss.expand(targets[chunk], scores[chunk])
            step[chunk] = _factored_newton_step(
                loss, chunk_expansion, X[chunk], penalty[chunk], grad[chunk], squared_atol[chunk]
            )
    return step


def _factored_newton_step(
    loss: Loss, expansion: Expansion, X: Tensor, penalty: Tensor, grad: Tensor, squared_atol: Tensor
) -> Tensor:
    """Solve as `_newton_step` does, with a Cholesky factor as preconditioner.

    Conjugate gradients correct its rounding errors.
    """
    tasks, r, outputs = grad.shape
    if loss.separate:
        hessian = (X.mT[:, None] * expansion.diagonal.mT[..., None, :]) @ X[:, None]
        hessian = hessian + torch.diag_embed(penalty.mT)
    else:
        eye = torch.eye(outputs, dtype=X.dtype, device=X.device)
        block_rows = []
        for unit_vector in eye:
            column = expansion.hvp(unit_vector.expand(*X.shape[:-1], outputs))
            block_rows.append(X.mT @ (column[..., None] * X[..., None, :]).flatten(-2))
        hessian = torch.stack(block_rows, 1).view(tasks, 1, outputs * r, outputs * r)
        hessian = hessian + torch.diag_embed(penalty[:, :, 0].repeat(1, outputs))[:, None]
    scale = hessian.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300).rsqrt()
    hessian = scale[..., :, None] * hessian * scale[..., None, :]
    hessian.diagonal(dim1=-2, dim2=-1).add_(1e-13)
    factor = torch.linalg.cholesky_ex(hessian).L

    def precondition(v: Tensor) -> Tensor:
        scaled_v = (scale * v.mT.reshape(scale.shape))[..., None]
        solution = (scale * torch.cholesky_solve(scaled_v, factor)[..., 0]).view(tasks, outputs, r).mT
        # Softmax is invariant to the mean over outputs. A penalty makes it 0, and 0 is chosen without a penalty.
        return solution if loss.separate else solution - solution.mean(-1, keepdim=True)

    step, _ = conjugate_gradients(
        _hessian_product(expansion, X, penalty),
        -grad,
        precondition,
        dim=loss.dims,
        squared_rtol=loss.cg_tolerance,
        squared_atol=squared_atol,
        max_steps=_CG_STEPS,
    )
    return step


def _hessian_product(expansion: Expansion, X: Tensor, penalty: Tensor) -> Matvec:
    """Return the function that multiplies penalty + Xᵀ·Hessian·X by a tensor shaped like V."""
    return lambda v: penalty * v + X.mT @ expansion.hvp(X @ v)
