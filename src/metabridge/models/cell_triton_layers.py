"""The layers of cells in Triton, each as few passes over memory; see `fused`.

Most return what they make and the map they were given, handed on to the next layer that reads it: gradients of all its
readers then add up inside the kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.models import cell_triton_kernels as kernels
from metabridge.models import triton_tiles
from metabridge.models.cells import MeanPool
from metabridge.models.fused_layers import differentiable

# These are chosen by how many registers and instructions the compiler then needs.
LINES = 3  # windows one below the other that a program looks through at the same pixels
FEW = 512  # elements of a map that a program holds beside nine sums
MANY = 2112  # programs that share nine sums


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
    return _Joined.apply(*map(triton_tiles.channels_last, maps))  # type: ignore[no-any-return]


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
    return _HandedOn.apply(layer, triton_tiles.channels_last(x), *weight)  # type: ignore[no-any-return]


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
            slope, *rest = differentiable((ctx.layer.plain(*inputs),), inputs, (g,))
            return None, slope if slope is None or more is None else slope + more, *rest
        more = None if more is None else triton_tiles.channels_last(more)
        return None, *ctx.layer.back(triton_tiles.channels_last(g), more, *inputs, *kept)


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
        (rows, c, *view), tile = _view(x, y, self.stride), triton_tiles.tile(x.shape[1], triton_tiles.WINDOWS)
        kernels.depthwise[triton_tiles.grid(rows, c, tile)](
            x, by_place, y, rows, c, *view, DILATION=self.dilation, **tile
        )
        return y, by_place

    def back(
        self, g: Tensor, more: Tensor | None, x: Tensor, weight: Tensor, _: Tensor, by_place: Tensor
    ) -> tuple[Tensor, ...]:
        gx, (rows, c, *view) = torch.empty_like(x), _view(x, g, self.stride)
        tile, chunk, parts = triton_tiles.tile(c, FEW), *triton_tiles.chunks(rows, c, MANY)
        partial = x.new_empty(parts, 3, 3, c, dtype=torch.float32)
        kernels.depthwise_back[c // tile["BC"], parts](
            g, more, x, by_place, gx, partial, rows, c, *view, chunk, DILATION=self.dilation, **tile
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
        (rows, c, *view), tile = _view(x, y, self.stride), triton_tiles.tile(x.shape[1], triton_tiles.WINDOWS)
        kernels.largest[triton_tiles.grid(rows, c, tile)](x, y, choice, rows, c, *view, **tile)
        return y, choice

    def back(self, g: Tensor, more: Tensor | None, x: Tensor, _: Tensor, choice: Tensor) -> tuple[Tensor, ...]:
        gx, tile = torch.empty_like(x), triton_tiles.tile(x.shape[1], triton_tiles.WINDOWS)
        rows, c, *view = _view(x, g, self.stride)
        kernels.largest_back[triton_tiles.grid(rows, c, tile)](g, more, choice, gx, rows, c, *view, **tile)
        return (gx,)

    def plain(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, self.stride, 1)


@dataclass(frozen=True)
class _MeanPooled:
    stride: int

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = _windows(x, self.stride)
        (rows, c, *view), tile = _view(x, y, self.stride), triton_tiles.tile(x.shape[1], triton_tiles.WINDOWS)
        kernels.mean[triton_tiles.grid(rows, c, tile)](x, y, rows, c, *view, **tile)
        return (y,)

    def back(self, g: Tensor, more: Tensor | None, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        gx, tile = torch.empty_like(x), triton_tiles.tile(x.shape[1], triton_tiles.WINDOWS)
        rows, c, *view = _view(x, g, self.stride)
        kernels.mean_back[triton_tiles.grid(rows, c, tile)](g, more, gx, rows, c, *view, **tile)
        return (gx,)

    def plain(self, x: Tensor) -> Tensor:
        return MeanPool(self.stride).forward(x)


@dataclass(frozen=True)
class _Halved:
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n, c, height, width = x.shape
        y = triton_tiles.empty(
            (n, 2 * c, triton_tiles.parts(height, 2), triton_tiles.parts(width, 2)), x.dtype, x.device
        )
        rows, tile = triton_tiles.matrix_shape(y)[0], triton_tiles.tile(c)
        kernels.halve[triton_tiles.grid(rows, c, tile)](x, y, rows, *x.shape[1:], *y.shape[2:], **tile)
        return (y,)

    def back(self, g: Tensor, more: Tensor | None, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        gx, tile, rows = (
            torch.empty_like(x),
            triton_tiles.tile(x.shape[1], triton_tiles.WINDOWS),
            triton_tiles.matrix_shape(g)[0],
        )
        kernels.halve_back[triton_tiles.grid(rows, x.shape[1], tile)](
            g, more, y, gx, rows, *x.shape[1:], *g.shape[2:], **tile
        )
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
        return tuple(_part(triton_tiles.channels_last(g), y, ctx.channels))


def _join(maps: Sequence[Tensor]) -> Tensor:
    """Rectify maps into one."""
    channels = [value.shape[1] for value in maps]
    n, _, *sides = maps[0].shape
    y = triton_tiles.empty((n, sum(channels), *sides), maps[0].dtype, maps[0].device)
    rows, width = triton_tiles.matrix_shape(y)
    for value, c, first in zip(maps, channels, itertools.accumulate(channels, initial=0)):
        tile = triton_tiles.tile(c)
        kernels.join[triton_tiles.grid(rows, c, tile)](value, y, rows, c, width, first, **tile)
    return y


def _part(g: Tensor, y: Tensor, channels: Sequence[int], more: Tensor | None = None) -> Iterator[Tensor]:
    """The gradients of the maps that were joined to y."""
    n, _, *sides = y.shape
    rows, width = triton_tiles.matrix_shape(y)
    for c, first in zip(channels, itertools.accumulate(channels, initial=0)):
        gx, tile = triton_tiles.empty((n, c, *sides), g.dtype, g.device), triton_tiles.tile(c)
        kernels.join_back[triton_tiles.grid(rows, c, tile)](g, more, y, gx, rows, c, width, first, **tile)
        yield gx


def _windows(x: Tensor, stride: int) -> Tensor:
    """An empty map for one value of every window, which lie `stride` pixels apart from the first one on."""
    n, c, height, width = x.shape
    return triton_tiles.empty(
        (n, c, triton_tiles.parts(height, stride), triton_tiles.parts(width, stride)), x.dtype, x.device
    )


def _matrix(x: Tensor) -> Tensor:
    return x.movedim(1, -1).flatten(0, -2)


def _view(x: Tensor, y: Tensor, stride: int) -> list[int]:
    """What the kernels of windows y on x go by: rows, channels, the sides of both, the stride, and windows in a row."""
    (n, _, down, across), lines = y.shape, LINES if stride == 1 else 1
    return [n * triton_tiles.parts(down, lines) * across, *x.shape[1:], down, across, stride, lines]
