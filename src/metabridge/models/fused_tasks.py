"""What stands between the convolutions of many tasks, as few passes over memory, in Triton; see `fused`.

Tasks are further channels (`folding`), of maps that are channels-last. Other maps, and devices other than a GPU, have
PyTorch's own operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.models import fused, task_kernels
from metabridge.models import fused_kernels as kernels

WHOLE = (2, 2), (2, 2), (0, 0), (1, 1), False  # windows that lie side by side


def usable(x: Tensor) -> bool:
    """Whether the kernels take such a map."""
    low = x.dtype in (torch.float32, torch.bfloat16) and x.ndim == 4 and x.shape[1] % fused.CHANNELS == 0
    return low and x.is_cuda and fused.AVAILABLE


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm(x), and of each channel the mean and one over the deviation."""
    x = fused._channels_last(x)
    norm, y = fused._statistics(x, weight, bias, eps), torch.empty_like(x)
    rows, c = fused._shape(x)
    tile = fused._tile(c)
    kernels.rectify[fused._tiles(rows, c, tile)](x, norm, None, None, y, rows, rows, c, 1.0, **tile)
    return y, norm[0], norm[1]


def normalised_back(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What g at BatchNorm(x) pulls back to x, the weight and the bias."""
    g, x = fused._channels_last(g), fused._channels_last(x)
    norm = torch.stack([mean, r, weight, torch.zeros_like(r)])
    rows, c = fused._shape(x)
    tile, chunk, parts = fused._tile(c), *fused._chunks(rows, c)
    partial = x.new_empty(2, parts, c, dtype=torch.float32)
    kernels.rectify_sums[c // tile["BC"], parts](
        g, x, norm, None, partial, rows, rows, chunk, c, 1.0, **tile, STAGES=fused.STAGES
    )
    (sums, (gb, gw)), gx = fused._added(partial, weight.dtype), torch.empty_like(x)
    kernels.rectify_back[fused._tiles(rows, c, tile)](g, x, norm, None, sums, gx, rows, rows, c, 1.0, 1 / rows, **tile)
    return gx, gw, gb


def normalised_again(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What u, v and s at the results of `normalised_back` pull back to g, x and the weight."""
    g, x, u = (fused._channels_last(value) for value in (g, x, u))
    rows, c = fused._shape(x)
    tile, chunk, parts = fused._tile(c), *fused._chunks(rows, c)
    partial = x.new_empty(5, parts, c, dtype=torch.float32)
    task_kernels.again_sums[c // tile["BC"], parts](
        g, x, u, mean, r, partial, rows, chunk, c, **tile, STAGES=fused.STAGES
    )
    total, (gg, gx, gw) = partial.sum(1), (torch.empty_like(g), torch.empty_like(x), torch.empty_like(r))
    v, s = v.contiguous(), s.contiguous()
    task_kernels.again_back[fused._tiles(rows, c, tile)](
        g, x, u, mean, r, weight, v, s, total, gg, gx, gw, rows, c, 1 / rows, **tile
    )
    return gg, gx, gw.to(weight.dtype)


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of every 2×2 window, and its place there."""
    x = fused._channels_last(x)
    n, c, height, width = x.shape
    y = fused._empty((n, c, height // 2, width // 2), x.dtype, x.device)
    places = torch.empty_like(y, dtype=torch.uint8)
    windows, tile = y.numel() // c, fused._tile(c, fused.WINDOWS)
    task_kernels.pool[fused._tiles(windows, c, tile)](x, y, places, windows, height, width, c, **tile)
    return y, places


def spread(values: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """Values at their places, in maps of the form of x, and zeros elsewhere."""
    n, c, height, width = x.shape
    found = fused._empty((n, c, height, width), values.dtype, x.device)
    windows, tile = n * -(-height // 2) * -(-width // 2), fused._tile(c, fused.WINDOWS)
    values, places = fused._channels_last(values), fused._channels_last(places)
    task_kernels.spread[fused._tiles(windows, c, tile)](values, places, found, windows, height, width, c, **tile)
    return found


def picked(u: Tensor, places: Tensor) -> Tensor:
    """The values at the places."""
    u, places = fused._channels_last(u), fused._channels_last(places)
    _, c, height, width = u.shape
    values = torch.empty_like(places, dtype=u.dtype)
    windows, tile = places.numel() // c, fused._tile(c, fused.WINDOWS)
    task_kernels.pick[fused._tiles(windows, c, tile)](u, places, values, windows, height, width, c, **tile)
    return values
