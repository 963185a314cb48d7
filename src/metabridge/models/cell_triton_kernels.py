"""The Triton kernels of `cell_layers`; see `fused_kernels`.

A map of HEIGHT × WIDTH pixels is looked at through DOWN × ACROSS windows of 3×3, STRIDE pixels apart. `k` numbers the
places in a window. A row stands for LINES windows, one below the other, which share most of what they see: the
compiler loads it once, as long as nothing is stored before the last of them. It knows the sides, as dividing by them
takes long otherwise.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005 (Triton knows no stars in tuples)

from __future__ import annotations

from metabridge.models.fused_triton_kernels import AVAILABLE, jit, tile_of

if AVAILABLE:
    import triton.language as tl


@jit
def near(
    row,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    down: tl.constexpr,
    right: tl.constexpr,
):
    """Where the pixel begins that is so far `down` and `right` of a row's first window, and whether there is one."""
    GROUPS: tl.constexpr = (DOWN + LINES - 1) // LINES
    i, j = row // ACROSS % GROUPS * LINES * STRIDE, row % ACROSS * STRIDE
    centre = (row // ACROSS // GROUPS * HEIGHT + i) * WIDTH + j
    inside = (i + down >= 0) & (i + down < HEIGHT) & (j + right >= 0) & (j + right < WIDTH) & (row < rows)
    return (centre.to(tl.int64) * c + (down * WIDTH + right) * c)[:, None], inside[:, None]


@jit
def window(
    row,
    rows,
    c,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    LINES: tl.constexpr,
    down: tl.constexpr,
    right: tl.constexpr,
):
    """Where the window begins that is so far `down` and `right` of a row's first one, and whether there is one."""
    return near(row, rows, c, DOWN, ACROSS, DOWN, ACROSS, 1, LINES, down, right)


@jit
def pixels_in(
    row,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    down: tl.constexpr,
    right: tl.constexpr,
):
    """How many pixels of the map the window so far `down` and `right` of a row's first one holds."""
    GROUPS: tl.constexpr = (DOWN + LINES - 1) // LINES
    i, j = (row // ACROSS % GROUPS * LINES + down) * STRIDE, (row % ACROSS + right) * STRIDE
    lines = 1 + (i > 0).to(tl.int32) + (i + 1 < HEIGHT).to(tl.int32)
    return (lines * (1 + (j > 0).to(tl.int32) + (j + 1 < WIDTH).to(tl.int32))).to(tl.float32)[:, None]


@jit
def plus(more, place, inside, slopes):
    """The gradient with what has come from elsewhere, if anything has."""
    if more is not None:
        slopes += tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
    return slopes


@jit
def depthwise(
    x,
    weight,
    y,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    DILATION: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """A 3×3 convolution of each channel of the rectified map by itself; the weight is by place and channel."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), (right * BC + tl.arange(0, BC))[None, :]
    totals = ()
    for line in tl.static_range(LINES):
        total = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            place, inside = near(
                row,
                rows,
                c,
                HEIGHT,
                WIDTH,
                DOWN,
                ACROSS,
                STRIDE,
                LINES,
                line * STRIDE + (k // 3 - 1) * DILATION,
                (k % 3 - 1) * DILATION,
            )
            value = tl.load(x + place + column, mask=inside, other=0.0)
            total += tl.where(value <= 0, 0.0, value).to(tl.float32) * tl.load(weight + k * c + column).to(tl.float32)
        totals = totals + (total,)
    for line in tl.static_range(LINES):
        place, inside = window(row, rows, c, DOWN, ACROSS, LINES, line, 0)
        tl.store(y + place + column, totals[line], mask=inside)


@jit
def depthwise_back(
    g,
    more,
    x,
    weight,
    gx,
    partial,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    chunk,
    DILATION: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The map's gradient, and parts of the weight's, of a chunk of rows."""
    column = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    start = tl.program_id(1) * chunk
    nothing = tl.zeros([BR, BC], tl.float32)
    sums = (nothing,) * 9
    for offset in range(start, tl.minimum(start + chunk, rows), BR):
        row = offset + tl.arange(0, BR)
        totals = ()
        for pixel in tl.static_range(LINES * STRIDE * STRIDE):
            place, own = near(row, rows, c, HEIGHT, WIDTH, DOWN, ACROSS, STRIDE, LINES, pixel // STRIDE, pixel % STRIDE)
            value = tl.load(x + place + column, mask=own, other=0.0)
            positive = value > 0
            value = tl.where(value <= 0, 0.0, value).to(tl.float32)
            total = tl.zeros([BR, BC], tl.float32)
            for k in tl.static_range(9):
                if (pixel // STRIDE - (k // 3 - 1) * DILATION) % STRIDE == 0 and (
                    pixel % STRIDE - (k % 3 - 1) * DILATION
                ) % STRIDE == 0:
                    place, inside = window(
                        row,
                        rows,
                        c,
                        DOWN,
                        ACROSS,
                        LINES,
                        (pixel // STRIDE - (k // 3 - 1) * DILATION) // STRIDE,
                        (pixel % STRIDE - (k % 3 - 1) * DILATION) // STRIDE,
                    )
                    slopes = tl.load(g + place + column, mask=inside, other=0.0).to(tl.float32)
                    total += slopes * tl.load(weight + k * c + column).to(tl.float32)
                    sums = sums[:k] + (sums[k] + slopes * value,) + sums[k + 1 :]
            totals = totals + (tl.where(positive, total, 0.0),)
        for pixel in tl.static_range(LINES * STRIDE * STRIDE):
            place, own = near(row, rows, c, HEIGHT, WIDTH, DOWN, ACROSS, STRIDE, LINES, pixel // STRIDE, pixel % STRIDE)
            tl.store(gx + place + column, plus(more, place + column, own, totals[pixel]), mask=own)
    for k in tl.static_range(9):
        tl.store(partial + (tl.program_id(1) * 9 + k) * c + column, tl.sum(sums[k], 0)[None, :])


@jit
def largest(
    x,
    y,
    choice,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The largest value in each window, and its place there."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), (right * BC + tl.arange(0, BC))[None, :]
    totals = ()
    choices = ()
    for line in tl.static_range(LINES):
        best = tl.full([BR, BC], float("-inf"), tl.float32)
        chosen = tl.zeros([BR, BC], tl.int32)
        for k in tl.static_range(9):
            place, inside = near(
                row,
                rows,
                c,
                HEIGHT,
                WIDTH,
                DOWN,
                ACROSS,
                STRIDE,
                LINES,
                line * STRIDE + (k // 3 - 1),
                (k % 3 - 1),
            )
            value = tl.load(x + place + column, mask=inside, other=float("-inf")).to(tl.float32)
            better = (value > best) | (value != value)
            chosen = tl.where(better, k, chosen)
            best = tl.where(better, value, best)
        totals = totals + (best,)
        choices = choices + (chosen,)
    for line in tl.static_range(LINES):
        place, inside = window(row, rows, c, DOWN, ACROSS, LINES, line, 0)
        tl.store(y + place + column, totals[line], mask=inside)
        tl.store(choice + place + column, choices[line].to(tl.uint8), mask=inside)


@jit
def largest_back(
    g,
    more,
    choice,
    gx,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """What each pixel receives from the windows in which it was the largest."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), (right * BC + tl.arange(0, BC))[None, :]
    totals = ()
    for pixel in tl.static_range(LINES * STRIDE * STRIDE):
        total = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            if (pixel // STRIDE - (k // 3 - 1)) % STRIDE == 0 and (pixel % STRIDE - (k % 3 - 1)) % STRIDE == 0:
                place, inside = window(
                    row,
                    rows,
                    c,
                    DOWN,
                    ACROSS,
                    LINES,
                    (pixel // STRIDE - (k // 3 - 1)) // STRIDE,
                    (pixel % STRIDE - (k % 3 - 1)) // STRIDE,
                )
                chosen = tl.load(choice + place + column, mask=inside, other=9) == k
                total += tl.where(chosen, tl.load(g + place + column, mask=inside, other=0.0).to(tl.float32), 0.0)
        totals = totals + (total,)
    for pixel in tl.static_range(LINES * STRIDE * STRIDE):
        place, own = near(row, rows, c, HEIGHT, WIDTH, DOWN, ACROSS, STRIDE, LINES, pixel // STRIDE, pixel % STRIDE)
        tl.store(gx + place + column, plus(more, place + column, own, totals[pixel]), mask=own)


@jit
def mean(
    x,
    y,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The mean of the pixels in each window."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), (right * BC + tl.arange(0, BC))[None, :]
    totals = ()
    for line in tl.static_range(LINES):
        total = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            place, inside = near(
                row,
                rows,
                c,
                HEIGHT,
                WIDTH,
                DOWN,
                ACROSS,
                STRIDE,
                LINES,
                line * STRIDE + (k // 3 - 1),
                (k % 3 - 1),
            )
            total += tl.load(x + place + column, mask=inside, other=0.0).to(tl.float32)
        total /= pixels_in(row, HEIGHT, WIDTH, DOWN, ACROSS, STRIDE, LINES, line, 0)
        totals = totals + (total,)
    for line in tl.static_range(LINES):
        place, inside = window(row, rows, c, DOWN, ACROSS, LINES, line, 0)
        tl.store(y + place + column, totals[line], mask=inside)


@jit
def mean_back(
    g,
    more,
    gx,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """What each pixel receives from the windows that hold it."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), (right * BC + tl.arange(0, BC))[None, :]
    totals = ()
    for pixel in tl.static_range(LINES * STRIDE * STRIDE):
        total = tl.zeros([BR, BC], tl.float32)
        for k in tl.static_range(9):
            if (pixel // STRIDE - (k // 3 - 1)) % STRIDE == 0 and (pixel % STRIDE - (k % 3 - 1)) % STRIDE == 0:
                place, inside = window(
                    row,
                    rows,
                    c,
                    DOWN,
                    ACROSS,
                    LINES,
                    (pixel // STRIDE - (k // 3 - 1)) // STRIDE,
                    (pixel % STRIDE - (k % 3 - 1)) // STRIDE,
                )
                held = pixels_in(
                    row,
                    HEIGHT,
                    WIDTH,
                    DOWN,
                    ACROSS,
                    STRIDE,
                    LINES,
                    (pixel // STRIDE - (k // 3 - 1)) // STRIDE,
                    (pixel % STRIDE - (k % 3 - 1)) // STRIDE,
                )
                total += tl.load(g + place + column, mask=inside, other=0.0).to(tl.float32) / held
        totals = totals + (total,)
    for pixel in tl.static_range(LINES * STRIDE * STRIDE):
        place, own = near(row, rows, c, HEIGHT, WIDTH, DOWN, ACROSS, STRIDE, LINES, pixel // STRIDE, pixel % STRIDE)
        tl.store(gx + place + column, plus(more, place + column, own, totals[pixel]), mask=own)


@jit
def halve(
    x,
    y,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The even pixels of the rectified map, and beside them the odd ones, with zeros beyond the edge."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), (right * BC + tl.arange(0, BC))[None, :]
    for odd in tl.static_range(2):
        place, inside = near(row, rows, c, HEIGHT, WIDTH, DOWN, ACROSS, 2, 1, odd, odd)
        value = tl.load(x + place + column, mask=inside, other=0.0)
        place = (2 * row[:, None].to(tl.int64) + odd) * c + column
        tl.store(y + place, tl.where(value <= 0, 0.0, value), mask=(row < rows)[:, None])


@jit
def halve_back(
    g,
    more,
    y,
    gx,
    rows,
    c,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of a map that was halved to `y`: nothing where one side is even and the other odd."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), (right * BC + tl.arange(0, BC))[None, :]
    for pixel in tl.static_range(4):
        place, own = near(row, rows, c, HEIGHT, WIDTH, DOWN, ACROSS, 2, 1, pixel // 2, pixel % 2)
        slopes = tl.zeros([BR, BC], tl.float32)
        if pixel % 3 == 0:
            half = (2 * row[:, None].to(tl.int64) + pixel // 3) * c + column
            slopes = tl.load(g + half, mask=own, other=0.0).to(tl.float32)
            slopes = tl.where(tl.load(y + half, mask=own, other=0.0) > 0, slopes, 0.0)
        tl.store(gx + place + column, plus(more, place + column, own, slopes), mask=own)


@jit
def join(x, y, rows, c, width, first, BR: tl.constexpr, BC: tl.constexpr):
    """Rectify a map into the columns of a wider one from `first` on."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR)[:, None], right * BC + tl.arange(0, BC)[None, :]
    value = tl.load(x + row.to(tl.int64) * c + column, mask=row < rows, other=0.0)
    tl.store(y + row.to(tl.int64) * width + first + column, tl.where(value <= 0, 0.0, value), mask=row < rows)


@jit
def join_back(g, more, y, gx, rows, c, width, first, BR: tl.constexpr, BC: tl.constexpr):
    """Take one map's gradient out of the wider one's."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), right * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None]
    place = row[:, None].to(tl.int64) * width + first + column[None, :]
    positive = tl.load(y + place, mask=inside, other=0.0) > 0
    slopes = tl.where(positive, tl.load(g + place, mask=inside, other=0.0).to(tl.float32), 0.0)
    place = row[:, None].to(tl.int64) * c + column[None, :]
    tl.store(gx + place, plus(more, place, inside, slopes), mask=inside)
