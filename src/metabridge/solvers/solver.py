"""Base classes of the inner solvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from metabridge.errors import InputError
from metabridge.models.network import Params
from metabridge.registry import Registered
from metabridge.solvers.problem import Problem

Rates = Literal["fixed", "per-tensor", "per-element"]


class Solver(Registered, ABC, root=True):
    """Base class of inner solvers: how a method adapts to the support set of one task.

    A solver is a frozen dataclass in a module of this package. It sees one task; engines put it under a loop, a thread
    or `vmap`. All its fields need defaults.

    Attributes:
        outer_rules: The outer gradients that the solver admits, names of `OUTER_RULES`.
        closed_form: Whether it solves for a linear head in closed form, without an initial head.
        needs_labels: Whether targets must be class labels.
        rates: Whether step sizes are "fixed", or meta-learned "per-tensor" or "per-element".

    >>> from metabridge.solvers import GradientDescent
    >>> isinstance(GradientDescent(steps=3), Solver), GradientDescent.outer_rules
    (True, ('exact', 'first-order', 'displacement'))
    """

    registry: ClassVar[dict[str, type[Solver]]] = {}
    required: ClassVar[tuple[str, ...]] = ("name", "label", "outer_rules")
    outer_rules: ClassVar[tuple[str, ...]]
    closed_form: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False
    rates: Rates = "fixed"

    @property
    def displacement_weight(self) -> float:
        """The factor of θ − θ' in the outer gradient "displacement"."""
        return 1.0

    def solver_params(self, adapted: Params) -> Params:
        """Return the initial values of the parameters that the outer loop learns for this solver.

        Args:
            adapted: The parameters that the inner loop adapts, by name.

        Returns:
            Tensors by name; names start with "rates." or "solver.".
        """
        return {}

    @abstractmethod
    def solve(self, problem: Problem, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the adapted parameters.

        Args:
            problem: The inner problem of one task.
            start: The initial parameters.
            solver_params: The solver's learned parameters, named as `solver_params` returns them.
            exact: Whether the result can be differentiated through the solve. If false, gradients of the support loss
                count as constants, so that the outer gradient is of first order.
        """


class IterativeSolver(Solver, root=True):
    """Base class of solvers that take `steps` steps from the initial parameters.

    Attributes:
        steps: A field of every iterative solver: the number of steps.

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
        """Return `params` after one step; `start` holds the initial parameters."""


def check_steps(steps: Any) -> None:
    """Raise an InputError if a number of steps is not a whole number of at least 0."""
    if not isinstance(steps, int) or steps < 0:
        raise InputError(f"steps is {steps!r}, but must be a whole number, 0 or more.")
