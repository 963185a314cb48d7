"""Batch normalization with correct first and second derivatives under `vmap`, and two kinds of statistics.

Under `vmap`, PyTorch's batch norm returns wrong second derivatives without an error. `BatchNorm` returns correct ones.
Its argument `statistics` selects the mean and the variance:

- "batch": every input batch is normalized by its own mean and variance, in training and in evaluation. A batch is the
  support set or the query set of a task. This is transductive: the prediction for a query depends on the other queries.
  MAML uses it. The layer has no buffers.
- "running": in training, every batch is normalized by its own mean and variance. In evaluation (`net.eval()`), all
  batches are normalized by fixed statistics, which `estimate_statistics` measures on training images. This is
  inductive: every query is predicted independently. Unlike PyTorch's running statistics, the fixed statistics are not
  moving averages.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.autodiff import inside_transform
from metabridge.errors import InputError
from metabridge.models import triton_support
from metabridge.models.task_folding import fold, unfold

Statistics = Literal["batch", "running"]


class BatchNorm(nn.Module):
    """Normalize each channel (axis 1) over all other axes, then scale and shift it.

    Args:
        channels: Number of channels.
        statistics: "batch" to normalize by the mean and variance of the input batch, in training and in evaluation;
            "running" to use fixed statistics in evaluation, which `estimate_statistics` measures.
        eps: Small number that is added to the variance.

    Raises:
        InputError: If `statistics` is neither "batch" nor "running".

    >>> norm = BatchNorm(3)
    >>> norm(5 + torch.randn(8, 3, 4, 4)).mean().abs().item() < 1e-6
    True
    """

    weight: nn.Parameter | None  # None if the layer does not scale
    bias: nn.Parameter | None  # None if the layer does not shift
    mean: Tensor  # the fixed statistics, only with statistics="running"
    variance: Tensor

    def __init__(self, channels: int, statistics: Statistics = "batch", eps: float = 1e-5) -> None:
        super().__init__()
        if statistics not in ("batch", "running"):
            raise InputError(f"statistics is {statistics!r}, but must be 'batch' or 'running'.")
        self.channels, self.statistics, self.eps = channels, statistics, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        if statistics == "running":
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized `x`, of shape (n, channels, ...).

        Args:
            x: Input batch of the same shape.

        Returns:
            The normalized batch.

        Raises:
            InputError: If the layer normalizes by the statistics of `x`, but each channel has only one value.
        """
        # if x is in bfloat16, weight and bias are nevertheless in float32
        dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        weight = x.new_ones(self.channels, dtype=dtype) if self.weight is None else self.weight
        bias = x.new_zeros(self.channels, dtype=dtype) if self.bias is None else self.bias
        weight, bias = (value.float() if value.dtype == torch.bfloat16 else value for value in (weight, bias))
        if self.statistics == "batch" or self.training:
            if x.numel() == x.shape[1]:
                raise InputError(
                    f"batch norm got a batch of shape {tuple(x.shape)}, which has one value per channel and thus no "
                    "variance. Use batches of at least two examples, or net.eval() with statistics='running'."
                )
            if inside_transform():
                return _Normalize.apply(x, weight, bias, self.eps)[0]  # type: ignore[no-any-return]
            return F.batch_norm(x, None, None, weight, bias, training=True, eps=self.eps)
        scale = weight * torch.rsqrt(self.variance + self.eps)
        shift = bias - self.mean * scale
        return torch.addcmul(_by_channel(shift, x).to(x.dtype), x, _by_channel(scale, x).to(x.dtype))

    def extra_repr(self) -> str:
        """Return the arguments that `repr` shows."""
        return f"{self.channels}, statistics={self.statistics!r}"


class _Normalize(torch.autograd.Function):
    """Return y = w·n + b, the mean μ and r = 1/√(variance + ε), where n = (x − μ)·r is the normalized x.

    Under `vmap` the tasks are folded into the channels, because the second derivatives of PyTorch's own batching rule
    are wrong.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        if triton_support.can_fuse_tasks(x):
            from metabridge.models.fused_tasks import batch_norm

            return batch_norm(x, weight, bias, eps)
        return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.eps = inputs
        _, mean, r = output
        ctx.mark_non_differentiable(mean, r)
        ctx.save_for_backward(x, weight, mean, r)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, r = ctx.saved_tensors
        return (*_NormalizeBackward.apply(g, x, weight, mean, r, ctx.eps), None)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        x, weight, bias = (fold(info, dim, value, axis) for dim, value, axis in zip(dims, inputs, (1, 0, 0)))
        return _unfold_channels(info, _Normalize.apply(x, weight, bias, inputs[3]), (1, 0, 0))


class _NormalizeBackward(torch.autograd.Function):
    """Return the gradients with respect to x, w and b, given the gradient g with respect to y.

    They are gx = w·r·(g − m(g) − n·m(g·n)), gw = Σg·n and gb = Σg, where m is the mean over all axes except the
    channels. gx includes the dependence of μ and r on x.
    """

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, eps: float) -> tuple[Tensor, ...]:
        if triton_support.can_fuse_tasks(x):
            from metabridge.models.fused_tasks import batch_norm_backward

            return batch_norm_backward(g, x, weight, mean, r)
        return torch.ops.aten.native_batch_norm_backward(  # type: ignore[no-any-return]
            g, x, weight, None, None, mean, r, True, eps, [True, True, True]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, u: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor | None, ...]:
        return *_NormalizeDoubleBackward.apply(*ctx.saved_tensors, u, v, s), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        folded = [fold(info, dim, value, axis) for dim, value, axis in zip(dims, inputs, (1, 1, 0, 0, 0))]
        return _unfold_channels(info, _NormalizeBackward.apply(*folded, inputs[5]), (1, 0, 0))


class _NormalizeDoubleBackward(torch.autograd.Function):
    """The backward pass of `_NormalizeBackward` with respect to its inputs g, x and w.

    u, v and s are the gradients with respect to its outputs gx, gw and gb.
    """

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        if triton_support.can_fuse_tasks(inputs[1]):
            from metabridge.models.fused_tasks import batch_norm_double_backward

            return batch_norm_double_backward(*inputs)
        return _double_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing, because third derivatives are not implemented."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "Third derivatives of batch norm are not implemented. All methods need at most second derivatives."
        )

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        axes = (1, 1, 0, 0, 0, 1, 0, 0)  # the channel axis of each input
        folded = [fold(info, dim, value, axis) for dim, value, axis in zip(dims, inputs, axes)]
        return _unfold_channels(info, _NormalizeDoubleBackward.apply(*folded), (1, 1, 0))


def _double_backward(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients with respect to g, x and w, given the gradients u, v and s (see `_NormalizeDoubleBackward`).

    n, r and m are defined in `_Normalize` and `_NormalizeBackward`. With c = v − w·r·m(u·n) and e = w·r·m(g·n), the
    gradient with respect to n is c·g − e·u. The gradients with respect to g and x are linear combinations of u, g, n
    and 1 with one coefficient per channel. Computing the coefficients first saves passes over the feature maps, which
    take most of the time.
    """
    axes = [axis for axis in range(x.ndim) if axis != 1]
    w, v, s, mean, r = (_by_channel(value, x) for value in (weight, v, s, mean, r))

    def m(value: Tensor) -> Tensor:
        return value.mean(axes, keepdim=True, dtype=r.dtype)  # value may have a lower precision

    n = torch.addcmul(-mean * r, x, r)
    mg, mu, mgn, mun = m(g), m(u), m(g * n), m(u * n)
    scaled_m_ugx = m(g * u) - mu * mg - mun * mgn  # m(u·gx) / (w·r)
    c, e = v - w * r * mun, w * r * mgn
    g_grad = torch.addcmul(torch.addcmul(s - w * r * mu, n, c), u, w * r)
    n_factor = r * (c * mgn - e * mun) + w * r.square() * scaled_m_ugx
    x_grad = torch.addcmul(torch.addcmul(torch.addcmul(r * (e * mu - c * mg), n, -n_factor), g, r * c), u, -r * e)
    w_grad = (r * scaled_m_ugx).flatten() * (x.numel() // x.shape[1])
    return g_grad.to(g.dtype), x_grad.to(x.dtype), w_grad


def _unfold_channels(
    info: Any, outputs: tuple[Tensor, ...], axes: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Undo `fold` for each output, given its channel axis, and return the outputs and their task axes for `vmap`."""
    return tuple(unfold(info, value, axis) for value, axis in zip(outputs, axes)), axes


def _by_channel(value: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per channel so that it broadcasts with x."""
    return value.view(-1, *(1,) * (x.ndim - 2))


def replace_batch_norm(module: nn.Module, statistics: Statistics) -> nn.Module:
    """Return a copy of `module` in which `BatchNorm` layers replace PyTorch's batch norms.

    The new layers have the same weights, biases and `eps` and, for `statistics="running"`, the running statistics of
    the old ones as fixed statistics. Parameters and layers that are shared in `module` are also shared in the copy.

    >>> replace_batch_norm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "batch")[1]
    BatchNorm(3, statistics='batch')
    """
    module = copy.deepcopy(module)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _convert(module, statistics)
    replace_layers(module, nn.modules.batchnorm._BatchNorm, lambda layer: _convert(layer, statistics))
    return module


def replace_layers(
    net: nn.Module, layer_types: type | types.UnionType, make_replacement: Callable[[Any], nn.Module]
) -> None:
    """Replace all layers of the given types in place; a layer with several names is replaced by one new layer.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> replace_layers(net, nn.Tanh, lambda layer: nn.ReLU())
    >>> net[1]
    ReLU()
    """
    new_layers: dict[nn.Module, nn.Module] = {}
    for parent in list(net.modules()):
        for name, layer in list(parent._modules.items()):  # named_children() yields a layer only under its first name
            if layer is not None and isinstance(layer, layer_types):
                if layer not in new_layers:
                    new_layers[layer] = make_replacement(layer)
                setattr(parent, name, new_layers[layer])


def group_count(channels: int, max_groups: int = 16) -> int:
    """Return the number of groups of a group norm: the largest divisor of `channels` up to `max_groups`.

    >>> group_count(48), group_count(24), group_count(8)
    (16, 12, 8)
    """
    return next(count for count in range(min(max_groups, channels), 0, -1) if channels % count == 0)


def estimate_statistics(net: nn.Module, batches: Iterable[Tensor], *, fixed: Collection[nn.Module] = ()) -> None:
    """Measure the fixed statistics of all `BatchNorm` layers of `net` with `statistics="running"`.

    Each layer gets the mean and the variance of its inputs over all batches; every batch has the same weight, even if
    the batches differ in size. The network computes the inputs of its layers in training mode, with its current
    parameters.

    Args:
        net: The network, which is changed in place.
        batches: Batches of inputs of `net`.
        fixed: Modules of `net` that are applied as in evaluation. If they are batch norms, they keep their statistics.

    Raises:
        InputError: If there is no batch, or one of these layers is not called in the forward pass.

    >>> net = nn.Sequential(BatchNorm(1, "running"))
    >>> estimate_statistics(net, [torch.tensor([[1.0], [3.0]])])
    >>> net[0].mean
    tensor([2.])
    """
    fixed = set(fixed)
    layers = [layer for layer in running_batch_norms(net) if layer not in fixed]
    if not layers:
        return
    moments: dict[BatchNorm, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if layer not in moments:  # a copy of `net` in another thread has the same hooks
            return
        assert isinstance(layer, BatchNorm)
        x = inputs[0].float() if inputs[0].dtype == torch.bfloat16 else inputs[0]
        axes = [axis for axis in range(x.ndim) if axis != 1]
        variance, mean = torch.var_mean(x, axes, correction=0)
        moments[layer].append((mean, variance))

    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    modes = {layer: layer.training for layer in net.modules()}
    for layer in modes:
        layer.training = layer not in fixed
    try:
        with torch.no_grad():
            for batch in batches:
                net(batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
    if not all(moments.values()):
        raise InputError(
            "batches is empty, or net does not call all its batch norms. Pass at least one batch of inputs to estimate "
            "the statistics from, and remove batch norms that are not called."
        )
    for layer, layer_moments in moments.items():
        means, variances = (torch.stack(values) for values in zip(*layer_moments))
        layer.mean.copy_(means.mean(0))
        # m(x²) − m(x)² would be inaccurate if |mean| ≫ standard deviation
        layer.variance.copy_(variances.mean(0) + means.var(0, correction=0))


def running_batch_norms(net: nn.Module) -> list[BatchNorm]:
    """Return the `BatchNorm` layers of `net` that use fixed statistics in evaluation."""
    return [layer for layer in net.modules() if isinstance(layer, BatchNorm) and layer.statistics == "running"]


def uses_batch_statistics(net: nn.Module) -> bool:
    """Return whether a `BatchNorm` layer makes predictions depend on the other inputs of the batch in evaluation."""
    return any(isinstance(layer, BatchNorm) and layer.statistics == "batch" for layer in net.modules())


def _convert(layer: nn.modules.batchnorm._BatchNorm, statistics: Statistics) -> BatchNorm:
    norm = BatchNorm(layer.num_features, statistics, layer.eps)
    norm.weight, norm.bias = layer.weight, layer.bias  # the same objects, because other layers may share them
    if statistics == "running" and layer.running_mean is not None and layer.running_var is not None:
        norm.mean, norm.variance = layer.running_mean, layer.running_var
    if layer.weight is not None:
        norm.to(layer.weight)  # casts and moves the new buffers if `layer` has no running statistics
    return norm.train(layer.training)
