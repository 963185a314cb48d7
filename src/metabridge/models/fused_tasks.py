"""Batch norm and max pooling of many tasks, and their first and second derivatives, fused with Triton.

The tasks are folded into the channels (see `task_folding`), and feature maps are channels-last. Callers use PyTorch's
operations instead if `triton_support.can_fuse_tasks` is false.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.models import fused_triton_kernels as kernels
from metabridge.models import task_triton_kernels, triton_tiles
from metabridge.models.fused_layers import norm_act_backward


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return BatchNorm(x), and the mean and rstd = 1/√(variance + eps) of every channel."""
    x = triton_tiles.channels_last(x)
    norm_params, y = triton_tiles.compute_norm_params(x, weight, bias, eps), torch.empty_like(x)
    rows, c = triton_tiles.matrix_shape(x)
    tile = triton_tiles.tile_shape(c)
    # norm_act computes addend + factor · LeakyReLU(BatchNorm(x)); here addend = 0 and factor = 1 (each passed as None),
    # and LeakyReLU has slope 1, which leaves only the batch norm
    kernels.norm_act[triton_tiles.launch_grid(rows, c, tile)](x, norm_params, None, None, y, rows, rows, c, 1.0, **tile)
    return y, norm_params[0], norm_params[1]


def batch_norm_backward(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias, given the gradient g with respect to BatchNorm(x)."""
    x = triton_tiles.channels_last(x)
    # zeros in place of the bias, which does not affect these gradients if the slope is 1
    norm_params = torch.stack([mean, rstd, weight, torch.zeros_like(rstd)])
    return norm_act_backward(g, x, norm_params, None, triton_tiles.matrix_shape(x)[0], 1.0, weight.dtype)


def batch_norm_double_backward(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to the inputs g, x and weight of `batch_norm_backward`.

    That function returns the gradients of a loss with respect to x, weight and bias. Here it is differentiated in turn:
    u, v and s are the gradients of another scalar with respect to its three results.
    """
    g, x, u = (triton_tiles.channels_last(value) for value in (g, x, u))
    rows, c = triton_tiles.matrix_shape(x)
    tile, chunk_size, num_chunks = triton_tiles.tile_shape(c), *triton_tiles.row_chunks(rows, c)
    chunk_sums = x.new_empty(5, num_chunks, c, dtype=torch.float32)
    task_triton_kernels.norm_double_sums[c // tile["BC"], num_chunks](
        g, x, u, mean, rstd, chunk_sums, rows, chunk_size, c, **tile, STAGES=triton_tiles.STAGES
    )
    sums, (grad_g, grad_x, grad_weight) = (
        chunk_sums.sum(1),
        (torch.empty_like(g), torch.empty_like(x), torch.empty_like(rstd)),
    )
    v, s = v.contiguous(), s.contiguous()
    task_triton_kernels.norm_double_backward[triton_tiles.launch_grid(rows, c, tile)](
        g, x, u, mean, rstd, weight, v, s, sums, grad_g, grad_x, grad_weight, rows, c, 1 / rows, **tile
    )
    return grad_g, grad_x, grad_weight.to(weight.dtype)


def max_pool_2x2(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of every 2×2 window and its index in the window, from 0 to 3 as uint8."""
    x = triton_tiles.channels_last(x)
    n, c, height, width = x.shape
    y = triton_tiles.empty_channels_last((n, c, height // 2, width // 2), x.dtype, x.device)
    indices = torch.empty_like(y, dtype=torch.uint8)
    num_windows, tile = y.numel() // c, triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS)
    task_triton_kernels.max_pool_2x2[triton_tiles.launch_grid(num_windows, c, tile)](
        x, y, indices, num_windows, height, width, c, **tile
    )
    return y, indices


def max_unpool_2x2(values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Return maps with the shape of x: `values` where the 2×2 windows of x have their maxima, and zeros elsewhere.

    `values` has one element per window, and `indices` is the second result of `max_pool_2x2(x)`.
    """
    n, c, height, width = x.shape
    result = triton_tiles.empty_channels_last((n, c, height, width), values.dtype, x.device)
    # including the incomplete windows at the edges of maps with odd height or width, where the kernel stores zeros
    num_windows = n * triton_tiles.ceil_div(height, 2) * triton_tiles.ceil_div(width, 2)
    tile = triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS)
    values, indices = triton_tiles.channels_last(values), triton_tiles.channels_last(indices)
    task_triton_kernels.max_unpool_2x2[triton_tiles.launch_grid(num_windows, c, tile)](
        values, indices, result, num_windows, height, width, c, **tile
    )
    return result


def gather_2x2(u: Tensor, indices: Tensor) -> Tensor:
    """Return the elements of u where the 2×2 windows of another map x have their maxima, one per window.

    u has the shape of x, and `indices` is the second result of `max_pool_2x2(x)`.
    """
    u, indices = triton_tiles.channels_last(u), triton_tiles.channels_last(indices)
    _, c, height, width = u.shape
    values = torch.empty_like(indices, dtype=u.dtype)
    num_windows, tile = indices.numel() // c, triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS)
    task_triton_kernels.gather_2x2[triton_tiles.launch_grid(num_windows, c, tile)](
        u, indices, values, num_windows, height, width, c, **tile
    )
    return values
