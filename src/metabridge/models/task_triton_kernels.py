"""The Triton kernels of `fused_tasks`; see `fused_kernels`. Columns are the channels of all tasks."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from metabridge.models.fused_triton_kernels import AVAILABLE, jit, tile_of

if AVAILABLE:
    import triton.language as tl


@jit
def again_sums(g, x, u, mean, r, partial, rows, chunk, c, BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
    """Σg, Σu, Σgn, Σun and Σgu of a chunk of rows, where n is the normalised x."""
    column, lane = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BR)
    start = tl.program_id(1) * chunk
    count = tl.minimum(chunk, rows - start)
    base = start.to(tl.int64) * c
    middle, scale = tl.load(mean + column)[None, :], tl.load(r + column)[None, :]
    sg = tl.zeros([BR, BC], tl.float32)
    su = tl.zeros([BR, BC], tl.float32)
    sgn = tl.zeros([BR, BC], tl.float32)
    sun = tl.zeros([BR, BC], tl.float32)
    sgu = tl.zeros([BR, BC], tl.float32)
    for offset in tl.range(0, count, BR, num_stages=STAGES):
        row = offset + lane
        inside = (row < count)[:, None]
        place = base + row[:, None] * c + column[None, :]
        n = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - middle) * scale
        one = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        two = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
        sg += one
        su += two
        sgn += one * n
        sun += two * n
        sgu += one * two
    out, step = partial + tl.program_id(1) * c + column, tl.num_programs(1) * c
    tl.store(out, tl.sum(sg, 0))
    tl.store(out + step, tl.sum(su, 0))
    tl.store(out + 2 * step, tl.sum(sgn, 0))
    tl.store(out + 3 * step, tl.sum(sun, 0))
    tl.store(out + 4 * step, tl.sum(sgu, 0))


@jit
def again_back(g, x, u, mean, r, weight, v, s, total, gg, gx, gw, rows, c, share, BR: tl.constexpr, BC: tl.constexpr):
    """What u, v and s pull back to g, x and the weight: `norm._pulled_back` in one pass."""
    below, right = tile_of(c, BC)
    row, column = below * BR + tl.arange(0, BR), right * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None]
    place = row[:, None].to(tl.int64) * c + column[None, :]
    middle, scale = tl.load(mean + column), tl.load(r + column)
    wr, own = tl.load(weight + column) * scale, tl.load(v + column)
    mg, mu = share * tl.load(total + column), share * tl.load(total + c + column)
    mgn, mun = share * tl.load(total + 2 * c + column), share * tl.load(total + 3 * c + column)
    product = share * tl.load(total + 4 * c + column) - mu * mg - mun * mgn
    a, e = own - wr * mun, wr * mgn
    fall = scale * (a * mgn - e * mun) + wr * scale * product
    n = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - middle[None, :]) * scale[None, :]
    one = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(s + column) - wr * mu
    tl.store(gg + place, shift[None, :] + a[None, :] * n + wr[None, :] * two, mask=inside)
    slopes = (scale * (e * mu - a * mg))[None, :] - fall[None, :] * n
    slopes += (scale * a)[None, :] * one - (scale * e)[None, :] * two
    tl.store(gx + place, slopes, mask=inside)
    if below == 0:
        tl.store(gw + column, scale * product * rows)


@jit
def first(window, height, width):
    """The first pixel of each 2×2 window."""
    across, down = width // 2, height // 2
    return ((window // across // down * height + window // across % down * 2) * width + window % across * 2).to(
        tl.int64
    )


@jit
def pool(x, y, choice, windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """The largest value of each 2×2 window, the first of equals or what is not a number, and its place there."""
    below, right = tile_of(c, BC)
    window, column = below * BR + tl.arange(0, BR)[:, None], right * BC + tl.arange(0, BC)[None, :]
    inside = window < windows
    corner = first(window, height, width) * c + column
    best = tl.load(x + corner, mask=inside, other=0.0).to(tl.float32)
    chosen = tl.zeros([BR, BC], tl.int32)
    for k in tl.static_range(1, 4):
        value = tl.load(x + corner + (k // 2 * width + k % 2) * c, mask=inside, other=0.0).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        chosen = tl.where(better, k, chosen)
    place = window.to(tl.int64) * c + column
    tl.store(y + place, best, mask=inside)
    tl.store(choice + place, chosen.to(tl.uint8), mask=inside)


@jit
def spread(values, choice, x, windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """Each window's value at its place, and zeros elsewhere, also in what an odd size cuts off."""
    below, right = tile_of(c, BC)
    window, column = below * BR + tl.arange(0, BR)[:, None], right * BC + tl.arange(0, BC)[None, :]
    across, down = (width + 1) // 2, (height + 1) // 2
    point, i, j = window // across // down, window // across % down, window % across
    whole = (window < windows) & (i < height // 2) & (j < width // 2)
    place = ((point * (height // 2) + i) * (width // 2) + j).to(tl.int64) * c + column
    value = tl.load(values + place, mask=whole, other=0.0)
    chosen = tl.load(choice + place, mask=whole, other=4).to(tl.int32)
    corner = ((point * height + 2 * i) * width + 2 * j).to(tl.int64) * c + column
    for k in tl.static_range(4):
        inside = (window < windows) & (2 * i + k // 2 < height) & (2 * j + k % 2 < width)
        tl.store(x + corner + (k // 2 * width + k % 2) * c, tl.where(chosen == k, value, 0.0), mask=inside)


@jit
def pick(u, choice, values, windows, height, width, c, BR: tl.constexpr, BC: tl.constexpr):
    """The value at each window's place."""
    below, right = tile_of(c, BC)
    window, column = below * BR + tl.arange(0, BR)[:, None], right * BC + tl.arange(0, BC)[None, :]
    inside = window < windows
    place = window.to(tl.int64) * c + column
    chosen = tl.load(choice + place, mask=inside, other=0).to(tl.int32)
    found = first(window, height, width) * c + column + (chosen // 2 * width + chosen % 2) * c
    tl.store(values + place, tl.load(u + found, mask=inside, other=0.0), mask=inside)
