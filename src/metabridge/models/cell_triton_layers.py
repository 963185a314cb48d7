"""The layers of the operators of cells, fused with Triton like the layers of `fused_layers`.

Every layer except `relu_concat` returns its output and its input x. If another layer also reads x, pass it the returned
x. The backward pass of the first layer then receives the gradient with respect to the returned x as `extra_grad` and
adds it in its kernel. This saves a separate pass over memory.
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
from metabridge.models.cell_triton_kernels import WindowGrid
from metabridge.models.cells import AvgPool
from metabridge.models.fused_layers import differentiable_vjp

# Chosen according to the numbers of registers and instructions of the compiled kernels. A tile is the matrix of values
# that a Triton program processes at once; its columns are channels.
WINDOWS_PER_ROW = 3  # windows, one below the other, that a row of a tile represents if the stride is 1 (otherwise one)
WEIGHT_TILE_ELEMENTS = 512  # elements of a tile in the backward pass of the depthwise convolution
WEIGHT_PROGRAMS = 2112  # number of programs among which that pass divides the sums that give the weight gradient


def conv_1x1(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 1×1 convolution of x, and x."""
    return _with_input(_Conv1x1(), x, weight)


def relu_depthwise_conv(x: Tensor, weight: Tensor, stride: int, dilation: int) -> tuple[Tensor, Tensor]:
    """Return the depthwise 3×3 convolution of ReLU(x), padded by `dilation`, and x."""
    return _with_input(_ReluDepthwiseConv(stride, dilation), x, weight)


def max_pool(x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return the maximum of every 3×3 window, and x."""
    return _with_input(_MaxPool(stride), x)


def avg_pool(x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return the mean of the pixels in every 3×3 window, excluding the padding, and x."""
    return _with_input(_AvgPool(stride), x)


def relu_even_odd(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a map with twice as many channels as x, and x.

    If x has c channels, the first c channels of the map contain ReLU(x) at pixels (2i, 2j), and the last c channels
    ReLU(x) at pixels (2i + 1, 2j + 1), with zeros beyond the edge.
    """
    return _with_input(_ReluEvenOdd(), x)


def relu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ReLU(x), and x."""
    return _with_input(_Relu(), x)


def relu_concat(*maps: Tensor) -> Tensor:
    """Concatenate the channels of the maps and apply ReLU."""
    return _ReluConcat.apply(*map(triton_tiles.channels_last, maps))  # type: ignore[no-any-return]


class _Layer(Protocol):
    """A function of a map x and at most one weight, and its backward pass."""

    @property
    def forward(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return the output for x and the weight, and other tensors that the backward pass needs."""

    @property
    def backward(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return the gradients with respect to x and the weight.

        The arguments are the gradient g with respect to the output, `extra_grad` (see above), x, the weight and all
        results of `forward`.
        """

    @property
    def reference(self) -> Callable[..., Tensor]:
        """Return the output for x and the weight, computed with PyTorch's operations."""


def _with_input(layer: _Layer, x: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
    return _WithInput.apply(layer, triton_tiles.channels_last(x), *weight)  # type: ignore[no-any-return]


class _WithInput(torch.autograd.Function):
    """Return a layer's output and its input."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
        y, *saved = layer.forward(x, *weight)
        ctx.save_for_backward(x, *weight, y, *saved)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.num_inputs = layer, 1 + len(weight)
        return y, x

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, extra_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, saved = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        if g is None:
            return None, extra_grad, *[None] * (ctx.num_inputs - 1)
        if torch.is_grad_enabled():
            grad_x, *weight_grads = differentiable_vjp((ctx.layer.reference(*inputs),), inputs, (g,))
            return None, grad_x if grad_x is None or extra_grad is None else grad_x + extra_grad, *weight_grads
        extra_grad = None if extra_grad is None else triton_tiles.channels_last(extra_grad)
        return None, *ctx.layer.backward(triton_tiles.channels_last(g), extra_grad, *inputs, *saved)


@dataclass(frozen=True)
class _Conv1x1:
    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (F.linear(x.movedim(1, -1), weight.flatten(1)).movedim(-1, 1),)

    def backward(
        self, g: Tensor, extra_grad: Tensor | None, x: Tensor, weight: Tensor, _: Tensor
    ) -> tuple[Tensor, ...]:
        matrix, rows = weight.flatten(1), _matrix(g)
        grad_x = rows @ matrix if extra_grad is None else torch.addmm(_matrix(extra_grad), rows, matrix)
        return grad_x.view(*x.movedim(1, -1).shape).movedim(-1, 1), (rows.T @ _matrix(x)).view_as(weight)

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight)


@dataclass(frozen=True)
class _ReluDepthwiseConv:
    stride: int
    dilation: int

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, rows, grid, tile = _window_output(x, self.stride)
        weight_matrix = weight.flatten(1).T.contiguous()  # (9, channels)
        kernels.relu_depthwise_conv[triton_tiles.launch_grid(rows, x.shape[1], tile)](
            x, weight_matrix, y, rows, x.shape[1], grid, DILATION=self.dilation, **tile
        )
        return y, weight_matrix

    def backward(
        self, g: Tensor, extra_grad: Tensor | None, x: Tensor, weight: Tensor, _: Tensor, weight_matrix: Tensor
    ) -> tuple[Tensor, ...]:
        grad_x, c, (rows, grid) = torch.empty_like(x), x.shape[1], _window_rows(x, g, self.stride)
        tile, chunk_size, num_chunks = (
            triton_tiles.tile_shape(c, WEIGHT_TILE_ELEMENTS),
            *triton_tiles.row_chunks(rows, c, WEIGHT_PROGRAMS),
        )
        chunk_sums = x.new_empty(num_chunks, 3, 3, c, dtype=torch.float32)
        kernels.relu_depthwise_conv_backward[c // tile["BC"], num_chunks](
            g,
            extra_grad,
            x,
            weight_matrix,
            grad_x,
            chunk_sums,
            rows,
            c,
            grid,
            chunk_size,
            DILATION=self.dilation,
            **tile,
        )
        return grad_x, chunk_sums.sum(0).to(weight.dtype).movedim(-1, 0)[:, None]

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.relu(x), weight, None, self.stride, self.dilation, self.dilation, x.shape[1])


@dataclass(frozen=True)
class _MaxPool:
    stride: int

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, rows, grid, tile = _window_output(x, self.stride)
        indices = torch.empty_like(y, dtype=torch.uint8)
        kernels.max_pool[triton_tiles.launch_grid(rows, x.shape[1], tile)](
            x, y, indices, rows, x.shape[1], grid, **tile
        )
        return y, indices

    def backward(
        self, g: Tensor, extra_grad: Tensor | None, x: Tensor, _: Tensor, indices: Tensor
    ) -> tuple[Tensor, ...]:
        grad_x, c, (rows, grid) = torch.empty_like(x), x.shape[1], _window_rows(x, g, self.stride)
        tile = triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS)
        kernels.max_pool_backward[triton_tiles.launch_grid(rows, c, tile)](
            g, extra_grad, indices, grad_x, rows, c, grid, **tile
        )
        return (grad_x,)

    def reference(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, self.stride, 1)


@dataclass(frozen=True)
class _AvgPool:
    stride: int

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, rows, grid, tile = _window_output(x, self.stride)
        kernels.avg_pool[triton_tiles.launch_grid(rows, x.shape[1], tile)](x, y, rows, x.shape[1], grid, **tile)
        return (y,)

    def backward(self, g: Tensor, extra_grad: Tensor | None, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        grad_x, c, (rows, grid) = torch.empty_like(x), x.shape[1], _window_rows(x, g, self.stride)
        tile = triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS)
        kernels.avg_pool_backward[triton_tiles.launch_grid(rows, c, tile)](g, extra_grad, grad_x, rows, c, grid, **tile)
        return (grad_x,)

    def reference(self, x: Tensor) -> Tensor:
        return AvgPool(self.stride).forward(x)


@dataclass(frozen=True)
class _ReluEvenOdd:
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n, c, height, width = x.shape
        out_height, out_width = triton_tiles.ceil_div(height, 2), triton_tiles.ceil_div(width, 2)
        y = triton_tiles.empty_channels_last((n, 2 * c, out_height, out_width), x.dtype, x.device)
        rows, tile = triton_tiles.matrix_shape(y)[0], triton_tiles.tile_shape(c)
        grid = WindowGrid(height, width, out_height, out_width, stride=2, windows_per_row=1)
        kernels.relu_even_odd[triton_tiles.launch_grid(rows, c, tile)](x, y, rows, c, grid, **tile)
        return (y,)

    def backward(self, g: Tensor, extra_grad: Tensor | None, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        grad_x, c, rows = torch.empty_like(x), x.shape[1], triton_tiles.matrix_shape(g)[0]
        tile = triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS)
        grid = WindowGrid(x.shape[2], x.shape[3], g.shape[2], g.shape[3], stride=2, windows_per_row=1)
        kernels.relu_even_odd_backward[triton_tiles.launch_grid(rows, c, tile)](
            g, extra_grad, y, grad_x, rows, c, grid, **tile
        )
        return (grad_x,)

    def reference(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return torch.cat([x[..., ::2, ::2], F.pad(x, (0, 1, 0, 1))[..., 1::2, 1::2]], 1)


@dataclass(frozen=True)
class _Relu:
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (_relu_concat([x]),)

    def backward(self, g: Tensor, extra_grad: Tensor | None, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(_relu_concat_backward(g, y, [x.shape[1]], extra_grad))

    def reference(self, x: Tensor) -> Tensor:
        return F.relu(x)


class _ReluConcat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *maps: Tensor) -> Tensor:
        y = _relu_concat(maps)
        ctx.save_for_backward(y)
        ctx.channels = [value.shape[1] for value in maps]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (g * (y > 0)).split(ctx.channels, 1)  # type: ignore[no-any-return]
        return tuple(_relu_concat_backward(triton_tiles.channels_last(g), y, ctx.channels))


def _relu_concat(maps: Sequence[Tensor]) -> Tensor:
    channels = [value.shape[1] for value in maps]
    n, _, *size = maps[0].shape
    y = triton_tiles.empty_channels_last((n, sum(channels), *size), maps[0].dtype, maps[0].device)
    rows, y_columns = triton_tiles.matrix_shape(y)
    for value, c, first_column in zip(maps, channels, itertools.accumulate(channels, initial=0)):
        tile = triton_tiles.tile_shape(c)
        kernels.relu_concat[triton_tiles.launch_grid(rows, c, tile)](value, y, rows, c, y_columns, first_column, **tile)
    return y


def _relu_concat_backward(
    g: Tensor, y: Tensor, channels: Sequence[int], extra_grad: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield the gradients with respect to the concatenated maps."""
    n, _, *size = y.shape
    rows, y_columns = triton_tiles.matrix_shape(y)
    for c, first_column in zip(channels, itertools.accumulate(channels, initial=0)):
        grad_x, tile = triton_tiles.empty_channels_last((n, c, *size), g.dtype, g.device), triton_tiles.tile_shape(c)
        kernels.relu_concat_backward[triton_tiles.launch_grid(rows, c, tile)](
            g, extra_grad, y, grad_x, rows, c, y_columns, first_column, **tile
        )
        yield grad_x


def _matrix(x: Tensor) -> Tensor:
    """Reshape x to (n · height · width, channels)."""
    return x.movedim(1, -1).flatten(0, -2)


def _window_output(x: Tensor, stride: int) -> tuple[Tensor, int, WindowGrid, dict[str, int]]:
    """Return an uninitialized output with one pixel per window, the results of `_window_rows`, and the tile shape."""
    n, c, height, width = x.shape
    shape = n, c, triton_tiles.ceil_div(height, stride), triton_tiles.ceil_div(width, stride)
    y = triton_tiles.empty_channels_last(shape, x.dtype, x.device)
    return y, *_window_rows(x, y, stride), triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS)


def _window_rows(x: Tensor, y: Tensor, stride: int) -> tuple[int, WindowGrid]:
    """Return the number of rows that a kernel processes, and the grid of the windows in x that correspond to y."""
    (n, _, out_height, out_width), windows_per_row = y.shape, WINDOWS_PER_ROW if stride == 1 else 1
    rows = n * triton_tiles.ceil_div(out_height, windows_per_row) * out_width
    return rows, WindowGrid(x.shape[2], x.shape[3], out_height, out_width, stride, windows_per_row)
