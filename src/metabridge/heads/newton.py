"""Newton's method with conjugate gradients for many small convex problems at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metabridge.conjugate_gradients import Product, conjugate_gradients

STEPS = 60
HINGE_STEPS = 20  # squared-hinge problems that are unsolved after these steps are solved in their duals
_LAST_DECREMENT = 1e-10  # Newton decrement, relative to the objective, from which on a step is the last one
_DERIVATIVE_SHARE = 0.1  # the line search ends when the derivative along the step is below this share of the first
_CG_STEPS = 60  # conjugate-gradient steps before a factor of the Hessian replaces its diagonal as preconditioner
_LARGEST_FACTORED = 2048  # the largest Hessian that is factored


class Expansion(NamedTuple):
    """A loss to second order around some scores (tasks, points, outputs).

    Args:
        value: The loss, (tasks, 1, problems).
        grad: The gradient, shaped like the scores.
        hvp: The product of the Hessian with a direction shaped like the scores.
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
        cg_tolerance: The relative tolerance on the squared residual of Newton steps. Where the loss is quadratic except
            for kinks, precise steps pay.
    """

    expand: Callable[[Tensor, Tensor], Expansion]
    separate: bool
    cg_tolerance: float

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of one problem in a tensor (tasks, ..., outputs)."""
        return (-2,) if self.separate else (-2, -1)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the dimensions of every problem, which stay with size 1."""
        return values.sum(self.dims, keepdim=True)


def _cross_entropy(truth: Tensor, scores: Tensor) -> Expansion:
    # Scores relative to that of the true class: small probabilities of other classes are then exact to rounding.
    margin = scores - (truth * scores).sum(-1, keepdim=True)
    top = margin.amax(-1, keepdim=True)
    odds = (margin - top).exp()
    wrong = odds - truth * odds
    wrong_sum = wrong.sum(-1, keepdim=True)
    wrong_share = wrong_sum / odds.sum(-1, keepdim=True)
    p = odds / odds.sum(-1, keepdim=True)

    def hvp(direction: Tensor) -> Tensor:
        weighted = p * (direction - (truth * direction).sum(-1, keepdim=True))
        return weighted - p * weighted.sum(-1, keepdim=True)

    value = (top + (wrong_sum + torch.expm1(-top)).log1p()).sum((-2, -1), keepdim=True)
    diagonal = torch.where(truth > 0, p * wrong_share, p - p.square())
    return Expansion(value, torch.where(truth > 0, -wrong_share, p), hvp, diagonal)


def _squared_hinge(truth: Tensor, scores: Tensor) -> Expansion:
    sign = 2 * truth - 1
    shortfall = (1 - sign * scores).clamp_min(0)
    diagonal = 2.0 * (shortfall > 0).to(scores.dtype)
    return Expansion(shortfall.square().sum(-2, keepdim=True), -2 * sign * shortfall, diagonal.mul, diagonal)


# Σ_n −log softmax(f_n)[y_n], whose Hessian at a point is diag(p) − ppᵀ.
CROSS_ENTROPY = Loss(_cross_entropy, separate=False, cg_tolerance=1e-4)
# Σ_n Σ_k max(0, 1 − s_nk f_nk)² with s_nk = 1 where k = y_n and −1 elsewhere: one-vs-rest.
SQUARED_HINGE = Loss(_squared_hinge, separate=True, cg_tolerance=1e-12)


def minimize(loss: Loss, labels: Tensor, points: Tensor, penalty: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Return V (tasks, r, outputs) that minimizes ½ Σ_j penalty_j ‖V_j‖² + loss(points V), and its relative excess.

    Args:
        loss: The loss.
        labels: The classes, (tasks, n).
        points: (tasks, n, r), in float64, best with orthogonal columns.
        penalty: The penalty on each row of V, (tasks, r).
        outputs: The number of classes.

    Returns:
        V, and an estimate of how far each objective is above its minimum, relative to it, (tasks, problems): half the
        Newton decrement −⟨gradient, step⟩ before the last step. If the loss has directions without curvature, in which
        rounding can hide an excess, it is at least the bound ½ Σ_j gradient_j² / penalty_j after the last step.

    >>> import torch
    >>> points, labels = torch.tensor([[[1.0], [-1.0]]]).double(), torch.tensor([[0, 1]])
    >>> solution, excess = minimize(SQUARED_HINGE, labels, points, torch.ones(1, 1).double(), outputs=2)
    >>> solution.round(decimals=6), bool((excess < 1e-8).all())
    (tensor([[[ 0.8000, -0.8000]]], dtype=torch.float64), True)
    """
    truth = all_truth = one_hot(labels, outputs).to(points.dtype)
    penalty = all_penalty = penalty[..., None]
    all_points = points
    solution = points.new_zeros(len(points), points.shape[-1], outputs)
    rows = torch.arange(len(points), device=points.device)  # the tasks that are still iterated
    V, scores = solution, points @ solution
    expansion = loss.expand(truth, scores)
    objective = expansion.value
    excess = torch.zeros_like(objective)
    for _ in range(HINGE_STEPS if loss.separate else STEPS):
        grad = penalty * V + points.mT @ expansion.grad
        step = _newton_step(loss, truth, scores, expansion, points, penalty, grad, 1e-20 * objective)
        decrement = -loss.total(grad * step)
        score_step = points @ step
        # The penalty along the step is norm + t · (linear + t · quadratic / 2).
        norm = loss.total(penalty * V.square()) / 2
        linear, quadratic = loss.total(penalty * V * step), loss.total(penalty * step.square())
        # Bisect the step length until the objective has decreased and its derivative along the step is small.
        length, least, most = (
            torch.ones_like(decrement),
            torch.zeros_like(decrement),
            torch.full_like(decrement, torch.inf),
        )
        last = decrement <= _LAST_DECREMENT * objective
        for _ in range(40):
            new_V, new_scores = V + length * step, scores + length * score_step
            new_expansion = loss.expand(truth, new_scores)
            new_objective = new_expansion.value + (norm + length * (linear + length * quadratic / 2))
            derivative = loss.total(new_expansion.grad * score_step) + linear + length * quadratic
            sufficient = new_objective <= objective - 1e-4 * length * decrement + 1e-12 * objective
            too_long = ~sufficient | (derivative > _DERIVATIVE_SHARE * decrement)
            too_short = ~too_long & (derivative < -_DERIVATIVE_SHARE * decrement) & ~last
            too_long &= ~(last & (new_objective <= objective))
            if not (too_long | too_short).any():
                break
            least, most = torch.where(too_short, length, least), torch.where(too_long, length, most)
            bisected = torch.where(most.isinf(), 2 * length, (least + most) / 2)
            length = torch.where(too_long | too_short, bisected, length)
        else:
            new_V = torch.where(too_long, V, new_V)  # rounding hides what is left to gain
            new_scores = torch.where(too_long, scores, new_scores)
            new_expansion = loss.expand(truth, new_scores)
            new_objective = torch.where(too_long, objective, new_objective)
        solution[rows], excess[rows] = new_V, decrement / (2 * objective).clamp_min(1e-300)
        solved = (decrement <= _LAST_DECREMENT * objective) | (objective - new_objective <= 1e-12 * objective)
        unsolved = ~solved.all(-1).all(-1)
        if not unsolved.any():
            break
        V, scores, expansion, objective = new_V, new_scores, new_expansion, new_objective
        if 2 * int(unsolved.sum()) <= len(rows):
            rows, truth, points, penalty = rows[unsolved], truth[unsolved], points[unsolved], penalty[unsolved]
            V, scores, objective = V[unsolved], scores[unsolved], objective[unsolved]
            expansion = loss.expand(truth, scores)
    if loss.separate:
        excess = torch.maximum(excess, _excess_bound(loss, all_truth, all_points, all_penalty, solution))
    return solution, excess[:, 0]


def _excess_bound(loss: Loss, truth: Tensor, points: Tensor, penalty: Tensor, solution: Tensor) -> Tensor:
    """Return a bound on the relative excess of an objective over its minimum, or 0 where the loss is curved."""
    expansion = loss.expand(truth, points @ solution)
    grad = penalty * solution + points.mT @ expansion.grad
    objective = expansion.value + loss.total(penalty * solution.square()) / 2
    flat = (expansion.diagonal > 0).sum(-2, keepdim=True) < points.shape[-1]
    return torch.where(flat, loss.total(grad.square() / penalty) / (2 * objective).clamp_min(1e-300), 0)


def _newton_step(
    loss: Loss,
    truth: Tensor,
    scores: Tensor,
    expansion: Expansion,
    points: Tensor,
    penalty: Tensor,
    grad: Tensor,
    floor: Tensor,
) -> Tensor:
    """Solve (penalty + pointsᵀ·Hessian·points) v = −grad approximately.

    The preconditioner is the diagonal penalty_j + w̄ ‖column j‖², with w̄ the mean curvature of an output. If this does
    not suffice, a task gets a factor of its Hessian instead.
    """
    unknowns = grad.shape[-2] * (1 if loss.separate else grad.shape[-1])
    mean_curvature = expansion.diagonal.mean(-2, keepdim=True)
    diagonal = (penalty + points.square().sum(-2)[..., None] * mean_curvature).clamp_min(1e-300)
    step, solved = conjugate_gradients(
        _hessian_product(expansion, points, penalty),
        -grad,
        diagonal.reciprocal().mul,
        dim=loss.dims,
        tolerance=loss.cg_tolerance,
        floor=floor,
        steps=_CG_STEPS if unknowns <= _LARGEST_FACTORED else unknowns,
    )
    unsolved = (~solved).any(-1).any(-1).nonzero()[:, 0]
    if unknowns <= _LARGEST_FACTORED and len(unsolved):
        for chunk in unsolved.split(max(1, 2**24 // unknowns**2)):
            part = loss.expand(truth[chunk], scores[chunk])
            step[chunk] = _factored_newton_step(loss, part, points[chunk], penalty[chunk], grad[chunk], floor[chunk])
    return step


def _factored_newton_step(
    loss: Loss, expansion: Expansion, points: Tensor, penalty: Tensor, grad: Tensor, floor: Tensor
) -> Tensor:
    """Return the Newton step with a Cholesky factor of the Hessian, inexact by rounding, as preconditioner."""
    tasks, r, outputs = grad.shape
    if loss.separate:
        hessian = (points.mT[:, None] * expansion.diagonal.mT[..., None, :]) @ points[:, None]
        hessian = hessian + torch.diag_embed(penalty.mT)
    else:
        eye = torch.eye(outputs, dtype=points.dtype, device=points.device)
        rows = []
        for unit in eye:
            column = expansion.hvp(unit.expand(*points.shape[:-1], outputs))
            rows.append(points.mT @ (column[..., None] * points[..., None, :]).flatten(-2))
        hessian = torch.stack(rows, 1).view(tasks, 1, outputs * r, outputs * r)
        hessian = hessian + torch.diag_embed(penalty[:, :, 0].repeat(1, outputs))[:, None]
    scale = hessian.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300).rsqrt()
    hessian = scale[..., :, None] * hessian * scale[..., None, :]
    hessian.diagonal(dim1=-2, dim2=-1).add_(1e-13)
    factor = torch.linalg.cholesky_ex(hessian).L

    def precondition(v: Tensor) -> Tensor:
        right = (scale * v.mT.reshape(scale.shape))[..., None]
        solution = (scale * torch.cholesky_solve(right, factor)[..., 0]).view(tasks, outputs, r).mT
        # Softmax does not see the mean over outputs, and the penalty makes it 0.
        return solution if loss.separate else solution - solution.mean(-1, keepdim=True)

    step, _ = conjugate_gradients(
        _hessian_product(expansion, points, penalty),
        -grad,
        precondition,
        dim=loss.dims,
        tolerance=loss.cg_tolerance,
        floor=floor,
        steps=_CG_STEPS,
    )
    return step


def _hessian_product(expansion: Expansion, points: Tensor, penalty: Tensor) -> Product:
    """Return the product with penalty + pointsᵀ·Hessian·points."""
    return lambda v: penalty * v + points.mT @ expansion.hvp(points @ v)
