"""Convolutions and max poolings of many tasks at once, each with weights of its own.

Under `vmap` the tasks become further channels, as they do in `BatchNorm`: a convolution has a group for each task, and
a pooling does not care. So maps keep one layout from layer to layer, also on the way back and on the way back through
that, where PyTorch's own rules copy them at each layer. On a GPU channels are last, and groups of few channels,
such as the colours of an image, are padded with zeros to as many as tensor cores take: a GPU would otherwise
go through the tasks one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metabridge.models import triton_support

Form = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # stride, padding and dilation
WHOLE = (2, 2), (2, 2), (0, 0), (1, 1), False  # windows that lie side by side


class Folding(TorchFunctionMode):
    """While it is on, convolutions and max poolings of a batch of images are those of this module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the two functions."""
        kwargs = kwargs or {}
        batch = len(args) > 0 and isinstance(args[0], Tensor) and args[0].ndim == 4
        if func is torch.conv2d and batch:
            return _convolved(*args, **kwargs)
        if func is F.max_pool2d and batch and len(args) < 7 and not kwargs.get("return_indices"):
            return _pooled(*args, **kwargs)
        return func(*args, **kwargs)


def serves(x: Tensor) -> bool:
    """Whether it pays: a CPU is quicker with PyTorch's own rules."""
    return x.is_cuda


def fold(info: Any, dim: int | None, value: Tensor, axis: int) -> Tensor:
    """Fold the axis of tasks, at `dim` or nowhere, into another."""
    if dim is None:
        value, dim = value.expand(info.batch_size, *value.shape), 0
    return value.movedim(dim, axis).flatten(axis, axis + 1)


def unfold(info: Any, value: Tensor, axis: int) -> Tensor:
    """Give tasks an axis of their own again."""
    return value.unflatten(axis, (info.batch_size, -1))  # type: ignore[no-any-return]


def _convolved(
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


def _pooled(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    size = _pair(kernel_size)
    window = size, _pair(stride or size), _pair(padding), _pair(dilation), ceil_mode
    return _Pooling.apply(x, window)[0]  # type: ignore[no-any-return]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


class _Convolution(torch.autograd.Function):
    """y = x ∗ w. It, what it pulls back to x, and what it pulls back to w are each other's derivatives."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, form: Form, groups: int) -> Tensor:
        return _convolve(_aligned(x, groups), _aligned_weight(weight, groups), form, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, *ctx.form = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        first, second = ctx.needs_input_grad[:2]
        towards_x = _TowardsInput.apply(slope, weight, x.shape[2:], *ctx.form) if first else None
        towards_w = _TowardsWeight.apply(x, slope, weight.shape[2:], *ctx.form) if second else None
        return towards_x, towards_w, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, int]:
        x, weight = fold(info, dims[0], x, 1), fold(info, dims[1], weight, 0)
        return unfold(info, _Convolution.apply(x, weight, *rest[:-1], rest[-1] * info.batch_size), 1), 1


class _TowardsInput(torch.autograd.Function):
    """What g at y = x ∗ w pulls back to x, of some size."""

    @staticmethod
    def forward(g: Tensor, weight: Tensor, size: tuple[int, int], form: Form, groups: int) -> Tensor:
        smallest = (
            (out - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
            for out, kernel, stride, padding, dilation in zip(g.shape[2:], weight.shape[2:], *form)
        )
        rest = tuple(wanted - least for wanted, least in zip(size, smallest))
        return _convolve(_last(g), _last(weight), form, groups, rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, weight, _, *ctx.form = inputs
        ctx.save_for_backward(g, weight)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        g, weight = ctx.saved_tensors
        first, second = ctx.needs_input_grad[:2]
        towards_g = _Convolution.apply(u, weight, *ctx.form) if first else None
        towards_w = _TowardsWeight.apply(u, g, weight.shape[2:], *ctx.form) if second else None
        return towards_g, towards_w, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], g: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, int]:
        g, weight = fold(info, dims[0], g, 1), fold(info, dims[1], weight, 0)
        return unfold(info, _TowardsInput.apply(g, weight, *rest[:-1], rest[-1] * info.batch_size), 1), 1


class _TowardsWeight(torch.autograd.Function):
    """What g at y = x ∗ w pulls back to w, of some size."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, size: tuple[int, int], form: Form, groups: int) -> Tensor:
        channels = x.shape[1] // groups
        x, g = _aligned(x, groups), _last(g)
        weight = x.new_empty(g.shape[1], x.shape[1] // groups, *size)
        found: Tensor = torch.ops.aten.convolution_backward(
            g, x, _last(weight), None, *form, False, (0, 0), groups, (False, True, False)
        )[1]
        return found[:, :channels]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, g, _, *ctx.form = inputs
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        first, second = ctx.needs_input_grad[:2]
        towards_x = _TowardsInput.apply(g, v, x.shape[2:], *ctx.form) if first else None
        towards_g = _Convolution.apply(x, v, *ctx.form) if second else None
        return towards_x, towards_g, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, g: Tensor, *rest: Any) -> tuple[Tensor, int]:
        x, g = fold(info, dims[0], x, 1), fold(info, dims[1], g, 1)
        return unfold(info, _TowardsWeight.apply(x, g, *rest[:-1], rest[-1] * info.batch_size), 0), 0


def _convolve(x: Tensor, weight: Tensor, form: Form, groups: int, rest: tuple[int, ...] | None = None) -> Tensor:
    """Convolve or, with a rest of pixels at the end, go the way back of a convolution."""
    return torch.ops.aten.convolution(  # type: ignore[no-any-return]
        x, weight, None, *form, rest is not None, rest or (0, 0), groups
    )


def _last(value: Tensor) -> Tensor:
    """The same values, on a GPU with the channels last."""
    return value.contiguous(memory_format=torch.channels_last) if value.is_cuda else value


def _missing(value: Tensor, channels: int, groups: int) -> int:
    """How many channels a group lacks."""
    return -channels % (16 // value.element_size()) if value.is_cuda and groups > 1 else 0


def _aligned(x: Tensor, groups: int) -> Tensor:
    n, channels, *size = x.shape
    channels //= groups
    missing = _missing(x, channels, groups)
    if not missing:
        return _last(x)
    padded = x.new_zeros(n, *size, groups, channels + missing)
    padded[..., :channels] = x.unflatten(1, (groups, channels)).permute(0, 3, 4, 1, 2)
    return padded.flatten(3).permute(0, 3, 1, 2)


def _aligned_weight(weight: Tensor, groups: int) -> Tensor:
    return _last(F.pad(weight, (0, 0, 0, 0, 0, _missing(weight, weight.shape[1], groups))))


class _Pooling(torch.autograd.Function):
    """The largest value of each window, and its place."""

    @staticmethod
    def forward(x: Tensor, window: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if window == WHOLE and triton_support.fusible_tasks(x):
            from metabridge.models.fused_tasks import pooled

            return pooled(x)
        return torch.ops.aten.max_pool2d_with_indices(_last(x), *window)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.window = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # of places there are none
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, places = ctx.saved_tensors
        return _Spread.apply(slope, places, x, ctx.window), None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], x: Tensor, window: tuple[Any, ...]
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        y, places = _Pooling.apply(fold(info, dims[0], x, 1), window)
        return (unfold(info, y, 1), unfold(info, places, 1)), (1, 1)


class _Spread(torch.autograd.Function):
    """Values put where they were found in maps of the form of x, and zeros elsewhere."""

    @staticmethod
    def forward(values: Tensor, places: Tensor, x: Tensor, window: tuple[Any, ...]) -> Tensor:
        if places.dtype == torch.uint8:
            from metabridge.models.fused_tasks import spread

            return spread(values, places, x)
        return torch.ops.aten.max_pool2d_with_indices_backward(  # type: ignore[no-any-return]
            _last(values), _last(x), *window, _last(places)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, places, x, ctx.window = inputs
        ctx.save_for_backward(places, x)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        places, x = ctx.saved_tensors
        return _Pick.apply(u, places, x, ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _picked_up(_Spread.apply, info, dims, *inputs)


class _Pick(torch.autograd.Function):
    """The values at the places, which `_Spread` would put back."""

    @staticmethod
    def forward(u: Tensor, places: Tensor, x: Tensor, window: tuple[Any, ...]) -> Tensor:
        if places.dtype == torch.uint8:
            from metabridge.models.fused_tasks import picked

            return picked(u, places)
        # pixels before channels, where they lie so
        order = (0, 2, 3, 1) if u.is_contiguous(memory_format=torch.channels_last) else (0, 1, 2, 3)
        axis = order.index(2)
        u, places = (value.permute(order) for value in (u, places))
        found = u.flatten(axis, axis + 1).gather(axis, places.flatten(axis, axis + 1)).view(places.shape)
        return found.permute([order.index(place) for place in range(4)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, places, x, ctx.window = inputs
        ctx.save_for_backward(places, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        places, x = ctx.saved_tensors
        return _Spread.apply(g, places, x, ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _picked_up(_Pick.apply, info, dims, *inputs)


def _picked_up(function: Callable[..., Tensor], info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
    *maps, window = inputs
    return unfold(info, function(*(fold(info, dim, value, 1) for dim, value in zip(dims, maps)), window), 1), 1
