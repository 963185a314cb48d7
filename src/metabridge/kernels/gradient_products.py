"""Inner products of the gradients of two sets of samples.

They come either from the gradients themselves, where these are formed, or from the factors of a linear layer's,
Σ_pq (a_ip·a_jq)(g_iop·g_juq), which never forms them.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from metabridge.kernels.jacobian import Rows
from metabridge.kernels.layer_overrides import cached

Outputs = Literal["mean", "sum", "full"]


def inner(left: Rows, right: Rows, outputs: Outputs, work: int, into: Tensor) -> None:
    """Add to `into` (samples · r, samples · r) the inner products of two sets of gradients.

    r is the number of outputs for "full" and 1 otherwise: the trace over outputs is the product of gradients
    that stand end to end. `work` bounds the numbers held at a time.
    """
    rows = 2 if outputs == "full" else 1
    a, b = (side.formed.reshape(math.prod(side.formed.shape[:rows]), -1) for side in (left, right))
    parts = 1 if left is not right else 8 if cached(a) else 2
    steps = -(-len(a) // parts)  # what is below the diagonal is left out, as far as blocks go
    for start in range(0, len(a), max(1, steps)):
        first = start if left is right else 0
        into[start : start + steps, first:].addmm_(a[start : start + steps], b[first:].mT)
    r = into.shape[0] // len(left.formed)
    grid = into.unflatten(0, (-1, r)).unflatten(2, (-1, r))
    for name in left.factors:
        _factored(left.factors[name], right.factors[name], work, grid, left is right)


def _factored(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], work: int, grid: Tensor, symmetric: bool
) -> None:
    """Add Σ_pq (a_ip·a_jq)(g_iop·g_juq) to the grid (i, o, j, u), a block of pairs (i, j) at a time."""
    r, positions = grid.shape[1], left[0].shape[-1]
    pairs = max(1, work // (positions**2 * (r**2 + 1) + 2 * r * left[1].shape[2] * positions))
    columns = min(grid.shape[2], pairs)
    lines = min(max(1, pairs // columns), -(-grid.shape[0] // 8) if symmetric and cached(grid) else grid.shape[0])
    for i in range(0, grid.shape[0], lines):
        a, g = (factor[i : i + lines] for factor in left)
        for j in range(i if symmetric else 0, grid.shape[2], columns):
            b, h = (factor[j : j + columns] for factor in right)
            near = _gram(a.unsqueeze(1), b.unsqueeze(1))
            product = _gram(*(side.reshape(len(side), r, -1, positions) for side in (g, h))).mul_(near)
            grid[i : i + lines, :, j : j + columns] += (
                product.sum((2, 5)) if positions > 1 else product[:, :, 0, ..., 0]
            )


def _gram(a: Tensor, b: Tensor) -> Tensor:
    """(i, o, p, j, u, q) from a (i, o, c, p) and b (j, u, c, q)."""
    left, right = a.mT.reshape(-1, a.shape[2]), b.mT.reshape(-1, b.shape[2])
    return (left @ right.mT).view(*a.shape[:2], a.shape[3], *b.shape[:2], b.shape[3])
