"""Rules for the outer gradient of one task, such as "exact" or "first-order".

If all layers adapt, `Task` contains the network's inputs, and `Leaves.initial_params` the initial values of all
parameters that adapt. Otherwise `Task` contains features, and `Leaves.initial_params` is the initial head; the gradient
with respect to the features is propagated into the network's body afterwards.

To add an outer gradient, decorate a function with `outer_rule`, and add its name to `outer_rules` of the solvers that
support it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metabridge.autodiff import grad_and_value, vjp
from metabridge.conjugate_gradients import conjugate_gradients_fixed_steps
from metabridge.models.network import Params
from metabridge.solvers import IterativeSolver, Problem

if TYPE_CHECKING:
    from metabridge.learners.method import Method


class Task(NamedTuple):
    """One task: a support set to adapt on and a query set for the loss after adaptation."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor


class Leaves(NamedTuple):
    """The variables with respect to which the outer gradient is computed.

    `initial_params` are the initial values of the parameters that adapt, and `solver_params` the learned parameters of
    the solver. `support_x` and `query_x` are features, or () if all layers adapt, since inputs need no gradient.
    """

    initial_params: Params
    solver_params: Params
    support_x: Tensor | tuple[()] = ()
    query_x: Tensor | tuple[()] = ()


T = TypeVar("T")
Apply = Callable[[Params, Tensor], Tensor]  # returns the outputs for parameters and inputs (or features)


class OuterGradient(Protocol):
    """A function that returns the outer gradient of one task, with the structure of `leaves`, and its query loss."""

    def __call__(
        self, method: Method, apply: Apply, leaves: Leaves, task: Task, *, flat: bool
    ) -> tuple[Leaves, Tensor]:
        """Return the gradient and the loss; see `task_gradient` for the arguments."""


class OuterRule(NamedTuple):
    """An outer gradient and its properties.

    Args:
        gradient: The function that computes it.
        second_order: Whether it needs second derivatives of the network if all layers adapt.
        all_layers: Whether it can be used only if all layers adapt; it is zero for parameters that do not adapt.
        learns_solver_params: Whether it trains the solver's parameters, such as learned step sizes.
    """

    gradient: OuterGradient
    second_order: bool = False
    all_layers: bool = False
    learns_solver_params: bool = True


OUTER_RULES: dict[str, OuterRule] = {}


def outer_rule(
    name: str, *, second_order: bool = False, all_layers: bool = False, learns_solver_params: bool = True
) -> Callable[[OuterGradient], OuterGradient]:
    """Register a function in `OUTER_RULES`; see `OuterRule` for the arguments."""

    def register(gradient: OuterGradient) -> OuterGradient:
        OUTER_RULES[name] = OuterRule(gradient, second_order, all_layers, learns_solver_params)
        return gradient

    return register


def task_gradient(
    method: Method, apply: Apply, leaves: Leaves, task: Task, *, flat: bool = False
) -> tuple[Leaves, Tensor]:
    """Return the outer gradient of one task, with the structure of `leaves`, and its query loss.

    Args:
        method: The method, whose `outer` names the rule.
        apply: Returns the outputs for parameters and inputs (or features).
        leaves: The variables with respect to which the gradient is computed.
        task: The task.
        flat: Whether to save memory: to keep only the parameters after each inner step, instead of the autograd graph
            of all steps, and to recompute each step in the backward pass. Only exact gradients use it.
    """
    return OUTER_RULES[method.outer].gradient(method, apply, leaves, task, flat=flat)


@outer_rule("exact", second_order=True)
def exact_gradient(method: Method, apply: Apply, leaves: Leaves, task: Task, *, flat: bool) -> tuple[Leaves, Tensor]:
    """Differentiate through the inner solve."""
    if flat and isinstance(method.inner, IterativeSolver):
        return _backward_over_steps(method, method.inner, apply, leaves, task)
    return _differentiate_solve(method, apply, leaves, task, exact=True)


@outer_rule("first-order")
def first_order_gradient(
    method: Method, apply: Apply, leaves: Leaves, task: Task, *, flat: bool
) -> tuple[Leaves, Tensor]:
    """Differentiate through the inner solve, treating inner gradients and support features as constants."""
    return _differentiate_solve(method, apply, leaves, task, exact=False)


@outer_rule("implicit", second_order=True)
def implicit_gradient(method: Method, apply: Apply, leaves: Leaves, task: Task, *, flat: bool) -> tuple[Leaves, Tensor]:
    """Solve the linear system of the optimality conditions of the inner problem.

    If the solver's `implicit_system` is None, the backward pass of `solve` already solves this system. The minimum θ'
    of the proximal problem with initial parameters θ and strength λ satisfies ∇ℓ(θ') + λ(θ' − θ) = 0, so dθ'/dθ =
    (I + H/λ)⁻¹ with the Hessian H of ℓ (iMAML; Wang et al. 2021, table 1).
    """
    solver = method.inner
    assert solver is not None
    system = solver.implicit_system
    if system is None:
        return _differentiate_solve(method, apply, leaves, task, exact=True)
    problem = _inner_problem(method, apply, leaves.support_x, task)
    adapted = solver.solve(problem, leaves.initial_params, leaves.solver_params, exact=False)
    (grad, query_x), loss = _query_gradient(method, apply, adapted, leaves, task)

    def support_grad(params: Params, support_x: Tensor | tuple[()]) -> Params:
        return _inner_problem(method, apply, support_x, task).grad(params, exact=True)

    support_vjp = vjp(support_grad, adapted, leaves.support_x)  # the Hessian is symmetric, so its vjp is Hv

    def system_product(v: Params) -> Params:
        """Return (I + H/λ)v."""
        hvp = support_vjp(v)[0]
        return {name: value + (1 / system.strength) * hvp[name] for name, value in v.items()}

    solution = conjugate_gradients_fixed_steps(system_product, grad, system.cg_steps)
    support_x: Tensor | tuple[()] = ()
    if isinstance(leaves.support_x, Tensor):  # the minimum also depends on the support features
        support_x = -support_vjp(solution)[1] / system.strength
    return Leaves(solution, {}, support_x, query_x), loss


@outer_rule("displacement", all_layers=True, learns_solver_params=False)
def displacement_gradient(
    method: Method, apply: Apply, leaves: Leaves, task: Task, *, flat: bool
) -> tuple[Leaves, Tensor]:
    """Return θ − θ' for the initial parameters θ and the adapted ones θ' (Reptile; Wang et al. 2021, table 1).

    For a proximal solver, it is multiplied by the strength λ.
    """
    assert method.inner is not None
    problem = Problem(apply, method.loss, task.support_x, task.support_y)
    adapted = method.inner.solve(problem, leaves.initial_params, leaves.solver_params, exact=False)
    weight = method.inner.displacement_weight
    displacement = {name: weight * (value - adapted[name]) for name, value in leaves.initial_params.items()}
    solver_params = {name: torch.zeros_like(value) for name, value in leaves.solver_params.items()}
    return Leaves(displacement, solver_params), _query_loss(method, apply, adapted, (), task)


@outer_rule("plain")
def plain_gradient(method: Method, apply: Apply, leaves: Leaves, task: Task, *, flat: bool) -> tuple[Leaves, Tensor]:
    """Return the gradient of the query loss, without an inner solve."""

    def objective(leaves: Leaves) -> Tensor:
        return _query_loss(method, apply, leaves.initial_params, leaves.query_x, task)

    return grad_and_value(objective, leaves)


def _differentiate_solve(
    method: Method, apply: Apply, leaves: Leaves, task: Task, *, exact: bool
) -> tuple[Leaves, Tensor]:
    """Return the gradient of the query loss, computed by differentiating through `solver.solve`."""
    solver = method.inner
    assert solver is not None

    def objective(leaves: Leaves) -> Tensor:
        problem = _inner_problem(method, apply, leaves.support_x, task)
        adapted = solver.solve(problem, leaves.initial_params, leaves.solver_params, exact=exact)
        return _query_loss(method, apply, adapted, leaves.query_x, task)

    return grad_and_value(objective, leaves)


def _backward_over_steps(
    method: Method, solver: IterativeSolver, apply: Apply, leaves: Leaves, task: Task
) -> tuple[Leaves, Tensor]:
    """Return the exact gradient, computed by v ← (∂step)ᵀv from the last inner step to the first.

    v starts as the gradient of the query loss at the adapted parameters, and ∂step is the Jacobian of a step. For
    gradient descent with step size α on the support loss ℓ, v ← (∂step)ᵀv is v ← v − α∇²ℓ v. Only the parameters after
    each step are stored. Each step is recomputed, so only the graph of one step exists at a time.
    """

    def step(params: Params, start: Params, solver_params: Params, support_x: Tensor | tuple[()]) -> Params:
        problem = _inner_problem(method, apply, support_x, task)
        return solver.step(problem, params, start, solver_params, exact=True)

    iterates = [leaves.initial_params]
    for _ in range(solver.steps):
        iterates.append(step(iterates[-1], leaves.initial_params, leaves.solver_params, leaves.support_x))
    (grad, query_x), loss = _query_gradient(method, apply, iterates.pop(), leaves, task)
    # sums over the steps of the gradients with respect to the other inputs of `step`: the initial parameters, on which
    # proximal steps depend, the solver's parameters and the support features
    sums = tree_map(torch.zeros_like, tuple(leaves[:3]))
    while iterates:
        step_vjp = vjp(step, iterates.pop(), leaves.initial_params, leaves.solver_params, leaves.support_x)
        grad, *step_grads = step_vjp(grad)
        sums = _add(sums, tuple(step_grads))
    initial_grad, solver_grad, support_grad = sums
    return Leaves(_add(initial_grad, grad), solver_grad, support_grad, query_x), loss


def _inner_problem(method: Method, apply: Apply, support_x: Tensor | tuple[()], task: Task) -> Problem:
    return Problem(apply, method.loss, _features_or_inputs(support_x, task.support_x), task.support_y)


def _query_gradient(
    method: Method, apply: Apply, adapted: Params, leaves: Leaves, task: Task
) -> tuple[tuple[Params, Tensor | tuple[()]], Tensor]:
    """Return the gradient of the query loss with respect to adapted parameters and query features, and the loss."""

    def objective(variables: tuple[Params, Tensor | tuple[()]]) -> Tensor:
        return _query_loss(method, apply, *variables, task)

    return grad_and_value(objective, (adapted, leaves.query_x))


def _query_loss(method: Method, apply: Apply, adapted: Params, query_x: Tensor | tuple[()], task: Task) -> Tensor:
    return method.loss(apply(adapted, _features_or_inputs(query_x, task.query_x)), task.query_y)


def _features_or_inputs(features: Tensor | tuple[()], inputs: Tensor) -> Tensor:
    return features if isinstance(features, Tensor) else inputs


def _add(left: T, right: T) -> T:
    return tree_map(torch.add, left, right)  # type: ignore[no-any-return]
