"""Newton's method with conjugate gradients, for the linear classifiers of many small tasks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metabridge.conjugate_gradients import Matvec, conjugate_gradients

MAX_STEPS = 60  # maximum number of Newton steps
MAX_HINGE_STEPS = 20  # the same for the squared hinge; problems that do not converge are then solved in their duals
_DECREMENT_TOLERANCE = 1e-10  # stop after a step whose Newton decrement, relative to the objective, is at most this
_LINE_SEARCH_RATIO = 0.1  # the line search stops when the derivative is below this fraction of its initial value
_MAX_CG_STEPS = 60  # maximum number of conjugate-gradient steps with each preconditioner
_MAX_CHOLESKY_SIZE = 2048  # the Cholesky factor of a larger Hessian is not computed


class Expansion(NamedTuple):
    """The second-order expansion of a loss around the scores (tasks, n, outputs).

    Args:
        value: The loss, (tasks, 1, subproblems), see `Loss.separable`.
        grad: The gradient, with the shape of the scores.
        hvp: The function that multiplies the Hessian by a tensor with the shape of the scores.
        diagonal: The diagonal of the Hessian, with the shape of the scores.
    """

    value: Tensor
    grad: Tensor
    hvp: Callable[[Tensor], Tensor]
    diagonal: Tensor


class Loss(NamedTuple):
    """A loss function of one-hot labels and scores.

    Args:
        expand: The function that computes the expansion of the loss from one-hot labels and scores.
        separable: Whether the loss is a sum over outputs, so that each output is an independent subproblem. Otherwise
            each task has one subproblem.
        cg_tolerance: The relative tolerance of the squared residual in the linear system of a Newton step. Accurate
            steps pay off for a piecewise quadratic loss.
    """

    expand: Callable[[Tensor, Tensor], Expansion]
    separable: bool
    cg_tolerance: float

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of a tensor (tasks, n, outputs) that belong to one subproblem."""
        return (-2,) if self.separable else (-2, -1)

    def total(self, values: Tensor) -> Tensor:
        """Sum `values` over each subproblem, and keep the reduced dimensions with size 1."""
        return values.sum(self.dims, keepdim=True)


def _cross_entropy(targets: Tensor, scores: Tensor) -> Expansion:
    # Subtract the score of the true class, so that small probabilities of the other classes stay accurate.
    logits = scores - (targets * scores).sum(-1, keepdim=True)
    max_logit = logits.amax(-1, keepdim=True)
    exp_logits = (logits - max_logit).exp()
    wrong_exp_logits = exp_logits - targets * exp_logits  # 0 for the true class
    wrong_sum = wrong_exp_logits.sum(-1, keepdim=True)
    error_probability = wrong_sum / exp_logits.sum(-1, keepdim=True)
    p = exp_logits / exp_logits.sum(-1, keepdim=True)

    def hvp(direction: Tensor) -> Tensor:
        weighted = p * (direction - (targets * direction).sum(-1, keepdim=True))
        return weighted - p * weighted.sum(-1, keepdim=True)

    # log Σ exp(logits), where the logit of the true class is 0
    value = (max_logit + (wrong_sum + torch.expm1(-max_logit)).log1p()).sum((-2, -1), keepdim=True)
    diagonal = torch.where(targets > 0, p * error_probability, p - p.square())
    return Expansion(value, torch.where(targets > 0, -error_probability, p), hvp, diagonal)


def _squared_hinge(targets: Tensor, scores: Tensor) -> Expansion:
    sign = 2 * targets - 1
    violation = (1 - sign * scores).clamp_min(0)
    diagonal = 2.0 * (violation > 0).to(scores.dtype)
    return Expansion(violation.square().sum(-2, keepdim=True), -2 * sign * violation, diagonal.mul, diagonal)


# Σ_n −log softmax(f_n)[y_n], with the Hessian diag(p) − ppᵀ for each n, where p = softmax(f_n).
CROSS_ENTROPY = Loss(_cross_entropy, separable=False, cg_tolerance=1e-4)
# Σ_n Σ_k max(0, 1 − s_nk f_nk)² with s_nk = 1 if k = y_n and −1 otherwise: one-vs-rest.
SQUARED_HINGE = Loss(_squared_hinge, separable=True, cg_tolerance=1e-12)


def minimize(loss: Loss, labels: Tensor, X: Tensor, penalty: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Minimize ½ Σ_j penalty_j ‖V_j‖² + loss(XV) over V (tasks, r, outputs) with rows V_j.

    Args:
        loss: The loss.
        labels: The class labels, (tasks, n).
        X: The design matrices, (tasks, n, r), in float64. The method converges fastest if their columns are orthogonal.
        penalty: The penalty on each row of V, (tasks, r).
        outputs: The number of outputs, one for each class.

    Returns:
        V, and an estimate of the relative suboptimality of each subproblem, (tasks, subproblems): half the Newton
        decrement −⟨gradient, step⟩ before the last step, divided by the objective. If a separable loss has directions
        without curvature, in which rounding errors can hide the suboptimality, the estimate is at least the upper bound
        ½ Σ_j gradient_j² / penalty_j after the last step, divided by the objective.

    >>> import torch
    >>> X, labels = torch.tensor([[[1.0], [-1.0]]]).double(), torch.tensor([[0, 1]])
    >>> solution, suboptimality = minimize(SQUARED_HINGE, labels, X, torch.ones(1, 1).double(), outputs=2)
    >>> solution.round(decimals=6), bool((suboptimality < 1e-8).all())
    (tensor([[[ 0.8000, -0.8000]]], dtype=torch.float64), True)
    """
    targets = all_targets = one_hot(labels, outputs).to(X.dtype)
    penalty = all_penalty = penalty[..., None]
    all_X = X
    solution = X.new_zeros(len(X), X.shape[-1], outputs)
    # Indices of the tasks in the iteration. When at least half of these tasks are solved, the solved ones are dropped.
    active_tasks = torch.arange(len(X), device=X.device)
    V, scores = solution, X @ solution
    expansion = loss.expand(targets, scores)
    objective = expansion.value
    suboptimality = torch.zeros_like(objective)
    for _ in range(MAX_HINGE_STEPS if loss.separable else MAX_STEPS):
        grad = penalty * V + X.mT @ expansion.grad
        step = _newton_step(loss, targets, scores, expansion, X, penalty, grad, 1e-20 * objective)
        decrement = -loss.total(grad * step)
        score_step = X @ step
        # After a step of length t, the penalty term is constant + t · (linear + t · quadratic / 2).
        constant = loss.total(penalty * V.square()) / 2
        linear, quadratic = loss.total(penalty * V * step), loss.total(penalty * step.square())
        # Bisect the step length until the objective has decreased and its derivative along the step is small.
        length = torch.ones_like(decrement)
        min_length, max_length = torch.zeros_like(length), torch.full_like(length, torch.inf)
        is_last_step = decrement <= _DECREMENT_TOLERANCE * objective
        for _ in range(40):
            new_V, new_scores = V + length * step, scores + length * score_step
            new_expansion = loss.expand(targets, new_scores)
            new_objective = new_expansion.value + (constant + length * (linear + length * quadratic / 2))
            derivative = loss.total(new_expansion.grad * score_step) + linear + length * quadratic
            has_decreased = new_objective <= objective - 1e-4 * length * decrement + 1e-12 * objective
            too_long = ~has_decreased | (derivative > _LINE_SEARCH_RATIO * decrement)
            too_short = ~too_long & (derivative < -_LINE_SEARCH_RATIO * decrement) & ~is_last_step
            too_long &= ~(is_last_step & (new_objective <= objective))
            if not (too_long | too_short).any():
                break
            min_length = torch.where(too_short, length, min_length)
            max_length = torch.where(too_long, length, max_length)
            bisected_length = torch.where(max_length.isinf(), 2 * length, (min_length + max_length) / 2)
            length = torch.where(too_long | too_short, bisected_length, length)
        else:
            new_V = torch.where(too_long, V, new_V)  # any further decrease is below the rounding errors
            new_scores = torch.where(too_long, scores, new_scores)
            new_expansion = loss.expand(targets, new_scores)
            new_objective = torch.where(too_long, objective, new_objective)
        solution[active_tasks] = new_V
        suboptimality[active_tasks] = decrement / (2 * objective).clamp_min(1e-300)
        has_stalled = objective - new_objective <= 1e-12 * objective
        unsolved = ~(is_last_step | has_stalled).all(-1).all(-1)
        if not unsolved.any():
            break
        V, scores, expansion, objective = new_V, new_scores, new_expansion, new_objective
        if 2 * int(unsolved.sum()) <= len(active_tasks):
            active_tasks, targets, X, penalty = (tensor[unsolved] for tensor in (active_tasks, targets, X, penalty))
            V, scores, objective = V[unsolved], scores[unsolved], objective[unsolved]
            expansion = loss.expand(targets, scores)
    if loss.separable:
        bound = _suboptimality_bound(loss, all_targets, all_X, all_penalty, solution)
        suboptimality = torch.maximum(suboptimality, bound)
    return solution, suboptimality[:, 0]


def _suboptimality_bound(loss: Loss, targets: Tensor, X: Tensor, penalty: Tensor, solution: Tensor) -> Tensor:
    """Return an upper bound on the relative suboptimality of each subproblem, or 0 if its loss has full curvature."""
    expansion = loss.expand(targets, X @ solution)
    grad = penalty * solution + X.mT @ expansion.grad
    objective = expansion.value + loss.total(penalty * solution.square()) / 2
    has_flat_directions = (expansion.diagonal > 0).sum(-2, keepdim=True) < X.shape[-1]
    return torch.where(has_flat_directions, loss.total(grad.square() / penalty) / (2 * objective).clamp_min(1e-300), 0)


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
    """Solve (penalty + Xᵀ·Hessian·X) v = −grad approximately, by conjugate gradients.

    The preconditioner is the diagonal matrix with the entries penalty_j + w̄ ‖X_j‖², where X_j is a column of X and w̄
    the mean curvature of an output. Tasks that do not converge are solved again with a Cholesky factor as the
    preconditioner, if the matrix has at most `_MAX_CHOLESKY_SIZE` rows.
    """
    unknowns = grad.shape[-2] * (1 if loss.separable else grad.shape[-1])
    mean_curvature = expansion.diagonal.mean(-2, keepdim=True)
    diagonal = (penalty + X.square().sum(-2)[..., None] * mean_curvature).clamp_min(1e-300)
    step, solved = conjugate_gradients(
        _hessian_product(expansion, X, penalty),
        -grad,
        diagonal.reciprocal().mul,
        dim=loss.dims,
        squared_rtol=loss.cg_tolerance,
        squared_atol=squared_atol,
        max_steps=_MAX_CG_STEPS if unknowns <= _MAX_CHOLESKY_SIZE else unknowns,
    )
    unsolved = (~solved).any(-1).any(-1).nonzero()[:, 0]
    if unknowns <= _MAX_CHOLESKY_SIZE and len(unsolved):
        # The Hessians of a chunk have at most 2²⁴ entries, 128 MB.
        for chunk in unsolved.split(max(1, 2**24 // unknowns**2)):
            chunk_expansion = loss.expand(targets[chunk], scores[chunk])
            step[chunk] = _cholesky_newton_step(
                loss, chunk_expansion, X[chunk], penalty[chunk], grad[chunk], squared_atol[chunk]
            )
    return step


def _cholesky_newton_step(
    loss: Loss, expansion: Expansion, X: Tensor, penalty: Tensor, grad: Tensor, squared_atol: Tensor
) -> Tensor:
    """Solve the linear system of `_newton_step` with a Cholesky factor of its matrix as the preconditioner.

    The conjugate-gradient steps correct the rounding errors of the factor.
    """
    tasks, r, outputs = grad.shape
    if loss.separable:
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
    hessian.diagonal(dim1=-2, dim2=-1).add_(1e-13)  # so that the factorization of a singular Hessian succeeds
    factor = torch.linalg.cholesky_ex(hessian).L

    def precondition(v: Tensor) -> Tensor:
        scaled_v = (scale * v.mT.reshape(scale.shape))[..., None]
        solution = (scale * torch.cholesky_solve(scaled_v, factor)[..., 0]).view(tasks, outputs, r).mT
        # Softmax is invariant to the mean of a row over outputs. The penalty makes this mean 0; set it to 0 in rows
        # without penalty too.
        return solution if loss.separable else solution - solution.mean(-1, keepdim=True)

    step, _ = conjugate_gradients(
        _hessian_product(expansion, X, penalty),
        -grad,
        precondition,
        dim=loss.dims,
        squared_rtol=loss.cg_tolerance,
        squared_atol=squared_atol,
        max_steps=_MAX_CG_STEPS,
    )
    return step


def _hessian_product(expansion: Expansion, X: Tensor, penalty: Tensor) -> Matvec:
    """Return the function that multiplies penalty + Xᵀ·Hessian·X by a tensor with the shape of V."""
    return lambda v: penalty * v + X.mT @ expansion.hvp(X @ v)
