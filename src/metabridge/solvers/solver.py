"""Base classes of the inner solvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

from metabridge.errors import InputError
from metabridge.models.network import Params
from metabridge.registry import Registered
from metabridge.solvers.problem import Problem

Rates = Literal["fixed", "per-tensor", "per-element"]


class ProximalSystem(NamedTuple):
    """The linear system (I + H/λ)v = g of the implicit gradient v at a proximal minimum.

    H is the Hessian of the support loss, and g the gradient of the query loss, both at the minimum.

    Args:
        strength: The weight λ of ½‖θ' − θ‖² in the proximal objective.
        cg_steps: The number of conjugate-gradient steps that solve the system.
    """

    strength: float
    cg_steps: int


class Solver(Registered, ABC, abstract=True):
    """Base class of inner solvers: how a method adapts to the support set of one task.

    A solver is a frozen dataclass in a module of this package, and all its fields need defaults. It solves the problem
    of one task; an `Engine` applies it to many tasks in a loop, in threads or under `vmap`.

    Attributes:
        outer_rules: The names in `learners.OUTER_RULES` of the outer gradients that the solver supports.
        solves_exactly: Whether it computes the optimal linear head without an initial head or a step size.
        needs_labels: Whether targets must be class labels.
        rates: Whether step sizes are "fixed", or meta-learned "per-tensor" or "per-element".

    >>> from metabridge.solvers import GradientDescent
    >>> isinstance(GradientDescent(steps=3), Solver), GradientDescent.outer_rules
    (True, ('exact', 'first-order', 'displacement'))
    """

    registry: ClassVar[dict[str, type[Solver]]] = {}
    required: ClassVar[tuple[str, ...]] = ("name", "label", "outer_rules")
    outer_rules: ClassVar[tuple[str, ...]]
    solves_exactly: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False
    rates: Rates = "fixed"

    @property
    def displacement_weight(self) -> float:
        """The factor of θ − θ' in the outer gradient "displacement", with initial parameters θ and adapted ones θ'."""
        return 1.0

    @property
    def implicit_system(self) -> ProximalSystem | None:
        """The linear system of the outer gradient "implicit"; None if the backward pass of `solve` already solves it.

        A solver that supports "implicit" must define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define implicit_system to support 'implicit'.")

    def solver_params(self, adapted: Params) -> Params:
        """Return the initial values of the parameters that the outer loop learns for this solver.

        Args:
            adapted: The parameters that the inner loop adapts, by name.

        Returns:
            Tensors by name. The names start with "rates." or "solver.".
        """
        return {}

    @abstractmethod
    def solve(self, problem: Problem, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the adapted parameters.

        Args:
            problem: The inner problem of one task.
            start: The initial parameters.
            solver_params: The solver's learned parameters, with the names that the method `solver_params` returns.
            exact: Whether derivatives of the result are exact. If false, the result is the same, but its derivatives
                treat the gradients of the support loss as constants. Closed-form solvers compute no such gradients;
                with them, false means that derivatives treat the support features as constants.

        Returns:
            The adapted parameters by name.
        """


class IterativeSolver(Solver, abstract=True):
    """Base class of solvers that take `steps` steps from the initial parameters.

    Attributes:
        steps: The number of steps. Every subclass defines it as a field.

    >>> import torch
    >>> from metabridge.solvers import GradientDescent, Problem, task_loss
    >>> problem = Problem(lambda params, x: x * params["a"], task_loss, torch.ones(4, 1), torch.ones(4, 1))
    >>> start = {"a": torch.zeros(())}
    >>> GradientDescent(lr=0.5).step(problem, start, start, {}, exact=False)
    {'a': tensor(0.5000)}
    """

    steps: int

    def solve(self, problem: Problem, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the parameters after all steps; see `Solver.solve`."""
        params = start
        for _ in range(self.steps):
            params = self.step(problem, params, start, solver_params, exact=exact)
        return params

    @abstractmethod
    def step(self, problem: Problem, params: Params, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the parameters after one step.

        Args:
            problem: The inner problem of one task.
            params: The current parameters.
            start: The initial parameters.
            solver_params: The solver's learned parameters, as in `solve`.
            exact: Whether the step can be differentiated, as in `solve`.

        Returns:
            The new parameters by name.
        """


def check_steps(steps: Any) -> None:
    """Raise an InputError unless `steps` is a non-negative integer."""
    if not isinstance(steps, int) or steps < 0:
        raise InputError(f"steps is {steps!r}, but must be an integer, 0 or more.")
