"""What stands between the convolutions of many tasks, as few passes over memory, in Triton; see `fused`.

Tasks are further channels (`folding`), of maps that are channels-last. Other maps, and devices other than a GPU, have
PyTorch's own operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.models import fused_triton_kernels as kernels
from metabridge.models import task_triton_kernels, triton_tiles


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm(x), and of each channel the mean and one over the deviation."""
    x = triton_tiles.channels_last(x)
    norm, y = triton_tiles.statistics(x, weight, bias, eps), torch.empty_like(x)
    rows, c = triton_tiles.matrix_shape(x)
    tile = triton_tiles.tile(c)
    kernels.rectify[triton_tiles.grid(rows, c, tile)](x, norm, None, None, y, rows, rows, c, 1.0, **tile)
    return y, norm[0], norm[1]


def normalised_back(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What g at BatchNorm(x) pulls back to x, the weight and the bias."""
    g, x = triton_tiles.channels_last(g), triton_tiles.channels_last(x)
    norm = torch.stack([mean, r, weight, torch.zeros_like(r)])
    rows, c = triton_tiles.matrix_shape(x)
    tile, chunk, parts = triton_tiles.tile(c), *triton_tiles.chunks(rows, c)
    partial = x.new_empty(2, parts, c, dtype=torch.float32)
    kernels.rectify_sums[c // tile["BC"], parts](
        g, x, norm, None, partial, rows, rows, chunk, c, 1.0, **tile, STAGES=triton_tiles.STAGES
    )
    (sums, (gb, gw)), gx = triton_tiles.added(partial, weight.dtype), torch.empty_like(x)
    kernels.rectify_back[triton_tiles.grid(rows, c, tile)](
        g, x, norm, None, sums, gx, rows, rows, c, 1.0, 1 / rows, **tile
    )
    return gx, gw, gb


def normalised_again(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What u, v and s at the results of `normalised_back` pull back to g, x and the weight."""
    g, x, u = (triton_tiles.channels_last(value) for value in (g, x, u))
    rows, c = triton_tiles.matrix_shape(x)
    tile, chunk, parts = triton_tiles.tile(c), *triton_tiles.chunks(rows, c)
    partial = x.new_empty(5, parts, c, dtype=torch.float32)
    task_triton_kernels.again_sums[c // tile["BC"], parts](
        g, x, u, mean, r, partial, rows, chunk, c, **tile, STAGES=triton_tiles.STAGES
    )
    total, (gg, gx, gw) = partial.sum(1), (torch.empty_like(g), torch.empty_like(x), torch.empty_like(r))
    v, s = v.contiguous(), s.contiguous()
    task_triton_kernels.again_back[triton_tiles.grid(rows, c, tile)](
        g, x, u, mean, r, weight, v, s, total, gg, gx, gw, rows, c, 1 / rows, **tile
    )
    return gg, gx, gw.to(weight.dtype)


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of every 2×2 window, and its place there."""
    x = triton_tiles.channels_last(x)
    n, c, height, width = x.shape
    y = triton_tiles.empty((n, c, height // 2, width // 2), x.dtype, x.device)
    places = torch.empty_like(y, dtype=torch.uint8)
    windows, tile = y.numel() // c, triton_tiles.tile(c, triton_tiles.WINDOWS)
    task_triton_kernels.pool[triton_tiles.grid(windows, c, tile)](x, y, places, windows, height, width, c, **tile)
    return y, places


def spread(values: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """Values at their places, in maps of the form of x, and zeros elsewhere."""
    n, c, height, width = x.shape
    found = triton_tiles.empty((n, c, height, width), values.dtype, x.device)
    windows, tile = n * -(-height // 2) * -(-width // 2), triton_tiles.tile(c, triton_tiles.WINDOWS)
    values, places = triton_tiles.channels_last(values), triton_tiles.channels_last(places)
    task_triton_kernels.spread[triton_tiles.grid(windows, c, tile)](
        values, places, found, windows, height, width, c, **tile
    )
    return found


def picked(u: Tensor, places: Tensor) -> Tensor:
    """The values at the places."""
    u, places = triton_tiles.channels_last(u), triton_tiles.channels_last(places)
    _, c, height, width = u.shape
    values = torch.empty_like(places, dtype=u.dtype)
    windows, tile = places.numel() // c, triton_tiles.tile(c, triton_tiles.WINDOWS)
    task_triton_kernels.pick[triton_tiles.grid(windows, c, tile)](u, places, values, windows, height, width, c, **tile)
    return values
