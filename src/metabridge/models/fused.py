"""A residual block's batch norms, rectifiers and pooling as few passes over memory, in Triton.

On a GPU in bfloat16 a ResNet-12 spends half of its time between the convolutions, reading and writing
maps. Here LeakyReLU(BatchNorm(x)) is one pass for the statistics and one to apply them, forward and
backward alike, and the end of a block writes the pooled map alone. Maps are channels-last, seen as a
matrix (points × height × width, channels), stored as they come and computed in float32.

Statistics are merged by the rule of Chan et al. (1979), which loses no digits where |mean| ≫ deviation.
A second derivative is taken through PyTorch's own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.models import fused_kernels as kernels

AVAILABLE = kernels.AVAILABLE
CHANNELS = 16  # a map's channels must be a multiple of it
# The sizes below are chosen among those tried on an H200, whose 132 multiprocessors they suit.
TILE = 2048  # elements of a map that a program holds at a time
WINDOWS = 1024  # and elements of a pooled map
STAGES = 4  # tiles that a sum over rows reads ahead
PROGRAMS = 528  # that share a sum over all rows
TAPS = 32  # a stem's inputs by output pixel, 9 for each channel, filled up to a power of two


def rectified(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """LeakyReLU(BatchNorm(x)) with the statistics of the batch."""
    return _Rectified.apply(_channels_last(x), weight, bias, eps, slope)  # type: ignore[no-any-return]


def merged(
    main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, slope: float
) -> Tensor:
    """LeakyReLU(MaxPool2×2(BatchNorm(main) + BatchNorm(shortcut))) with the statistics of the batch."""
    return _Merged.apply(_channels_last(main), _channels_last(shortcut), w1, b1, w2, b2, eps, slope)  # type: ignore[no-any-return]


def branches(x: Tensor, main: Tensor, shortcut: Tensor) -> tuple[Tensor, Tensor]:
    """The 3×3 and the 1×1 convolution that a block begins with.

    A 1×1 convolution is a matrix product. Images, whose few channels leave cuDNN's tiles empty and
    which need no gradient, go through one kernel for both.
    """
    if 9 * x.shape[1] <= TAPS and main.shape[0] in (32, 64, 128) and not x.requires_grad:
        return _Stem.apply(_channels_last(x), main, shortcut)  # type: ignore[no-any-return]
    return F.conv2d(x, main, padding=1), F.linear(x.movedim(1, -1), shortcut.flatten(1)).movedim(-1, 1)


def kept(noise: Tensor, chance: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """0 on the squares of `size` × `size` whose upper left corner has `noise` below `chance`, and 1 elsewhere."""
    n, c, down, across = noise.shape
    height, width = down + size - 1, across + size - 1
    result = _empty((n, c, height, width), dtype, noise.device)
    rows, tile = n * height * width, _tile(c)
    kernels.keep[_tiles(rows, c, tile)](
        _channels_last(noise), chance, result, rows, height, width, c, SIZE=size, **tile
    )
    return result


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
        norm, y = _statistics(x, weight, bias, eps), torch.empty_like(x)
        rows, c = _shape(x)
        tile = _tile(c)
        kernels.rectify[_tiles(rows, c, tile)](x, norm, y, rows, c, slope, **tile)
        ctx.save_for_backward(x, weight, bias, norm)
        ctx.settings = eps, slope
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, norm = ctx.saved_tensors
        _, slope = ctx.settings
        if torch.is_grad_enabled():
            inputs = x, weight, bias
            return *_differentiable((_plain_rectified(*inputs, *ctx.settings),), inputs, (g,)), None, None
        g = _channels_last(g)
        rows, c = _shape(x)
        tile, chunk, parts = _tile(c), *_chunks(rows, c)
        partial = x.new_empty(2, parts, c, dtype=torch.float32)
        kernels.rectify_sums[c // tile["BC"], parts](g, x, norm, partial, rows, chunk, c, slope, **tile, STAGES=STAGES)
        (total, (gb, gw)), gx = _added(partial, weight.dtype), torch.empty_like(x)
        kernels.rectify_back[_tiles(rows, c, tile)](g, x, norm, total, gx, rows, c, slope, 1 / rows, **tile)
        return gx, gw, gb, None, None


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
        first, second = _statistics(main, w1, b1, eps), _statistics(shortcut, w2, b2, eps)
        n, c, height, width = main.shape
        pooled = n, c, height // 2, width // 2
        y, main_kept, shortcut_kept = (_empty(pooled, main.dtype, main.device) for _ in range(3))
        choice = torch.empty_like(y, dtype=torch.uint8)
        windows, tile = n * (height // 2) * (width // 2), _tile(c, WINDOWS)
        kernels.merge[_tiles(windows, c, tile)](
            main, shortcut, first, second, y, main_kept, shortcut_kept, choice, windows, height, width, c, slope, **tile
        )
        ctx.save_for_backward(main, shortcut, w1, b1, w2, b2, first, second, main_kept, shortcut_kept, choice)
        ctx.settings = eps, slope
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, first, second, main_kept, shortcut_kept, choice = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable((_plain_merged(*inputs, *ctx.settings),), inputs, (g,)), None, None
        main, shortcut, w1 = inputs[:3]
        _, slope = ctx.settings
        g = _channels_last(g)
        n, c, height, width = main.shape
        windows = _shape(g)[0]
        tile, chunk, parts = _tile(c), *_chunks(windows, c)
        partial = main.new_empty(3, parts, c, dtype=torch.float32)
        kernels.merge_sums[c // tile["BC"], parts](
            g, main_kept, shortcut_kept, choice, first, second, partial, windows, chunk, c, slope, **tile, STAGES=STAGES
        )
        total, (gb, gw1, gw2) = _added(partial, w1.dtype)
        gmain, gshortcut = torch.empty_like(main), torch.empty_like(shortcut)
        windows, tile = n * ((height + 1) // 2) * ((width + 1) // 2), _tile(c, WINDOWS)
        kernels.merge_back[_tiles(windows, c, tile)](
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
        results = [_empty((n, outputs, height, width), x.dtype, x.device) for _ in range(2)]
        kernels.stem[(_parts(rows, 256),)](
            x, _channels_last(main), shortcut, *results, rows, height, width, c, O=outputs, TAPS=TAPS, BR=256
        )
        ctx.save_for_backward(x, main, shortcut)
        return results[0], results[1]

    @staticmethod
    def backward(ctx: Any, gmain: Tensor, gshortcut: Tensor) -> tuple[Tensor | None, ...]:
        x, main, shortcut = ctx.saved_tensors
        if torch.is_grad_enabled():
            both = F.conv2d(x, main, padding=1), F.conv2d(x, shortcut)
            return None, *_differentiable(both, (main, shortcut), (gmain, gshortcut))
        _, c, height, width = x.shape
        outputs, rows = main.shape[0], _shape(x)[0]
        chunk = _parts(_parts(rows, PROGRAMS), 64) * 64
        parts = _parts(rows, chunk)
        partial = x.new_empty(parts, 2, outputs, TAPS, dtype=torch.float32)
        kernels.stem_back[(parts,)](
            x,
            _channels_last(gmain),
            _channels_last(gshortcut),
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


def _differentiable(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], slopes: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Pull `slopes` back from `outputs` to `inputs` in a way that can be differentiated again."""
    wanted = [value for value in inputs if value.requires_grad]
    pulled = iter(torch.autograd.grad(outputs, wanted, slopes, create_graph=True))
    return tuple(next(pulled) if value.requires_grad else None for value in inputs)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _shape(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[1], x.shape[1]


def _tile(channels: int, elements: int = TILE) -> dict[str, int]:
    """Rows and columns of a tile; the columns divide the channels, so that no tile is partly empty."""
    columns = min(64, channels & -channels)
    return {"BR": elements // columns, "BC": columns}


def _tiles(rows: int, channels: int, tile: dict[str, int]) -> tuple[int]:
    """The grid of a kernel in which every program has one tile."""
    return (_parts(rows, tile["BR"]) * (channels // tile["BC"]),)


def _chunks(rows: int, channels: int) -> tuple[int, int]:
    """How many rows one program adds up, and how many programs that makes."""
    tile = _tile(channels)
    parts = max(1, PROGRAMS // (channels // tile["BC"]))
    chunk = _parts(_parts(rows, parts), tile["BR"]) * tile["BR"]
    return chunk, _parts(rows, chunk)


def _statistics(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the rows mean, 1/deviation, weight and bias, which is all that a batch norm is."""
    rows, c = _shape(x)
    tile, chunk, parts = _tile(c), *_chunks(rows, c)
    partial = x.new_empty(2, parts, c, dtype=torch.float32)
    norm = x.new_empty(4, c, dtype=torch.float32)
    kernels.moments[c // tile["BC"], parts](x, partial, rows, chunk, c, **tile, STAGES=STAGES)
    kernels.finish_moments[(c // 8,)](
        partial, weight, bias, norm, rows, chunk, parts, c, eps, PARTS=_power_of_two(parts), BC=8
    )
    return norm


def _added(partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sums of the parts, and the same in the `dtype` of the parameters whose gradients they are."""
    sums, parts, c = partial.shape
    total, rounded = partial.new_empty(sums, c), partial.new_empty(sums, c, dtype=dtype)
    kernels.add[c // 8, sums](partial, total, rounded, parts, c, PARTS=_power_of_two(parts), BC=8)
    return total, rounded


def _parts(whole: int, size: int) -> int:
    """How many parts of a size make up the whole."""
    return -(-whole // size)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
