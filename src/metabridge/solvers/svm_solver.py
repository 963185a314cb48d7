"""The multi-class support vector machine of Crammer and Singer on the support features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metabridge.errors import check_positive
from metabridge.interior_point import KKTFactors, solve_qp
from metabridge.models.network import Params
from metabridge.solvers.problem import Problem
from metabridge.solvers.solver import Solver

# Weight of ‖step‖², relative to Q, that keeps the factors of a singular Q positive. Derivatives need more of it than
# solutions, since no later iteration corrects them.
_DERIVATIVE_PROXIMAL = 1e-10


@dataclass(frozen=True)
class SVMSolver(Solver):
    """The multi-class SVM of Crammer and Singer in closed form, as in MetaOptNet (Wang et al. 2021, table 2).

    The outer gradient differentiates the optimality conditions of the dual problem. The scale of the outputs is
    meta-learned in logarithms, as `solver.log_scale`.

    Args:
        C: The weight of the hinge losses.
        scale: The initial factor of the outputs.

    Raises:
        InputError: If `C` or `scale` is not positive.

    >>> import metabridge as mb
    >>> mb.Method(adapts="head", inner=SVMSolver(C=1.0), outer="implicit", training_head="solved").inner
    SVMSolver(C=1.0, scale=7.0)
    """

    name: ClassVar[str] = "svm"
    label: ClassVar[str] = "Crammer-Singer SVM"
    stored_name: ClassVar[str] = "SupportVectors"
    outer_rules: ClassVar[tuple[str, ...]] = ("implicit", "first-order")
    closed_form: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    C: float = 0.1
    scale: float = 7.0

    def __post_init__(self) -> None:
        check_positive("C", self.C)
        check_positive("scale", self.scale)

    def solver_params(self, adapted: Params) -> Params:
        """Return the initial logarithm of the scale."""
        return {"solver.log_scale": torch.full_like(adapted["head.weight"].sum(), math.log(self.scale))}

    def solve(self, problem: Problem, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the weight of the SVM as that of the head; see `Solver.solve`."""
        problem = problem if exact else problem.detached()
        weight = crammer_singer(problem.x, problem.y, start["head.weight"].shape[0], self.C)
        return {"head.weight": solver_params["solver.log_scale"].exp() * weight}


def crammer_singer(features: Tensor, labels: Tensor, outputs: int, C: float) -> Tensor:
    """Return the weight (..., outputs, d) of the multi-class support vector machine (Crammer and Singer 2001).

    It minimizes ½ Σ_k ‖w_k‖² + C Σ_n max_k(w_kᵀφ_n + 1[k ≠ y_n] − w_{y_n}ᵀφ_n), without bias, by its dual:
    min ½ Σ_k ‖Σ_n α_nk φ_n‖² − Σ_n α_{n,y_n} with α_nk ≤ C·1[k = y_n] and Σ_k α_nk = 0; w_k = Σ_n α_nk φ_n.

    The weight is differentiable in the features, once, by the implicit function theorem: a change dQ moves α by
    −P dQ α, where P solves the KKT system reduced to Σ_k α_nk = 0.

    Args:
        features: The points φ, (..., n, d).
        labels: The class y of each point, (..., n).
        outputs: The number of classes.
        C: The weight of the hinge losses.

    >>> import torch
    >>> crammer_singer(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), outputs=2, C=0.1)
    tensor([[ 0.1000, -0.1000],
            [-0.1000,  0.1000]])
    """
    points = features.double()
    constant_points = points.detach()
    truth = (labels[..., None, :] == torch.arange(outputs, device=labels.device)[:, None]).double()
    gram = (constant_points @ constant_points.mT)[..., None, :, :]
    # Every bound is 0 or C. Without the bound C, α would be about 1 / spread: the smaller of the two is its unit.
    spread = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    unit = C / (C * spread).clamp_min(1)
    Q, top = unit[..., None] * gram, C / unit * truth
    A = torch.eye(points.shape[-2], dtype=points.dtype, device=points.device).expand(*truth.shape, -1)
    zeros = torch.zeros_like(truth[..., 0, :])
    solution = solve_qp(Q, truth, A, zeros, torch.full_like(truth, -torch.inf), top)
    proximal = _DERIVATIVE_PROXIMAL * Q.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None]
    stiffness = solution.upper / solution.slack[..., 1, :, :] + proximal
    system = KKTFactors.factor(Q + torch.diag_embed(stiffness), A)

    image = unit * (points @ (points.mT @ solution.alpha.mT)).mT  # Qα
    change, _ = system.solve(image - image.detach(), torch.zeros_like(solution.dual))  # 0, but with a derivative
    return (unit * (solution.alpha - change) @ points).to(features.dtype)
