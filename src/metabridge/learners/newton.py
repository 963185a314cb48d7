"""Newton's method with conjugate gradients for many small convex problems at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metabridge.conjugate import Product, conjugate_gradients

log = logging.getLogger("metabridge")
STEPS = 100


class Expansion(NamedTuple):
    """A loss to second order about some scores (tasks, points, outputs).

    `value` (tasks,) and `slope`, shaped like the scores; `curvature` multiplies by the Hessian, and
    `weight` is the Hessian's diagonal.
    """

    value: Tensor
    slope: Tensor
    curvature: Callable[[Tensor], Tensor]
    weight: Tensor


Loss = Callable[[Tensor], Expansion]


def cross_entropy(labels: Tensor, outputs: int) -> Loss:
    """Σ_n −log softmax(f_n)[y_n], whose Hessian at a point is diag(p) − ppᵀ.

    >>> import torch
    >>> loss = cross_entropy(torch.tensor([[0, 1]]), outputs=2)
    >>> loss(torch.zeros(1, 2, 2)).value
    tensor([1.3863])
    """
    truth = one_hot(labels, outputs)

    def expand(scores: Tensor) -> Expansion:
        logs = scores.log_softmax(-1)
        p = logs.exp()

        def curvature(direction: Tensor) -> Tensor:
            weighted = p * direction
            return weighted - p * weighted.sum(-1, keepdim=True)

        return Expansion(-(truth * logs).sum((-2, -1)), p - truth, curvature, p - p.square())

    return expand


def squared_hinge(labels: Tensor, outputs: int) -> Loss:
    """Σ_n Σ_k max(0, 1 − s_nk f_nk)² with s_nk = 1 where k = y_n and −1 elsewhere: one against the rest.

    >>> import torch
    >>> loss = squared_hinge(torch.tensor([[0, 1]]), outputs=2)
    >>> loss(torch.zeros(1, 2, 2)).value
    tensor([4.])
    """
    sign = 2 * one_hot(labels, outputs) - 1

    def expand(scores: Tensor) -> Expansion:
        short = (1 - sign * scores).clamp_min(0)
        weight = 2.0 * (short > 0).to(scores.dtype)
        return Expansion(short.square().sum((-2, -1)), -2 * sign * short, weight.mul, weight)

    return expand


def minimise(loss: Loss, points: Tensor, penalty: Tensor, outputs: int) -> Tensor:
    """Return V (tasks, r, outputs) that minimises ½ Σ_j penalty_j ‖V_j‖² + loss(points V) in every task.

    `points` is (tasks, n, r), float64, best with orthogonal columns: conjugate gradients are preconditioned
    by penalty_j + w̄ ‖column j‖², the Hessian's diagonal were all points of an output curved alike. A task's
    step is halved until its objective falls; the last step is shorter than 1e-5 of the solution and
    leaves at most about a hundredth of itself to go.
    """
    solution = points.new_zeros(len(points), points.shape[-1], outputs)
    scores = points @ solution
    penalty = penalty[:, None]
    strength = points.square().sum(-2)[..., None]
    here = loss(scores)
    height = here.value
    for _ in range(STEPS):
        gradient = penalty * solution + points.mT @ here.slope
        diagonal = (penalty + strength * here.weight.mean(-2, keepdim=True)).clamp_min(1e-300)
        step = _step(points, penalty, here.curvature, gradient, diagonal, 1e-24 * height[:, None, None])
        move = points @ step
        promise = 1e-4 * _dot(gradient, step)
        part = torch.ones_like(promise)
        for _ in range(40):
            trial, trial_scores = solution + part * step, scores + part * move
            there = loss(trial_scores)
            reached = there.value + (penalty * trial.square()).sum((-2, -1)) / 2
            higher = reached > height + (part * promise)[:, 0, 0] + 1e-12 * height
            if not higher.any():
                break
            part = torch.where(higher[:, None, None], part / 2, part)
        solution, scores, here, height = trial, trial_scores, there, reached
        if (_dot(step, step) <= 1e-10 * _dot(solution, solution)).all():
            return solution
    log.warning("Newton's method stopped after %d steps before every task was solved.", STEPS)
    return solution


def _step(
    points: Tensor, penalty: Tensor, curvature: Product, gradient: Tensor, diagonal: Tensor, floor: Tensor
) -> Tensor:
    """Solve (penalty + pointsᵀ·curvature·points) v = −gradient to a hundredth."""

    def product(v: Tensor) -> Tensor:
        return penalty * v + points.mT @ curvature(points @ v)

    unknown = gradient[0].numel()
    return conjugate_gradients(
        product, -gradient, diagonal.reciprocal().mul, over=(-2, -1), fall=1e-4, floor=floor, steps=unknown
    )[0]


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum((-2, -1), keepdim=True)
