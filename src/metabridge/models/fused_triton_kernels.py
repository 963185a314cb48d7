"""The Triton kernels of `fused`. Each sees a map as a matrix (rows, c), in tiles of BR rows and BC columns."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, disable-error-code=assignment

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
    jit = triton.jit
except ImportError:  # PyTorch for CPUs comes without
    AVAILABLE = False

    def jit(kernel):  # noqa: D103
        return kernel


@jit
def channel(norm, column, c):
    """The rows mean, 1/deviation, weight and bias of `norm`, at the columns."""
    return (
        tl.load(norm + column)[None, :],
        tl.load(norm + c + column)[None, :],
        tl.load(norm + 2 * c + column)[None, :],
        tl.load(norm + 3 * c + column)[None, :],
    )


@jit
def tile_of(c, BC: tl.constexpr):
    """The row and the column of a program's tile. They share the grid's first axis: the others end at 65 535."""
    return tl.program_id(0) // (c // BC), tl.program_id(0) % (c // BC)


@jit
def moments(x, partial, rows, chunk, c, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
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
def finish_moments(partial, weight, bias, norm, rows, chunk, parts, c, eps, PARTS: tl.constexpr, BC: tl.constexpr):
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
def add(partial, total, rounded, parts, c, PARTS: tl.constexpr, BC: tl.constexpr):
    """Add up the parts of sums, and round them to the type of the parameters."""
    column, part = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, PARTS)[:, None]
    place = (tl.program_id(1) * parts + part) * c + column[None, :]
    result = tl.sum(tl.load(partial + place, mask=part < parts, other=0.0), 0)
    tl.store(total + tl.program_id(1) * c + column, result)
    tl.store(rounded + tl.program_id(1) * c + column, result)


@jit
def rectify(x, norm, factor, total, y, rows, pixels, c, slope, BR: tl.constexpr, BC: tl.constexpr):
    """LeakyReLU of the normalised map, times each point's `factor`, added to `total`."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), right * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None]
    place = row[:, None].to(tl.int64) * c + column[None, :]
    mean, r, weight, bias = channel(norm, column, c)
    value = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * r * weight + bias
    value = tl.where(value > 0, value, slope * value)
    if factor is not None:
        value *= tl.load(factor + row // pixels, mask=row < rows, other=0.0)[:, None]
    if total is not None:
        value += tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, value, mask=inside)


@jit
def rectify_sums(
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
    """Σg and Σgn of a chunk of rows, where g has passed the rectifier and n is the normalised x."""
    column, lane = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BR)
    start = tl.program_id(1) * chunk
    count = tl.minimum(chunk, rows - start)
    x += start.to(tl.int64) * c
    g += start.to(tl.int64) * c
    mean, r, weight, bias = channel(norm, column, c)
    plain = tl.zeros([BR, BC], tl.float32)
    paired = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        place = row[:, None] * c + column[None, :]
        n = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * r
        slopes = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        slopes = tl.where(n * weight + bias > 0, slopes, slope * slopes)
        if factor is not None:
            slopes *= tl.load(factor + (start + row) // pixels, mask=row < count, other=0.0)[:, None]
        plain += slopes
        paired += slopes * n
    out = partial + tl.program_id(1) * c + column
    tl.store(out, tl.sum(plain, 0))
    tl.store(out + tl.num_programs(1) * c, tl.sum(paired, 0))


@jit
def rectify_back(g, x, norm, factor, total, gx, rows, pixels, c, slope, share, BR: tl.constexpr, BC: tl.constexpr):
    """gx = wr(g − m(g) − n m(gn)), where m is the mean over the rows."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), right * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None]
    place = row[:, None].to(tl.int64) * c + column[None, :]
    mean, r, weight, bias = channel(norm, column, c)
    mg, mgn = share * tl.load(total + column)[None, :], share * tl.load(total + c + column)[None, :]
    n = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * r
    slopes = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
    slopes = tl.where(n * weight + bias > 0, slopes, slope * slopes)
    if factor is not None:
        slopes *= tl.load(factor + row // pixels, mask=row < rows, other=0.0)[:, None]
    tl.store(gx + place, weight * r * (slopes - mg - n * mgn), mask=inside)


@jit
def merge(
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
    below, right = tile_of(c, BC)
    flat, window = right * BC + tl.arange(0, BC), below * BR + tl.arange(0, BR)[:, None]
    column = flat[None, :]
    inside = window < windows
    across, down = width // 2, height // 2
    top = (window // across // down * height + window // across % down * 2) * width + window % across * 2
    corner = top.to(tl.int64) * c + column
    mean1, r1, w1, b1 = channel(first, flat, c)
    mean2, r2, w2, b2 = channel(second, flat, c)
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
def merge_sums(
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
    mean1, r1, _, _ = channel(first, column, c)
    mean2, r2, _, _ = channel(second, column, c)
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
def merge_back(
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
    below, right = tile_of(c, BC)
    flat, window = right * BC + tl.arange(0, BC), below * BR + tl.arange(0, BR)[:, None]
    column = flat[None, :]
    across, down = (width + 1) // 2, (height + 1) // 2
    point, i, j = window // across // down, window // across % down, window % across
    whole = (window < windows) & (i < height // 2) & (j < width // 2)
    place = ((point * (height // 2) + i) * (width // 2) + j).to(tl.int64) * c + column
    slopes = tl.load(g + place, mask=whole, other=0.0).to(tl.float32)
    chosen = tl.load(choice + place, mask=whole, other=0).to(tl.int32)
    slopes = tl.where(chosen > 3, slopes, slope * slopes)
    chosen = chosen & 3
    mean1, r1, w1, _ = channel(first, flat, c)
    mean2, r2, w2, _ = channel(second, flat, c)
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
def taps(x, row, rows, height, width, c, TAPS: tl.constexpr):
    """What a 3×3 convolution sees at each pixel: (rows, TAPS), by line, column and channel."""
    tap = tl.arange(0, TAPS)[None, :]
    down, right = tap // (3 * c) - 1, tap // c % 3 - 1
    i, j = (row // width % height)[:, None], (row % width)[:, None]
    inside = (i + down >= 0) & (i + down < height) & (j + right >= 0) & (j + right < width)
    place = (row[:, None] + down * width - 1) * c + tap % (3 * c)
    return tl.load(x + place, mask=inside & (tap < 9 * c) & (row < rows)[:, None], other=0.0)


@jit
def stem(
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
    """The 3×3 and the 1×1 convolution of a few channels, as one product over taps."""
    row, out, tap = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, O)[None, :], tl.arange(0, TAPS)[:, None]
    seen = taps(x, row, rows, height, width, c, TAPS)
    w1 = tl.load(main + out * 9 * c + tap, mask=tap < 9 * c, other=0.0)
    w2 = tl.load(shortcut + out * c + tap - 4 * c, mask=(tap >= 4 * c) & (tap < 5 * c), other=0.0)
    place = row[:, None].to(tl.int64) * O + out
    inside = (row < rows)[:, None]
    tl.store(y1 + place, tl.dot(seen, w1, input_precision="ieee"), mask=inside)
    tl.store(y2 + place, tl.dot(seen, w2, input_precision="ieee"), mask=inside)


@jit
def stem_back(
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
    """Parts of the gradient of both convolutions' weights."""
    out, tap = tl.arange(0, O), tl.arange(0, TAPS)
    start = tl.program_id(0) * chunk
    slopes1 = tl.zeros([O, TAPS], tl.float32)
    slopes2 = tl.zeros([O, TAPS], tl.float32)
    for offset in range(start, tl.minimum(start + chunk, rows), BR):
        row = offset + tl.arange(0, BR)
        seen = taps(x, row, rows, height, width, c, TAPS)
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
def keep(noise, chance, result, rows, height, width, c, SIZE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """What DropBlock keeps: 0 where a square was dropped, else 1."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR)[:, None], right * BC + tl.arange(0, BC)[None, :]
    down, across = height - SIZE + 1, width - SIZE + 1
    point, i, j = row // width // height, row // width % height, row % width
    lowest = tl.full([BR, BC], 1.0, tl.float32)
    for k in range(SIZE * SIZE):
        above, left = i - k // SIZE, j - k % SIZE
        inside = (row < rows) & (above >= 0) & (above < down) & (left >= 0) & (left < across)
        place = ((point * down + above) * across + left).to(tl.int64) * c + column
        lowest = tl.minimum(lowest, tl.load(noise + place, mask=inside, other=1.0))
    tl.store(result + row.to(tl.int64) * c + column, tl.where(lowest < tl.load(chance), 0.0, 1.0), mask=row < rows)
