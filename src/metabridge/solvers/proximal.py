"""The proximal problem, solved by gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from metabridge.errors import check_count, check_not_negative, check_positive
from metabridge.models.network import Params
from metabridge.solvers.problem import Problem
from metabridge.solvers.solver import IterativeSolver, ProximalSystem, check_steps


@dataclass(frozen=True)
class Proximal(IterativeSolver):
    """Minimize ℓ(θ') + (λ/2)‖θ' − θ‖² by gradient descent, as in iMAML (Wang et al. 2021, table 1).

    The outer gradient "implicit" is correct only at the minimum. Use enough `steps` to reach it, and enough `cg_steps`
    to solve the linear system of the implicit gradient.

    Args:
        strength: The weight λ of the squared distance to the initial parameters θ.
        steps: The number of gradient steps.
        lr: The step size.
        tolerance: The parameters of a task stay unchanged once the norm of the objective's gradient is at most this.
        cg_steps: The number of conjugate-gradient steps that solve the linear system of the implicit gradient.

    Raises:
        InputError: If `strength` or `lr` is not positive, `steps` or `tolerance` is negative, `cg_steps` is not at
            least 1, or `steps` or `cg_steps` is not an integer.

    >>> import torch
    >>> from metabridge.solvers import Problem, task_loss
    >>> problem = Problem(lambda params, x: x * params["a"], task_loss, torch.ones(4, 1), torch.ones(4, 1))
    >>> Proximal(strength=1.0, steps=50, lr=0.3).solve(problem, {"a": torch.zeros(())}, {}, exact=False)
    {'a': tensor(0.5000)}
    """

    name: ClassVar[str] = "proximal"
    label: ClassVar[str] = "proximal"
    outer_rules: ClassVar[tuple[str, ...]] = ("exact", "first-order", "implicit", "displacement")

    strength: float = 2.0
    steps: int = 16
    lr: float = 0.05
    tolerance: float = 0.0
    cg_steps: int = 5

    def __post_init__(self) -> None:
        check_steps(self.steps)
        check_positive("strength", self.strength)
        check_positive("lr", self.lr)
        check_not_negative("tolerance", self.tolerance)
        check_count("cg_steps", self.cg_steps)

    @property
    def displacement_weight(self) -> float:
        """The weight λ, since the gradient of the objective's minimum over θ' with respect to θ is λ(θ − θ')."""
        return self.strength

    @property
    def implicit_system(self) -> ProximalSystem:
        """The linear system of the optimality condition ∇ℓ(θ') + λ(θ' − θ) = 0."""
        return ProximalSystem(self.strength, self.cg_steps)

    def step(self, problem: Problem, params: Params, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the parameters after one gradient step on the proximal objective; see `IterativeSolver.step`."""
        grad = problem.grad(params, exact=exact)
        grad = {name: grad[name] + self.strength * (params[name] - start[name]) for name in params}
        if self.tolerance > 0:
            squared_norm = torch.stack([value.detach().square().sum() for value in grad.values()]).sum()
            unsolved = (squared_norm > self.tolerance**2).to(squared_norm.dtype)
            grad = {name: unsolved * value for name, value in grad.items()}
        return {name: params[name] - self.lr * grad[name] for name in params}
