"""Convolution and max pooling under `vmap` over tasks, with separate weights for each task.

The tasks are folded into the channels, as in `batch_norm`: the number of groups of a convolution is multiplied by the
number of tasks, and max pooling treats the channels of all tasks alike. Feature maps thus keep one layout in all
layers, in the forward, backward and double backward pass, whereas PyTorch's batching rules for `vmap` copy them in
every layer. On a GPU the maps are channels-last. Groups with few channels, such as the colors of an image, are padded
with zero channels to the size that tensor cores need, because a GPU would otherwise process the tasks one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metabridge.models import triton_support

ConvSettings = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # stride, padding and dilation
PoolSettings = tuple[Any, ...]  # kernel size, stride, padding, dilation and ceil mode
POOL_2X2 = (2, 2), (2, 2), (0, 0), (1, 1), False  # the `PoolSettings` for which `fused_tasks` has kernels


class Folding(TorchFunctionMode):
    """Context manager that replaces convolution and max pooling of image batches by the functions of this module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement of `func` if there is one, and `func` otherwise."""
        kwargs = kwargs or {}
        is_batch = len(args) > 0 and isinstance(args[0], Tensor) and args[0].ndim == 4
        if func is torch.conv2d and is_batch:
            return _conv2d(*args, **kwargs)
        # the seventh argument is return_indices, which `_max_pool2d` does not support
        if func is F.max_pool2d and is_batch and len(args) < 7 and not kwargs.get("return_indices"):
            return _max_pool2d(*args, **kwargs)
        return func(*args, **kwargs)


def is_faster(x: Tensor) -> bool:
    """Return whether folding is faster than PyTorch's batching rules for `vmap`, which is true only on a GPU."""
    return x.is_cuda


def fold(info: Any, dim: int | None, value: Tensor, axis: int) -> Tensor:
    """Fold the task axis `dim` of a tensor into `axis`; if `dim` is None, first repeat the tensor for every task.

    `info` is the argument that PyTorch passes to `vmap` methods; `info.batch_size` is the number of tasks.
    """
    if dim is None:
        value, dim = value.expand(info.batch_size, *value.shape), 0
    return value.movedim(dim, axis).flatten(axis, axis + 1)


def unfold(info: Any, value: Tensor, axis: int) -> Tensor:
    """Undo `fold`: return the tensor with a separate task axis at `axis`."""
    return value.unflatten(axis, (info.batch_size, -1))  # type: ignore[no-any-return]


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    y: Tensor = _Convolution.apply(x, weight, (_pair(stride), _pair(padding), _pair(dilation)), groups)
    return y if bias is None else y + bias.view(-1, 1, 1)


def _max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    size = _pair(kernel_size)
    pool_settings = size, _pair(stride or size), _pair(padding), _pair(dilation), ceil_mode
    return _MaxPool.apply(x, pool_settings)[0]  # type: ignore[no-any-return]


def _pair(value: Any) -> tuple[int, int]:
    """Return an option, such as the stride, as a pair for height and width."""
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


class _Convolution(torch.autograd.Function):
    """The convolution y = x ∗ w.

    `_InputGrad` and `_WeightGrad` compute its gradients. Each of the three functions computes its own gradients with
    the other two.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, settings: ConvSettings, groups: int) -> Tensor:
        return _convolve(_pad_channels(x, groups), _pad_weight(weight, groups), settings, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.settings, ctx.groups = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x_grad, needs_w_grad = ctx.needs_input_grad[:2]
        x_grad = _InputGrad.apply(g, weight, x.shape[2:], ctx.settings, ctx.groups) if needs_x_grad else None
        w_grad = _WeightGrad.apply(x, g, weight.shape[2:], ctx.settings, ctx.groups) if needs_w_grad else None
        return x_grad, w_grad, None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, settings: ConvSettings, groups: int
    ) -> tuple[Tensor, int]:
        x, weight = fold(info, dims[0], x, 1), fold(info, dims[1], weight, 0)
        return unfold(info, _Convolution.apply(x, weight, settings, groups * info.batch_size), 1), 1


class _InputGrad(torch.autograd.Function):
    """The gradient with respect to x, given the gradient g with respect to y = x ∗ w.

    `size` is the height and width of x.
    """

    @staticmethod
    def forward(g: Tensor, weight: Tensor, size: tuple[int, int], settings: ConvSettings, groups: int) -> Tensor:
        min_sizes = (  # the smallest height and width of x with which y has the height and width of g
            (out - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
            for out, kernel, stride, padding, dilation in zip(g.shape[2:], weight.shape[2:], *settings)
        )
        output_padding = tuple(x_size - min_size for x_size, min_size in zip(size, min_sizes))
        return _convolve(_channels_last(g), _channels_last(weight), settings, groups, output_padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, weight, _, ctx.settings, ctx.groups = inputs
        ctx.save_for_backward(g, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        g, weight = ctx.saved_tensors
        needs_g_grad, needs_w_grad = ctx.needs_input_grad[:2]
        g_grad = _Convolution.apply(grad_output, weight, ctx.settings, ctx.groups) if needs_g_grad else None
        w_grad = None
        if needs_w_grad:
            w_grad = _WeightGrad.apply(grad_output, g, weight.shape[2:], ctx.settings, ctx.groups)
        return g_grad, w_grad, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        g: Tensor,
        weight: Tensor,
        size: tuple[int, int],
        settings: ConvSettings,
        groups: int,
    ) -> tuple[Tensor, int]:
        g, weight = fold(info, dims[0], g, 1), fold(info, dims[1], weight, 0)
        return unfold(info, _InputGrad.apply(g, weight, size, settings, groups * info.batch_size), 1), 1


class _WeightGrad(torch.autograd.Function):
    """The gradient with respect to w, given the gradient g with respect to y = x ∗ w.

    `size` is the height and width of w.
    """

    @staticmethod
    def forward(x: Tensor, g: Tensor, size: tuple[int, int], settings: ConvSettings, groups: int) -> Tensor:
        channels = x.shape[1] // groups
        x, g = _pad_channels(x, groups), _channels_last(g)
        weight = x.new_empty(g.shape[1], x.shape[1] // groups, *size)
        weight_grad: Tensor = torch.ops.aten.convolution_backward(
            g, x, _channels_last(weight), None, *settings, False, (0, 0), groups, (False, True, False)
        )[1]
        return weight_grad[:, :channels]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, g, _, ctx.settings, ctx.groups = inputs
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        needs_x_grad, needs_g_grad = ctx.needs_input_grad[:2]
        x_grad = _InputGrad.apply(g, grad_output, x.shape[2:], ctx.settings, ctx.groups) if needs_x_grad else None
        g_grad = _Convolution.apply(x, grad_output, ctx.settings, ctx.groups) if needs_g_grad else None
        return x_grad, g_grad, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        x: Tensor,
        g: Tensor,
        size: tuple[int, int],
        settings: ConvSettings,
        groups: int,
    ) -> tuple[Tensor, int]:
        x, g = fold(info, dims[0], x, 1), fold(info, dims[1], g, 1)
        return unfold(info, _WeightGrad.apply(x, g, size, settings, groups * info.batch_size), 0), 0


def _convolve(
    x: Tensor, weight: Tensor, settings: ConvSettings, groups: int, output_padding: tuple[int, ...] | None = None
) -> Tensor:
    """Return the convolution, or the transposed convolution if `output_padding` is not None."""
    return torch.ops.aten.convolution(  # type: ignore[no-any-return]
        x, weight, None, *settings, output_padding is not None, output_padding or (0, 0), groups
    )


def _channels_last(value: Tensor) -> Tensor:
    """Return the tensor in channels-last format if it is on a GPU, and unchanged otherwise."""
    return value.contiguous(memory_format=torch.channels_last) if value.is_cuda else value


def _padding_channels(value: Tensor, channels: int, groups: int) -> int:
    """Return the number of zero channels that must be added to each group of `channels` channels.

    On a GPU, the channels of a group then fill a multiple of 16 bytes per pixel, as tensor cores need.
    """
    return -channels % (16 // value.element_size()) if value.is_cuda and groups > 1 else 0


def _pad_channels(x: Tensor, groups: int) -> Tensor:
    """Add zero channels to each group of x, and return it in the format of `_channels_last`."""
    n, channels, *size = x.shape
    channels //= groups
    padding = _padding_channels(x, channels, groups)
    if not padding:
        return _channels_last(x)
    padded = x.new_zeros(n, *size, groups, channels + padding)
    padded[..., :channels] = x.unflatten(1, (groups, channels)).permute(0, 3, 4, 1, 2)
    return padded.flatten(3).permute(0, 3, 1, 2)


def _pad_weight(weight: Tensor, groups: int) -> Tensor:
    """Add zero input channels to the weight, as `_pad_channels` does to x."""
    return _channels_last(F.pad(weight, (0, 0, 0, 0, 0, _padding_channels(weight, weight.shape[1], groups))))


class _MaxPool(torch.autograd.Function):
    """The maximum of each window and its index.

    The index refers to the feature map or, if the kernel of `fused_tasks` is used, to the window.
    """

    @staticmethod
    def forward(x: Tensor, pool_settings: PoolSettings) -> tuple[Tensor, Tensor]:
        if pool_settings == POOL_2X2 and triton_support.can_fuse_tasks(x):
            from metabridge.models.fused_tasks import max_pool_2x2

            return max_pool_2x2(x)  # with indices in uint8
        return torch.ops.aten.max_pool2d_with_indices(_channels_last(x), *pool_settings)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.pool_settings = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # indices have no gradient
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, indices = ctx.saved_tensors
        return _MaxUnpool.apply(g, indices, x, ctx.pool_settings), None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], x: Tensor, pool_settings: PoolSettings
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        y, indices = _MaxPool.apply(fold(info, dims[0], x, 1), pool_settings)
        return (unfold(info, y, 1), unfold(info, indices, 1)), (1, 1)


class _MaxUnpool(torch.autograd.Function):
    """Feature maps of the same shape as x, with `values` at the indices of the maxima and zeros elsewhere."""

    @staticmethod
    def forward(values: Tensor, indices: Tensor, x: Tensor, pool_settings: PoolSettings) -> Tensor:
        if indices.dtype == torch.uint8:  # from the fused 2×2 pooling
            from metabridge.models.fused_tasks import max_unpool_2x2

            return max_unpool_2x2(values, indices, x)
        return torch.ops.aten.max_pool2d_with_indices_backward(  # type: ignore[no-any-return]
            _channels_last(values), _channels_last(x), *pool_settings, _channels_last(indices)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, indices, x, ctx.pool_settings = inputs
        ctx.save_for_backward(indices, x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        indices, x = ctx.saved_tensors
        return _Gather.apply(grad_output, indices, x, ctx.pool_settings), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _fold_apply_unfold(_MaxUnpool.apply, info, dims, *inputs)


class _Gather(torch.autograd.Function):
    """The elements of feature maps u at the indices of the maxima: the transpose of `_MaxUnpool`."""

    @staticmethod
    def forward(u: Tensor, indices: Tensor, x: Tensor, pool_settings: PoolSettings) -> Tensor:
        if indices.dtype == torch.uint8:  # from the fused 2×2 pooling
            from metabridge.models.fused_tasks import gather_2x2

            return gather_2x2(u, indices)
        # permute to the order of the memory layout, so that flatten makes no copy
        order = (0, 2, 3, 1) if u.is_contiguous(memory_format=torch.channels_last) else (0, 1, 2, 3)
        axis = order.index(2)
        u, indices = (value.permute(order) for value in (u, indices))
        values = u.flatten(axis, axis + 1).gather(axis, indices.flatten(axis, axis + 1)).view(indices.shape)
        return values.permute([order.index(dim) for dim in range(4)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, indices, x, ctx.pool_settings = inputs
        ctx.save_for_backward(indices, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        indices, x = ctx.saved_tensors
        return _MaxUnpool.apply(g, indices, x, ctx.pool_settings), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _fold_apply_unfold(_Gather.apply, info, dims, *inputs)


def _fold_apply_unfold(
    function: Callable[..., Tensor], info: Any, dims: tuple[Any, ...], *inputs: Any
) -> tuple[Tensor, int]:
    """Fold the tasks into the channels of the maps, apply `function`, and unfold the tasks of its result.

    `inputs` are the arguments of `function`: feature maps, followed by the pooling settings.
    """
    *maps, pool_settings = inputs
    folded_maps = (fold(info, dim, value, 1) for dim, value in zip(dims, maps))
    return unfold(info, function(*folded_maps, pool_settings), 1), 1
