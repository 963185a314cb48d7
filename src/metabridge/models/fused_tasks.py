"""Batch norm and max pooling of many tasks, and their first and second derivatives, with few passes over memory.

The tasks are folded into the channels (see `task_folding`), and feature maps are channels-last. The functions call
Triton kernels. If `triton_support.can_fuse_tasks` is false, the callers use PyTorch's operations instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.models import fused_triton_kernels as kernels
from metabridge.models import task_triton_kernels, triton_tiles
from metabridge.models.fused_layers import norm_act_backward


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return BatchNorm(x), and the mean and r = 1/√(variance + eps) of every channel."""
    x = triton_tiles.channels_last(x)
    norm, y = triton_tiles.norm_rows(x, weight, bias, eps), torch.empty_like(x)
    rows, c = triton_tiles.matrix_shape(x)
    tile = triton_tiles.tile_shape(c)
    kernels.norm_act[triton_tiles.launch_grid(rows, c, tile)](x, norm, None, None, y, rows, rows, c, 1.0, **tile)
    return y, norm[0], norm[1]


def batch_norm_backward(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias for the gradient g with respect to BatchNorm(x)."""
    x = triton_tiles.channels_last(x)
    norm = torch.stack([mean, r, weight, torch.zeros_like(r)])
    return norm_act_backward(g, x, norm, None, triton_tiles.matrix_shape(x)[0], 1.0, weight.dtype)


def batch_norm_double_backward(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of g, x and weight for the gradients u, v and s of the results of `batch_norm_backward`."""
    g, x, u = (triton_tiles.channels_last(value) for value in (g, x, u))
    rows, c = triton_tiles.matrix_shape(x)
    tile, chunk, parts = triton_tiles.tile_shape(c), *triton_tiles.row_chunks(rows, c)
    partial = x.new_empty(5, parts, c, dtype=torch.float32)
    task_triton_kernels.norm_double_sums[c // tile["BC"], parts](
        g, x, u, mean, r, partial, rows, chunk, c, **tile, STAGES=triton_tiles.STAGES
    )
    total, (gg, gx, gw) = partial.sum(1), (torch.empty_like(g), torch.empty_like(x), torch.empty_like(r))
    v, s = v.contiguous(), s.contiguous()
    task_triton_kernels.norm_double_backward[triton_tiles.launch_grid(rows, c, tile)](
        g, x, u, mean, r, weight, v, s, total, gg, gx, gw, rows, c, 1 / rows, **tile
    )
    return gg, gx, gw.to(weight.dtype)


def max_pool_2x2(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of every 2×2 window, and its position 0 to 3 in the window as uint8: the chosen pixel."""
    x = triton_tiles.channels_last(x)
    n, c, height, width = x.shape
    y = triton_tiles.empty_map((n, c, height // 2, width // 2), x.dtype, x.device)
    choice = torch.empty_like(y, dtype=torch.uint8)
    windows, tile = y.numel() // c, triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE)
    task_triton_kernels.max_pool_2x2[triton_tiles.launch_grid(windows, c, tile)](
        x, y, choice, windows, height, width, c, **tile
    )
    return y, choice


def max_unpool_2x2(values: Tensor, choice: Tensor, x: Tensor) -> Tensor:
    """Return maps of the same shape as x, with `values` at the chosen pixels and zeros elsewhere."""
    n, c, height, width = x.shape
    result = triton_tiles.empty_map((n, c, height, width), values.dtype, x.device)
    windows = n * triton_tiles.ceil_div(height, 2) * triton_tiles.ceil_div(width, 2)
    tile = triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE)
    values, choice = triton_tiles.channels_last(values), triton_tiles.channels_last(choice)
    task_triton_kernels.max_unpool_2x2[triton_tiles.launch_grid(windows, c, tile)](
        values, choice, result, windows, height, width, c, **tile
    )
    return result


def gather_2x2(u: Tensor, choice: Tensor) -> Tensor:
    """Return the values of u at the chosen pixels."""
    u, choice = triton_tiles.channels_last(u), triton_tiles.channels_last(choice)
    _, c, height, width = u.shape
    values = torch.empty_like(choice, dtype=u.dtype)
    windows, tile = choice.numel() // c, triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE)
    task_triton_kernels.gather_2x2[triton_tiles.launch_grid(windows, c, tile)](
        u, choice, values, windows, height, width, c, **tile
    )
    return values
