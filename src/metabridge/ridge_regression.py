"""Ridge regression in closed form, differentiable in all arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_weight(features: Tensor, targets: Tensor, penalty: Tensor) -> Tensor:
    """Return W (..., k, d) that minimizes ‖XWᵀ − Y‖² + penalty‖W‖², without bias.

    If n < d, Wᵀ = Xᵀ(XXᵀ + penalty·I)⁻¹Y, otherwise Wᵀ = (XᵀX + penalty·I)⁻¹XᵀY, so that the smaller matrix is
    factored.

    Args:
        features: X, (..., n, d): d features of n examples.
        targets: Y, (..., n, k): k targets per example.
        penalty: A scalar tensor. A penalty smaller than the rounding errors of the matrix is increased to their size.

    >>> import torch
    >>> ridge_weight(torch.tensor([[1.0]]), torch.tensor([[8.0]]), torch.tensor(3.0))
    tensor([[2.]])
    """
    wide = features.shape[-2] < features.shape[-1]
    gram = features @ features.mT if wide else features.mT @ features
    solution = _solve(gram, targets if wide else features.mT @ targets, penalty)
    return solution.mT @ features if wide else solution.mT


def ridge_dual(gram: Tensor, targets: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """Return the dual coefficients A (..., k, n) and the bias b (..., k) of ridge regression with a bias.

    W = AX and b minimize ‖XWᵀ + b − Y‖² + penalty‖W‖². A solves (K + penalty·I)Aᵀ = Y − Ȳ, where K is the Gram matrix
    of the centered features and Ȳ the mean target. Each row of A sums to 0, so X itself need not be centered in AX.

    Args:
        gram: XXᵀ, (..., n, n), where the rows of X are the features of n examples.
        targets: Y, (..., n, k): k targets per example.
        penalty: A scalar tensor. A penalty smaller than the rounding errors of the matrix is increased to their size.

    >>> import torch
    >>> x, y = torch.tensor([[4.0], [6.0]]), torch.tensor([[0.0], [4.0]])
    >>> ridge_dual(x @ x.mT, y, torch.tensor(2.0))
    (tensor([[-0.5000,  0.5000]]), tensor([-3.]))
    """
    column_mean = gram.mean(-2, keepdim=True)
    target_mean = targets.mean(-2, keepdim=True)
    centered = gram - (column_mean.mT + (column_mean - column_mean.mean(-1, keepdim=True)))
    solution = _solve(centered, targets - target_mean, penalty)
    # The columns of the solution sum to 0 except for rounding errors, which a small penalty amplifies: remove them.
    solution = solution - solution.mean(-2, keepdim=True)
    return solution.mT, (target_mean - column_mean @ solution)[..., 0, :]


def _solve(gram: Tensor, target: Tensor, penalty: Tensor) -> Tensor:
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # The Cholesky factorization could fail if the penalty were smaller than the rounding errors of the matrix.
    trace = gram.detach().diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    factor = torch.linalg.cholesky_ex(gram + torch.maximum(penalty, torch.finfo(gram.dtype).eps * trace) * eye).L
    # Two triangular solves, because cholesky_solve allocates memory outside the memory pool of a CUDA graph.
    forward_solution = torch.linalg.solve_triangular(factor, target, upper=False)
    solution: Tensor = torch.linalg.solve_triangular(factor.mT, forward_solution, upper=True)
    return solution
