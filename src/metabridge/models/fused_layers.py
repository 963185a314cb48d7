"""The layers between the convolutions of ResNet-12 and of cells, fused with Triton to save passes over memory.

On a GPU in bfloat16, ResNet-12 spends half of its time, and a network of cells nearly all of it, between the
convolutions, where feature maps are read and written. Here LeakyReLU(BatchNorm(x)) takes one pass to compute the
statistics and one to apply them, in the forward and in the backward pass. The end of a residual block writes only the
pooled map, and an operator of a cell adds its output directly to the sum of its node. Feature maps are channels-last.
They are stored in their dtype, and computed in float32.

The statistics of parts of a batch are merged by the rule of Chan et al. (1979), which is accurate even if |mean| is
much larger than the standard deviation. Second derivatives are computed by PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.models import fused_triton_kernels as kernels
from metabridge.models import triton_tiles

TAPS = 32  # a stem reads 9 input values per channel and output pixel, padded to this number, a power of two


def norm_leaky_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """Return LeakyReLU(BatchNorm(x)); `slope` is the negative slope."""
    return _NormAct.apply(triton_tiles.channels_last(x), weight, bias, None, None, eps, slope)  # type: ignore[no-any-return]


def add_norm(
    total: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor, eps: float, factor: Tensor | None = None
) -> Tensor:
    """Return total + factor · BatchNorm(x), where None means total = 0 and factor = 1.

    `factor` has one value per input and gets no gradient.
    """
    total = None if total is None else triton_tiles.channels_last(total)
    return _NormAct.apply(triton_tiles.channels_last(x), weight, bias, total, factor, eps, 1.0)  # type: ignore[no-any-return]


def residual_pool(
    main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, slope: float
) -> Tensor:
    """Return LeakyReLU(MaxPool2×2(BatchNorm(main) + BatchNorm(shortcut))).

    w1 and b1 are the weight and the bias of the first batch norm, w2 and b2 of the second.
    """
    return _ResidualPool.apply(  # type: ignore[no-any-return]
        triton_tiles.channels_last(main), triton_tiles.channels_last(shortcut), w1, b1, w2, b2, eps, slope
    )


def stem_convolutions(x: Tensor, main_weight: Tensor, shortcut_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of the 3×3 and the 1×1 convolution at the start of a residual block.

    For images of at most three channels that need no gradient, one kernel computes both convolutions if there are 32,
    64 or 128 output channels, because images have too few channels to fill the tiles of cuDNN. Otherwise, the 1×1
    convolution is computed as a matrix product.
    """
    if 9 * x.shape[1] <= TAPS and main_weight.shape[0] in (32, 64, 128) and not x.requires_grad:
        return _Stem.apply(triton_tiles.channels_last(x), main_weight, shortcut_weight)  # type: ignore[no-any-return]
    return F.conv2d(x, main_weight, padding=1), F.linear(x.movedim(1, -1), shortcut_weight.flatten(1)).movedim(-1, 1)


def drop_block_mask(noise: Tensor, probability: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return 0 in each `size` × `size` square whose upper left corner has `noise` < `probability`, and 1 elsewhere."""
    n, c, down, across = noise.shape
    height, width = down + size - 1, across + size - 1
    result = triton_tiles.empty_map((n, c, height, width), dtype, noise.device)
    rows, tile = n * height * width, triton_tiles.tile_shape(c)
    kernels.drop_block_mask[triton_tiles.launch_grid(rows, c, tile)](
        triton_tiles.channels_last(noise), probability, result, rows, height, width, c, SIZE=size, **tile
    )
    return result


def differentiable_vjp(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the differentiable vector-Jacobian product for each input, or None if it requires no gradient."""
    differentiated = [value for value in inputs if value.requires_grad]
    grads = iter(torch.autograd.grad(outputs, differentiated, cotangents, create_graph=True))
    return tuple(next(grads) if value.requires_grad else None for value in inputs)


class _NormAct(torch.autograd.Function):
    """Return total + factor · LeakyReLU(BatchNorm(x))."""

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
        norm, y = triton_tiles.norm_rows(x, weight, bias, eps), torch.empty_like(x)
        rows, c = triton_tiles.matrix_shape(x)
        tile = triton_tiles.tile_shape(c)
        kernels.norm_act[triton_tiles.launch_grid(rows, c, tile)](
            x, norm, factor, total, y, rows, rows // len(x), c, slope, **tile
        )
        ctx.save_for_backward(x, weight, bias, norm, factor)
        ctx.settings = eps, slope
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, norm, factor = ctx.saved_tensors
        total_grad = g if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():
            inputs = x, weight, bias
            output_grad = g if factor is None else g * factor.view(-1, 1, 1, 1).to(g.dtype)
            grads = differentiable_vjp((_plain_norm_act(*inputs, *ctx.settings),), inputs, (output_grad,))
            return *grads, total_grad, None, None, None
        pixels = x.numel() // x.shape[1] // len(x)
        gx, gw, gb = norm_act_backward(g, x, norm, factor, pixels, ctx.settings[1], weight.dtype)
        return gx, gw, gb, total_grad, None, None, None


def norm_act_backward(
    g: Tensor, x: Tensor, norm: Tensor, factor: Tensor | None, pixels: int, slope: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias for the gradient g of factor · LeakyReLU(BatchNorm(x)).

    Args:
        g: Gradient with respect to the output.
        x: Input of the batch norm.
        norm: Result of `triton_tiles.norm_rows` for x.
        factor: One factor per input, or None for 1.
        pixels: Number of pixels of an input, which have the same factor.
        slope: Negative slope of LeakyReLU.
        dtype: Dtype of the gradients of weight and bias.
    """
    g = triton_tiles.channels_last(g)
    rows, c = triton_tiles.matrix_shape(x)
    tile, chunk, parts = triton_tiles.tile_shape(c), *triton_tiles.row_chunks(rows, c)
    partial = x.new_empty(2, parts, c, dtype=torch.float32)
    kernels.norm_act_sums[c // tile["BC"], parts](
        g, x, norm, factor, partial, rows, pixels, chunk, c, slope, **tile, STAGES=triton_tiles.STAGES
    )
    (sums, (gb, gw)), gx = triton_tiles.sum_parts(partial, dtype), torch.empty_like(x)
    kernels.norm_act_backward[triton_tiles.launch_grid(rows, c, tile)](
        g, x, norm, factor, sums, gx, rows, pixels, c, slope, 1 / rows, **tile
    )
    return gx, gw, gb


class _ResidualPool(torch.autograd.Function):
    """The function `residual_pool`."""

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
        norms = triton_tiles.norm_rows(main, w1, b1, eps), triton_tiles.norm_rows(shortcut, w2, b2, eps)
        n, c, height, width = main.shape
        shape = n, c, height // 2, width // 2
        # the output, and for the backward pass the values of both inputs at the maxima
        outputs = [triton_tiles.empty_map(shape, main.dtype, main.device) for _ in range(3)]
        choice = torch.empty_like(outputs[0], dtype=torch.uint8)
        windows, tile = n * (height // 2) * (width // 2), triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE)
        kernels.residual_pool[triton_tiles.launch_grid(windows, c, tile)](
            main, shortcut, *norms, *outputs, choice, windows, height, width, c, slope, **tile
        )
        ctx.save_for_backward(main, shortcut, w1, b1, w2, b2, *norms, *outputs[1:], choice)
        ctx.settings = eps, slope
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, main_norm, shortcut_norm, main_chosen, shortcut_chosen, choice = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable_vjp((_plain_residual_pool(*inputs, *ctx.settings),), inputs, (g,)), None, None
        main, shortcut, w1 = inputs[:3]
        _, slope = ctx.settings
        g = triton_tiles.channels_last(g)
        n, c, height, width = main.shape
        windows = triton_tiles.matrix_shape(g)[0]
        tile, chunk, parts = triton_tiles.tile_shape(c), *triton_tiles.row_chunks(windows, c)
        partial = main.new_empty(3, parts, c, dtype=torch.float32)
        chosen = main_chosen, shortcut_chosen, choice
        kernels.residual_pool_sums[c // tile["BC"], parts](
            g, *chosen, main_norm, shortcut_norm, partial, windows, chunk, c, slope, **tile, STAGES=triton_tiles.STAGES
        )
        sums, (gb, gw1, gw2) = triton_tiles.sum_parts(partial, w1.dtype)
        gmain, gshortcut = torch.empty_like(main), torch.empty_like(shortcut)
        windows = n * ((height + 1) // 2) * ((width + 1) // 2)
        tile = triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE)
        tensors = g, choice, main, shortcut, main_norm, shortcut_norm, sums, gmain, gshortcut
        kernels.residual_pool_backward[triton_tiles.launch_grid(windows, c, tile)](
            *tensors, windows, height, width, c, slope, 1 / (n * height * width), **tile
        )
        return gmain, gshortcut, gw1, gb, gw2, gb, None, None


class _Stem(torch.autograd.Function):
    """The function `stem_convolutions` for images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, main_weight: Tensor, shortcut_weight: Tensor) -> tuple[Tensor, Tensor]:
        n, c, height, width = x.shape
        out_channels, rows = main_weight.shape[0], n * height * width
        results = [triton_tiles.empty_map((n, out_channels, height, width), x.dtype, x.device) for _ in range(2)]
        tensors = x, triton_tiles.channels_last(main_weight), shortcut_weight, *results
        kernels.stem_convolutions[(triton_tiles.ceil_div(rows, 256),)](
            *tensors, rows, height, width, c, O=out_channels, TAPS=TAPS, BR=256
        )
        ctx.save_for_backward(x, main_weight, shortcut_weight)
        return results[0], results[1]

    @staticmethod
    def backward(ctx: Any, gmain: Tensor, gshortcut: Tensor) -> tuple[Tensor | None, ...]:
        x, main_weight, shortcut_weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            outputs = F.conv2d(x, main_weight, padding=1), F.conv2d(x, shortcut_weight)
            return None, *differentiable_vjp(outputs, (main_weight, shortcut_weight), (gmain, gshortcut))
        _, c, height, width = x.shape
        out_channels, rows = main_weight.shape[0], triton_tiles.matrix_shape(x)[0]
        chunk = triton_tiles.ceil_div(triton_tiles.ceil_div(rows, triton_tiles.PROGRAMS), 64) * 64
        parts = triton_tiles.ceil_div(rows, chunk)
        partial = x.new_empty(parts, 2, out_channels, TAPS, dtype=torch.float32)
        tensors = x, triton_tiles.channels_last(gmain), triton_tiles.channels_last(gshortcut), partial
        kernels.stem_weight_grads[(parts,)](
            *tensors, rows, chunk, height, width, c, O=out_channels, TAPS=TAPS, BR=64, num_stages=2
        )
        total = partial.sum(0).to(main_weight.dtype)
        main_weight_grad = total[0, :, : 9 * c].reshape(out_channels, 3, 3, c).movedim(-1, 1)
        return None, main_weight_grad, total[1, :, 4 * c : 5 * c].reshape(shortcut_weight.shape)


def _plain_norm_act(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    return F.leaky_relu(_plain_norm(x, weight, bias, eps), slope)


def _plain_residual_pool(
    main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, slope: float
) -> Tensor:
    return F.leaky_relu(F.max_pool2d(_plain_norm(main, w1, b1, eps) + _plain_norm(shortcut, w2, b2, eps), 2), slope)


def _plain_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.batch_norm(x, None, None, weight.float(), bias.float(), training=True, eps=eps)
