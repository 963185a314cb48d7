"""Ridge regression in closed form, differentiable in everything."""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_weight(features: Tensor, targets: Tensor, penalty: Tensor) -> Tensor:
    """Return W (..., k, d) that minimises ‖XWᵀ − Y‖² + penalty‖W‖², without bias.

    `features` X is (..., n, d), `targets` Y (..., n, k), `penalty` a scalar tensor. With fewer points than features
    it is Woodbury's form Wᵀ = Xᵀ(XXᵀ + penalty·I)⁻¹Y, otherwise (XᵀX + penalty·I)⁻¹XᵀY: the smaller matrix is factored.

    >>> import torch
    >>> ridge_weight(torch.tensor([[1.0]]), torch.tensor([[8.0]]), torch.tensor(3.0))
    tensor([[2.]])
    """
    wide = features.shape[-2] < features.shape[-1]
    gram = features @ features.mT if wide else features.mT @ features
    solved = _solve(gram, targets if wide else features.mT @ targets, penalty)
    return solved.mT @ features if wide else solved.mT


def ridge_dual(gram: Tensor, targets: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """Return a (..., k, n) and b (..., k), with which W = aX and b minimise ‖XWᵀ + b − Y‖² + penalty‖W‖².

    `gram` is XXᵀ. With its rows and columns centred, (K + penalty·I)aᵀ is Y less its mean. So a sums to 0 over the
    points, and the features need not be centred themselves.

    >>> import torch
    >>> x, y = torch.tensor([[4.0], [6.0]]), torch.tensor([[0.0], [4.0]])
    >>> ridge_dual(x @ x.mT, y, torch.tensor(2.0))
    (tensor([[-0.5000,  0.5000]]), tensor([-3.]))
    """
    level = gram.mean(-2, keepdim=True)
    middle = targets.mean(-2, keepdim=True)
    solved = _solve(gram - (level.mT + (level - level.mean(-1, keepdim=True))), targets - middle, penalty)
    solved = solved - solved.mean(-2, keepdim=True)  # 0 but for rounding, which a small penalty magnifies
    return solved.mT, (middle - level @ solved)[..., 0, :]


def _solve(gram: Tensor, right: Tensor, penalty: Tensor) -> Tensor:
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # A penalty below the rounding errors of the matrix would leave it without a factor.
    size = gram.detach().diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    factor = torch.linalg.cholesky_ex(gram + torch.maximum(penalty, torch.finfo(gram.dtype).eps * size) * eye).L
    # Two triangular solves, where cholesky_solve would allocate behind the back of a CUDA graph.
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved
