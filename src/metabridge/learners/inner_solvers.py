"""Inner solvers: how a method adapts to one task's support set (the second column of the taxonomy).

Every solver is plain data with one function, `solve`, that sees one task. It knows nothing of
batches: the engines put it under a loop, a thread or `vmap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.autodiff import grad
from metabridge.errors import InputError, check_count, check_not_negative, check_positive
from metabridge.learners.ridge_regression import ridge_weight
from metabridge.learners.svm_qp import crammer_singer
from metabridge.models.network import Params

Loss = Callable[[Tensor, Tensor], Tensor]
Rates = Literal["fixed", "per-tensor", "per-element"]


def task_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy for class labels; ½ mean ‖prediction − target‖² for values, as in all four papers.

    >>> task_loss(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
    tensor(2.5000)
    """
    if target.is_floating_point():
        return (prediction - target).square().sum(-1).mean() / 2
    return F.cross_entropy(prediction, target)


@dataclass(frozen=True)
class Problem:
    """What one task asks of a solver: fit `apply(params, x)` to `y` under `loss`."""

    apply: Callable[[Params, Tensor], Tensor]
    loss: Loss
    x: Tensor
    y: Tensor

    def value(self, params: Params) -> Tensor:
        """Return the support loss ℓ(params)."""
        return self.loss(self.apply(params, self.x), self.y)

    def detached(self) -> Problem:
        """Return the same problem with its inputs as constants."""
        return Problem(self.apply, self.loss, self.x.detach(), self.y)


@dataclass(frozen=True)
class GradientDescent:
    """Early stopping as regulariser: a few steps from the initialisation (A tab. 1).

    `lr` is one rate, or a rate for each prefix of parameter names, the longest match deciding:
    `{"features": 0.01, "head": 0.1}`. With `rates` "per-tensor" or "per-element" (Meta-SGD) they
    are only where learning starts: the rates themselves are meta-learned, as `rates.NAME`.
    """

    steps: int = 5
    lr: float | Mapping[str, float] = 0.01
    rates: Rates = "fixed"

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        for value in self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]:
            check_positive("lr", value)
        if self.rates not in ("fixed", "per-tensor", "per-element"):
            raise InputError(f"rates is {self.rates!r}, but must be 'fixed', 'per-tensor' or 'per-element'.")

    def extras(self, moving: Params) -> Params:
        """Return the initial values of the solver's own learned parameters."""
        if self.rates == "fixed":
            return {}
        return {
            f"rates.{name}": torch.full_like(value if self.rates == "per-element" else value.sum(), self._rate(name))
            for name, value in moving.items()
        }

    def solve(self, problem: Problem, start: Params, extras: Params, *, exact: bool) -> Params:
        """Return the adapted parameters (A eq. 4).

        With `exact`, the result can be differentiated through the steps. Without it the slopes
        count as constants, so the outer gradient is first order (D eq. 3).
        """
        params = start
        for _ in range(self.steps):
            params = self.step(problem, params, start, extras, exact=exact)
        return params

    def step(self, problem: Problem, params: Params, start: Params, extras: Params, *, exact: bool) -> Params:
        """One step of gradient descent on the support loss."""
        slope = _slope(problem, params, exact)
        learned = {} if self.rates == "fixed" else extras
        return {name: params[name] - learned.get(f"rates.{name}", self._rate(name)) * slope[name] for name in params}

    def _rate(self, name: str) -> float:
        if not isinstance(self.lr, Mapping):
            return self.lr
        matches = [prefix for prefix in self.lr if name == prefix or name.startswith(prefix + ".")]
        if not matches:
            raise InputError(
                f"lr names {', '.join(map(repr, self.lr))}, but none of them covers the parameter {name!r}. "
                "Add a prefix of it."
            )
        return self.lr[max(matches, key=len)]


@dataclass(frozen=True)
class Proximal:
    """Stay close to the start: min ℓ(θ') + (λ/2)‖θ' − θ‖² with λ = `strength` (A tab. 1).

    Solved by gradient descent; a task stops moving once its slope is within `tolerance`.
    iMAML's implicit gradient supposes that the minimum was reached, so give it the steps it
    needs, and enough `cg_steps` of conjugate gradient for its linear system.
    """

    strength: float = 2.0
    steps: int = 16
    lr: float = 0.05
    tolerance: float = 0.0
    cg_steps: int = 5

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        check_positive("strength", self.strength)
        check_positive("lr", self.lr)
        check_not_negative("tolerance", self.tolerance)
        check_count("cg_steps", self.cg_steps)

    def extras(self, moving: Params) -> Params:
        """Nothing of this solver is learned."""
        return {}

    def solve(self, problem: Problem, start: Params, extras: Params, *, exact: bool) -> Params:
        """Return θ' after `steps` steps on the proximal objective."""
        params = start
        for _ in range(self.steps):
            params = self.step(problem, params, start, extras, exact=exact)
        return params

    def step(self, problem: Problem, params: Params, start: Params, extras: Params, *, exact: bool) -> Params:
        """One step of gradient descent on the proximal objective, unless it is solved already."""
        slope = _slope(problem, params, exact)
        slope = {name: slope[name] + self.strength * (params[name] - start[name]) for name in params}
        if self.tolerance > 0:
            size = torch.stack([value.detach().square().sum() for value in slope.values()]).sum()
            moving = (size > self.tolerance**2).to(size.dtype)
            slope = {name: moving * value for name, value in slope.items()}
        return {name: params[name] - self.lr * slope[name] for name in params}


@dataclass(frozen=True)
class Ridge:
    """Ridge regression on the support features, in closed form (R2D2; A tab. 2).

    `penalty` and the output `scale` are where meta-learning starts from; both are learned, in
    logarithms, as `solver.log_penalty` and `solver.log_scale`. Labels are fitted one-hot.
    """

    penalty: float = 1.0
    scale: float = 5.0

    def __post_init__(self) -> None:
        check_positive("penalty", self.penalty)
        check_positive("scale", self.scale)

    def extras(self, moving: Params) -> Params:
        """Return the initial penalty and scale."""
        like = moving["head.weight"]
        return {
            "solver.log_penalty": torch.full_like(like.sum(), math.log(self.penalty)),
            "solver.log_scale": torch.full_like(like.sum(), math.log(self.scale)),
        }

    def solve(self, problem: Problem, start: Params, extras: Params, *, exact: bool) -> Params:
        """Return the ridge head W = argmin ‖XWᵀ − Y‖² + λ‖W‖², scaled if targets are labels."""
        problem = problem if exact else problem.detached()
        labels = not problem.y.is_floating_point()
        outputs = start["head.weight"].shape[0]
        targets = problem.y
        if labels:  # one-hot; F.one_hot looks at the labels, which neither vmap nor a captured graph allows
            targets = (problem.y[:, None] == torch.arange(outputs, device=problem.y.device)).to(problem.x.dtype)
        penalty, scale = extras["solver.log_penalty"].exp(), extras["solver.log_scale"].exp()
        # in float64, since points that are alike leave a system as singular as the penalty, which is learned, is small
        weight = ridge_weight(problem.x.double(), targets.double(), penalty.double()).to(problem.x.dtype)
        return {"head.weight": scale * weight if labels else weight}


@dataclass(frozen=True)
class SupportVectors:
    """The multi-class support vector machine of Crammer and Singer (MetaOptNet; A tab. 2).

    The outer gradient passes through the optimality conditions of the dual problem. The output
    `scale` is learned, in logarithms, as `solver.log_scale`.
    """

    C: float = 0.1
    scale: float = 7.0

    def __post_init__(self) -> None:
        check_positive("C", self.C)
        check_positive("scale", self.scale)

    def extras(self, moving: Params) -> Params:
        """Return the initial scale."""
        return {"solver.log_scale": torch.full_like(moving["head.weight"].sum(), math.log(self.scale))}

    def solve(self, problem: Problem, start: Params, extras: Params, *, exact: bool) -> Params:
        """Return the head of the support vector machine."""
        problem = problem if exact else problem.detached()
        weight = crammer_singer(problem.x, problem.y, start["head.weight"].shape[0], self.C)
        return {"head.weight": extras["solver.log_scale"].exp() * weight}


Solver = GradientDescent | Proximal | Ridge | SupportVectors


def _slope(problem: Problem, params: Params, exact: bool) -> Params:
    if not exact:
        problem, params = problem.detached(), {name: value.detach() for name, value in params.items()}
    return grad(problem.value, params)


def _check_steps(steps: int) -> None:
    if not isinstance(steps, int) or steps < 0:
        raise InputError(f"steps is {steps!r}, but must be a whole number, 0 or more.")
