"""Triton kernels of `cell_triton_layers`; for rows, tiles and names such as `c` and `g`, see `fused_triton_kernels`.

A `WindowGrid` describes the 3×3 windows of a map. A row of a tile represents `windows_per_row` windows, one below the
other. These windows overlap, but the compiler loads each pixel only once if all loads come before the first store. The
grid is a compile-time constant, because otherwise the divisions by its height and width would be slow.

`k` from 0 to 8 is the position of a pixel in a window. In backward passes, a row also represents windows_per_row ·
stride² pixels of the map, numbered by `pixel`: each lies `pixel // stride` pixels below and `pixel % stride` pixels to
the right of the center of the row's first window. `extra_grad` is None or another gradient with respect to x, which is
added to the computed gradient.

ReLU is computed as `tl.where(value <= 0, 0.0, value)`, which keeps NaN.
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
        out_height: Height of the output, in which each window is one pixel.
        out_width: Width of the output.
        stride: Distance between neighboring windows in pixels.
        windows_per_row: Number of windows, one below the other, that a row of a tile represents.
    """

    height: int
    width: int
    out_height: int
    out_width: int
    stride: int
    windows_per_row: int


@constexpr_function
def is_in_window(STRIDE, DILATION, pixel, k):
    """Return whether any window has `pixel` at position `k`."""
    down, right = pixel // STRIDE - (k // 3 - 1) * DILATION, pixel % STRIDE - (k % 3 - 1) * DILATION
    return down % STRIDE == 0 and right % STRIDE == 0


@constexpr_function
def window_below(STRIDE, DILATION, pixel, k):
    """Return how many windows the window with `pixel` at position `k` lies below the row's first window."""
    return (pixel // STRIDE - (k // 3 - 1) * DILATION) // STRIDE


@constexpr_function
def window_right(STRIDE, DILATION, pixel, k):
    """Return how many windows the window with `pixel` at position `k` lies to the right of the row's first window."""
    return (pixel % STRIDE - (k % 3 - 1) * DILATION) // STRIDE


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
    """Return the index of an element of a map, and whether the element exists.

    The map is the input, whose elements are pixels, or the output, whose elements are windows. The element lies `down`
    elements below and `right` elements to the right of the row's first window (in the output) or of the center of this
    window (in the input). HEIGHT, WIDTH and STRIDE, the distance between neighboring windows, are in elements of the
    map.
    """
    # number of rows of the matrix that together represent one column of windows
    ROWS_PER_COLUMN: tl.constexpr = (GRID.out_height + GRID.windows_per_row - 1) // GRID.windows_per_row
    i, j = row // GRID.out_width % ROWS_PER_COLUMN * GRID.windows_per_row * STRIDE, row % GRID.out_width * STRIDE
    first_center = (row // GRID.out_width // ROWS_PER_COLUMN * HEIGHT + i) * WIDTH + j
    inside = (i + down >= 0) & (i + down < HEIGHT) & (j + right >= 0) & (j + right < WIDTH) & (row < rows)
    return (first_center.to(tl.int64) * c + (down * WIDTH + right) * c)[:, None], inside[:, None]


@jit
def pixel_index(row, rows, c, GRID: tl.constexpr, down: tl.constexpr, right: tl.constexpr):
    """Return `grid_index` for a pixel of the input."""
    return grid_index(row, rows, c, GRID.height, GRID.width, GRID.stride, GRID, down, right)


@jit
def window_index(row, rows, c, GRID: tl.constexpr, down: tl.constexpr, right: tl.constexpr):
    """Return `grid_index` for a window, i.e. for a pixel of the output."""
    return grid_index(row, rows, c, GRID.out_height, GRID.out_width, 1, GRID, down, right)


@jit
def window_pixel_index(row, rows, c, GRID: tl.constexpr, DILATION: tl.constexpr, window: tl.constexpr, k: tl.constexpr):
    """Return the index of the pixel at position `k` of the row's window number `window`, and whether it exists."""
    return pixel_index(row, rows, c, GRID, window * GRID.stride + (k // 3 - 1) * DILATION, (k % 3 - 1) * DILATION)


@jit
def containing_window_index(
    row, rows, c, GRID: tl.constexpr, DILATION: tl.constexpr, pixel: tl.constexpr, k: tl.constexpr
):
    """Return the index in the output of the window with `pixel` at position `k`, and whether the window exists."""
    return window_index(
        row, rows, c, GRID, window_below(GRID.stride, DILATION, pixel, k), window_right(GRID.stride, DILATION, pixel, k)
    )


@jit
def pixels_in_window(row, GRID: tl.constexpr, down: tl.constexpr, right: tl.constexpr):
    """Return the number of pixels of a window, excluding the padding.

    The window lies `down` windows below and `right` windows to the right of the row's first window.
    """
    # number of rows of the matrix that together represent one column of windows
    ROWS_PER_COLUMN: tl.constexpr = (GRID.out_height + GRID.windows_per_row - 1) // GRID.windows_per_row
    i = (row // GRID.out_width % ROWS_PER_COLUMN * GRID.windows_per_row + down) * GRID.stride
    j = (row % GRID.out_width + right) * GRID.stride
    pixel_rows = 1 + (i > 0).to(tl.int32) + (i + 1 < GRID.height).to(tl.int32)
    return (pixel_rows * (1 + (j > 0).to(tl.int32) + (j + 1 < GRID.width).to(tl.int32))).to(tl.float32)[:, None]


@jit
def add_extra_grad(extra_grad, index, inside, grad):
    """Return `grad` + `extra_grad`, or `grad` if `extra_grad` is None."""
    if extra_grad is not None:
        grad += load_float(extra_grad + index, inside)
    return grad


@jit
def store_windows(y, values, row, rows, c, column, GRID: tl.constexpr):
    """Store one value for each window of each row."""
    WINDOWS: tl.constexpr = GRID.windows_per_row
    for window in tl.static_range(WINDOWS):
        index, inside = window_index(row, rows, c, GRID, window, 0)
        tl.store(y + index + column, values[window], mask=inside)


@jit
def store_pixel_grads(grad_x, extra_grad, grads, row, rows, c, column, GRID: tl.constexpr):
    """Store the gradients of the pixels that each row represents."""
    PIXELS: tl.constexpr = GRID.windows_per_row * GRID.stride * GRID.stride
    for pixel in tl.static_range(PIXELS):
        index, inside = pixel_index(row, rows, c, GRID, pixel // GRID.stride, pixel % GRID.stride)
        tl.store(grad_x + index + column, add_extra_grad(extra_grad, index + column, inside, grads[pixel]), mask=inside)


@jit
def relu_depthwise_conv(
    x, weight, y, rows, c, GRID: tl.constexpr, DILATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Store the depthwise 3×3 convolution of ReLU(x), for a weight of shape (9, c)."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    WINDOWS: tl.constexpr = GRID.windows_per_row
    outputs = ()
    for window in tl.static_range(WINDOWS):
        output = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            index, inside = window_pixel_index(row, rows, c, GRID, DILATION, window, k)
            value = tl.load(x + index + column, mask=inside, other=0.0)
            output += tl.where(value <= 0, 0.0, value).to(tl.float32) * tl.load(weight + k * c + column).to(tl.float32)
        outputs = outputs + (output,)
    store_windows(y, outputs, row, rows, c, column, GRID)


@jit
def relu_depthwise_conv_backward(
    g,
    extra_grad,
    x,
    weight,
    grad_x,
    chunk_sums,
    rows,
    c,
    GRID: tl.constexpr,
    chunk_size,
    DILATION: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store the gradient with respect to x, and sum the gradient with respect to the weight over a chunk."""
    column = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    start = tl.program_id(1) * chunk_size
    PIXELS: tl.constexpr = GRID.windows_per_row * GRID.stride * GRID.stride
    zeros = tl.zeros([BR, BC], tl.float32)
    weight_grads = (zeros,) * 9
    for offset in range(start, tl.minimum(start + chunk_size, rows), BR):
        row = offset + tl.arange(0, BR)
        grads = ()
        for pixel in tl.static_range(PIXELS):
            index, inside = pixel_index(row, rows, c, GRID, pixel // GRID.stride, pixel % GRID.stride)
            value = tl.load(x + index + column, mask=inside, other=0.0)
            positive = value > 0
            value = tl.where(value <= 0, 0.0, value).to(tl.float32)
            grad = tl.zeros([BR, BC], tl.float32)
            for k in tl.static_range(9):
                if is_in_window(GRID.stride, DILATION, pixel, k):
                    index, inside = containing_window_index(row, rows, c, GRID, DILATION, pixel, k)
                    window_grad = load_float(g + index + column, inside)
                    grad += window_grad * tl.load(weight + k * c + column).to(tl.float32)
                    weight_grads = weight_grads[:k] + (weight_grads[k] + window_grad * value,) + weight_grads[k + 1 :]
            grads = grads + (tl.where(positive, grad, 0.0),)
        store_pixel_grads(grad_x, extra_grad, grads, row, rows, c, column, GRID)
    for k in tl.static_range(9):
        tl.store(chunk_sums + (tl.program_id(1) * 9 + k) * c + column, tl.sum(weight_grads[k], 0)[None, :])


@jit
def max_pool(x, y, indices, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store the maximum of each window and its position `k`."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    WINDOWS: tl.constexpr = GRID.windows_per_row
    maxima = ()
    max_indices = ()
    for window in tl.static_range(WINDOWS):
        max_value = tl.full([BR, BC], float("-inf"), tl.float32)
        max_k = tl.zeros([BR, BC], tl.int32)
        for k in tl.static_range(9):
            index, inside = window_pixel_index(row, rows, c, GRID, 1, window, k)
            value = tl.load(x + index + column, mask=inside, other=float("-inf")).to(tl.float32)
            is_larger = (value > max_value) | (value != value)  # NaN counts as larger than all numbers
            max_k = tl.where(is_larger, k, max_k)
            max_value = tl.where(is_larger, value, max_value)
        maxima = maxima + (max_value,)
        max_indices = max_indices + (max_k,)
    for window in tl.static_range(WINDOWS):
        index, inside = window_index(row, rows, c, GRID, window, 0)
        tl.store(y + index + column, maxima[window], mask=inside)
        tl.store(indices + index + column, max_indices[window].to(tl.uint8), mask=inside)


@jit
def max_pool_backward(g, extra_grad, indices, grad_x, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store the gradient of each pixel: the sum of the gradients of all windows in which the pixel is the maximum."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    PIXELS: tl.constexpr = GRID.windows_per_row * GRID.stride * GRID.stride
    grads = ()
    for pixel in tl.static_range(PIXELS):
        grad = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            if is_in_window(GRID.stride, 1, pixel, k):
                index, inside = containing_window_index(row, rows, c, GRID, 1, pixel, k)
                is_max = tl.load(indices + index + column, mask=inside, other=9) == k  # 9 is never equal to k
                grad += tl.where(is_max, load_float(g + index + column, inside), 0.0)
        grads = grads + (grad,)
    store_pixel_grads(grad_x, extra_grad, grads, row, rows, c, column, GRID)


@jit
def avg_pool(x, y, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store the mean of the pixels in each window, excluding the padding."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    WINDOWS: tl.constexpr = GRID.windows_per_row
    outputs = ()
    for window in tl.static_range(WINDOWS):
        output = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            index, inside = window_pixel_index(row, rows, c, GRID, 1, window, k)
            output += load_float(x + index + column, inside)
        output /= pixels_in_window(row, GRID, window, 0)
        outputs = outputs + (output,)
    store_windows(y, outputs, row, rows, c, column, GRID)


@jit
def avg_pool_backward(g, extra_grad, grad_x, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store the gradient of each pixel.

    It is the sum, over the windows that contain the pixel, of the window's gradient divided by its number of pixels.
    """
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    PIXELS: tl.constexpr = GRID.windows_per_row * GRID.stride * GRID.stride
    grads = ()
    for pixel in tl.static_range(PIXELS):
        grad = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            if is_in_window(GRID.stride, 1, pixel, k):
                index, inside = containing_window_index(row, rows, c, GRID, 1, pixel, k)
                count = pixels_in_window(
                    row, GRID, window_below(GRID.stride, 1, pixel, k), window_right(GRID.stride, 1, pixel, k)
                )
                grad += load_float(g + index + column, inside) / count
        grads = grads + (grad,)
    store_pixel_grads(grad_x, extra_grad, grads, row, rows, c, column, GRID)


@jit
def relu_even_odd(x, y, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store ReLU(x) at pixels (2i, 2j) as the first c channels of y, and at (2i + 1, 2j + 1) as the last c channels.

    The last c channels are 0 where (2i + 1, 2j + 1) lies beyond the edge of x.
    """
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    for odd in tl.static_range(2):
        index, inside = pixel_index(row, rows, c, GRID, odd, odd)
        value = tl.load(x + index + column, mask=inside, other=0.0)
        y_index = (2 * row[:, None].to(tl.int64) + odd) * c + column
        tl.store(y + y_index, tl.where(value <= 0, 0.0, value), mask=(row < rows)[:, None])


@jit
def relu_even_odd_backward(g, extra_grad, y, grad_x, rows, c, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store the gradient with respect to x, which is 0 (or `extra_grad`) at pixels with one even and one odd index."""
    row, column = tile_indices(c, BR, BC)
    column = column[None, :]
    for pixel in tl.static_range(4):
        index, inside = pixel_index(row, rows, c, GRID, pixel // 2, pixel % 2)
        grad = tl.zeros([BR, BC], tl.float32)
        if pixel % 3 == 0:  # pixels 0 and 3 are (2i, 2j) and (2i + 1, 2j + 1)
            y_index = (2 * row[:, None].to(tl.int64) + pixel // 3) * c + column
            grad = load_float(g + y_index, inside)
            grad = tl.where(tl.load(y + y_index, mask=inside, other=0.0) > 0, grad, 0.0)
        tl.store(grad_x + index + column, add_extra_grad(extra_grad, index + column, inside, grad), mask=inside)


@jit
def relu_concat(x, y, rows, c, y_columns, first_column, BR: tl.constexpr, BC: tl.constexpr):
    """Store ReLU(x) in the columns of y from `first_column` on, where y has `y_columns` columns."""
    row, column = tile_indices(c, BR, BC)
    row, column = row[:, None], column[None, :]
    value = tl.load(x + row.to(tl.int64) * c + column, mask=row < rows, other=0.0)
    tl.store(
        y + row.to(tl.int64) * y_columns + first_column + column, tl.where(value <= 0, 0.0, value), mask=row < rows
    )


@jit
def relu_concat_backward(
    g, extra_grad, y, grad_x, rows, c, y_columns, first_column, BR: tl.constexpr, BC: tl.constexpr
):
    """Store the gradient with respect to the map whose columns in y start at `first_column`."""
    row, column = tile_indices(c, BR, BC)
    inside = (row < rows)[:, None]
    index = row[:, None].to(tl.int64) * y_columns + first_column + column[None, :]
    positive = tl.load(y + index, mask=inside, other=0.0) > 0
    grad = tl.where(positive, load_float(g + index, inside), 0.0)
    index = row[:, None].to(tl.int64) * c + column[None, :]
    tl.store(grad_x + index, add_extra_grad(extra_grad, index, inside, grad), mask=inside)
