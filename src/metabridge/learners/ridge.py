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
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky_ex(gram + penalty * eye).L
    # Two triangular solves, where cholesky_solve would allocate behind the back of a CUDA graph.
    half = torch.linalg.solve_triangular(factor, targets if wide else features.mT @ targets, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved.mT @ features if wide else solved.mT
