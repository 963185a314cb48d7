"""Triton kernels of `fused_layers`, and helpers for all kernels.

A kernel treats channels-last feature maps as a matrix: each pixel of each image is a row, and each of the `c` channels
is a column. It processes tiles of BR rows and BC columns. `inside` masks the elements of a tile that exist. `rows`,
`pixels`, `num_windows` and `num_chunks` are the numbers of rows, of pixels per image, of 2×2 pooling windows and of
chunks (see below); `k` from 0 to 3 is the position of a pixel in a 2×2 window.

`g` is the gradient of the loss with respect to the output, and `grad_x` the gradient with respect to the input x. The
four rows of `norm_params` contain the mean, rstd = 1/√(variance + eps), weight and bias of every channel, and
n = (x − mean)·rstd is the normalized x.

To sum over all rows, each program sums a chunk of `chunk_size` rows and stores the result in `chunk_sums`. Another
kernel adds up the chunks, which gives `sums`. CHUNKS is the number of chunks, rounded up to a power of two (as
`tl.arange` requires). `inverse_count` is 1 divided by the number of rows of x, so inverse_count · sums is a mean.
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
    """Load elements as float32, with 0 where the mask is false."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@jit
def load_norm_params(norm_params, column, c):
    """Load the mean, rstd, weight and bias of the columns."""
    return (
        tl.load(norm_params + column)[None, :],
        tl.load(norm_params + c + column)[None, :],
        tl.load(norm_params + 2 * c + column)[None, :],
        tl.load(norm_params + 3 * c + column)[None, :],
    )


@jit
def tile_position(c, BC: tl.constexpr):
    """Return the row and the column of the program's tile in the grid of tiles.

    Both are computed from the first program index, because the other axes of a launch grid are limited to 65 535
    programs.
    """
    return tl.program_id(0) // (c // BC), tl.program_id(0) % (c // BC)


@jit
def tile_indices(c, BR: tl.constexpr, BC: tl.constexpr):
    """Return the indices of the rows and columns in the program's tile."""
    tile_row, tile_column = tile_position(c, BC)
    return tile_row * BR + tl.arange(0, BR), tile_column * BC + tl.arange(0, BC)


@jit
def chunk_columns(BC: tl.constexpr):
    """Return the column indices of a program that sums over a chunk."""
    return tl.program_id(0) * BC + tl.arange(0, BC)


@jit
def chunk_bounds(rows, chunk_size):
    """Return the first row of the program's chunk and the number of rows in the chunk."""
    start = tl.program_id(1) * chunk_size
    return start, tl.minimum(chunk_size, rows - start)


@jit
def store_sum(chunk_sums, index: tl.constexpr, column, c, values):
    """Sum `values` over the rows, and store the result as number `index` in `chunk_sums` (sums, chunks, c)."""
    tl.store(chunk_sums + tl.program_id(1) * c + column + index * tl.num_programs(1) * c, tl.sum(values, 0))


@jit
def chunk_moments(x, moments, rows, chunk_size, c, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
    """Compute the mean and the sum of squared deviations of a chunk.

    Each lane (row of the tile) processes every BR-th row of the chunk with Welford's algorithm. The formula of Chan et
    al. (1979) then merges the lanes.
    """
    column, lane = chunk_columns(BC), tl.arange(0, BR)
    start, count = chunk_bounds(rows, chunk_size)
    x += start.to(tl.int64) * c
    lane_mean = tl.zeros([BR, BC], tl.float32)
    lane_squares = tl.zeros([BR, BC], tl.float32)
    step_count = 0.0
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        value = load_float(x + row[:, None] * c + column[None, :], inside)
        step_count += 1.0
        difference = value - lane_mean
        lane_mean += tl.where(inside, difference * (1.0 / step_count), 0.0)
        lane_squares += tl.where(inside, difference * (value - lane_mean), 0.0)
    lane_count = tl.maximum((count - lane + BR - 1) // BR, 0).to(tl.float32)[:, None]
    chunk_mean = tl.sum(lane_count * lane_mean, 0) / count
    deviation = lane_mean - chunk_mean[None, :]
    out = moments + tl.program_id(1) * c + column
    tl.store(out, chunk_mean)
    tl.store(out + tl.num_programs(1) * c, tl.sum(lane_squares + lane_count * deviation * deviation, 0))


@jit
def merge_moments(
    moments, weight, bias, norm_params, rows, chunk_size, num_chunks, c, eps, CHUNKS: tl.constexpr, BC: tl.constexpr
):
    """Merge the moments of all chunks with the formula of Chan et al. (1979), and store `norm_params`."""
    column, chunk = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, CHUNKS)[:, None]
    inside = chunk < num_chunks
    count = tl.where(inside, tl.minimum(chunk_size, rows - chunk * chunk_size), 0).to(tl.float32)
    index = chunk * c + column[None, :]
    chunk_mean = tl.load(moments + index, mask=inside, other=0.0)
    chunk_squares = tl.load(moments + num_chunks * c + index, mask=inside, other=0.0)
    mean = tl.sum(count * chunk_mean, 0) / rows
    deviation = chunk_mean - mean[None, :]
    variance = tl.sum(chunk_squares + count * deviation * deviation, 0) / rows
    tl.store(norm_params + column, mean)
    tl.store(norm_params + c + column, 1.0 / tl.sqrt(variance + eps))
    tl.store(norm_params + 2 * c + column, tl.load(weight + column).to(tl.float32))
    tl.store(norm_params + 3 * c + column, tl.load(bias + column).to(tl.float32))


@jit
def sum_chunks(chunk_sums, sums, rounded_sums, num_chunks, c, CHUNKS: tl.constexpr, BC: tl.constexpr):
    """Add up the chunks of each sum, and store the results in float32 and in the dtype of `rounded_sums`."""
    column, chunk = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, CHUNKS)[:, None]
    index = (tl.program_id(1) * num_chunks + chunk) * c + column[None, :]
    result = tl.sum(tl.load(chunk_sums + index, mask=chunk < num_chunks, other=0.0), 0)
    tl.store(sums + tl.program_id(1) * c + column, result)
    tl.store(rounded_sums + tl.program_id(1) * c + column, result)


@jit
def norm_act(x, norm_params, factor, addend, y, rows, pixels, c, slope, BR: tl.constexpr, BC: tl.constexpr):
    """Compute y = addend + factor · LeakyReLU(BatchNorm(x)).

    `addend` is a feature map, or None for 0. `factor` has one element per image, i.e. per `pixels` rows, or is None for
    1.
    """
    row, column = tile_indices(c, BR, BC)
    inside = (row < rows)[:, None]
    index = row[:, None].to(tl.int64) * c + column[None, :]
    mean, rstd, weight, bias = load_norm_params(norm_params, column, c)
    value = (load_float(x + index, inside) - mean) * rstd * weight + bias
    value = tl.where(value > 0, value, slope * value)
    if factor is not None:
        value *= tl.load(factor + row // pixels, mask=row < rows, other=0.0)[:, None]
    if addend is not None:
        value += load_float(addend + index, inside)
    tl.store(y + index, value, mask=inside)


@jit
def norm_output_grad(g, factor, n, weight, bias, slope, image, image_mask):
    """Return the gradient with respect to y = BatchNorm(x), given the gradient g with respect to factor · LeakyReLU(y).

    `image` contains the index of each row's image, which selects the factor.
    """
    g = tl.where(n * weight + bias > 0, g, slope * g)
    if factor is not None:
        g *= tl.load(factor + image, mask=image_mask, other=0.0)[:, None]
    return g


@jit
def norm_act_sums(
    g,
    x,
    norm_params,
    factor,
    chunk_sums,
    rows,
    pixels,
    chunk_size,
    c,
    slope,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum g and g·n over a chunk.

    Here g stands for `norm_grad`, the gradient with respect to the output of batch norm.
    """
    column, row_in_tile = chunk_columns(BC), tl.arange(0, BR)
    start, count = chunk_bounds(rows, chunk_size)
    x += start.to(tl.int64) * c
    g += start.to(tl.int64) * c
    mean, rstd, weight, bias = load_norm_params(norm_params, column, c)
    sum_g = tl.zeros([BR, BC], tl.float32)
    sum_gn = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + row_in_tile
        inside = (row < count)[:, None]
        index = row[:, None] * c + column[None, :]
        n = (load_float(x + index, inside) - mean) * rstd
        norm_grad = load_float(g + index, inside)
        norm_grad = norm_output_grad(norm_grad, factor, n, weight, bias, slope, (start + row) // pixels, row < count)
        sum_g += norm_grad
        sum_gn += norm_grad * n
    store_sum(chunk_sums, 0, column, c, sum_g)
    store_sum(chunk_sums, 1, column, c, sum_gn)


@jit
def norm_act_backward(
    g, x, norm_params, factor, sums, grad_x, rows, pixels, c, slope, inverse_count, BR: tl.constexpr, BC: tl.constexpr
):
    """Compute grad_x = weight·rstd·(g − m(g) − n·m(g·n)).

    m is the mean over the rows, and g stands for `norm_grad`, the gradient with respect to the output of batch norm.
    """
    row, column = tile_indices(c, BR, BC)
    inside = (row < rows)[:, None]
    index = row[:, None].to(tl.int64) * c + column[None, :]
    mean, rstd, weight, bias = load_norm_params(norm_params, column, c)
    mg, mgn = inverse_count * tl.load(sums + column)[None, :], inverse_count * tl.load(sums + c + column)[None, :]
    n = (load_float(x + index, inside) - mean) * rstd
    norm_grad = load_float(g + index, inside)
    norm_grad = norm_output_grad(norm_grad, factor, n, weight, bias, slope, row // pixels, row < rows)
    tl.store(grad_x + index, weight * rstd * (norm_grad - mg - n * mgn), mask=inside)


@jit
def window_corner(window, height, width):
    """Return the index of the first pixel of each 2×2 window."""
    out_width, out_height = width // 2, height // 2
    corner = (
        window // out_width // out_height * height + window // out_width % out_height * 2
    ) * width + window % out_width * 2
    return corner.to(tl.int64)


@jit
def covering_window(window, num_windows, height, width):
    """Return the position of a 2×2 window in a grid of windows that covers all pixels.

    If the height or width is odd, the windows at the edge are not full, and max pooling ignores their pixels.

    Returns:
        The window's row and column in the grid, whether the window is full, its index in the output of max pooling, and
        the index of its first pixel.
    """
    grid_width, grid_height = (width + 1) // 2, (height + 1) // 2
    image, i, j = window // grid_width // grid_height, window // grid_width % grid_height, window % grid_width
    is_full = (window < num_windows) & (i < height // 2) & (j < width // 2)
    out_index = ((image * (height // 2) + i) * (width // 2) + j).to(tl.int64)
    corner_index = ((image * height + 2 * i) * width + 2 * j).to(tl.int64)
    return i, j, is_full, out_index, corner_index


@jit
def pixel_exists(window, num_windows, i, j, height, width, k: tl.constexpr):
    """Return whether pixel `k` of the window in row i and column j of `covering_window` lies in the map."""
    return (window < num_windows) & (2 * i + k // 2 < height) & (2 * j + k % 2 < width)


@jit
def residual_pool(
    main,
    shortcut,
    main_norm_params,
    shortcut_norm_params,
    y,
    main_at_max,
    shortcut_at_max,
    max_codes,
    num_windows,
    height,
    width,
    c,
    slope,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Compute LeakyReLU(MaxPool2×2(BatchNorm(main) + BatchNorm(shortcut))).

    For the backward pass, also store the values of main and shortcut at the maximum of each window. `max_codes`
    contains the position of the maximum in its window (0 to 3), plus 4 if the maximum is positive.

    Numbers 1 and 2 in names stand for main and shortcut.
    """
    row, channel = tile_indices(c, BR, BC)
    window, column = row[:, None], channel[None, :]
    inside = window < num_windows
    corner = window_corner(window, height, width) * c + column
    mean1, rstd1, w1, b1 = load_norm_params(main_norm_params, channel, c)
    mean2, rstd2, w2, b2 = load_norm_params(shortcut_norm_params, channel, c)
    scale1, scale2 = rstd1 * w1, rstd2 * w2
    max_value = tl.zeros([BR, BC], tl.float32)
    max_main = tl.zeros([BR, BC], tl.float32)
    max_shortcut = tl.zeros([BR, BC], tl.float32)
    max_k = tl.zeros([BR, BC], tl.int32)
    for k in tl.static_range(4):
        index = corner + (k // 2 * width + k % 2) * c
        main_value = load_float(main + index, inside)
        shortcut_value = load_float(shortcut + index, inside)
        value = (main_value - mean1) * scale1 + b1 + (shortcut_value - mean2) * scale2 + b2
        if k == 0:
            max_value, max_main, max_shortcut = value, main_value, shortcut_value
        else:
            is_larger = value > max_value
            max_value = tl.where(is_larger, value, max_value)
            max_main = tl.where(is_larger, main_value, max_main)
            max_shortcut = tl.where(is_larger, shortcut_value, max_shortcut)
            max_k = tl.where(is_larger, k, max_k)
    index = window.to(tl.int64) * c + column
    tl.store(y + index, tl.where(max_value > 0, max_value, slope * max_value), mask=inside)
    tl.store(main_at_max + index, max_main, mask=inside)
    tl.store(shortcut_at_max + index, max_shortcut, mask=inside)
    tl.store(max_codes + index, (max_k + tl.where(max_value > 0, 4, 0)).to(tl.uint8), mask=inside)


@jit
def residual_pool_sums(
    g,
    main_at_max,
    shortcut_at_max,
    max_codes,
    main_norm_params,
    shortcut_norm_params,
    chunk_sums,
    num_windows,
    chunk_size,
    c,
    slope,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum g, g·n₁ and g·n₂ over a chunk of windows, at the maximum of each window.

    Here g stands for `pool_grad`, the gradient with respect to the output of max pooling; n₁ and n₂ are the normalized
    main and shortcut.
    """
    column, row_in_tile = chunk_columns(BC), tl.arange(0, BR)
    start, count = chunk_bounds(num_windows, chunk_size)
    base = start.to(tl.int64) * c
    mean1, rstd1, _, _ = load_norm_params(main_norm_params, column, c)
    mean2, rstd2, _, _ = load_norm_params(shortcut_norm_params, column, c)
    sum_g = tl.zeros([BR, BC], tl.float32)
    sum_gn1 = tl.zeros([BR, BC], tl.float32)
    sum_gn2 = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + row_in_tile
        inside = (row < count)[:, None]
        index = base + row[:, None] * c + column[None, :]
        pool_grad = load_float(g + index, inside)
        pool_grad = tl.where(tl.load(max_codes + index, mask=inside, other=0) > 3, pool_grad, slope * pool_grad)
        sum_g += pool_grad
        sum_gn1 += pool_grad * (load_float(main_at_max + index, inside) - mean1) * rstd1
        sum_gn2 += pool_grad * (load_float(shortcut_at_max + index, inside) - mean2) * rstd2
    store_sum(chunk_sums, 0, column, c, sum_g)
    store_sum(chunk_sums, 1, column, c, sum_gn1)
    store_sum(chunk_sums, 2, column, c, sum_gn2)


@jit
def residual_pool_backward(
    g,
    max_codes,
    main,
    shortcut,
    main_norm_params,
    shortcut_norm_params,
    sums,
    grad_main,
    grad_shortcut,
    num_windows,
    height,
    width,
    c,
    slope,
    inverse_count,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Compute the gradients of main and shortcut.

    Max pooling ignores pixels outside full windows, but they affect the loss through the statistics of the batch norms.
    Therefore `num_windows` also counts the incomplete windows at the edges.
    """
    row, channel = tile_indices(c, BR, BC)
    window, column = row[:, None], channel[None, :]
    i, j, is_full, out_index, corner = covering_window(window, num_windows, height, width)
    index = out_index * c + column
    pool_grad = load_float(g + index, is_full)
    max_code = tl.load(max_codes + index, mask=is_full, other=0).to(tl.int32)
    pool_grad = tl.where(max_code > 3, pool_grad, slope * pool_grad)
    max_k = max_code & 3
    mean1, rstd1, w1, _ = load_norm_params(main_norm_params, channel, c)
    mean2, rstd2, w2, _ = load_norm_params(shortcut_norm_params, channel, c)
    mg = inverse_count * tl.load(sums + channel)[None, :]
    # m(g·n₁) and m(g·n₂) times rstd, because they are multiplied by centered values instead of normalized values
    mgn1, mgn2 = (
        inverse_count * tl.load(sums + c + channel)[None, :] * rstd1,
        inverse_count * tl.load(sums + 2 * c + channel)[None, :] * rstd2,
    )
    scale1, scale2 = w1 * rstd1, w2 * rstd2
    corner = corner * c + column
    for k in tl.static_range(4):
        inside = pixel_exists(window, num_windows, i, j, height, width, k)
        index = corner + (k // 2 * width + k % 2) * c
        centered_grad = tl.where(max_k == k, pool_grad, 0.0) - mg
        centered_main = load_float(main + index, inside) - mean1
        centered_shortcut = load_float(shortcut + index, inside) - mean2
        tl.store(grad_main + index, scale1 * (centered_grad - centered_main * mgn1), mask=inside)
        tl.store(grad_shortcut + index, scale2 * (centered_grad - centered_shortcut * mgn2), mask=inside)


@jit
def load_patches(x, row, rows, height, width, c, PATCH_SIZE: tl.constexpr):
    """Load the 3×3 patch around every pixel, flattened to 9·c elements and padded with zeros to PATCH_SIZE.

    The elements of a patch are ordered by row, column and channel.
    """
    element = tl.arange(0, PATCH_SIZE)[None, :]
    down, right = element // (3 * c) - 1, element // c % 3 - 1
    i, j = (row // width % height)[:, None], (row % width)[:, None]
    inside = (i + down >= 0) & (i + down < height) & (j + right >= 0) & (j + right < width)
    # each of the three rows of a patch begins one pixel to the left of the center
    index = (row[:, None] + down * width - 1) * c + element % (3 * c)
    return tl.load(x + index, mask=inside & (element < 9 * c) & (row < rows)[:, None], other=0.0)


@jit
def first_convolutions(
    x,
    main_weight,
    shortcut_weight,
    y1,
    y2,
    rows,
    height,
    width,
    c,
    OUT_CHANNELS: tl.constexpr,
    PATCH_SIZE: tl.constexpr,
    BR: tl.constexpr,
):
    """Compute the 3×3 main and the 1×1 shortcut convolution of images, as matrix products with the same patches.

    Numbers 1 and 2 in names stand for main and shortcut.
    """
    row, out_channel, element = (
        tl.program_id(0) * BR + tl.arange(0, BR),
        tl.arange(0, OUT_CHANNELS)[None, :],
        tl.arange(0, PATCH_SIZE)[:, None],
    )
    patches = load_patches(x, row, rows, height, width, c, PATCH_SIZE)
    w1 = tl.load(main_weight + out_channel * 9 * c + element, mask=element < 9 * c, other=0.0)
    center = element - 4 * c  # the 1×1 convolution reads only the center of a patch
    w2 = tl.load(shortcut_weight + out_channel * c + center, mask=(center >= 0) & (center < c), other=0.0)
    index = row[:, None].to(tl.int64) * OUT_CHANNELS + out_channel
    inside = (row < rows)[:, None]
    tl.store(y1 + index, tl.dot(patches, w1, input_precision="ieee"), mask=inside)
    tl.store(y2 + index, tl.dot(patches, w2, input_precision="ieee"), mask=inside)


@jit
def first_convolution_weight_grads(
    x,
    g1,
    g2,
    chunk_sums,
    rows,
    chunk_size,
    height,
    width,
    c,
    OUT_CHANNELS: tl.constexpr,
    PATCH_SIZE: tl.constexpr,
    BR: tl.constexpr,
):
    """Sum the weight gradients of both convolutions over a chunk.

    `g1` and `g2` are the gradients with respect to the outputs of the main and the shortcut convolution.
    """
    out_channel, element = tl.arange(0, OUT_CHANNELS), tl.arange(0, PATCH_SIZE)
    start = tl.program_id(0) * chunk_size
    grads1 = tl.zeros([OUT_CHANNELS, PATCH_SIZE], tl.float32)
    grads2 = tl.zeros([OUT_CHANNELS, PATCH_SIZE], tl.float32)
    for offset in range(start, tl.minimum(start + chunk_size, rows), BR):
        row = offset + tl.arange(0, BR)
        patches = load_patches(x, row, rows, height, width, c, PATCH_SIZE)
        index = row[:, None].to(tl.int64) * OUT_CHANNELS + out_channel[None, :]
        inside = (row < rows)[:, None]
        grad_y1 = tl.load(g1 + index, mask=inside, other=0.0)
        grad_y2 = tl.load(g2 + index, mask=inside, other=0.0)
        grads1 = tl.dot(tl.trans(grad_y1), patches, grads1, input_precision="ieee")
        grads2 = tl.dot(tl.trans(grad_y2), patches, grads2, input_precision="ieee")
    index = (tl.program_id(0) * 2 * OUT_CHANNELS + out_channel[:, None]) * PATCH_SIZE + element[None, :]
    tl.store(chunk_sums + index, grads1)
    tl.store(chunk_sums + index + OUT_CHANNELS * PATCH_SIZE, grads2)


@jit
def drop_block_mask(
    noise, probability, keep_mask, rows, height, width, c, SIZE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Store 0 in every SIZE × SIZE square whose upper left corner has noise below `probability`, and 1 elsewhere."""
    row, column = tile_indices(c, BR, BC)
    row, column = row[:, None], column[None, :]
    noise_height, noise_width = height - SIZE + 1, width - SIZE + 1
    image, i, j = row // width // height, row // width % height, row % width
    min_noise = tl.full([BR, BC], 1.0, tl.float32)
    for k in range(SIZE * SIZE):
        corner_row, corner_column = i - k // SIZE, j - k % SIZE
        inside = (
            (row < rows)
            & (corner_row >= 0)
            & (corner_row < noise_height)
            & (corner_column >= 0)
            & (corner_column < noise_width)
        )
        index = ((image * noise_height + corner_row) * noise_width + corner_column).to(tl.int64) * c + column
        min_noise = tl.minimum(min_noise, tl.load(noise + index, mask=inside, other=1.0))
    tl.store(
        keep_mask + row.to(tl.int64) * c + column, tl.where(min_noise < tl.load(probability), 0.0, 1.0), mask=row < rows
    )
