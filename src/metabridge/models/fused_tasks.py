"""What stands between the convolutions of many tasks, as few passes over memory, in Triton; see `fused`.

Tasks are further channels (`folding`), of maps that are channels-last. Other maps, and devices other than a GPU, have
PyTorch's own operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.models import fused_kernels as kernels
from metabridge.models import task_kernels, tiles


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm(x), and of each channel the mean and one over the deviation."""
    x = tiles.channels_last(x)
    norm, y = tiles.statistics(x, weight, bias, eps), torch.empty_like(x)
    rows, c = tiles.matrix_shape(x)
    tile = tiles.tile(c)
    kernels.rectify[tiles.grid(rows, c, tile)](x, norm, None, None, y, rows, rows, c, 1.0, **tile)
    return y, norm[0], norm[1]


def normalised_back(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What g at BatchNorm(x) pulls back to x, the weight and the bias."""
    g, x = tiles.channels_last(g), tiles.channels_last(x)
    norm = torch.stack([mean, r, weight, torch.zeros_like(r)])
    rows, c = tiles.matrix_shape(x)
    tile, chunk, parts = tiles.tile(c), *tiles.chunks(rows, c)
    partial = x.new_empty(2, parts, c, dtype=torch.float32)
    kernels.rectify_sums[c // tile["BC"], parts](
        g, x, norm, None, partial, rows, rows, chunk, c, 1.0, **tile, STAGES=tiles.STAGES
    )
    (sums, (gb, gw)), gx = tiles.added(partial, weight.dtype), torch.empty_like(x)
    kernels.rectify_back[tiles.grid(rows, c, tile)](g, x, norm, None, sums, gx, rows, rows, c, 1.0, 1 / rows, **tile)
    return gx, gw, gb


def normalised_again(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What u, v and s at the results of `normalised_back` pull back to g, x and the weight."""
    g, x, u = (tiles.channels_last(value) for value in (g, x, u))
    rows, c = tiles.matrix_shape(x)
    tile, chunk, parts = tiles.tile(c), *tiles.chunks(rows, c)
    partial = x.new_empty(5, parts, c, dtype=torch.float32)
    task_kernels.again_sums[c // tile["BC"], parts](
        g, x, u, mean, r, partial, rows, chunk, c, **tile, STAGES=tiles.STAGES
    )
    total, (gg, gx, gw) = partial.sum(1), (torch.empty_like(g), torch.empty_like(x), torch.empty_like(r))
    v, s = v.contiguous(), s.contiguous()
    task_kernels.again_back[tiles.grid(rows, c, tile)](
        g, x, u, mean, r, weight, v, s, total, gg, gx, gw, rows, c, 1 / rows, **tile
    )
    return gg, gx, gw.to(weight.dtype)


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of every 2×2 window, and its place there."""
    x = tiles.channels_last(x)
    n, c, height, width = x.shape
    y = tiles.empty((n, c, height // 2, width // 2), x.dtype, x.device)
    places = torch.empty_like(y, dtype=torch.uint8)
    windows, tile = y.numel() // c, tiles.tile(c, tiles.WINDOWS)
    task_kernels.pool[tiles.grid(windows, c, tile)](x, y, places, windows, height, width, c, **tile)
    return y, places


def spread(values: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """Values at their places, in maps of the form of x, and zeros elsewhere."""
    n, c, height, width = x.shape
    found = tiles.empty((n, c, height, width), values.dtype, x.device)
    windows, tile = n * -(-height // 2) * -(-width // 2), tiles.tile(c, tiles.WINDOWS)
    values, places = tiles.channels_last(values), tiles.channels_last(places)
    task_kernels.spread[tiles.grid(windows, c, tile)](values, places, found, windows, height, width, c, **tile)
    return found


def picked(u: Tensor, places: Tensor) -> Tensor:
    """The values at the places."""
    u, places = tiles.channels_last(u), tiles.channels_last(places)
    _, c, height, width = u.shape
    values = torch.empty_like(places, dtype=u.dtype)
    windows, tile = places.numel() // c, tiles.tile(c, tiles.WINDOWS)
    task_kernels.pick[tiles.grid(windows, c, tile)](u, places, values, windows, height, width, c, **tile)
    return values
