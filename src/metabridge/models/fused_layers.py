"""What stands between the convolutions of a ResNet-12 or a cell, as few passes over memory, in Triton.

On a GPU in bfloat16 a ResNet-12 spends half of its time between the convolutions, reading and writing
maps, and a stack of cells nearly all of it. Here LeakyReLU(BatchNorm(x)) is one pass for the statistics and
one to apply them, forward and backward alike, the end of a block writes the pooled map alone, and an operator
of a cell adds what it sends to what the node has received. Maps are channels-last, seen as a matrix
(points × height × width, channels), stored as they come and computed in float32.

Statistics are merged by the rule of Chan et al. (1979), which loses no digits where |mean| ≫ deviation.
A second derivative is taken through PyTorch's own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.models import fused_triton_kernels as kernels
from metabridge.models import triton_tiles

TAPS = 32  # a stem's inputs by output pixel, 9 for each channel, filled up to a power of two


def rectified(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """LeakyReLU(BatchNorm(x)) with the statistics of the batch."""
    return _Rectified.apply(triton_tiles.channels_last(x), weight, bias, None, None, eps, slope)  # type: ignore[no-any-return]


def added(
    total: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor, eps: float, factor: Tensor | None = None
) -> Tensor:
    """The `total` so far, of nothing at first, plus BatchNorm(x) times a `factor` (points) that has no gradient."""
    total = None if total is None else triton_tiles.channels_last(total)
    return _Rectified.apply(triton_tiles.channels_last(x), weight, bias, total, factor, eps, 1.0)  # type: ignore[no-any-return]


def merged(
    main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, slope: float
) -> Tensor:
    """LeakyReLU(MaxPool2×2(BatchNorm(main) + BatchNorm(shortcut))) with the statistics of the batch."""
    return _Merged.apply(  # type: ignore[no-any-return]
        triton_tiles.channels_last(main), triton_tiles.channels_last(shortcut), w1, b1, w2, b2, eps, slope
    )


def branches(x: Tensor, main: Tensor, shortcut: Tensor) -> tuple[Tensor, Tensor]:
    """The 3×3 and the 1×1 convolution that a block begins with.

    A 1×1 convolution is a matrix product. Images, whose few channels leave cuDNN's tiles empty and
    which need no gradient, go through one kernel for both.
    """
    if 9 * x.shape[1] <= TAPS and main.shape[0] in (32, 64, 128) and not x.requires_grad:
        return _Stem.apply(triton_tiles.channels_last(x), main, shortcut)  # type: ignore[no-any-return]
    return F.conv2d(x, main, padding=1), F.linear(x.movedim(1, -1), shortcut.flatten(1)).movedim(-1, 1)


def kept(noise: Tensor, chance: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """0 on the squares of `size` × `size` whose upper left corner has `noise` below `chance`, and 1 elsewhere."""
    n, c, down, across = noise.shape
    height, width = down + size - 1, across + size - 1
    result = triton_tiles.empty((n, c, height, width), dtype, noise.device)
    rows, tile = n * height * width, triton_tiles.tile(c)
    kernels.keep[triton_tiles.grid(rows, c, tile)](
        triton_tiles.channels_last(noise), chance, result, rows, height, width, c, SIZE=size, **tile
    )
    return result


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        total: Tensor | None,
        factor: Tensor | None,
        eps: float,
        slope: float,
    ) -> Tensor:
        norm, y = triton_tiles.statistics(x, weight, bias, eps), torch.empty_like(x)
        rows, c = triton_tiles.matrix_shape(x)
        tile = triton_tiles.tile(c)
        kernels.rectify[triton_tiles.grid(rows, c, tile)](
            x, norm, factor, total, y, rows, rows // len(x), c, slope, **tile
        )
        ctx.save_for_backward(x, weight, bias, norm, factor)
        ctx.settings = eps, slope
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, norm, factor = ctx.saved_tensors
        _, slope = ctx.settings
        towards_total = g if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():
            inputs, scaled = (x, weight, bias), g if factor is None else g * factor.view(-1, 1, 1, 1).to(g.dtype)
            slopes = differentiable((_plain_rectified(*inputs, *ctx.settings),), inputs, (scaled,))
            return *slopes, towards_total, None, None, None
        g = triton_tiles.channels_last(g)
        rows, c = triton_tiles.matrix_shape(x)
        tile, chunk, parts = triton_tiles.tile(c), *triton_tiles.chunks(rows, c)
        partial = x.new_empty(2, parts, c, dtype=torch.float32)
        pixels = rows // len(x)
        kernels.rectify_sums[c // tile["BC"], parts](
            g, x, norm, factor, partial, rows, pixels, chunk, c, slope, **tile, STAGES=triton_tiles.STAGES
        )
        (sums, (gb, gw)), gx = triton_tiles.added(partial, weight.dtype), torch.empty_like(x)
        kernels.rectify_back[triton_tiles.grid(rows, c, tile)](
            g, x, norm, factor, sums, gx, rows, pixels, c, slope, 1 / rows, **tile
        )
        return gx, gw, gb, towards_total, None, None, None


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        main: Tensor,
        shortcut: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        eps: float,
        slope: float,
    ) -> Tensor:
        first, second = triton_tiles.statistics(main, w1, b1, eps), triton_tiles.statistics(shortcut, w2, b2, eps)
        n, c, height, width = main.shape
        pooled = n, c, height // 2, width // 2
        y, main_kept, shortcut_kept = (triton_tiles.empty(pooled, main.dtype, main.device) for _ in range(3))
        choice = torch.empty_like(y, dtype=torch.uint8)
        windows, tile = n * (height // 2) * (width // 2), triton_tiles.tile(c, triton_tiles.WINDOWS)
        kernels.merge[triton_tiles.grid(windows, c, tile)](
            main, shortcut, first, second, y, main_kept, shortcut_kept, choice, windows, height, width, c, slope, **tile
        )
        ctx.save_for_backward(main, shortcut, w1, b1, w2, b2, first, second, main_kept, shortcut_kept, choice)
        ctx.settings = eps, slope
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, first, second, main_kept, shortcut_kept, choice = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable((_plain_merged(*inputs, *ctx.settings),), inputs, (g,)), None, None
        main, shortcut, w1 = inputs[:3]
        _, slope = ctx.settings
        g = triton_tiles.channels_last(g)
        n, c, height, width = main.shape
        windows = triton_tiles.matrix_shape(g)[0]
        tile, chunk, parts = triton_tiles.tile(c), *triton_tiles.chunks(windows, c)
        partial = main.new_empty(3, parts, c, dtype=torch.float32)
        kernels.merge_sums[c // tile["BC"], parts](
            g,
            main_kept,
            shortcut_kept,
            choice,
            first,
            second,
            partial,
            windows,
            chunk,
            c,
            slope,
            **tile,
            STAGES=triton_tiles.STAGES,
        )
        total, (gb, gw1, gw2) = triton_tiles.added(partial, w1.dtype)
        gmain, gshortcut = torch.empty_like(main), torch.empty_like(shortcut)
        windows, tile = n * ((height + 1) // 2) * ((width + 1) // 2), triton_tiles.tile(c, triton_tiles.WINDOWS)
        kernels.merge_back[triton_tiles.grid(windows, c, tile)](
            g,
            choice,
            main,
            shortcut,
            first,
            second,
            total,
            gmain,
            gshortcut,
            windows,
            height,
            width,
            c,
            slope,
            1 / (n * height * width),
            **tile,
        )
        return gmain, gshortcut, gw1, gb, gw2, gb, None, None


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, main: Tensor, shortcut: Tensor) -> tuple[Tensor, Tensor]:
        n, c, height, width = x.shape
        outputs, rows = main.shape[0], n * height * width
        results = [triton_tiles.empty((n, outputs, height, width), x.dtype, x.device) for _ in range(2)]
        kernels.stem[(triton_tiles.parts(rows, 256),)](
            x,
            triton_tiles.channels_last(main),
            shortcut,
            *results,
            rows,
            height,
            width,
            c,
            O=outputs,
            TAPS=TAPS,
            BR=256,
        )
        ctx.save_for_backward(x, main, shortcut)
        return results[0], results[1]

    @staticmethod
    def backward(ctx: Any, gmain: Tensor, gshortcut: Tensor) -> tuple[Tensor | None, ...]:
        x, main, shortcut = ctx.saved_tensors
        if torch.is_grad_enabled():
            both = F.conv2d(x, main, padding=1), F.conv2d(x, shortcut)
            return None, *differentiable(both, (main, shortcut), (gmain, gshortcut))
        _, c, height, width = x.shape
        outputs, rows = main.shape[0], triton_tiles.matrix_shape(x)[0]
        chunk = triton_tiles.parts(triton_tiles.parts(rows, triton_tiles.PROGRAMS), 64) * 64
        parts = triton_tiles.parts(rows, chunk)
        partial = x.new_empty(parts, 2, outputs, TAPS, dtype=torch.float32)
        kernels.stem_back[(parts,)](
            x,
            triton_tiles.channels_last(gmain),
            triton_tiles.channels_last(gshortcut),
            partial,
            rows,
            chunk,
            height,
            width,
            c,
            O=outputs,
            TAPS=TAPS,
            BR=64,
            num_stages=2,
        )
        total = partial.sum(0).to(main.dtype)
        taps = total[0, :, : 9 * c].reshape(outputs, 3, 3, c).movedim(-1, 1)
        return None, taps, total[1, :, 4 * c : 5 * c].reshape(shortcut.shape)


def _plain_rectified(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    return F.leaky_relu(_plain_norm(x, weight, bias, eps), slope)


def _plain_merged(
    main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, slope: float
) -> Tensor:
    return F.leaky_relu(F.max_pool2d(_plain_norm(main, w1, b1, eps) + _plain_norm(shortcut, w2, b2, eps), 2), slope)


def _plain_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.batch_norm(x, None, None, weight.float(), bias.float(), training=True, eps=eps)


def differentiable(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], slopes: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Pull `slopes` back from `outputs` to `inputs` in a way that can be differentiated again."""
    wanted = [value for value in inputs if value.requires_grad]
    pulled = iter(torch.autograd.grad(outputs, wanted, slopes, create_graph=True))
    return tuple(next(pulled) if value.requires_grad else None for value in inputs)
