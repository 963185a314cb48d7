"""Newton's method with conjugate gradients for many small convex problems at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metabridge.conjugate_gradients import Product, conjugate_gradients

STEPS = 60
HINGE_STEPS = 20  # Problems that are not solved by then go to their duals.
_DECREMENT = 1e-10  # Newton decrement, relative to the objective, at which the step to come is the last.
_FLAT = 0.1  # Share of its first slope along a step at which the line search ends.
_CHEAP = 60  # Steps of conjugate gradients before a factor of the Hessian replaces its diagonal as preconditioner.
_DENSE = 2048  # The largest Hessian that is factored.


class Expansion(NamedTuple):
    """A loss to second order about some scores (tasks, points, outputs).

    `value` (tasks, 1, problems) and `slope`, shaped like the scores; `curvature` multiplies by the Hessian, and
    `weight` is the Hessian's diagonal.
    """

    value: Tensor
    slope: Tensor
    curvature: Callable[[Tensor], Tensor]
    weight: Tensor


class Loss(NamedTuple):
    """A loss of one-hot labels and scores; if `separate`, every output is a problem by itself.

    Newton steps are solved until the squared residual has fallen to the share `fall`: where the loss is quadratic but
    for kinks, a step to the end pays.
    """

    expand: Callable[[Tensor, Tensor], Expansion]
    separate: bool
    fall: float

    @property
    def over(self) -> tuple[int, ...]:
        """The dimensions of one problem in a tensor (tasks, ..., outputs)."""
        return (-2,) if self.separate else (-2, -1)

    def total(self, values: Tensor) -> Tensor:
        """Sum over the dimensions of every problem, which are kept."""
        return values.sum(self.over, keepdim=True)


def _cross_entropy(truth: Tensor, scores: Tensor) -> Expansion:
    # Relative to the score of the true class: what is tiny where a point is classified well is then exact to rounding.
    margin = scores - (truth * scores).sum(-1, keepdim=True)
    top = margin.amax(-1, keepdim=True)
    odds = (margin - top).exp()
    wrong = odds - truth * odds
    others = wrong.sum(-1, keepdim=True)
    rest = others / odds.sum(-1, keepdim=True)
    p = odds / odds.sum(-1, keepdim=True)

    def curvature(direction: Tensor) -> Tensor:
        weighted = p * (direction - (truth * direction).sum(-1, keepdim=True))
        return weighted - p * weighted.sum(-1, keepdim=True)

    value = (top + (others + torch.expm1(-top)).log1p()).sum((-2, -1), keepdim=True)
    weight = torch.where(truth > 0, p * rest, p - p.square())
    return Expansion(value, torch.where(truth > 0, -rest, p), curvature, weight)


def _squared_hinge(truth: Tensor, scores: Tensor) -> Expansion:
    sign = 2 * truth - 1
    short = (1 - sign * scores).clamp_min(0)
    weight = 2.0 * (short > 0).to(scores.dtype)
    return Expansion(short.square().sum(-2, keepdim=True), -2 * sign * short, weight.mul, weight)


# Σ_n −log softmax(f_n)[y_n], whose Hessian at a point is diag(p) − ppᵀ.
CROSS_ENTROPY = Loss(_cross_entropy, separate=False, fall=1e-4)
# Σ_n Σ_k max(0, 1 − s_nk f_nk)² with s_nk = 1 where k = y_n and −1 elsewhere: one against the rest.
SQUARED_HINGE = Loss(_squared_hinge, separate=True, fall=1e-12)


def minimise(loss: Loss, labels: Tensor, points: Tensor, penalty: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Return V (tasks, r, outputs) that minimises ½ Σ_j penalty_j ‖V_j‖² + loss(points V), and how much is missing.

    `points` is (tasks, n, r), float64, best with orthogonal columns; `penalty` is (tasks, r). What is missing, (tasks,
    problems), is half the Newton decrement −⟨gradient, step⟩ over the objective, before the last step: an estimate of
    how far above its minimum the objective was. Where the loss leaves directions without curvature, in which rounding
    can hide what is left, it is at least the bound ½ Σ_j gradient_j² / penalty_j after the last step.

    >>> import torch
    >>> points, labels = torch.tensor([[[1.0], [-1.0]]]).double(), torch.tensor([[0, 1]])
    >>> solution, missing = minimise(SQUARED_HINGE, labels, points, torch.ones(1, 1).double(), outputs=2)
    >>> solution.round(decimals=6), bool((missing < 1e-8).all())
    (tensor([[[ 0.8000, -0.8000]]], dtype=torch.float64), True)
    """
    truth = all_truth = one_hot(labels, outputs).to(points.dtype)
    penalty = all_penalty = penalty[..., None]
    all_points = points
    solution = points.new_zeros(len(points), points.shape[-1], outputs)
    rows = torch.arange(len(points), device=points.device)
    here, scores = solution, points @ solution
    loss_here = loss.expand(truth, scores)
    height = loss_here.value
    missing = torch.zeros_like(height)
    for _ in range(HINGE_STEPS if loss.separate else STEPS):
        gradient = penalty * here + points.mT @ loss_here.slope
        step = _step(loss, truth, scores, loss_here, points, penalty, gradient, 1e-20 * height)
        decrement = -loss.total(gradient * step)
        move = points @ step
        rest = loss.total(penalty * here.square()) / 2
        pull, bend = loss.total(penalty * here * step), loss.total(penalty * step.square())
        # Bisect until the objective has fallen and most of its slope along the step is gone.
        part, least, most = (
            torch.ones_like(decrement),
            torch.zeros_like(decrement),
            torch.full_like(decrement, torch.inf),
        )
        final = decrement <= _DECREMENT * height
        for _ in range(40):
            there, scores_there = here + part * step, scores + part * move
            loss_there = loss.expand(truth, scores_there)
            reached = loss_there.value + (rest + part * (pull + part * bend / 2))
            slope = loss.total(loss_there.slope * move) + pull + part * bend
            far = ~(reached <= height - 1e-4 * part * decrement + 1e-12 * height) | (slope > _FLAT * decrement)
            near = ~far & (slope < -_FLAT * decrement) & ~final
            far &= ~(final & (reached <= height))
            if not (far | near).any():
                break
            least, most = torch.where(near, part, least), torch.where(far, part, most)
            part = torch.where(far | near, torch.where(most.isinf(), 2 * part, (least + most) / 2), part)
        else:
            there = torch.where(far, here, there)  # rounding hides what is left to gain
            scores_there = torch.where(far, scores, scores_there)
            loss_there = loss.expand(truth, scores_there)
            reached = torch.where(far, height, reached)
        solution[rows], missing[rows] = there, decrement / (2 * height).clamp_min(1e-300)
        solved = (decrement <= _DECREMENT * height) | (height - reached <= 1e-12 * height)
        going = ~solved.all(-1).all(-1)
        if not going.any():
            break
        here, scores, loss_here, height = there, scores_there, loss_there, reached
        if 2 * int(going.sum()) <= len(rows):
            rows, truth, points, penalty = rows[going], truth[going], points[going], penalty[going]
            here, scores, height = here[going], scores[going], height[going]
            loss_here = loss.expand(truth, scores)
    if loss.separate:
        missing = torch.maximum(missing, _bound(loss, all_truth, all_points, all_penalty, solution))
    return solution, missing[:, 0]


def _bound(loss: Loss, truth: Tensor, points: Tensor, penalty: Tensor, solution: Tensor) -> Tensor:
    """Return by how much, relative to it, an objective can be above its minimum, or 0 where the loss is curved."""
    here = loss.expand(truth, points @ solution)
    gradient = penalty * solution + points.mT @ here.slope
    height = here.value + loss.total(penalty * solution.square()) / 2
    flat = (here.weight > 0).sum(-2, keepdim=True) < points.shape[-1]
    return torch.where(flat, loss.total(gradient.square() / penalty) / (2 * height).clamp_min(1e-300), 0)


def _step(
    loss: Loss,
    truth: Tensor,
    scores: Tensor,
    here: Expansion,
    points: Tensor,
    penalty: Tensor,
    gradient: Tensor,
    floor: Tensor,
) -> Tensor:
    """Solve (penalty + pointsᵀ·curvature·points) v = −gradient to a hundredth.

    The preconditioner is penalty_j + w̄ ‖column j‖², the Hessian's diagonal were all points of an output curved alike.
    Tasks for which this is not enough get a factor of their Hessian instead.
    """

    unknown = gradient.shape[-2] * (1 if loss.separate else gradient.shape[-1])
    diagonal = (penalty + points.square().sum(-2)[..., None] * here.weight.mean(-2, keepdim=True)).clamp_min(1e-300)
    step, solved = conjugate_gradients(
        _hessian(here, points, penalty),
        -gradient,
        diagonal.reciprocal().mul,
        dim=loss.over,
        tolerance=loss.fall,
        floor=floor,
        steps=_CHEAP if unknown <= _DENSE else unknown,
    )
    hard = (~solved).any(-1).any(-1).nonzero()[:, 0]
    if unknown <= _DENSE and len(hard):
        for some in hard.split(max(1, 2**24 // unknown**2)):
            expansion = loss.expand(truth[some], scores[some])
            step[some] = _factored_step(loss, expansion, points[some], penalty[some], gradient[some], floor[some])
    return step


def _factored_step(
    loss: Loss, here: Expansion, points: Tensor, penalty: Tensor, gradient: Tensor, floor: Tensor
) -> Tensor:
    """Do what `_step` does with a Cholesky factor of the Hessian as preconditioner, which rounding makes inexact."""
    tasks, r, outputs = gradient.shape
    if loss.separate:
        hessian = (points.mT[:, None] * here.weight.mT[..., None, :]) @ points[:, None]
        hessian = hessian + torch.diag_embed(penalty.mT)
    else:
        eye = torch.eye(outputs, dtype=points.dtype, device=points.device)
        rows = []
        for unit in eye:
            bent = here.curvature(unit.expand(*points.shape[:-1], outputs))
            rows.append(points.mT @ (bent[..., None] * points[..., None, :]).flatten(-2))
        hessian = torch.stack(rows, 1).view(tasks, 1, outputs * r, outputs * r)
        hessian = hessian + torch.diag_embed(penalty[:, :, 0].repeat(1, outputs))[:, None]
    scale = hessian.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300).rsqrt()
    hessian = scale[..., :, None] * hessian * scale[..., None, :]
    hessian.diagonal(dim1=-2, dim2=-1).add_(1e-13)
    factor = torch.linalg.cholesky_ex(hessian).L

    def precondition(v: Tensor) -> Tensor:
        right = (scale * v.mT.reshape(scale.shape))[..., None]
        solved = (scale * torch.cholesky_solve(right, factor)[..., 0]).view(tasks, outputs, r).mT
        # Softmax does not see what all outputs have in common, and the penalty wants none of it.
        return solved if loss.separate else solved - solved.mean(-1, keepdim=True)

    product = _hessian(here, points, penalty)
    step, _ = conjugate_gradients(
        product, -gradient, precondition, dim=loss.over, tolerance=loss.fall, floor=floor, steps=_CHEAP
    )
    return step


def _hessian(here: Expansion, points: Tensor, penalty: Tensor) -> Product:
    """Return the product with penalty + pointsᵀ·curvature·points."""
    return lambda v: penalty * v + points.mT @ here.curvature(points @ v)
