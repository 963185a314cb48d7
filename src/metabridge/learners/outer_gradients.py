"""The outer gradient of one task: how it treats the inner solve (the third column of the taxonomy).

A task lives in the space of what its method adapts. When all layers adapt, points are the raw
inputs and `start` holds every weight. When only the head adapts, or nothing, points are features
and `start` is the head; the gradient with respect to the features goes back into the body outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metabridge.autodiff import grad, grad_and_value, vjp
from metabridge.learners.inner_solvers import GradientDescent, Problem, Proximal
from metabridge.learners.method import Method
from metabridge.models.network import Params


class Task(NamedTuple):
    """One task: a support set to adapt on, a query set to be judged on."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor


class Leaves(NamedTuple):
    """What an outer gradient is taken with respect to. Points are () unless they are features."""

    start: Params
    extras: Params
    support_x: Tensor | tuple[()] = ()
    query_x: Tensor | tuple[()] = ()


T = TypeVar("T")
Apply = Callable[[Params, Tensor], Tensor]


def task_gradient(
    method: Method, apply: Apply, leaves: Leaves, task: Task, *, flat: bool = False
) -> tuple[Leaves, Tensor]:
    """Return one task's outer gradient, shaped like `leaves`, and its query loss.

    `flat` asks for the exact gradient with memory that does not grow with the number of steps.
    """
    if method.outer == "displacement":
        return _displacement(method, apply, leaves, task)
    if method.outer == "implicit" and isinstance(method.inner, Proximal):
        return _implicit(method, method.inner, apply, leaves, task)
    if flat and method.outer == "exact" and isinstance(method.inner, GradientDescent | Proximal):
        return _backward_over_steps(method, method.inner, apply, leaves, task)

    def objective(leaves: Leaves) -> Tensor:
        adapted = leaves.start
        if method.inner is not None:
            problem = Problem(apply, method.loss, _points(leaves.support_x, task.support_x), task.support_y)
            exact = method.outer != "first-order"
            adapted = method.inner.solve(problem, leaves.start, leaves.extras, exact=exact)
        return _judge(method, apply, adapted, leaves.query_x, task)

    return grad_and_value(objective, leaves)


def _backward_over_steps(
    method: Method, solver: GradientDescent | Proximal, apply: Apply, leaves: Leaves, task: Task
) -> tuple[Leaves, Tensor]:
    """The exact gradient from the inner iterates alone: v ← (∂step)ᵀv, from the last step to the first.

    Each step is run again when its turn comes, so the graph of a single step is all that ever exists:
    for gradient descent this accumulates the Hessian-vector products v ← v − α∇²ℓ v.
    """

    def step(params: Params, start: Params, extras: Params, support_x: Tensor | tuple[()]) -> Params:
        problem = Problem(apply, method.loss, _points(support_x, task.support_x), task.support_y)
        return solver.step(problem, params, start, extras, exact=True)

    iterates = [leaves.start]
    for _ in range(solver.steps):
        iterates.append(step(iterates[-1], leaves.start, leaves.extras, leaves.support_x))
    (slope, query_x), loss = _query_gradient(method, apply, iterates.pop(), leaves, task)
    start, extras, support_x = tree_map(torch.zeros_like, tuple(leaves[:3]))
    while iterates:
        slope, *more = vjp(step, iterates.pop(), leaves.start, leaves.extras, leaves.support_x)(slope)
        start, extras, support_x = _add((start, extras, support_x), tuple(more))
    return Leaves(_add(start, slope), extras, support_x, query_x), loss


def _implicit(method: Method, solver: Proximal, apply: Apply, leaves: Leaves, task: Task) -> tuple[Leaves, Tensor]:
    """iMAML: at the proximal minimum ∇ℓ(θ') + λ(θ' − θ) = 0, so dθ'/dθ = (I + H/λ)⁻¹ (A tab. 1)."""
    problem = Problem(apply, method.loss, _points(leaves.support_x, task.support_x), task.support_y)
    adapted = solver.solve(problem, leaves.start, leaves.extras, exact=False)
    (slope, query_x), loss = _query_gradient(method, apply, adapted, leaves, task)

    def support_slope(params: Params, support_x: Tensor | tuple[()]) -> Params:
        moved = Problem(apply, method.loss, _points(support_x, task.support_x), task.support_y)
        return grad(moved.value, params)

    pull = vjp(support_slope, adapted, leaves.support_x)  # the Hessian is symmetric: its pull-back is Hv

    def curve(v: Params) -> Params:
        return _add(v, _scaled(pull(v)[0], 1 / solver.strength))

    solution = conjugate_gradient(curve, slope, solver.cg_steps)
    support_x: Tensor | tuple[()] = ()
    if isinstance(leaves.support_x, Tensor):  # how the support's features move the minimum
        support_x = -pull(solution)[1] / solver.strength
    return Leaves(solution, {}, support_x, query_x), loss


def _displacement(method: Method, apply: Apply, leaves: Leaves, task: Task) -> tuple[Leaves, Tensor]:
    """Reptile's θ − θ'; λ(θ − θ') is the gradient of the Moreau envelope, Meta-MinibatchProx's (A tab. 1)."""
    assert method.inner is not None
    problem = Problem(apply, method.loss, task.support_x, task.support_y)
    adapted = method.inner.solve(problem, leaves.start, leaves.extras, exact=False)
    weight = method.inner.strength if isinstance(method.inner, Proximal) else 1.0
    gap = {name: weight * (value - adapted[name]) for name, value in leaves.start.items()}
    extras = {name: torch.zeros_like(value) for name, value in leaves.extras.items()}
    return Leaves(gap, extras), _judge(method, apply, adapted, (), task)


def conjugate_gradient(matrix: Callable[[Params], Params], target: Params, steps: int) -> Params:
    """Solve `matrix(v) = target` for a positive definite `matrix`, in a fixed number of steps.

    A task whose residual has vanished stays where it is, so that tasks can be solved side by side.
    """
    solution = {name: torch.zeros_like(value) for name, value in target.items()}
    residual, direction = target, target
    size = _dot(residual, residual)
    for _ in range(steps):
        image = matrix(direction)
        curvature = _dot(direction, image)
        safe = curvature > 0
        rate = torch.where(safe, size / torch.where(safe, curvature, torch.ones_like(curvature)), 0.0)
        solution = {name: solution[name] + rate * direction[name] for name in solution}
        residual = {name: residual[name] - rate * image[name] for name in residual}
        smaller = _dot(residual, residual)
        turn = torch.where(size > 0, smaller / torch.where(size > 0, size, torch.ones_like(size)), 0.0)
        direction = {name: residual[name] + turn * direction[name] for name in direction}
        size = smaller
    return solution


def _query_gradient(
    method: Method, apply: Apply, adapted: Params, leaves: Leaves, task: Task
) -> tuple[tuple[Params, Tensor | tuple[()]], Tensor]:
    def judge(adapted_and_query: tuple[Params, Tensor | tuple[()]]) -> Tensor:
        return _judge(method, apply, *adapted_and_query, task)

    return grad_and_value(judge, (adapted, leaves.query_x))


def _judge(method: Method, apply: Apply, adapted: Params, query_x: Tensor | tuple[()], task: Task) -> Tensor:
    return method.loss(apply(adapted, _points(query_x, task.query_x)), task.query_y)


def _points(leaf: Tensor | tuple[()], constant: Tensor) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else constant


def _add(left: T, right: T) -> T:
    return tree_map(torch.add, left, right)  # type: ignore[no-any-return]


def _scaled(params: Params, factor: float) -> Params:
    return {name: factor * value for name, value in params.items()}


def _dot(left: Params, right: Params) -> Tensor:
    return torch.stack([(left[name] * right[name]).sum() for name in left]).sum()
