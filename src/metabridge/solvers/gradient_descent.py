"""Gradient descent on the support loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from metabridge.errors import InputError, check_positive
from metabridge.models.network import Params
from metabridge.solvers.problem import Problem
from metabridge.solvers.solver import IterativeSolver, Rates, check_steps


@dataclass(frozen=True)
class GradientDescent(IterativeSolver):
    """A few steps of gradient descent from the initial parameters, as in MAML and ANIL (Wang et al. 2021, table 1).

    Args:
        steps: The number of steps.
        lr: The step size, or step sizes by prefix of the parameter names, such as `{"features": 0.01, "head": 0.1}`. A
            prefix ends before a dot or at the end of the name. The longest matching prefix applies, and adapting raises
            an `InputError` if there is none.
        rates: "fixed" keeps the step sizes constant. "per-tensor" and "per-element" (Meta-SGD) meta-learn one for each
            parameter tensor or for each of its elements, starting from `lr`. The step sizes of the parameter NAME are
            the parameter `rates.NAME`.

    Raises:
        InputError: If `steps` is not an integer or is negative, a step size is not positive, or `rates` is unknown.

    >>> import torch
    >>> from metabridge.solvers import Problem, task_loss
    >>> problem = Problem(lambda params, x: x * params["a"], task_loss, torch.ones(4, 1), torch.ones(4, 1))
    >>> GradientDescent(steps=2, lr=0.5).solve(problem, {"a": torch.zeros(())}, {}, exact=False)
    {'a': tensor(0.7500)}
    """

    name: ClassVar[str] = "gradient-descent"
    label: ClassVar[str] = "gradient descent"
    outer_rules: ClassVar[tuple[str, ...]] = ("exact", "first-order", "displacement")

    steps: int = 5
    lr: float | Mapping[str, float] = 0.01
    rates: Rates = "fixed"

    def __post_init__(self) -> None:
        check_steps(self.steps)
        for value in self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]:
            check_positive("lr", value)
        if self.rates not in ("fixed", "per-tensor", "per-element"):
            raise InputError(f"rates is {self.rates!r}, but must be 'fixed', 'per-tensor' or 'per-element'.")

    def solver_params(self, adapted: Params) -> Params:
        """Return the initial step sizes if they are meta-learned, else nothing; see `Solver.solver_params`."""
        if self.rates == "fixed":
            return {}
        return {
            f"rates.{name}": torch.full_like(
                value if self.rates == "per-element" else value.sum(), self._initial_rate(name)
            )
            for name, value in adapted.items()
        }

    def step(self, problem: Problem, params: Params, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the parameters after one step (Wang et al. 2021, eq. 4); see `IterativeSolver.step`."""
        grad = problem.grad(params, exact=exact)
        rates = {} if self.rates == "fixed" else solver_params
        return {
            name: params[name] - rates.get(f"rates.{name}", self._initial_rate(name)) * grad[name] for name in params
        }

    def _initial_rate(self, name: str) -> float:
        """Return the step size that `lr` gives the parameter with this name."""
        if not isinstance(self.lr, Mapping):
            return self.lr
        matches = [prefix for prefix in self.lr if name == prefix or name.startswith(prefix + ".")]
        if not matches:
            raise InputError(
                f"lr has the prefixes {', '.join(map(repr, self.lr))}, but none of them matches the parameter "
                f"{name!r}. Add a prefix of its name."
            )
        return self.lr[max(matches, key=len)]
