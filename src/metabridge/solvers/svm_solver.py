"""The multi-class support vector machine of Crammer and Singer (2001) on the support features."""

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

# Added to the diagonal of the matrix Q of the dual, as a fraction of its largest entry, so that the Cholesky
# factorization of a singular Q succeeds. The number in `solve_qp` is smaller, since later iterations there correct the
# error that it causes; nothing corrects a derivative.
_DERIVATIVE_REGULARIZATION = 1e-10


@dataclass(frozen=True)
class SVMSolver(Solver):
    """The multi-class SVM of Crammer and Singer (2001), as in MetaOptNet (Lee et al. 2019).

    The SVM is a quadratic program. It is solved to optimality, and the outer gradient differentiates the optimality
    conditions of its dual. The default settings are those of Wang et al. (2021, table 2). The logarithm of `scale` is
    meta-learned, as the parameter `solver.log_scale`.

    Args:
        C: The weight of the hinge losses.
        scale: The initial factor by which the outputs are multiplied.

    Raises:
        InputError: If `C` or `scale` is not positive.

    >>> import metabridge as mb
    >>> mb.Method(adapts="head", inner=SVMSolver(C=1.0), outer="implicit", training_head="solved").inner
    SVMSolver(C=1.0, scale=7.0)
    """

    name: ClassVar[str] = "svm"
    label: ClassVar[str] = "Crammer-Singer SVM"
    stored_name: ClassVar[str] = "SupportVectors"  # class name of version 0.1.0, which saved runs contain
    outer_rules: ClassVar[tuple[str, ...]] = ("implicit", "first-order")
    solves_exactly: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    C: float = 0.1
    scale: float = 7.0

    def __post_init__(self) -> None:
        check_positive("C", self.C)
        check_positive("scale", self.scale)

    @property
    def implicit_system(self) -> None:
        """None, since differentiating `solve` differentiates the optimality conditions."""
        return

    def solver_params(self, adapted: Params) -> Params:
        """Return the initial logarithm of the scale; see `Solver.solver_params`."""
        return {"solver.log_scale": torch.full_like(adapted["head.weight"].sum(), math.log(self.scale))}

    def solve(self, problem: Problem, start: Params, solver_params: Params, *, exact: bool) -> Params:
        """Return the SVM's weight, multiplied by the learned scale, as the head; see `Solver.solve`."""
        problem = problem if exact else problem.detached()
        weight = crammer_singer(problem.x, problem.y, start["head.weight"].shape[0], self.C)
        return {"head.weight": solver_params["solver.log_scale"].exp() * weight}


def crammer_singer(features: Tensor, labels: Tensor, outputs: int, C: float) -> Tensor:
    """Return the weight of the multi-class support vector machine (Crammer and Singer 2001).

    It minimizes ½ Σ_k ‖w_k‖² + C Σ_n max_k(w_kᵀφ_n + 1[k ≠ y_n] − w_{y_n}ᵀφ_n), without bias, by its dual:
    min ½ Σ_k ‖Σ_n α_nk φ_n‖² − Σ_n α_{n,y_n} with α_nk ≤ C·1[k = y_n] and Σ_k α_nk = 0; w_k = Σ_n α_nk φ_n.

    The weight can be differentiated once with respect to the features, by the implicit function theorem: if the Gram
    matrix K of the features changes by dK, α_k changes by −v_k, where v and ν solve (K + D_k)v_k − ν = dK α_k and
    Σ_k v_k = 0. The diagonal matrix D_k contains the multiplier of each bound divided by its slack.

    Args:
        features: The features φ, (..., n, d).
        labels: The class labels y, (..., n).
        outputs: The number of outputs, one for each class.
        C: The weight of the hinge losses.

    Returns:
        The weight, (..., outputs, d), in the dtype of `features`.

    >>> import torch
    >>> crammer_singer(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), outputs=2, C=0.1)
    tensor([[ 0.1000, -0.1000],
            [-0.1000,  0.1000]])
    """
    x = features.double()
    constant_x = x.detach()
    one_hot_labels = (labels[..., None, :] == torch.arange(outputs, device=labels.device)[:, None]).double()
    gram = (constant_x @ constant_x.mT)[..., None, :, :]
    # Measure α in units in which it is of order 1: α is at most C, and about 1 / mean_square if C is large.
    mean_square = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    alpha_unit = C / (C * mean_square).clamp_min(1)
    Q, upper_bound = alpha_unit[..., None] * gram, C / alpha_unit * one_hot_labels
    A = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).expand(*one_hot_labels.shape, -1)
    zeros = torch.zeros_like(one_hot_labels[..., 0, :])
    lower_bound = torch.full_like(one_hot_labels, -torch.inf)
    solution = solve_qp(Q, one_hot_labels, A, zeros, lower_bound, upper_bound)
    regularization = _DERIVATIVE_REGULARIZATION * Q.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None]
    diagonal = solution.upper / solution.slack[..., 1, :, :] + regularization
    system = KKTFactors.factor(Q + torch.diag_embed(diagonal), A)

    Q_alpha = alpha_unit * (x @ (x.mT @ solution.alpha.mT)).mT
    rhs = Q_alpha - Q_alpha.detach()  # its value is 0, and its derivative is dQ α
    alpha_shift, _ = system.solve(rhs, torch.zeros_like(solution.dual))
    return (alpha_unit * (solution.alpha - alpha_shift) @ x).to(features.dtype)
