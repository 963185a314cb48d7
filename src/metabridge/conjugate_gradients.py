"""Conjugate gradients for many linear systems at once, of which only products with their matrices are needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def conjugate_gradients(
    product: Product,
    target: Tensor,
    precondition: Product,
    *,
    over: int | tuple[int, ...],
    fall: float,
    floor: Tensor | float = 0.0,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Solve product(v) = target for positive definite matrices; return v and which systems are solved.

    Every system goes `over` these dimensions, until its squared residual, as `precondition` measures it, has fallen to
    the share `fall` or below `floor`, where it is rounding that a direction without curvature would blow up.

    >>> conjugate_gradients(lambda v: 2 * v, torch.ones(1, 1), lambda v: v, over=0, fall=1e-20, steps=9)
    (tensor([[0.5000]]), tensor([[True]]))
    """
    v, residual = torch.zeros_like(target), target
    direction = scaled = precondition(residual)
    size = (residual * scaled).sum(over, keepdim=True)
    enough = (fall * size).clamp_min(floor)
    for _ in range(steps):
        going = size > enough
        if not going.any():
            break
        image = product(direction)
        curvature = (direction * image).sum(over, keepdim=True)
        length = torch.where(going & (curvature > 0), size / curvature, 0)  # rounding can make it negative
        v, residual = v + length * direction, residual - length * image
        scaled = precondition(residual)
        before, size = size, (residual * scaled).sum(over, keepdim=True)
        direction = scaled + torch.where(going, size / before, 0) * direction
    return v, size <= enough
