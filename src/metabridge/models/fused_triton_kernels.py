"""Triton kernels of `fused_layers`, and helpers for all kernels.

A kernel sees a channels-last feature map as a matrix of shape (rows, c) and processes tiles of BR rows and BC columns.
`g` is the gradient of the loss with respect to the output, and `gx` the gradient with respect to the input `x`. `norm`
contains four rows: mean, r = 1/√(variance + eps), weight and bias of every channel. n = (x − mean)·r is the normalized
x. Sums over rows are divided into chunks of `chunk` rows; `partial` contains the sums of the chunks and `total` the
complete sums. `share` is 1 divided by the number of rows of x, so that share · total is a mean.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, disable-error-code=assignment

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
    jit = triton.jit
    constexpr_function = triton.constexpr_function
except ImportError:  # PyTorch for CPUs does not include Triton
    AVAILABLE = False

    def jit(kernel):  # noqa: D103
        return kernel

    constexpr_function = jit


@jit
def load_float(pointer, mask):
    """Load values as float32, and 0 where the mask is false."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@jit
def load_norm(norm, column, c):
    """Load mean, r, weight and bias of the columns."""
    return (
        tl.load(norm + column)[None, :],
        tl.load(norm + c + column)[None, :],
        tl.load(norm + 2 * c + column)[None, :],
        tl.load(norm + 3 * c + column)[None, :],
    )


@jit
def tile_position(c, BC: tl.constexpr):
    """Return the row and the column of the program's tile.

    Both are encoded in the first axis of the grid, because the other axes have at most 65 535 programs.
    """
    return tl.program_id(0) // (c // BC), tl.program_id(0) % (c // BC)


@jit
def tile_indices(c, BR: tl.constexpr, BC: tl.constexpr):
    """Return the rows and the columns of the program's tile."""
    below, right = tile_position(c, BC)
    return below * BR + tl.arange(0, BR), right * BC + tl.arange(0, BC)


@jit
def chunk_columns(BC: tl.constexpr):
    """Return the columns of a program that sums over a chunk of rows."""
    return tl.program_id(0) * BC + tl.arange(0, BC)


@jit
def chunk_rows(rows, chunk):
    """Return the first row of the program's chunk, and its number of rows."""
    start = tl.program_id(1) * chunk
    return start, tl.minimum(chunk, rows - start)


@jit
def store_sum(partial, index: tl.constexpr, column, c, values):
    """Store the sum of the program's chunk in `partial`, of shape (sums, programs, c), as sum number `index`."""
    tl.store(partial + tl.program_id(1) * c + column + index * tl.num_programs(1) * c, tl.sum(values, 0))


@jit
def chunk_moments(x, partial, rows, chunk, c, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
    """Compute the mean and the sum of squared deviations of a chunk.

    Each lane (row of the tile) uses Welford's rule for its rows; the rule of Chan et al. merges the lanes.
    """
    column, lane = chunk_columns(BC), tl.arange(0, BR)
    start, count = chunk_rows(rows, chunk)
    x += start.to(tl.int64) * c
    mean = tl.zeros([BR, BC], tl.float32)
    squares = tl.zeros([BR, BC], tl.float32)
    step = 0.0
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        value = load_float(x + row[:, None] * c + column[None, :], inside)
        step += 1.0
        change = value - mean
        mean += tl.where(inside, change * (1.0 / step), 0.0)
        squares += tl.where(inside, change * (value - mean), 0.0)
    lane_count = tl.maximum((count - lane + BR - 1) // BR, 0).to(tl.float32)[:, None]
    center = tl.sum(lane_count * mean, 0) / count
    deviation = mean - center[None, :]
    out = partial + tl.program_id(1) * c + column
    tl.store(out, center)
    tl.store(out + tl.num_programs(1) * c, tl.sum(squares + lane_count * deviation * deviation, 0))


@jit
def merge_moments(partial, weight, bias, norm, rows, chunk, parts, c, eps, PARTS: tl.constexpr, BC: tl.constexpr):
    """Merge the moments of all chunks by the rule of Chan et al., and store the four rows of `norm`."""
    column, part = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, PARTS)[:, None]
    inside = part < parts
    count = tl.where(inside, tl.minimum(chunk, rows - part * chunk), 0).to(tl.float32)
    index = part * c + column[None, :]
    mean = tl.load(partial + index, mask=inside, other=0.0)
    squares = tl.load(partial + parts * c + index, mask=inside, other=0.0)
    center = tl.sum(count * mean, 0) / rows
    deviation = mean - center[None, :]
    variance = tl.sum(squares + count * deviation * deviation, 0) / rows
    tl.store(norm + column, center)
    tl.store(norm + c + column, 1.0 / tl.sqrt(variance + eps))
    tl.store(norm + 2 * c + column, tl.load(weight + column).to(tl.float32))
    tl.store(norm + 3 * c + column, tl.load(bias + column).to(tl.float32))


@jit
def sum_parts(partial, total, rounded, parts, c, PARTS: tl.constexpr, BC: tl.constexpr):
    """Add up the chunks of each sum, and store it in float32 (`total`) and in the dtype of `rounded`."""
    column, part = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, PARTS)[:, None]
    index = (tl.program_id(1) * parts + part) * c + column[None, :]
    result = tl.sum(tl.load(partial + index, mask=part < parts, other=0.0), 0)
    tl.store(total + tl.program_id(1) * c + column, result)
    tl.store(rounded + tl.program_id(1) * c + column, result)


@jit
def norm_act(x, norm, factor, total, y, rows, pixels, c, slope, BR: tl.constexpr, BC: tl.constexpr):
    """Compute y = total + factor · LeakyReLU(BatchNorm(x)).

    Here `total` is not a sum over rows, but a map, or None for 0. `factor` has one value per `pixels` rows, or is None
    for 1.
    """
    row, column = tile_indices(c, BR, BC)
    inside = (row < rows)[:, None]
    index = row[:, None].to(tl.int64) * c + column[None, :]
    mean, r, weight, bias = load_norm(norm, column, c)
    value = (load_float(x + index, inside) - mean) * r * weight + bias
    value = tl.where(value > 0, value, slope * value)
    if factor is not None:
        value *= tl.load(factor + row // pixels, mask=row < rows, other=0.0)[:, None]
    if total is not None:
        value += load_float(total + index, inside)
    tl.store(y + index, value, mask=inside)


@jit
def norm_act_input_grad(g, factor, n, weight, bias, slope, point, point_inside):
    """Return the gradient with respect to the output of batch norm for the gradient g of factor · LeakyReLU of it.

    `point` contains for each row of the tile the index of its input, which selects the factor.
    """
    g = tl.where(n * weight + bias > 0, g, slope * g)
    if factor is not None:
        g *= tl.load(factor + point, mask=point_inside, other=0.0)[:, None]
    return g


@jit
def norm_act_sums(
    g,
    x,
    norm,
    factor,
    partial,
    rows,
    pixels,
    chunk,
    c,
    slope,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum g and g·n over a chunk of rows, where g is the gradient with respect to the output of batch norm."""
    column, lane = chunk_columns(BC), tl.arange(0, BR)
    start, count = chunk_rows(rows, chunk)
    x += start.to(tl.int64) * c
    g += start.to(tl.int64) * c
    mean, r, weight, bias = load_norm(norm, column, c)
    sum_g = tl.zeros([BR, BC], tl.float32)
    sum_gn = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        index = row[:, None] * c + column[None, :]
        n = (load_float(x + index, inside) - mean) * r
        norm_g = load_float(g + index, inside)
        norm_g = norm_act_input_grad(norm_g, factor, n, weight, bias, slope, (start + row) // pixels, row < count)
        sum_g += norm_g
        sum_gn += norm_g * n
    store_sum(partial, 0, column, c, sum_g)
    store_sum(partial, 1, column, c, sum_gn)


@jit
def norm_act_backward(g, x, norm, factor, total, gx, rows, pixels, c, slope, share, BR: tl.constexpr, BC: tl.constexpr):
    """Compute gx = w·r·(g − m(g) − n·m(g·n)), where m is the mean over the rows and g is as in `norm_act_sums`."""
    row, column = tile_indices(c, BR, BC)
    inside = (row < rows)[:, None]
    index = row[:, None].to(tl.int64) * c + column[None, :]
    mean, r, weight, bias = load_norm(norm, column, c)
    mg, mgn = share * tl.load(total + column)[None, :], share * tl.load(total + c + column)[None, :]
    n = (load_float(x + index, inside) - mean) * r
    norm_g = load_float(g + index, inside)
    norm_g = norm_act_input_grad(norm_g, factor, n, weight, bias, slope, row // pixels, row < rows)
    tl.store(gx + index, weight * r * (norm_g - mg - n * mgn), mask=inside)


@jit
def window_corner(window, height, width):
    """Return the index of the first pixel of each 2×2 window."""
    across, down = width // 2, height // 2
    corner = (window // across // down * height + window // across % down * 2) * width + window % across * 2
    return corner.to(tl.int64)


@jit
def covering_window(window, windows, height, width):
    """Return the position of a 2×2 window in a grid that covers all pixels, also the last row or column of an odd side.

    The results are the window's row and column in the grid, whether the window is whole, its index among the whole
    windows, and the index of its first pixel.
    """
    across, down = (width + 1) // 2, (height + 1) // 2
    point, i, j = window // across // down, window // across % down, window % across
    whole = (window < windows) & (i < height // 2) & (j < width // 2)
    pooled = ((point * (height // 2) + i) * (width // 2) + j).to(tl.int64)
    corner = ((point * height + 2 * i) * width + 2 * j).to(tl.int64)
    return i, j, whole, pooled, corner


@jit
def pixel_exists(window, windows, i, j, height, width, k: tl.constexpr):
    """Return whether pixel `k` of a window of `covering_window` lies in the map."""
    return (window < windows) & (2 * i + k // 2 < height) & (2 * j + k % 2 < width)


@jit
def residual_pool(
    main,
    shortcut,
    first,
    second,
    y,
    main_chosen,
    shortcut_chosen,
    choice,
    windows,
    height,
    width,
    c,
    slope,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Compute LeakyReLU(MaxPool2×2(BatchNorm(main) + BatchNorm(shortcut))).

    `first` and `second` are the `norm` of main and shortcut. Also store the values of main and shortcut at the chosen
    pixel (the maximum of its window), and in `choice` its position in the window, plus 4 if the maximum is positive.
    """
    row, flat = tile_indices(c, BR, BC)
    window, column = row[:, None], flat[None, :]
    inside = window < windows
    corner = window_corner(window, height, width) * c + column
    mean1, r1, w1, b1 = load_norm(first, flat, c)
    mean2, r2, w2, b2 = load_norm(second, flat, c)
    scale1, scale2 = r1 * w1, r2 * w2
    best = tl.zeros([BR, BC], tl.float32)
    best_main = tl.zeros([BR, BC], tl.float32)
    best_shortcut = tl.zeros([BR, BC], tl.float32)
    best_k = tl.zeros([BR, BC], tl.int32)
    for k in tl.static_range(4):
        index = corner + (k // 2 * width + k % 2) * c
        a = load_float(main + index, inside)
        b = load_float(shortcut + index, inside)
        value = (a - mean1) * scale1 + b1 + (b - mean2) * scale2 + b2
        if k == 0:
            best, best_main, best_shortcut = value, a, b
        else:
            better = value > best
            best = tl.where(better, value, best)
            best_main = tl.where(better, a, best_main)
            best_shortcut = tl.where(better, b, best_shortcut)
            best_k = tl.where(better, k, best_k)
    index = window.to(tl.int64) * c + column
    tl.store(y + index, tl.where(best > 0, best, slope * best), mask=inside)
    tl.store(main_chosen + index, best_main, mask=inside)
    tl.store(shortcut_chosen + index, best_shortcut, mask=inside)
    tl.store(choice + index, (best_k + tl.where(best > 0, 4, 0)).to(tl.uint8), mask=inside)


@jit
def residual_pool_sums(
    g,
    main_chosen,
    shortcut_chosen,
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
    """Sum g, g·n₁ and g·n₂ over the chosen pixels of a chunk of windows.

    g is the gradient with respect to the output of the pooling; n₁ and n₂ are main and shortcut after normalization.
    """
    column, lane = chunk_columns(BC), tl.arange(0, BR)
    start, count = chunk_rows(windows, chunk)
    base = start.to(tl.int64) * c
    mean1, r1, _, _ = load_norm(first, column, c)
    mean2, r2, _, _ = load_norm(second, column, c)
    sum_g = tl.zeros([BR, BC], tl.float32)
    sum_gn1 = tl.zeros([BR, BC], tl.float32)
    sum_gn2 = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        index = base + row[:, None] * c + column[None, :]
        pool_g = load_float(g + index, inside)
        pool_g = tl.where(tl.load(choice + index, mask=inside, other=0) > 3, pool_g, slope * pool_g)
        sum_g += pool_g
        sum_gn1 += pool_g * (load_float(main_chosen + index, inside) - mean1) * r1
        sum_gn2 += pool_g * (load_float(shortcut_chosen + index, inside) - mean2) * r2
    store_sum(partial, 0, column, c, sum_g)
    store_sum(partial, 1, column, c, sum_gn1)
    store_sum(partial, 2, column, c, sum_gn2)


@jit
def residual_pool_backward(
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
    """Compute the gradients of main and shortcut.

    Pixels in no whole window are not pooled, but affect the loss through the statistics of the batch norms.
    """
    row, flat = tile_indices(c, BR, BC)
    window, column = row[:, None], flat[None, :]
    i, j, whole, pooled, corner = covering_window(window, windows, height, width)
    index = pooled * c + column
    pool_g = load_float(g + index, whole)
    chosen = tl.load(choice + index, mask=whole, other=0).to(tl.int32)
    pool_g = tl.where(chosen > 3, pool_g, slope * pool_g)
    chosen = chosen & 3
    mean1, r1, w1, _ = load_norm(first, flat, c)
    mean2, r2, w2, _ = load_norm(second, flat, c)
    mg = share * tl.load(total + flat)[None, :]
    mgn1, mgn2 = share * tl.load(total + c + flat)[None, :] * r1, share * tl.load(total + 2 * c + flat)[None, :] * r2
    scale1, scale2 = w1 * r1, w2 * r2
    corner = corner * c + column
    for k in tl.static_range(4):
        inside = pixel_exists(window, windows, i, j, height, width, k)
        index = corner + (k // 2 * width + k % 2) * c
        centered_g = tl.where(chosen == k, pool_g, 0.0) - mg
        a = load_float(main + index, inside) - mean1
        b = load_float(shortcut + index, inside) - mean2
        tl.store(gmain + index, scale1 * (centered_g - a * mgn1), mask=inside)
        tl.store(gshortcut + index, scale2 * (centered_g - b * mgn2), mask=inside)


@jit
def load_patches(x, row, rows, height, width, c, TAPS: tl.constexpr):
    """Load the 3×3 patch of every pixel: (rows, TAPS) values, ordered by row, column and channel within the patch."""
    tap = tl.arange(0, TAPS)[None, :]
    down, right = tap // (3 * c) - 1, tap // c % 3 - 1
    i, j = (row // width % height)[:, None], (row % width)[:, None]
    inside = (i + down >= 0) & (i + down < height) & (j + right >= 0) & (j + right < width)
    index = (row[:, None] + down * width - 1) * c + tap % (3 * c)
    return tl.load(x + index, mask=inside & (tap < 9 * c) & (row < rows)[:, None], other=0.0)


@jit
def stem_convolutions(
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
    """Compute a 3×3 and a 1×1 convolution of a map with few channels, as matrix products with the same patches.

    `main` and `shortcut` are the weights, y1 and y2 the outputs.
    """
    row, out, tap = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, O)[None, :], tl.arange(0, TAPS)[:, None]
    patches = load_patches(x, row, rows, height, width, c, TAPS)
    w1 = tl.load(main + out * 9 * c + tap, mask=tap < 9 * c, other=0.0)
    w2 = tl.load(shortcut + out * c + tap - 4 * c, mask=(tap >= 4 * c) & (tap < 5 * c), other=0.0)
    index = row[:, None].to(tl.int64) * O + out
    inside = (row < rows)[:, None]
    tl.store(y1 + index, tl.dot(patches, w1, input_precision="ieee"), mask=inside)
    tl.store(y2 + index, tl.dot(patches, w2, input_precision="ieee"), mask=inside)


@jit
def stem_weight_grads(
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
    """Sum the gradients of the weights of both convolutions over a chunk of rows."""
    out, tap = tl.arange(0, O), tl.arange(0, TAPS)
    start = tl.program_id(0) * chunk
    grads1 = tl.zeros([O, TAPS], tl.float32)
    grads2 = tl.zeros([O, TAPS], tl.float32)
    for offset in range(start, tl.minimum(start + chunk, rows), BR):
        row = offset + tl.arange(0, BR)
        patches = load_patches(x, row, rows, height, width, c, TAPS)
        index = row[:, None].to(tl.int64) * O + out[None, :]
        inside = (row < rows)[:, None]
        values1 = tl.load(g1 + index, mask=inside, other=0.0)
        values2 = tl.load(g2 + index, mask=inside, other=0.0)
        grads1 = tl.dot(tl.trans(values1), patches, grads1, input_precision="ieee")
        grads2 = tl.dot(tl.trans(values2), patches, grads2, input_precision="ieee")
    index = (tl.program_id(0) * 2 * O + out[:, None]) * TAPS + tap[None, :]
    tl.store(partial + index, grads1)
    tl.store(partial + index + O * TAPS, grads2)


@jit
def drop_block_mask(
    noise, chance, result, rows, height, width, c, SIZE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Store 0 in every SIZE × SIZE square whose upper left corner has noise below `chance`, and 1 elsewhere."""
    row, column = tile_indices(c, BR, BC)
    row, column = row[:, None], column[None, :]
    down, across = height - SIZE + 1, width - SIZE + 1
    point, i, j = row // width // height, row // width % height, row % width
    lowest = tl.full([BR, BC], 1.0, tl.float32)
    for k in range(SIZE * SIZE):
        above, left = i - k // SIZE, j - k % SIZE
        inside = (row < rows) & (above >= 0) & (above < down) & (left >= 0) & (left < across)
        index = ((point * down + above) * across + left).to(tl.int64) * c + column
        lowest = tl.minimum(lowest, tl.load(noise + index, mask=inside, other=1.0))
    tl.store(result + row.to(tl.int64) * c + column, tl.where(lowest < tl.load(chance), 0.0, 1.0), mask=row < rows)
