"""A residual block's batch norms, rectifiers and pooling as few passes over memory, in Triton.

On a GPU in bfloat16 a ResNet-12 spends half of its time between the convolutions, reading and writing
maps. Here LeakyReLU(BatchNorm(x)) is one pass for the statistics and one to apply them, forward and
backward alike, and the end of a block writes the pooled map alone. Maps are channels-last, seen as a
matrix (points × height × width, channels), stored as they come and computed in float32.

Statistics are merged by the rule of Chan et al. (1979), which loses no digits where |mean| ≫ deviation.
A second derivative is taken through PyTorch's own operations.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
    jit = triton.jit
except ImportError:  # PyTorch for CPUs comes without
    AVAILABLE = False

    def jit(kernel):  # noqa: D103
        return kernel


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
    _keep[c // tile["BC"], triton.cdiv(rows, tile["BR"])](
        _channels_last(noise), chance, result, rows, height, width, c, SIZE=size, **tile
    )
    return result


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
        norm, y = _statistics(x, weight, bias, eps), torch.empty_like(x)
        rows, c = _shape(x)
        tile = _tile(c)
        _rectify[c // tile["BC"], triton.cdiv(rows, tile["BR"])](x, norm, y, rows, c, slope, **tile)
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
        _rectify_sums[c // tile["BC"], parts](g, x, norm, partial, rows, chunk, c, slope, **tile, STAGES=STAGES)
        (total, (gb, gw)), gx = _added(partial, weight.dtype), torch.empty_like(x)
        grid = c // tile["BC"], triton.cdiv(rows, tile["BR"])
        _rectify_back[grid](g, x, norm, total, gx, rows, c, slope, 1 / rows, **tile)
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
        _merge[c // tile["BC"], triton.cdiv(windows, tile["BR"])](
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
        _merge_sums[c // tile["BC"], parts](
            g, main_kept, shortcut_kept, choice, first, second, partial, windows, chunk, c, slope, **tile, STAGES=STAGES
        )
        total, (gb, gw1, gw2) = _added(partial, w1.dtype)
        gmain, gshortcut = torch.empty_like(main), torch.empty_like(shortcut)
        windows, tile = n * ((height + 1) // 2) * ((width + 1) // 2), _tile(c, WINDOWS)
        _merge_back[c // tile["BC"], triton.cdiv(windows, tile["BR"])](
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
        _stem[(triton.cdiv(rows, 256),)](
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
        chunk = triton.cdiv(triton.cdiv(rows, PROGRAMS), 64) * 64
        parts = triton.cdiv(rows, chunk)
        partial = x.new_empty(parts, 2, outputs, TAPS, dtype=torch.float32)
        _stem_back[(parts,)](
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


def _chunks(rows: int, channels: int) -> tuple[int, int]:
    """How many rows one program adds up, and how many programs that makes."""
    tile = _tile(channels)
    parts = max(1, PROGRAMS // (channels // tile["BC"]))
    chunk = triton.cdiv(triton.cdiv(rows, parts), tile["BR"]) * tile["BR"]
    return chunk, triton.cdiv(rows, chunk)


def _statistics(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the rows mean, 1/deviation, weight and bias, which is all that a batch norm is."""
    rows, c = _shape(x)
    tile, chunk, parts = _tile(c), *_chunks(rows, c)
    partial = x.new_empty(2, parts, c, dtype=torch.float32)
    norm = x.new_empty(4, c, dtype=torch.float32)
    _moments[c // tile["BC"], parts](x, partial, rows, chunk, c, **tile, STAGES=STAGES)
    _finish_moments[(c // 8,)](
        partial, weight, bias, norm, rows, chunk, parts, c, eps, PARTS=triton.next_power_of_2(parts), BC=8
    )
    return norm


def _added(partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sums of the parts, and the same in the `dtype` of the parameters whose gradients they are."""
    sums, parts, c = partial.shape
    total, rounded = partial.new_empty(sums, c), partial.new_empty(sums, c, dtype=dtype)
    _add[c // 8, sums](partial, total, rounded, parts, c, PARTS=triton.next_power_of_2(parts), BC=8)
    return total, rounded


@jit
def _norm(norm, column, c):
    return (
        tl.load(norm + column)[None, :],
        tl.load(norm + c + column)[None, :],
        tl.load(norm + 2 * c + column)[None, :],
        tl.load(norm + 3 * c + column)[None, :],
    )


@jit
def _moments(x, partial, rows, chunk, c, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
    """Mean and sum of squared deviations of a chunk of rows: Welford's rule in each lane, then Chan's over lanes."""
    column, lane = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BR)
    start = tl.program_id(1) * chunk
    count = tl.minimum(chunk, rows - start)
    x += start.to(tl.int64) * c
    mean = tl.zeros([BR, BC], tl.float32)
    spread = tl.zeros([BR, BC], tl.float32)
    step = 0.0
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        value = tl.load(x + row[:, None] * c + column[None, :], mask=inside, other=0.0).to(tl.float32)
        step += 1.0
        change = value - mean
        mean += tl.where(inside, change * (1.0 / step), 0.0)
        spread += tl.where(inside, change * (value - mean), 0.0)
    seen = tl.maximum((count - lane + BR - 1) // BR, 0).to(tl.float32)[:, None]
    centre = tl.sum(seen * mean, 0) / count
    away = mean - centre[None, :]
    out = partial + tl.program_id(1) * c + column
    tl.store(out, centre)
    tl.store(out + tl.num_programs(1) * c, tl.sum(spread + seen * away * away, 0))


@jit
def _finish_moments(partial, weight, bias, norm, rows, chunk, parts, c, eps, PARTS: tl.constexpr, BC: tl.constexpr):
    """Merge the chunks by Chan's rule."""
    column, part = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, PARTS)[:, None]
    inside = part < parts
    count = tl.where(inside, tl.minimum(chunk, rows - part * chunk), 0).to(tl.float32)
    place = part * c + column[None, :]
    mean = tl.load(partial + place, mask=inside, other=0.0)
    spread = tl.load(partial + parts * c + place, mask=inside, other=0.0)
    centre = tl.sum(count * mean, 0) / rows
    away = mean - centre[None, :]
    variance = tl.sum(spread + count * away * away, 0) / rows
    tl.store(norm + column, centre)
    tl.store(norm + c + column, 1.0 / tl.sqrt(variance + eps))
    tl.store(norm + 2 * c + column, tl.load(weight + column).to(tl.float32))
    tl.store(norm + 3 * c + column, tl.load(bias + column).to(tl.float32))


@jit
def _add(partial, total, rounded, parts, c, PARTS: tl.constexpr, BC: tl.constexpr):
    column, part = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, PARTS)[:, None]
    place = (tl.program_id(1) * parts + part) * c + column[None, :]
    result = tl.sum(tl.load(partial + place, mask=part < parts, other=0.0), 0)
    tl.store(total + tl.program_id(1) * c + column, result)
    tl.store(rounded + tl.program_id(1) * c + column, result)


@jit
def _rectify(x, norm, y, rows, c, slope, BR: tl.constexpr, BC: tl.constexpr):
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    inside = (row < rows)[:, None]
    place = row[:, None].to(tl.int64) * c + column[None, :]
    mean, r, weight, bias = _norm(norm, column, c)
    value = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * r * weight + bias
    tl.store(y + place, tl.where(value > 0, value, slope * value), mask=inside)


@jit
def _rectify_sums(g, x, norm, partial, rows, chunk, c, slope, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
    """Σg and Σgn of a chunk of rows, where g has passed the rectifier and n is the normalised x."""
    column, lane = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BR)
    start = tl.program_id(1) * chunk
    count = tl.minimum(chunk, rows - start)
    x += start.to(tl.int64) * c
    g += start.to(tl.int64) * c
    mean, r, weight, bias = _norm(norm, column, c)
    plain = tl.zeros([BR, BC], tl.float32)
    paired = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        place = row[:, None] * c + column[None, :]
        n = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * r
        slopes = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        slopes = tl.where(n * weight + bias > 0, slopes, slope * slopes)
        plain += slopes
        paired += slopes * n
    out = partial + tl.program_id(1) * c + column
    tl.store(out, tl.sum(plain, 0))
    tl.store(out + tl.num_programs(1) * c, tl.sum(paired, 0))


@jit
def _rectify_back(g, x, norm, total, gx, rows, c, slope, share, BR: tl.constexpr, BC: tl.constexpr):
    """gx = wr(g − m(g) − n m(gn)), where m is the mean over the rows."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    inside = (row < rows)[:, None]
    place = row[:, None].to(tl.int64) * c + column[None, :]
    mean, r, weight, bias = _norm(norm, column, c)
    mg, mgn = share * tl.load(total + column)[None, :], share * tl.load(total + c + column)[None, :]
    n = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * r
    slopes = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
    slopes = tl.where(n * weight + bias > 0, slopes, slope * slopes)
    tl.store(gx + place, weight * r * (slopes - mg - n * mgn), mask=inside)


@jit
def _merge(
    main,
    shortcut,
    first,
    second,
    y,
    main_kept,
    shortcut_kept,
    choice,
    windows,
    height,
    width,
    c,
    slope,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Pool the sum of two norms, and keep of both what was chosen, where, and (+4) whether it is positive."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    window = tl.program_id(1) * BR + tl.arange(0, BR)[:, None]
    inside = window < windows
    across, down = width // 2, height // 2
    top = (window // across // down * height + window // across % down * 2) * width + window % across * 2
    corner = top.to(tl.int64) * c + column
    mean1, r1, w1, b1 = _norm(first, tl.program_id(0) * BC + tl.arange(0, BC), c)
    mean2, r2, w2, b2 = _norm(second, tl.program_id(0) * BC + tl.arange(0, BC), c)
    scale1, scale2 = r1 * w1, r2 * w2
    best = tl.zeros([BR, BC], tl.float32)
    one = tl.zeros([BR, BC], tl.float32)
    two = tl.zeros([BR, BC], tl.float32)
    chosen = tl.zeros([BR, BC], tl.int32)
    for k in tl.static_range(4):
        place = corner + (k // 2 * width + k % 2) * c
        a = tl.load(main + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(shortcut + place, mask=inside, other=0.0).to(tl.float32)
        value = (a - mean1) * scale1 + b1 + (b - mean2) * scale2 + b2
        if k == 0:
            best, one, two = value, a, b
        else:
            better = value > best
            best = tl.where(better, value, best)
            one = tl.where(better, a, one)
            two = tl.where(better, b, two)
            chosen = tl.where(better, k, chosen)
    place = window.to(tl.int64) * c + column
    tl.store(y + place, tl.where(best > 0, best, slope * best), mask=inside)
    tl.store(main_kept + place, one, mask=inside)
    tl.store(shortcut_kept + place, two, mask=inside)
    tl.store(choice + place, (chosen + tl.where(best > 0, 4, 0)).to(tl.uint8), mask=inside)


@jit
def _merge_sums(
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
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σg, Σgn₁ and Σgn₂ of a chunk of windows, over what was chosen in them."""
    column, lane = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BR)
    start = tl.program_id(1) * chunk
    count = tl.minimum(chunk, windows - start)
    base = start.to(tl.int64) * c
    mean1, r1, _, _ = _norm(first, column, c)
    mean2, r2, _, _ = _norm(second, column, c)
    plain = tl.zeros([BR, BC], tl.float32)
    paired1 = tl.zeros([BR, BC], tl.float32)
    paired2 = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        place = base + row[:, None] * c + column[None, :]
        slopes = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        slopes = tl.where(tl.load(choice + place, mask=inside, other=0) > 3, slopes, slope * slopes)
        plain += slopes
        paired1 += slopes * (tl.load(main_kept + place, mask=inside, other=0.0).to(tl.float32) - mean1) * r1
        paired2 += slopes * (tl.load(shortcut_kept + place, mask=inside, other=0.0).to(tl.float32) - mean2) * r2
    out = partial + tl.program_id(1) * c + column
    tl.store(out, tl.sum(plain, 0))
    tl.store(out + tl.num_programs(1) * c, tl.sum(paired1, 0))
    tl.store(out + 2 * tl.num_programs(1) * c, tl.sum(paired2, 0))


@jit
def _merge_back(
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
    share,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Both gradients of a block's end; the windows that an odd size cuts off receive the means' part alone."""
    flat = tl.program_id(0) * BC + tl.arange(0, BC)
    column = flat[None, :]
    window = tl.program_id(1) * BR + tl.arange(0, BR)[:, None]
    across, down = (width + 1) // 2, (height + 1) // 2
    point, i, j = window // across // down, window // across % down, window % across
    whole = (window < windows) & (i < height // 2) & (j < width // 2)
    place = ((point * (height // 2) + i) * (width // 2) + j).to(tl.int64) * c + column
    slopes = tl.load(g + place, mask=whole, other=0.0).to(tl.float32)
    chosen = tl.load(choice + place, mask=whole, other=0).to(tl.int32)
    slopes = tl.where(chosen > 3, slopes, slope * slopes)
    chosen = chosen & 3
    mean1, r1, w1, _ = _norm(first, flat, c)
    mean2, r2, w2, _ = _norm(second, flat, c)
    mg = share * tl.load(total + flat)[None, :]
    fall1, fall2 = share * tl.load(total + c + flat)[None, :] * r1, share * tl.load(total + 2 * c + flat)[None, :] * r2
    scale1, scale2 = w1 * r1, w2 * r2
    corner = ((point * height + 2 * i) * width + 2 * j).to(tl.int64) * c + column
    for k in tl.static_range(4):
        inside = (window < windows) & (2 * i + k // 2 < height) & (2 * j + k % 2 < width)
        place = corner + (k // 2 * width + k % 2) * c
        own = tl.where(chosen == k, slopes, 0.0) - mg
        a = tl.load(main + place, mask=inside, other=0.0).to(tl.float32) - mean1
        b = tl.load(shortcut + place, mask=inside, other=0.0).to(tl.float32) - mean2
        tl.store(gmain + place, scale1 * (own - a * fall1), mask=inside)
        tl.store(gshortcut + place, scale2 * (own - b * fall2), mask=inside)


@jit
def _taps(x, row, rows, height, width, c, TAPS: tl.constexpr):
    """What a 3×3 convolution sees at each pixel: (rows, TAPS), by line, column and channel."""
    tap = tl.arange(0, TAPS)[None, :]
    down, right = tap // (3 * c) - 1, tap // c % 3 - 1
    i, j = (row // width % height)[:, None], (row % width)[:, None]
    inside = (i + down >= 0) & (i + down < height) & (j + right >= 0) & (j + right < width)
    place = (row[:, None] + down * width - 1) * c + tap % (3 * c)
    return tl.load(x + place, mask=inside & (tap < 9 * c) & (row < rows)[:, None], other=0.0)


@jit
def _stem(
    x,
    main,
    shortcut,
    y1,
    y2,
    rows,
    height,
    width,
    c,
    O: tl.constexpr,  # noqa: E741
    TAPS: tl.constexpr,
    BR: tl.constexpr,
):
    row, out, tap = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, O)[None, :], tl.arange(0, TAPS)[:, None]
    seen = _taps(x, row, rows, height, width, c, TAPS)
    w1 = tl.load(main + out * 9 * c + tap, mask=tap < 9 * c, other=0.0)
    w2 = tl.load(shortcut + out * c + tap - 4 * c, mask=(tap >= 4 * c) & (tap < 5 * c), other=0.0)
    place = row[:, None].to(tl.int64) * O + out
    inside = (row < rows)[:, None]
    tl.store(y1 + place, tl.dot(seen, w1, input_precision="ieee"), mask=inside)
    tl.store(y2 + place, tl.dot(seen, w2, input_precision="ieee"), mask=inside)


@jit
def _stem_back(
    x,
    g1,
    g2,
    partial,
    rows,
    chunk,
    height,
    width,
    c,
    O: tl.constexpr,  # noqa: E741
    TAPS: tl.constexpr,
    BR: tl.constexpr,
):
    out, tap = tl.arange(0, O), tl.arange(0, TAPS)
    start = tl.program_id(0) * chunk
    slopes1 = tl.zeros([O, TAPS], tl.float32)
    slopes2 = tl.zeros([O, TAPS], tl.float32)
    for offset in range(start, tl.minimum(start + chunk, rows), BR):
        row = offset + tl.arange(0, BR)
        seen = _taps(x, row, rows, height, width, c, TAPS)
        place = row[:, None].to(tl.int64) * O + out[None, :]
        inside = (row < rows)[:, None]
        one = tl.load(g1 + place, mask=inside, other=0.0)
        two = tl.load(g2 + place, mask=inside, other=0.0)
        slopes1 = tl.dot(tl.trans(one), seen, slopes1, input_precision="ieee")
        slopes2 = tl.dot(tl.trans(two), seen, slopes2, input_precision="ieee")
    place = (tl.program_id(0) * 2 * O + out[:, None]) * TAPS + tap[None, :]
    tl.store(partial + place, slopes1)
    tl.store(partial + place + O * TAPS, slopes2)


@jit
def _keep(noise, chance, result, rows, height, width, c, SIZE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    column = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    row = tl.program_id(1) * BR + tl.arange(0, BR)[:, None]
    down, across = height - SIZE + 1, width - SIZE + 1
    point, i, j = row // width // height, row // width % height, row % width
    lowest = tl.full([BR, BC], 1.0, tl.float32)
    for k in range(SIZE * SIZE):
        above, left = i - k // SIZE, j - k % SIZE
        inside = (row < rows) & (above >= 0) & (above < down) & (left >= 0) & (left < across)
        place = ((point * down + above) * across + left).to(tl.int64) * c + column
        lowest = tl.minimum(lowest, tl.load(noise + place, mask=inside, other=1.0))
    tl.store(result + row.to(tl.int64) * c + column, tl.where(lowest < tl.load(chance), 0.0, 1.0), mask=row < rows)
