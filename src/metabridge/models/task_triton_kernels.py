"""Triton kernels of `fused_tasks`; for rows, columns, tiles, chunks and `rstd`, see `fused_triton_kernels`.

Each column of a matrix is a channel of one of the tasks. In kernels for 2×2 windows, each row represents a window,
`num_windows` is the number of windows, and `max_k` from 0 to 3 is the position of the maximum in its window.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from metabridge.models.fused_triton_kernels import (
    AVAILABLE,
    chunk_bounds,
    chunk_columns,
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
    g, x, u, mean, rstd, chunk_sums, rows, chunk_size, c, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr
):
    """Sum g, u, g·n, u·n and g·u over a chunk, for the formulas of `batch_norm._double_backward`.

    n is the normalized x, g a gradient with respect to y = BatchNorm(x), and u a gradient with respect to the resulting
    gradient of x.
    """
    column, row_in_tile = chunk_columns(BC), tl.arange(0, BR)
    start, count = chunk_bounds(rows, chunk_size)
    base = start.to(tl.int64) * c
    mean_value, rstd_value = tl.load(mean + column)[None, :], tl.load(rstd + column)[None, :]
    sum_g = tl.zeros([BR, BC], tl.float32)
    sum_u = tl.zeros([BR, BC], tl.float32)
    sum_gn = tl.zeros([BR, BC], tl.float32)
    sum_un = tl.zeros([BR, BC], tl.float32)
    sum_gu = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + row_in_tile
        inside = (row < count)[:, None]
        index = base + row[:, None] * c + column[None, :]
        n = (load_float(x + index, inside) - mean_value) * rstd_value
        g_value = load_float(g + index, inside)
        u_value = load_float(u + index, inside)
        sum_g += g_value
        sum_u += u_value
        sum_gn += g_value * n
        sum_un += u_value * n
        sum_gu += g_value * u_value
    store_sum(chunk_sums, 0, column, c, sum_g)
    store_sum(chunk_sums, 1, column, c, sum_u)
    store_sum(chunk_sums, 2, column, c, sum_gn)
    store_sum(chunk_sums, 3, column, c, sum_un)
    store_sum(chunk_sums, 4, column, c, sum_gu)


@jit
def norm_double_backward(
    g,
    x,
    u,
    mean,
    rstd,
    weight,
    v,
    s,
    sums,
    grad_g,
    grad_x,
    grad_weight,
    rows,
    c,
    inverse_count,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Compute the gradients with respect to g, x and the weight with the formulas of `batch_norm._double_backward`.

    The coefficient c of the formulas is called `a` here, because `c` is the number of columns. `sums` contains the
    results of `norm_double_sums`, added up over all chunks, and `inverse_count` is 1 / rows.
    """
    tile_row, _ = tile_position(c, BC)
    row, column = tile_indices(c, BR, BC)
    inside = (row < rows)[:, None]
    index = row[:, None].to(tl.int64) * c + column[None, :]
    mean_value, rstd_value = tl.load(mean + column), tl.load(rstd + column)
    w_rstd, v_value = tl.load(weight + column) * rstd_value, tl.load(v + column)
    # m(g), m(u), m(g·n) and m(u·n), where m is the mean per channel, over all rows
    mg, mu = inverse_count * tl.load(sums + column), inverse_count * tl.load(sums + c + column)
    mgn, mun = inverse_count * tl.load(sums + 2 * c + column), inverse_count * tl.load(sums + 3 * c + column)
    # m(u·gx) / (weight·rstd), where gx is the gradient with respect to x that `batch_norm_backward` returns
    scaled_m_ugx = inverse_count * tl.load(sums + 4 * c + column) - mu * mg - mun * mgn
    a, e = v_value - w_rstd * mun, w_rstd * mgn
    n_factor = rstd_value * (a * mgn - e * mun) + w_rstd * rstd_value * scaled_m_ugx
    n = (load_float(x + index, inside) - mean_value[None, :]) * rstd_value[None, :]
    g_value = load_float(g + index, inside)
    u_value = load_float(u + index, inside)
    g_offset = tl.load(s + column) - w_rstd * mu
    tl.store(grad_g + index, g_offset[None, :] + a[None, :] * n + w_rstd[None, :] * u_value, mask=inside)
    x_grad = (rstd_value * (e * mu - a * mg))[None, :] - n_factor[None, :] * n
    x_grad += (rstd_value * a)[None, :] * g_value - (rstd_value * e)[None, :] * u_value
    tl.store(grad_x + index, x_grad, mask=inside)
    if tile_row == 0:
        tl.store(grad_weight + column, rstd_value * scaled_m_ugx * rows)


@jit
def max_pool_2x2(x, y, indices, num_windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """Store the maximum of each 2×2 window and its index in the window.

    Of equal values, the first is the maximum. NaN counts as larger than all numbers, as in PyTorch.
    """
    row, column = tile_indices(c, BR, BC)
    window, column = row[:, None], column[None, :]
    inside = window < num_windows
    corner = window_corner(window, height, width) * c + column
    max_value = load_float(x + corner, inside)
    max_k = tl.zeros([BR, BC], tl.int32)
    for k in tl.static_range(1, 4):
        value = load_float(x + corner + (k // 2 * width + k % 2) * c, inside)
        is_larger = (value > max_value) | (value != value)
        max_value = tl.where(is_larger, value, max_value)
        max_k = tl.where(is_larger, k, max_k)
    index = window.to(tl.int64) * c + column
    tl.store(y + index, max_value, mask=inside)
    tl.store(indices + index, max_k.to(tl.uint8), mask=inside)


@jit
def max_unpool_2x2(values, indices, x, num_windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """Store in x the value of each window at the position of its maximum, and 0 at all other pixels.

    `num_windows` also counts the incomplete windows at the edges of maps with odd height or width. Max pooling ignores
    these windows, so all their pixels are set to 0.
    """
    row, column = tile_indices(c, BR, BC)
    window, column = row[:, None], column[None, :]
    i, j, is_full, out_index, corner = covering_window(window, num_windows, height, width)
    index = out_index * c + column
    value = tl.load(values + index, mask=is_full, other=0.0)
    max_k = tl.load(indices + index, mask=is_full, other=4).to(tl.int32)  # 4: no pixel
    corner = corner * c + column
    for k in tl.static_range(4):
        inside = pixel_exists(window, num_windows, i, j, height, width, k)
        tl.store(x + corner + (k // 2 * width + k % 2) * c, tl.where(max_k == k, value, 0.0), mask=inside)


@jit
def gather_2x2(u, indices, values, num_windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """Store, for each window, the element of u at the position `max_k` of the maximum, which `indices` contains."""
    row, column = tile_indices(c, BR, BC)
    window, column = row[:, None], column[None, :]
    inside = window < num_windows
    index = window.to(tl.int64) * c + column
    max_k = tl.load(indices + index, mask=inside, other=0).to(tl.int32)
    pixel = window_corner(window, height, width) * c + column + (max_k // 2 * width + max_k % 2) * c
    tl.store(values + index, tl.load(u + pixel, mask=inside, other=0.0), mask=inside)
