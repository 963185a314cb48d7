"""What stands between the convolutions of a ResNet-12 or a cell, as few passes over memory, in Triton.

On a GPU in bfloat16 a ResNet-12 spends half of its time between the convolutions, reading and writing
maps, and a stack of cells nearly all of it. Here LeakyReLU(BatchNorm(x)) is one pass for the statistics and
one to apply them, forward and backward alike, the end of a block writes the pooled map alone, and an operator
of a cell adds what it sends to what the node has received. Maps are channels-last, seen as a matrix
(points × height × width, channels), stored as they come and computed in float32.

Statistics are merged by the rule of Chan et al. (1979), which loses no digits where |mean| ≫ deviation.
A second derivative is taken through PyTorch's own operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.models import fused_kernels as kernels
from metabridge.models import tiles

TAPS = 32  # a stem's inputs by output pixel, 9 for each channel, filled up to a power of two
# These are chosen by how many registers and instructions the compiler then needs.
LINES = 3  # windows one below the other that a program looks through at the same pixels
FEW = 512  # elements of a map that a program holds beside nine sums
MANY = 2112  # programs that share nine sums


def rectified(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """LeakyReLU(BatchNorm(x)) with the statistics of the batch."""
    return _Rectified.apply(tiles.channels_last(x), weight, bias, None, None, eps, slope)  # type: ignore[no-any-return]


def added(
    total: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor, eps: float, factor: Tensor | None = None
) -> Tensor:
    """The `total` so far, of nothing at first, plus BatchNorm(x) times a `factor` (points) that has no gradient."""
    total = None if total is None else tiles.channels_last(total)
    return _Rectified.apply(tiles.channels_last(x), weight, bias, total, factor, eps, 1.0)  # type: ignore[no-any-return]


def merged(
    main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, slope: float
) -> Tensor:
    """LeakyReLU(MaxPool2×2(BatchNorm(main) + BatchNorm(shortcut))) with the statistics of the batch."""
    return _Merged.apply(tiles.channels_last(main), tiles.channels_last(shortcut), w1, b1, w2, b2, eps, slope)  # type: ignore[no-any-return]


def branches(x: Tensor, main: Tensor, shortcut: Tensor) -> tuple[Tensor, Tensor]:
    """The 3×3 and the 1×1 convolution that a block begins with.

    A 1×1 convolution is a matrix product. Images, whose few channels leave cuDNN's tiles empty and
    which need no gradient, go through one kernel for both.
    """
    if 9 * x.shape[1] <= TAPS and main.shape[0] in (32, 64, 128) and not x.requires_grad:
        return _Stem.apply(tiles.channels_last(x), main, shortcut)  # type: ignore[no-any-return]
    return F.conv2d(x, main, padding=1), F.linear(x.movedim(1, -1), shortcut.flatten(1)).movedim(-1, 1)


def pointwise(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The 1×1 convolution, and x.

    This and what follows return x too, for the one of them that takes it next: its gradients are then added up where
    they arise, and not in passes over memory of their own.
    """
    return _handed_on(_Pointwise(), x, weight)


def depthwise(x: Tensor, weight: Tensor, stride: int, dilation: int) -> tuple[Tensor, Tensor]:
    """The 3×3 convolution of each channel of ReLU(x) by itself, padded so that it keeps or halves the sides, and x."""
    return _handed_on(_Depthwise(stride, dilation), x, weight)


def max_pooled(x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The largest value in every 3×3 window, and x."""
    return _handed_on(_MaxPooled(stride), x)


def mean_pooled(x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The mean of every 3×3 window, of the pixels that it holds, and x."""
    return _handed_on(_MeanPooled(stride), x)


def halved(x: Tensor) -> tuple[Tensor, Tensor]:
    """ReLU(x) at pixels (2i, 2j), as further channels at (2i + 1, 2j + 1) with zeros beyond the edge, and x."""
    return _handed_on(_Halved(), x)


def positive(x: Tensor) -> tuple[Tensor, Tensor]:
    """ReLU(x), and x."""
    return _handed_on(_Positive(), x)


def joined(*maps: Tensor) -> Tensor:
    """ReLU of maps side by side, as channels of one."""
    return _Joined.apply(*map(tiles.channels_last, maps))  # type: ignore[no-any-return]


def kept(noise: Tensor, chance: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """0 on the squares of `size` × `size` whose upper left corner has `noise` below `chance`, and 1 elsewhere."""
    n, c, down, across = noise.shape
    height, width = down + size - 1, across + size - 1
    result = tiles.empty((n, c, height, width), dtype, noise.device)
    rows, tile = n * height * width, tiles.tile(c)
    kernels.keep[tiles.grid(rows, c, tile)](
        tiles.channels_last(noise), chance, result, rows, height, width, c, SIZE=size, **tile
    )
    return result


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        total: Tensor | None,
        factor: Tensor | None,
        eps: float,
        slope: float,
    ) -> Tensor:
        norm, y = tiles.statistics(x, weight, bias, eps), torch.empty_like(x)
        rows, c = tiles.matrix_shape(x)
        tile = tiles.tile(c)
        kernels.rectify[tiles.grid(rows, c, tile)](x, norm, factor, total, y, rows, rows // len(x), c, slope, **tile)
        ctx.save_for_backward(x, weight, bias, norm, factor)
        ctx.settings = eps, slope
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, norm, factor = ctx.saved_tensors
        _, slope = ctx.settings
        towards_total = g if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():
            inputs, scaled = (x, weight, bias), g if factor is None else g * factor.view(-1, 1, 1, 1).to(g.dtype)
            slopes = _differentiable((_plain_rectified(*inputs, *ctx.settings),), inputs, (scaled,))
            return *slopes, towards_total, None, None, None
        g = tiles.channels_last(g)
        rows, c = tiles.matrix_shape(x)
        tile, chunk, parts = tiles.tile(c), *tiles.chunks(rows, c)
        partial = x.new_empty(2, parts, c, dtype=torch.float32)
        pixels = rows // len(x)
        kernels.rectify_sums[c // tile["BC"], parts](
            g, x, norm, factor, partial, rows, pixels, chunk, c, slope, **tile, STAGES=tiles.STAGES
        )
        (sums, (gb, gw)), gx = tiles.added(partial, weight.dtype), torch.empty_like(x)
        kernels.rectify_back[tiles.grid(rows, c, tile)](
            g, x, norm, factor, sums, gx, rows, pixels, c, slope, 1 / rows, **tile
        )
        return gx, gw, gb, towards_total, None, None, None


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
        first, second = tiles.statistics(main, w1, b1, eps), tiles.statistics(shortcut, w2, b2, eps)
        n, c, height, width = main.shape
        pooled = n, c, height // 2, width // 2
        y, main_kept, shortcut_kept = (tiles.empty(pooled, main.dtype, main.device) for _ in range(3))
        choice = torch.empty_like(y, dtype=torch.uint8)
        windows, tile = n * (height // 2) * (width // 2), tiles.tile(c, tiles.WINDOWS)
        kernels.merge[tiles.grid(windows, c, tile)](
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
        g = tiles.channels_last(g)
        n, c, height, width = main.shape
        windows = tiles.matrix_shape(g)[0]
        tile, chunk, parts = tiles.tile(c), *tiles.chunks(windows, c)
        partial = main.new_empty(3, parts, c, dtype=torch.float32)
        kernels.merge_sums[c // tile["BC"], parts](
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
            **tile,
            STAGES=tiles.STAGES,
        )
        total, (gb, gw1, gw2) = tiles.added(partial, w1.dtype)
        gmain, gshortcut = torch.empty_like(main), torch.empty_like(shortcut)
        windows, tile = n * ((height + 1) // 2) * ((width + 1) // 2), tiles.tile(c, tiles.WINDOWS)
        kernels.merge_back[tiles.grid(windows, c, tile)](
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
        results = [tiles.empty((n, outputs, height, width), x.dtype, x.device) for _ in range(2)]
        kernels.stem[(tiles.parts(rows, 256),)](
            x, tiles.channels_last(main), shortcut, *results, rows, height, width, c, O=outputs, TAPS=TAPS, BR=256
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
        outputs, rows = main.shape[0], tiles.matrix_shape(x)[0]
        chunk = tiles.parts(tiles.parts(rows, tiles.PROGRAMS), 64) * 64
        parts = tiles.parts(rows, chunk)
        partial = x.new_empty(parts, 2, outputs, TAPS, dtype=torch.float32)
        kernels.stem_back[(parts,)](
            x,
            tiles.channels_last(gmain),
            tiles.channels_last(gshortcut),
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


class _Layer(Protocol):
    """What is done to a map x with a weight or none, and how the gradient comes back."""

    @property
    def forward(self) -> Callable[..., tuple[Tensor, ...]]:
        """From x and the weight to the value, and what else the way back needs."""

    @property
    def back(self) -> Callable[..., tuple[Tensor, ...]]:
        """From the value's gradient, more of x's or None, x, the weight and `forward`'s to the gradients of both."""

    @property
    def plain(self) -> Callable[..., Tensor]:
        """From x and the weight to the value, by PyTorch's own operations."""


def _handed_on(layer: _Layer, x: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
    return _HandedOn.apply(layer, tiles.channels_last(x), *weight)  # type: ignore[no-any-return]


class _HandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
        y, *kept = layer.forward(x, *weight)
        ctx.save_for_backward(x, *weight, y, *kept)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.inputs = layer, 1 + len(weight)
        return y, x

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, kept = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        if g is None:
            return None, more, *[None] * (ctx.inputs - 1)
        if torch.is_grad_enabled():
            slope, *rest = _differentiable((ctx.layer.plain(*inputs),), inputs, (g,))
            return None, slope if slope is None or more is None else slope + more, *rest
        more = None if more is None else tiles.channels_last(more)
        return None, *ctx.layer.back(tiles.channels_last(g), more, *inputs, *kept)


@dataclass(frozen=True)
class _Pointwise:
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (F.linear(x.movedim(1, -1), weight.flatten(1)).movedim(-1, 1),)

    def back(self, g: Tensor, more: Tensor | None, x: Tensor, weight: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        across, flat = weight.flatten(1), _matrix(g)
        slope = flat @ across if more is None else torch.addmm(_matrix(more), flat, across)
        return slope.view(*x.movedim(1, -1).shape).movedim(-1, 1), (flat.T @ _matrix(x)).view_as(weight)

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight)


@dataclass(frozen=True)
class _Depthwise:
    stride: int
    dilation: int

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, by_place = _windows(x, self.stride), weight.flatten(1).T.contiguous()
        (rows, c, *view), tile = _view(x, y, self.stride), tiles.tile(x.shape[1], tiles.WINDOWS)
        kernels.depthwise[tiles.grid(rows, c, tile)](x, by_place, y, rows, c, *view, DILATION=self.dilation, **tile)
        return y, by_place

    def back(
        self, g: Tensor, more: Tensor | None, x: Tensor, weight: Tensor, _: Tensor, by_place: Tensor
    ) -> tuple[Tensor, ...]:
        gx, (rows, c, *view) = torch.empty_like(x), _view(x, g, self.stride)
        tile, chunk, parts = tiles.tile(c, FEW), *tiles.chunks(rows, c, MANY)
        partial = x.new_empty(parts, 3, 3, c, dtype=torch.float32)
        kernels.depthwise_back[c // tile["BC"], parts](
            g,
            more,
            x,
            by_place,
            gx,
            partial,
            rows,
            c,
            *view,
            chunk,
            DILATION=self.dilation,
            **tile,
        )
        return gx, partial.sum(0).to(weight.dtype).movedim(-1, 0)[:, None]

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.relu(x), weight, None, self.stride, self.dilation, self.dilation, x.shape[1])


@dataclass(frozen=True)
class _MaxPooled:
    stride: int

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = _windows(x, self.stride)
        choice = torch.empty_like(y, dtype=torch.uint8)
        (rows, c, *view), tile = _view(x, y, self.stride), tiles.tile(x.shape[1], tiles.WINDOWS)
        kernels.largest[tiles.grid(rows, c, tile)](x, y, choice, rows, c, *view, **tile)
        return y, choice

    def back(self, g: Tensor, more: Tensor | None, x: Tensor, _: Tensor, choice: Tensor) -> tuple[Tensor, ...]:
        gx, (rows, c, *view), tile = (
            torch.empty_like(x),
            _view(x, g, self.stride),
            tiles.tile(x.shape[1], tiles.WINDOWS),
        )
        kernels.largest_back[tiles.grid(rows, c, tile)](g, more, choice, gx, rows, c, *view, **tile)
        return (gx,)

    def plain(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, self.stride, 1)


@dataclass(frozen=True)
class _MeanPooled:
    stride: int

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = _windows(x, self.stride)
        (rows, c, *view), tile = _view(x, y, self.stride), tiles.tile(x.shape[1], tiles.WINDOWS)
        kernels.mean[tiles.grid(rows, c, tile)](x, y, rows, c, *view, **tile)
        return (y,)

    def back(self, g: Tensor, more: Tensor | None, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        gx, (rows, c, *view), tile = (
            torch.empty_like(x),
            _view(x, g, self.stride),
            tiles.tile(x.shape[1], tiles.WINDOWS),
        )
        kernels.mean_back[tiles.grid(rows, c, tile)](g, more, gx, rows, c, *view, **tile)
        return (gx,)

    def plain(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, self.stride, 1, count_include_pad=False)


@dataclass(frozen=True)
class _Halved:
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n, c, height, width = x.shape
        y, tile = (
            tiles.empty((n, 2 * c, tiles.parts(height, 2), tiles.parts(width, 2)), x.dtype, x.device),
            tiles.tile(c),
        )
        kernels.halve[tiles.grid(tiles.matrix_shape(y)[0], c, tile)](
            x, y, tiles.matrix_shape(y)[0], *x.shape[1:], *y.shape[2:], **tile
        )
        return (y,)

    def back(self, g: Tensor, more: Tensor | None, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        gx, tile, rows = torch.empty_like(x), tiles.tile(x.shape[1], tiles.WINDOWS), tiles.matrix_shape(g)[0]
        kernels.halve_back[tiles.grid(rows, x.shape[1], tile)](g, more, y, gx, rows, *x.shape[1:], *g.shape[2:], **tile)
        return (gx,)

    def plain(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return torch.cat([x[..., ::2, ::2], F.pad(x, (0, 1, 0, 1))[..., 1::2, 1::2]], 1)


@dataclass(frozen=True)
class _Positive:
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (_join([x]),)

    def back(self, g: Tensor, more: Tensor | None, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(_part(g, y, [x.shape[1]], more))

    def plain(self, x: Tensor) -> Tensor:
        return F.relu(x)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *maps: Tensor) -> Tensor:
        y = _join(maps)
        ctx.save_for_backward(y)
        ctx.channels = [value.shape[1] for value in maps]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (g * (y > 0)).split(ctx.channels, 1)  # type: ignore[no-any-return]
        return tuple(_part(tiles.channels_last(g), y, ctx.channels))


def _join(maps: Sequence[Tensor]) -> Tensor:
    """Rectify maps into one."""
    channels = [value.shape[1] for value in maps]
    n, _, *sides = maps[0].shape
    y = tiles.empty((n, sum(channels), *sides), maps[0].dtype, maps[0].device)
    rows, width = tiles.matrix_shape(y)
    for value, c, first in zip(maps, channels, itertools.accumulate(channels, initial=0)):
        tile = tiles.tile(c)
        kernels.join[tiles.grid(rows, c, tile)](value, y, rows, c, width, first, **tile)
    return y


def _part(g: Tensor, y: Tensor, channels: Sequence[int], more: Tensor | None = None) -> Iterator[Tensor]:
    """The gradients of the maps that were joined to y."""
    n, _, *sides = y.shape
    rows, width = tiles.matrix_shape(y)
    for c, first in zip(channels, itertools.accumulate(channels, initial=0)):
        gx, tile = tiles.empty((n, c, *sides), g.dtype, g.device), tiles.tile(c)
        kernels.join_back[tiles.grid(rows, c, tile)](g, more, y, gx, rows, c, width, first, **tile)
        yield gx


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


def _windows(x: Tensor, stride: int) -> Tensor:
    """An empty map for one value of every window, which lie `stride` pixels apart from the first one on."""
    n, c, height, width = x.shape
    return tiles.empty((n, c, tiles.parts(height, stride), tiles.parts(width, stride)), x.dtype, x.device)


def _matrix(x: Tensor) -> Tensor:
    return x.movedim(1, -1).flatten(0, -2)


def _view(x: Tensor, y: Tensor, stride: int) -> list[int]:
    """What the kernels of windows y on x go by: rows, channels, the sides of both, the stride, and windows in a row."""
    (n, _, down, across), lines = y.shape, LINES if stride == 1 else 1
    return [n * tiles.parts(down, lines) * across, *x.shape[1:], down, across, stride, lines]
