"""Ridge regression in closed form, differentiable in all arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_weight(features: Tensor, targets: Tensor, penalty: Tensor) -> Tensor:
    """Return W (..., k, d) that minimizes ‖XWᵀ − Y‖² + penalty‖W‖², without bias.

    With fewer points than features it is computed as Wᵀ = Xᵀ(XXᵀ + penalty·I)⁻¹Y, otherwise as (XᵀX +
    penalty·I)⁻¹XᵀY, so that the smaller matrix is factored.

    Args:
        features: X, (..., n, d).
        targets: Y, (..., n, k).
        penalty: A scalar tensor.

    >>> import torch
    >>> ridge_weight(torch.tensor([[1.0]]), torch.tensor([[8.0]]), torch.tensor(3.0))
    tensor([[2.]])
    """
    wide = features.shape[-2] < features.shape[-1]
    gram = features @ features.mT if wide else features.mT @ features
    solution = _solve(gram, targets if wide else features.mT @ targets, penalty)
    return solution.mT @ features if wide else solution.mT


def ridge_dual(gram: Tensor, targets: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """Return a (..., k, n) and b (..., k) such that W = aX and b minimize ‖XWᵀ + b − Y‖² + penalty‖W‖².

    With K the Gram matrix of centered features, (K + penalty·I)aᵀ = Y minus its mean. So the coefficients of an output
    sum to 0, and the features themselves need not be centered.

    Args:
        gram: XXᵀ, (..., n, n).
        targets: Y, (..., n, k).
        penalty: A scalar tensor.

    >>> import torch
    >>> x, y = torch.tensor([[4.0], [6.0]]), torch.tensor([[0.0], [4.0]])
    >>> ridge_dual(x @ x.mT, y, torch.tensor(2.0))
    (tensor([[-0.5000,  0.5000]]), tensor([-3.]))
    """
    column_mean = gram.mean(-2, keepdim=True)
    target_mean = targets.mean(-2, keepdim=True)
    centered = gram - (column_mean.mT + (column_mean - column_mean.mean(-1, keepdim=True)))
    solution = _solve(centered, targets - target_mean, penalty)
    solution = solution - solution.mean(-2, keepdim=True)  # 0 but for rounding errors, which a small penalty magnifies
    return solution.mT, (target_mean - column_mean @ solution)[..., 0, :]


def _solve(gram: Tensor, target: Tensor, penalty: Tensor) -> Tensor:
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # With a penalty below the rounding errors of the matrix, the Cholesky factorization could fail.
    trace = gram.detach().diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    factor = torch.linalg.cholesky_ex(gram + torch.maximum(penalty, torch.finfo(gram.dtype).eps * trace) * eye).L
    # Two triangular solves, since cholesky_solve allocates memory that a CUDA graph does not see.
    half = torch.linalg.solve_triangular(factor, target, upper=False)
    solution: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solution
