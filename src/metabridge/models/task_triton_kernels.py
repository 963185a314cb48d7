"""Triton kernels of `fused_tasks`, with the conventions of `fused_triton_kernels`.

The columns are the channels of all tasks.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from metabridge.models.fused_triton_kernels import (
    AVAILABLE,
    chunk_columns,
    chunk_rows,
    covering_window,
    jit,
    load_float,
    pixel_exists,
    store_sum,
    tile_indices,
    tile_position,
    window_corner,
)

if AVAILABLE:
    import triton.language as tl


@jit
def norm_double_sums(
    g, x, u, mean, r, partial, rows, chunk, c, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr
):
    """Sum g, u, g·n, u·n and g·u over a chunk of rows."""
    column, lane = chunk_columns(BC), tl.arange(0, BR)
    start, count = chunk_rows(rows, chunk)
    base = start.to(tl.int64) * c
    center, scale = tl.load(mean + column)[None, :], tl.load(r + column)[None, :]
    sum_g = tl.zeros([BR, BC], tl.float32)
    sum_u = tl.zeros([BR, BC], tl.float32)
    sum_gn = tl.zeros([BR, BC], tl.float32)
    sum_un = tl.zeros([BR, BC], tl.float32)
    sum_gu = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        index = base + row[:, None] * c + column[None, :]
        n = (load_float(x + index, inside) - center) * scale
        g_value = load_float(g + index, inside)
        u_value = load_float(u + index, inside)
        sum_g += g_value
        sum_u += u_value
        sum_gn += g_value * n
        sum_un += u_value * n
        sum_gu += g_value * u_value
    store_sum(partial, 0, column, c, sum_g)
    store_sum(partial, 1, column, c, sum_u)
    store_sum(partial, 2, column, c, sum_gn)
    store_sum(partial, 3, column, c, sum_un)
    store_sum(partial, 4, column, c, sum_gu)


@jit
def norm_double_backward(
    g, x, u, mean, r, weight, v, s, total, gg, gx, gw, rows, c, share, BR: tl.constexpr, BC: tl.constexpr
):
    """Compute gg, gx and gw, the gradients of g, x and the weight, by the formulas of `batch_norm._double_backward`.

    The coefficient c of these formulas is called a, because c is the number of columns.
    """
    below, _ = tile_position(c, BC)
    row, column = tile_indices(c, BR, BC)
    inside = (row < rows)[:, None]
    index = row[:, None].to(tl.int64) * c + column[None, :]
    center, scale = tl.load(mean + column), tl.load(r + column)
    wr, v_value = tl.load(weight + column) * scale, tl.load(v + column)
    mg, mu = share * tl.load(total + column), share * tl.load(total + c + column)
    mgn, mun = share * tl.load(total + 2 * c + column), share * tl.load(total + 3 * c + column)
    product = share * tl.load(total + 4 * c + column) - mu * mg - mun * mgn
    a, e = v_value - wr * mun, wr * mgn
    n_factor = scale * (a * mgn - e * mun) + wr * scale * product
    n = (load_float(x + index, inside) - center[None, :]) * scale[None, :]
    g_value = load_float(g + index, inside)
    u_value = load_float(u + index, inside)
    shift = tl.load(s + column) - wr * mu
    tl.store(gg + index, shift[None, :] + a[None, :] * n + wr[None, :] * u_value, mask=inside)
    x_grad = (scale * (e * mu - a * mg))[None, :] - n_factor[None, :] * n
    x_grad += (scale * a)[None, :] * g_value - (scale * e)[None, :] * u_value
    tl.store(gx + index, x_grad, mask=inside)
    if below == 0:
        tl.store(gw + column, scale * product * rows)


@jit
def max_pool_2x2(x, y, choice, windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """Store the maximum of each 2×2 window and its position.

    Of equal values, the first is the maximum. NaN is larger than all numbers.
    """
    row, column = tile_indices(c, BR, BC)
    window, column = row[:, None], column[None, :]
    inside = window < windows
    corner = window_corner(window, height, width) * c + column
    best = load_float(x + corner, inside)
    chosen = tl.zeros([BR, BC], tl.int32)
    for k in tl.static_range(1, 4):
        value = load_float(x + corner + (k // 2 * width + k % 2) * c, inside)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        chosen = tl.where(better, k, chosen)
    index = window.to(tl.int64) * c + column
    tl.store(y + index, best, mask=inside)
    tl.store(choice + index, chosen.to(tl.uint8), mask=inside)


@jit
def max_unpool_2x2(values, choice, x, windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """Store in x the value of each window at its chosen pixel, and 0 at all other pixels, also those in no window."""
    row, column = tile_indices(c, BR, BC)
    window, column = row[:, None], column[None, :]
    i, j, whole, pooled, corner = covering_window(window, windows, height, width)
    index = pooled * c + column
    value = tl.load(values + index, mask=whole, other=0.0)
    chosen = tl.load(choice + index, mask=whole, other=4).to(tl.int32)
    corner = corner * c + column
    for k in tl.static_range(4):
        inside = pixel_exists(window, windows, i, j, height, width, k)
        tl.store(x + corner + (k // 2 * width + k % 2) * c, tl.where(chosen == k, value, 0.0), mask=inside)


@jit
def gather_2x2(u, choice, values, windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """Store the value of u at the chosen pixel of each window."""
    row, column = tile_indices(c, BR, BC)
    window, column = row[:, None], column[None, :]
    inside = window < windows
    index = window.to(tl.int64) * c + column
    chosen = tl.load(choice + index, mask=inside, other=0).to(tl.int32)
    pixel = window_corner(window, height, width) * c + column + (chosen // 2 * width + chosen % 2) * c
    tl.store(values + index, tl.load(u + pixel, mask=inside, other=0.0), mask=inside)
