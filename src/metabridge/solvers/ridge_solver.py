"""Ridge regression on the support features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from metabridge.errors import check_positive
from metabridge.models.network import Params
from metabridge.ridge_regression import ridge_weight
from metabridge.solvers.problem import Problem
from metabridge.solvers.solver import Solver


@dataclass(frozen=True)
class RidgeSolver(Solver):
    """Ridge regression on the support features in closed form, as in R2D2 (Wang et al. 2021, table 2).

    Class labels are one-hot encoded. The logarithms of `penalty` and `scale` are meta-learned, as the parameters
    `solver.log_penalty` and `solver.log_scale`.

    Args:
        penalty: The initial penalty λ of ‖XWᵀ − Y‖² + λ‖W‖², with support features X, targets Y and weight W.
        scale: The initial factor by which the outputs are multiplied if targets are class labels.

    Raises:
        InputError: If `penalty` or `scale` is not positive.

    >>> import metabridge as mb
    >>> mb.Method(adapts="head", inner=RidgeSolver(penalty=0.5), training_head="solved").outer
    'exact'
    """

    name: ClassVar[str] = "ridge"
    label: ClassVar[str] = "ridge regression"
    stored_name: ClassVar[str] = "Ridge"  # class name of version 0.1.0, which saved runs contain
    outer_rules: ClassVar[tuple[str, ...]] = ("exact", "first-order")
    solves_exactly: ClassVar[bool] = True

    penalty: float = 1.0
    scale: float = 5.0

    def __post_init__(self) -> None:
        check_positive("penalty", self.penalty)
        check_positive("scale", self.scale)

    def solver_params(self, adapted: Params) -> Params:
        """Return the initial logarithms of penalty and scale; see `Solver.solver_params`."""
        scalar = adapted["head.weight"].sum()  # only its shape, dtype and device are used
        return {
            "solver.log_penalty": torch.full_like(scalar, math.log(self.penalty)),
            "solver.log_scale": torch.full_like(scalar, math.log(self.scale)),
        }

    def solve(self, problem: Problem, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the head with the weight argmin_W ‖XWᵀ − Y‖² + λ‖W‖², scaled for class labels; see `Solver.solve`."""
        problem = problem if exact else problem.detached()
        targets = problem.one_hot_targets(start["head.weight"].shape[0])
        penalty, scale = solver_params["solver.log_penalty"].exp(), solver_params["solver.log_scale"].exp()
        # In float64, since the system is nearly singular if inputs are similar and the learned penalty is small.
        weight = ridge_weight(problem.x.double(), targets.double(), penalty.double()).to(problem.x.dtype)
        return {"head.weight": weight if problem.y.is_floating_point() else scale * weight}
