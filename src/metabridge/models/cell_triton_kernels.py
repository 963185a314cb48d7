"""Triton kernels of `cell_triton_layers`, with the conventions of `fused_triton_kernels`.

A `WindowGrid` describes the 3×3 windows of a map. A row of a tile represents `lines` windows, one below the other.
Their pixels overlap, but the compiler loads each pixel only once if all loads come before the first store. The grid is
a compile-time constant, because division by its sides would be slow otherwise.

`k` from 0 to 8 is the position of a pixel in a window. `pixel` from 0 to lines · stride² − 1 numbers the pixels of the
map that a row represents: it lies `pixel // stride` pixels below and `pixel % stride` pixels to the right of the center
of the row's first window. `more` is None or another gradient with respect to x, which is added to the computed one.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005 (Triton supports no unpacking in tuples)

from __future__ import annotations

from typing import NamedTuple

from metabridge.models.fused_triton_kernels import AVAILABLE, constexpr_function, jit, load_float, tile_indices

if AVAILABLE:
    import triton.language as tl


class WindowGrid(NamedTuple):
    """The 3×3 windows of a map.

    Args:
        height: Height of the map in pixels.
        width: Width of the map in pixels.
        down: Number of windows in a column of the grid.
        across: Number of windows in a row of the grid.
        stride: Distance between neighboring windows in pixels.
        lines: Number of windows, one below the other, that a row of a tile represents.
    """

    height: int
    width: int
    down: int
    across: int
    stride: int
    lines: int


@constexpr_function
def is_in_window(GRID, DILATION, pixel, k):
    """Return whether `pixel` is at position `k` of any window."""
    down, right = pixel // GRID.stride - (k // 3 - 1) * DILATION, pixel % GRID.stride - (k % 3 - 1) * DILATION
    return down % GRID.stride == 0 and right % GRID.stride == 0


@constexpr_function
def window_below(GRID, DILATION, pixel, k):
    """Return how many windows the window with `pixel` at position `k` is below the row's first window."""
    return (pixel // GRID.stride - (k // 3 - 1) * DILATION) // GRID.stride


@constexpr_function
def window_right(GRID, DILATION, pixel, k):
    """Return how many windows the window with `pixel` at position `k` is to the right of the row's first window."""
    return (pixel % GRID.stride - (k % 3 - 1) * DILATION) // GRID.stride


@jit
def grid_index(
    row,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    GRID: tl.constexpr,
    down: tl.constexpr,
    right: tl.constexpr,
):
    """Return the index of the element `down` below and `right` of a row's first window, and whether it exists.

    The elements are pixels or windows of a map. STRIDE is the distance between neighboring windows in elements.
    """
    GROUPS: tl.constexpr = (GRID.down + GRID.lines - 1) // GRID.lines
    i, j = row // GRID.across % GROUPS * GRID.lines * STRIDE, row % GRID.across * STRIDE
    center = (row // GRID.across // GROUPS * HEIGHT + i) * WIDTH + j
    inside = (i + down >= 0) & (i + down < HEIGHT) & (j + right >= 0) & (j + right < WIDTH) & (row < rows)
    return (center.to(tl.int64) * c + (down * WIDTH + right) * c)[:, None], inside[:, None]


@jit
def pixel_index(row, rows, c, GRID: tl.constexpr, down: tl.constexpr, right: tl.constexpr):
    """Return the index of the pixel `down` and `right` of the center of a row's first window, and whether it exists."""
    return grid_index(row, rows, c, GRID.height, GRID.width, GRID.stride, GRID, down, right)


@jit
def window_index(row, rows, c, GRID: tl.constexpr, down: tl.constexpr, right: tl.constexpr):
    """Return the index in the output of the window `down` and `right` of a row's first one, and whether it exists."""
    return grid_index(row, rows, c, GRID.down, GRID.across, 1, GRID, down, right)


@jit
def tap_index(row, rows, c, GRID: tl.constexpr, DILATION: tl.constexpr, line: tl.constexpr, k: tl.constexpr):
    """Return the index of the pixel at position `k` of window number `line` of a row, and whether it exists."""
    return pixel_index(row, rows, c, GRID, line * GRID.stride + (k // 3 - 1) * DILATION, (k % 3 - 1) * DILATION)


@jit
def window_of_pixel(row, rows, c, GRID: tl.constexpr, DILATION: tl.constexpr, pixel: tl.constexpr, k: tl.constexpr):
    """Return the index in the output of the window that has `pixel` at position `k`, and whether it exists."""
    return window_index(
        row, rows, c, GRID, window_below(GRID, DILATION, pixel, k), window_right(GRID, DILATION, pixel, k)
    )


@jit
def pixels_in_window(row, GRID: tl.constexpr, down: tl.constexpr, right: tl.constexpr):
    """Return how many of its 9 pixels lie in the map, for the window `down` and `right` of a row's first one."""
    GROUPS: tl.constexpr = (GRID.down + GRID.lines - 1) // GRID.lines
    i = (row // GRID.across % GROUPS * GRID.lines + down) * GRID.stride
    j = (row % GRID.across + right) * GRID.stride
    lines = 1 + (i > 0).to(tl.int32) + (i + 1 < GRID.height).to(tl.int32)
    return (lines * (1 + (j > 0).to(tl.int32) + (j + 1 < GRID.width).to(tl.int32))).to(tl.float32)[:, None]


@jit
def add_gradient(more, index, inside, grad):
    """Return `grad` + `more`, or `grad` if `more` is None."""
    if more is not None:
        grad += load_float(more + index, inside)
    return grad


@jit
def store_windows(y, values, row, rows, c, column, GRID: tl.constexpr):
    """Store one value per window of each row."""
    LINES: tl.constexpr = GRID.lines
    for line in tl.static_range(LINES):
        index, inside = window_index(row, rows, c, GRID, line, 0)
        tl.store(y + index + column, values[line], mask=inside)


@jit
def store_pixel_grads(gx, more, grads, row, rows, c, column, GRID: tl.constexpr):
    """Store the gradients of the pixels that each row represents."""
    PIXELS: tl.constexpr = GRID.lines * GRID.stride * GRID.stride
    for pixel in tl.static_range(PIXELS):
        index, inside = pixel_index(row, rows, c, GRID, pixel // GRID.stride, pixel % GRID.stride)
        tl.store(gx + index + column, add_gradient(more, index + column, inside, grads[pixel]), mask=inside)


@jit
def relu_depthwise_conv(
    x, weight, y, rows, c, GRID: tl.constexpr, DILATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Store the depthwise 3×3 convolution of ReLU(x); the weight has shape (9, c)."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    LINES: tl.constexpr = GRID.lines
    totals = ()
    for line in tl.static_range(LINES):
        total = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            index, inside = tap_index(row, rows, c, GRID, DILATION, line, k)
            value = tl.load(x + index + column, mask=inside, other=0.0)
            total += tl.where(value <= 0, 0.0, value).to(tl.float32) * tl.load(weight + k * c + column).to(tl.float32)
        totals = totals + (total,)
    store_windows(y, totals, row, rows, c, column, GRID)


@jit
def relu_depthwise_conv_backward(
    g,
    more,
    x,
    weight,
    gx,
    partial,
    rows,
    c,
    GRID: tl.constexpr,
    chunk,
    DILATION: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Compute the gradient of x, and sum the gradient of the weight over a chunk of rows."""
    column = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    start = tl.program_id(1) * chunk
    PIXELS: tl.constexpr = GRID.lines * GRID.stride * GRID.stride
    zeros = tl.zeros([BR, BC], tl.float32)
    sums = (zeros,) * 9
    for offset in range(start, tl.minimum(start + chunk, rows), BR):
        row = offset + tl.arange(0, BR)
        totals = ()
        for pixel in tl.static_range(PIXELS):
            index, inside = pixel_index(row, rows, c, GRID, pixel // GRID.stride, pixel % GRID.stride)
            value = tl.load(x + index + column, mask=inside, other=0.0)
            positive = value > 0
            value = tl.where(value <= 0, 0.0, value).to(tl.float32)
            total = tl.zeros([BR, BC], tl.float32)
            for k in tl.static_range(9):
                if is_in_window(GRID, DILATION, pixel, k):
                    index, inside = window_of_pixel(row, rows, c, GRID, DILATION, pixel, k)
                    grad = load_float(g + index + column, inside)
                    total += grad * tl.load(weight + k * c + column).to(tl.float32)
                    sums = sums[:k] + (sums[k] + grad * value,) + sums[k + 1 :]
            totals = totals + (tl.where(positive, total, 0.0),)
        store_pixel_grads(gx, more, totals, row, rows, c, column, GRID)
    for k in tl.static_range(9):
        tl.store(partial + (tl.program_id(1) * 9 + k) * c + column, tl.sum(sums[k], 0)[None, :])


@jit
def max_pool(x, y, choice, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store the maximum of each window, and its position `k`."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    LINES: tl.constexpr = GRID.lines
    totals = ()
    choices = ()
    for line in tl.static_range(LINES):
        best = tl.full([BR, BC], float("-inf"), tl.float32)
        chosen = tl.zeros([BR, BC], tl.int32)
        for k in tl.static_range(9):
            index, inside = tap_index(row, rows, c, GRID, 1, line, k)
            value = tl.load(x + index + column, mask=inside, other=float("-inf")).to(tl.float32)
            better = (value > best) | (value != value)
            chosen = tl.where(better, k, chosen)
            best = tl.where(better, value, best)
        totals = totals + (best,)
        choices = choices + (chosen,)
    for line in tl.static_range(LINES):
        index, inside = window_index(row, rows, c, GRID, line, 0)
        tl.store(y + index + column, totals[line], mask=inside)
        tl.store(choice + index + column, choices[line].to(tl.uint8), mask=inside)


@jit
def max_pool_backward(g, more, choice, gx, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """For each pixel, sum the gradients of the windows whose maximum it is."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    PIXELS: tl.constexpr = GRID.lines * GRID.stride * GRID.stride
    totals = ()
    for pixel in tl.static_range(PIXELS):
        total = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            if is_in_window(GRID, 1, pixel, k):
                index, inside = window_of_pixel(row, rows, c, GRID, 1, pixel, k)
                chosen = tl.load(choice + index + column, mask=inside, other=9) == k
                total += tl.where(chosen, load_float(g + index + column, inside), 0.0)
        totals = totals + (total,)
    store_pixel_grads(gx, more, totals, row, rows, c, column, GRID)


@jit
def mean_pool(x, y, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store the mean of the pixels in each window, excluding the padding."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    LINES: tl.constexpr = GRID.lines
    totals = ()
    for line in tl.static_range(LINES):
        total = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            index, inside = tap_index(row, rows, c, GRID, 1, line, k)
            total += load_float(x + index + column, inside)
        total /= pixels_in_window(row, GRID, line, 0)
        totals = totals + (total,)
    store_windows(y, totals, row, rows, c, column, GRID)


@jit
def mean_pool_backward(g, more, gx, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """For each pixel, sum the gradients of the windows that contain it, each divided by its number of pixels."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    PIXELS: tl.constexpr = GRID.lines * GRID.stride * GRID.stride
    totals = ()
    for pixel in tl.static_range(PIXELS):
        total = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            if is_in_window(GRID, 1, pixel, k):
                index, inside = window_of_pixel(row, rows, c, GRID, 1, pixel, k)
                count = pixels_in_window(row, GRID, window_below(GRID, 1, pixel, k), window_right(GRID, 1, pixel, k))
                total += load_float(g + index + column, inside) / count
        totals = totals + (total,)
    store_pixel_grads(gx, more, totals, row, rows, c, column, GRID)


@jit
def relu_even_odd(x, y, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store ReLU(x) at pixels (2i, 2j) and at pixels (2i + 1, 2j + 1), zero beyond the edge, as 2c channels."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    for odd in tl.static_range(2):
        index, inside = pixel_index(row, rows, c, GRID, odd, odd)
        value = tl.load(x + index + column, mask=inside, other=0.0)
        half = (2 * row[:, None].to(tl.int64) + odd) * c + column
        tl.store(y + half, tl.where(value <= 0, 0.0, value), mask=(row < rows)[:, None])


@jit
def relu_even_odd_backward(g, more, y, gx, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Compute the gradient of x, which is 0 (or `more`) at pixels with one even and one odd coordinate."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    for pixel in tl.static_range(4):
        index, inside = pixel_index(row, rows, c, GRID, pixel // 2, pixel % 2)
        grad = tl.zeros([BR, BC], tl.float32)
        if pixel % 3 == 0:
            half = (2 * row[:, None].to(tl.int64) + pixel // 3) * c + column
            grad = load_float(g + half, inside)
            grad = tl.where(tl.load(y + half, mask=inside, other=0.0) > 0, grad, 0.0)
        tl.store(gx + index + column, add_gradient(more, index + column, inside, grad), mask=inside)


@jit
def relu_concat(x, y, rows, c, width, first, BR: tl.constexpr, BC: tl.constexpr):
    """Store ReLU(x) in the columns of y that start at `first`; y has `width` columns."""
    row, column = tile_indices(c, BR, BC)
    row, column = row[:, None], column[None, :]
    value = tl.load(x + row.to(tl.int64) * c + column, mask=row < rows, other=0.0)
    tl.store(y + row.to(tl.int64) * width + first + column, tl.where(value <= 0, 0.0, value), mask=row < rows)


@jit
def relu_concat_backward(g, more, y, gx, rows, c, width, first, BR: tl.constexpr, BC: tl.constexpr):
    """Compute the gradient of the map whose columns in y start at `first`."""
    row, column = tile_indices(c, BR, BC)
    inside = (row < rows)[:, None]
    index = row[:, None].to(tl.int64) * width + first + column[None, :]
    positive = tl.load(y + index, mask=inside, other=0.0) > 0
    grad = tl.where(positive, load_float(g + index, inside), 0.0)
    index = row[:, None].to(tl.int64) * c + column[None, :]
    tl.store(gx + index, add_gradient(more, index, inside, grad), mask=inside)
