"""Inner products between the gradients of two sets of samples.

They are computed from materialized gradients or, without materializing the gradients, from the factors a and g of a
linear layer's gradients (see `jacobian`) as Σ_pq (a_ip·a_jq)(g_iop·g_juq). Here i and j are samples, o and u outputs,
and p and q positions.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from metabridge.kernels.jacobian import JacobianRows
from metabridge.kernels.layer_overrides import on_cpu

Outputs = Literal["mean", "sum", "full"]


def add_inner_products(
    left: JacobianRows, right: JacobianRows, outputs: Outputs, max_elements: int, result: Tensor
) -> None:
    """Add the inner products of two sets of gradients to a matrix.

    If `left` is `right`, blocks below the diagonal are skipped.

    Args:
        left: Gradients of the row samples.
        right: Gradients of the column samples.
        outputs: "full" for the inner products of all pairs of outputs; "mean" or "sum" for one number per pair of
            samples. For "mean", it is the sum over outputs, which the caller divides by their number.
        max_elements: Maximum number of elements of intermediate tensors.
        result: The matrix, (samples of `left` · r, samples of `right` · r), where r is the number of outputs for "full"
            and 1 otherwise.
    """
    leading_dims = 2 if outputs == "full" else 1
    left_rows, right_rows = (
        rows.materialized.reshape(math.prod(rows.materialized.shape[:leading_dims]), -1) for rows in (left, right)
    )
    # More blocks skip more of the part below the diagonal, but a GPU is faster with few large products.
    block_count = 1 if left is not right else 8 if on_cpu(left_rows) else 2
    step = -(-len(left_rows) // block_count)
    for start in range(0, len(left_rows), max(1, step)):
        first_column = start if left is right else 0
        block = result[start : start + step, first_column:]
        block.addmm_(left_rows[start : start + step], right_rows[first_column:].mT)
    r = result.shape[0] // len(left.materialized)
    grid = result.unflatten(0, (-1, r)).unflatten(2, (-1, r))
    for name in left.factors:
        _add_factored(left.factors[name], right.factors[name], max_elements, grid, left is right)


def _add_factored(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], max_elements: int, grid: Tensor, symmetric: bool
) -> None:
    """Add Σ_pq (a_ip·a_jq)(g_iop·g_juq) to the grid (i, o, j, u), one block of pairs (i, j) at a time."""
    r, positions = grid.shape[1], left[0].shape[-1]
    # Elements per pair: `input_gram`, `product`, and the reshaped copies of g and h.
    pairs = max(1, max_elements // (positions**2 * (r**2 + 1) + 2 * r * left[1].shape[2] * positions))
    columns = min(grid.shape[2], pairs)
    # On a CPU, at least 8 blocks of rows if symmetric, as in `add_inner_products`.
    rows = min(max(1, pairs // columns), -(-grid.shape[0] // 8) if symmetric and on_cpu(grid) else grid.shape[0])
    for i in range(0, grid.shape[0], rows):
        a, g = (factor[i : i + rows] for factor in left)
        for j in range(i if symmetric else 0, grid.shape[2], columns):
            b, h = (factor[j : j + columns] for factor in right)  # a and g of the column samples
            input_gram = _gram(a.unsqueeze(1), b.unsqueeze(1))
            product = _gram(*(factor.reshape(len(factor), r, -1, positions) for factor in (g, h))).mul_(input_gram)
            grid[i : i + rows, :, j : j + columns] += product.sum((2, 5)) if positions > 1 else product[:, :, 0, ..., 0]


def _gram(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ_c a_iocp b_jucq as a tensor (i, o, p, j, u, q); the sum is over features c."""
    a_rows, b_rows = a.mT.reshape(-1, a.shape[2]), b.mT.reshape(-1, b.shape[2])
    return (a_rows @ b_rows.mT).view(*a.shape[:2], a.shape[3], *b.shape[:2], b.shape[3])
