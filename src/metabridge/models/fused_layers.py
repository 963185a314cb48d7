"""The layers between the convolutions of ResNet-12 and of cells, fused with Triton to save passes over memory.

On a GPU in bfloat16, reading and writing feature maps between the convolutions takes half of the time of ResNet-12, and
nearly all of the time of a network of cells. Here LeakyReLU(BatchNorm(x)) reads x only twice, once to compute the
statistics and once to apply them; the backward pass also reads it twice. The end of a residual block writes only the
pooled map, and an operator of a cell adds its output directly to the sum of its node. Feature maps are channels-last.
They are stored in their dtype and processed in float32.

To compute the mean and variance of a batch, those of parts of the batch (chunks) are merged with the formula of Chan et
al. (1979), which is accurate even if |mean| is much larger than the standard deviation. Second derivatives are computed
with PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.models import fused_triton_kernels as kernels
from metabridge.models import triton_tiles

PATCH_SIZE = 32  # 3×3 patches of up to three channels (27 elements) are padded to this power of two


def norm_leaky_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """Return LeakyReLU(BatchNorm(x)), where `slope` is the negative slope."""
    return _NormAct.apply(triton_tiles.channels_last(x), weight, bias, None, None, eps, slope)  # type: ignore[no-any-return]


def add_norm(
    addend: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor, eps: float, factor: Tensor | None = None
) -> Tensor:
    """Return addend + factor · BatchNorm(x). None stands for addend = 0 or factor = 1.

    `factor` has one element per image, and no gradient is computed for it.
    """
    addend = None if addend is None else triton_tiles.channels_last(addend)
    # LeakyReLU with a negative slope of 1 is the identity
    return _NormAct.apply(triton_tiles.channels_last(x), weight, bias, addend, factor, eps, 1.0)  # type: ignore[no-any-return]


def residual_pool(
    main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, slope: float
) -> Tensor:
    """Return LeakyReLU(MaxPool2×2(BatchNorm(main) + BatchNorm(shortcut))).

    w1 and b1 are the weight and bias of the first batch norm, w2 and b2 those of the second.
    """
    return _ResidualPool.apply(  # type: ignore[no-any-return]
        triton_tiles.channels_last(main), triton_tiles.channels_last(shortcut), w1, b1, w2, b2, eps, slope
    )


def first_convolutions(x: Tensor, main_weight: Tensor, shortcut_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of the first 3×3 convolution and of the 1×1 shortcut convolution of a residual block.

    If x is a batch of images with at most three channels that needs no gradient, and there are 32, 64 or 128 output
    channels, one kernel computes both convolutions, because so few input channels do not fill cuDNN's tiles. Otherwise,
    cuDNN computes the 3×3 convolution, and a matrix product the 1×1 convolution.
    """
    if 9 * x.shape[1] <= PATCH_SIZE and main_weight.shape[0] in (32, 64, 128) and not x.requires_grad:
        return _FirstConvolutions.apply(triton_tiles.channels_last(x), main_weight, shortcut_weight)  # type: ignore[no-any-return]
    return F.conv2d(x, main_weight, padding=1), F.linear(x.movedim(1, -1), shortcut_weight.flatten(1)).movedim(-1, 1)


def drop_block_mask(noise: Tensor, probability: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return a mask: 0 in each `size` × `size` square whose upper left corner has `noise` < `probability`, else 1."""
    n, c, noise_height, noise_width = noise.shape
    height, width = noise_height + size - 1, noise_width + size - 1
    keep_mask = triton_tiles.empty_channels_last((n, c, height, width), dtype, noise.device)
    rows, tile = n * height * width, triton_tiles.tile_shape(c)
    kernels.drop_block_mask[triton_tiles.launch_grid(rows, c, tile)](
        triton_tiles.channels_last(noise), probability, keep_mask, rows, height, width, c, SIZE=size, **tile
    )
    return keep_mask


def differentiable_vjp(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return a differentiable vector-Jacobian product for each input, or None for inputs that require no gradient."""
    inputs_with_grad = [value for value in inputs if value.requires_grad]
    grads = iter(torch.autograd.grad(outputs, inputs_with_grad, cotangents, create_graph=True))
    return tuple(next(grads) if value.requires_grad else None for value in inputs)


class _NormAct(torch.autograd.Function):
    """Return addend + factor · LeakyReLU(BatchNorm(x))."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        addend: Tensor | None,
        factor: Tensor | None,
        eps: float,
        slope: float,
    ) -> Tensor:
        norm_params, y = triton_tiles.compute_norm_params(x, weight, bias, eps), torch.empty_like(x)
        rows, c = triton_tiles.matrix_shape(x)
        tile = triton_tiles.tile_shape(c)
        kernels.norm_act[triton_tiles.launch_grid(rows, c, tile)](
            x, norm_params, factor, addend, y, rows, rows // len(x), c, slope, **tile
        )
        ctx.save_for_backward(x, weight, bias, norm_params, factor)
        ctx.settings = eps, slope
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, norm_params, factor = ctx.saved_tensors
        addend_grad = g if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():
            inputs = x, weight, bias
            output_grad = g if factor is None else g * factor.view(-1, 1, 1, 1).to(g.dtype)
            grads = differentiable_vjp((_reference_norm_act(*inputs, *ctx.settings),), inputs, (output_grad,))
            return *grads, addend_grad, None, None, None
        pixels = x.numel() // x.shape[1] // len(x)
        grad_x, grad_weight, grad_bias = norm_act_backward(
            g, x, norm_params, factor, pixels, ctx.settings[1], weight.dtype
        )
        return grad_x, grad_weight, grad_bias, addend_grad, None, None, None


def norm_act_backward(
    g: Tensor, x: Tensor, norm_params: Tensor, factor: Tensor | None, pixels: int, slope: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias of factor · LeakyReLU(BatchNorm(x)).

    Args:
        g: Gradient with respect to the output.
        x: Input of the batch norm.
        norm_params: Mean, rstd, weight and bias of every channel, see `triton_tiles.compute_norm_params`.
        factor: One factor per image, or None for 1.
        pixels: Number of pixels per image.
        slope: Negative slope of LeakyReLU.
        dtype: Dtype of the gradients of weight and bias.
    """
    g = triton_tiles.channels_last(g)
    rows, c = triton_tiles.matrix_shape(x)
    tile, chunk_size, num_chunks = triton_tiles.tile_shape(c), *triton_tiles.row_chunks(rows, c)
    chunk_sums = x.new_empty(2, num_chunks, c, dtype=torch.float32)
    kernels.norm_act_sums[c // tile["BC"], num_chunks](
        g, x, norm_params, factor, chunk_sums, rows, pixels, chunk_size, c, slope, **tile, STAGES=triton_tiles.STAGES
    )
    (sums, (grad_bias, grad_weight)), grad_x = triton_tiles.sum_chunks(chunk_sums, dtype), torch.empty_like(x)
    kernels.norm_act_backward[triton_tiles.launch_grid(rows, c, tile)](
        g, x, norm_params, factor, sums, grad_x, rows, pixels, c, slope, 1 / rows, **tile
    )
    return grad_x, grad_weight, grad_bias


class _ResidualPool(torch.autograd.Function):
    """Implement `residual_pool`."""

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
        norm_params = (
            triton_tiles.compute_norm_params(main, w1, b1, eps),
            triton_tiles.compute_norm_params(shortcut, w2, b2, eps),
        )
        n, c, height, width = main.shape
        shape = n, c, height // 2, width // 2
        # the output and, for the backward pass, the values of main and shortcut at the maximum of each window
        outputs = [triton_tiles.empty_channels_last(shape, main.dtype, main.device) for _ in range(3)]
        # the position of the maximum in each window (0 to 3), plus 4 if the maximum is positive
        max_codes = torch.empty_like(outputs[0], dtype=torch.uint8)
        num_windows, tile = (
            n * (height // 2) * (width // 2),
            triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS),
        )
        kernels.residual_pool[triton_tiles.launch_grid(num_windows, c, tile)](
            main, shortcut, *norm_params, *outputs, max_codes, num_windows, height, width, c, slope, **tile
        )
        ctx.save_for_backward(main, shortcut, w1, b1, w2, b2, *norm_params, *outputs[1:], max_codes)
        ctx.settings = eps, slope
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, main_norm_params, shortcut_norm_params, main_at_max, shortcut_at_max, max_codes = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable_vjp((_reference_residual_pool(*inputs, *ctx.settings),), inputs, (g,)), None, None
        main, shortcut, w1 = inputs[:3]
        _, slope = ctx.settings
        g = triton_tiles.channels_last(g)
        n, c, height, width = main.shape
        num_windows = triton_tiles.matrix_shape(g)[0]
        tile, chunk_size, num_chunks = triton_tiles.tile_shape(c), *triton_tiles.row_chunks(num_windows, c)
        chunk_sums = main.new_empty(3, num_chunks, c, dtype=torch.float32)
        at_max = main_at_max, shortcut_at_max, max_codes
        kernels.residual_pool_sums[c // tile["BC"], num_chunks](
            g,
            *at_max,
            main_norm_params,
            shortcut_norm_params,
            chunk_sums,
            num_windows,
            chunk_size,
            c,
            slope,
            **tile,
            STAGES=triton_tiles.STAGES,
        )
        # b1 and b2 have the same gradient
        sums, (grad_bias, grad_w1, grad_w2) = triton_tiles.sum_chunks(chunk_sums, w1.dtype)
        grad_main, grad_shortcut = torch.empty_like(main), torch.empty_like(shortcut)
        # from here on, including the incomplete windows at the edges of maps with odd height or width
        num_windows = n * ((height + 1) // 2) * ((width + 1) // 2)
        tile = triton_tiles.tile_shape(c, triton_tiles.WINDOW_TILE_ELEMENTS)
        tensors = g, max_codes, main, shortcut, main_norm_params, shortcut_norm_params, sums, grad_main, grad_shortcut
        kernels.residual_pool_backward[triton_tiles.launch_grid(num_windows, c, tile)](
            *tensors, num_windows, height, width, c, slope, 1 / (n * height * width), **tile
        )
        return grad_main, grad_shortcut, grad_w1, grad_bias, grad_w2, grad_bias, None, None


class _FirstConvolutions(torch.autograd.Function):
    """Implement `first_convolutions` for images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, main_weight: Tensor, shortcut_weight: Tensor) -> tuple[Tensor, Tensor]:
        n, c, height, width = x.shape
        out_channels, rows = main_weight.shape[0], n * height * width
        shape = n, out_channels, height, width
        outputs = [triton_tiles.empty_channels_last(shape, x.dtype, x.device) for _ in range(2)]
        tensors = x, triton_tiles.channels_last(main_weight), shortcut_weight, *outputs
        kernels.first_convolutions[(triton_tiles.ceil_div(rows, 256),)](
            *tensors, rows, height, width, c, OUT_CHANNELS=out_channels, PATCH_SIZE=PATCH_SIZE, BR=256
        )
        ctx.save_for_backward(x, main_weight, shortcut_weight)
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, grad_y1: Tensor, grad_y2: Tensor) -> tuple[Tensor | None, ...]:
        x, main_weight, shortcut_weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            outputs = F.conv2d(x, main_weight, padding=1), F.conv2d(x, shortcut_weight)
            return None, *differentiable_vjp(outputs, (main_weight, shortcut_weight), (grad_y1, grad_y2))
        _, c, height, width = x.shape
        out_channels, rows = main_weight.shape[0], triton_tiles.matrix_shape(x)[0]
        chunk_size = triton_tiles.ceil_div(triton_tiles.ceil_div(rows, triton_tiles.SUM_PROGRAMS), 64) * 64
        num_chunks = triton_tiles.ceil_div(rows, chunk_size)
        chunk_sums = x.new_empty(num_chunks, 2, out_channels, PATCH_SIZE, dtype=torch.float32)
        tensors = x, triton_tiles.channels_last(grad_y1), triton_tiles.channels_last(grad_y2), chunk_sums
        kernels.first_convolution_weight_grads[(num_chunks,)](
            *tensors,
            rows,
            chunk_size,
            height,
            width,
            c,
            OUT_CHANNELS=out_channels,
            PATCH_SIZE=PATCH_SIZE,
            BR=64,
            num_stages=2,
        )
        weight_grads = chunk_sums.sum(0).to(main_weight.dtype)
        main_weight_grad = weight_grads[0, :, : 9 * c].reshape(out_channels, 3, 3, c).movedim(-1, 1)
        # the 1×1 convolution reads only the center of a patch
        return None, main_weight_grad, weight_grads[1, :, 4 * c : 5 * c].reshape(shortcut_weight.shape)


def _reference_norm_act(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    return F.leaky_relu(_reference_norm(x, weight, bias, eps), slope)


def _reference_residual_pool(
    main: Tensor, shortcut: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float, slope: float
) -> Tensor:
    return F.leaky_relu(
        F.max_pool2d(_reference_norm(main, w1, b1, eps) + _reference_norm(shortcut, w2, b2, eps), 2), slope
    )


def _reference_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.batch_norm(x, None, None, weight.float(), bias.float(), training=True, eps=eps)
