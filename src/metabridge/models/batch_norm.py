"""Batch normalisation that is right under vmap and double backward, with its statistics named.

`torch.nn.BatchNorm2d` under `vmap` gives second-order gradients that are silently wrong by a per
cent or two, and its one switch mixes two questions. Here the choice has a name:

- `statistics="batch"`: every set (the support of a task, or its queries) is normalised by its own
  mean and variance, in training and at test. Transductive: what is predicted for one query depends
  on the other queries in its set. This is MAML's habit, and no state is kept.
- `statistics="running"`: training normalises by the set at hand; evaluation (`net.eval()`) uses
  fixed statistics that `estimate_statistics` has measured over training images. Inductive: each
  query is predicted by itself.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
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
    """Normalise each channel (axis 1) over all other axes, then scale and shift it.

    >>> norm = BatchNorm(3)
    >>> norm(5 + torch.randn(8, 3, 4, 4)).mean().abs().item() < 1e-6
    True
    """

    weight: nn.Parameter | None  # None where a norm does not scale
    bias: nn.Parameter | None
    mean: Tensor
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
        """Normalise `x` of shape (points, channels, ...)."""
        dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        weight = x.new_ones(self.channels, dtype=dtype) if self.weight is None else self.weight
        bias = x.new_zeros(self.channels, dtype=dtype) if self.bias is None else self.bias
        weight, bias = (value.float() if value.dtype == torch.bfloat16 else value for value in (weight, bias))
        if self.statistics == "batch" or self.training:
            if x.numel() == x.shape[1]:
                raise InputError(
                    f"batch norm got {tuple(x.shape)}, one value per channel, and cannot normalise by the mean and "
                    "variance of one value. Use sets of at least two points, or net.eval() with statistics='running'."
                )
            if inside_transform():
                return _Normalise.apply(x, weight, bias, self.eps)[0]  # type: ignore[no-any-return]
            return F.batch_norm(x, None, None, weight, bias, training=True, eps=self.eps)
        scale = weight * torch.rsqrt(self.variance + self.eps)
        shift = bias - self.mean * scale
        return torch.addcmul(_by_channel(shift, x).to(x.dtype), x, _by_channel(scale, x).to(x.dtype))

    def extra_repr(self) -> str:
        """Show what decides the result."""
        return f"{self.channels}, statistics={self.statistics!r}"


class _Normalise(torch.autograd.Function):
    """y = w n + b, where n = (x − μ)r has mean 0 and variance 1 in each channel over the set.

    Fused kernels forward and backward; a batch of tasks under `vmap` is a batch of more channels.
    PyTorch's own rule for `vmap` is wrong at second order, which is why this stands here.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        if triton_support.fusible_tasks(x):
            from metabridge.models.fused_tasks import normalised

            return normalised(x, weight, bias, eps)
        return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.eps = inputs
        _, mean, r = output
        ctx.mark_non_differentiable(mean, r)
        ctx.save_for_backward(x, weight, mean, r)

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, r = ctx.saved_tensors
        return (*_NormaliseBackward.apply(slope, x, weight, mean, r, ctx.eps), None)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        x, weight, bias = (fold(info, dim, value, axis) for dim, value, axis in zip(dims, inputs, (1, 0, 0)))
        return _tasks(info, _Normalise.apply(x, weight, bias, inputs[3]), (1, 0, 0))


class _NormaliseBackward(torch.autograd.Function):
    """∂y: gx = wr(g − m(g) − n m(gn)), gw = Σgn, gb = Σg, where m is the mean over the set."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, eps: float) -> tuple[Tensor, ...]:
        if triton_support.fusible_tasks(x):
            from metabridge.models.fused_tasks import normalised_back

            return normalised_back(g, x, weight, mean, r)
        return torch.ops.aten.native_batch_norm_backward(  # type: ignore[no-any-return]
            g, x, weight, None, None, mean, r, True, eps, [True, True, True]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, u: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor | None, ...]:
        return *_NormaliseAgain.apply(*ctx.saved_tensors, u, v, s), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        folded = [fold(info, dim, value, axis) for dim, value, axis in zip(dims, inputs, (1, 1, 0, 0, 0))]
        return _tasks(info, _NormaliseBackward.apply(*folded, inputs[5]), (1, 0, 0))


class _NormaliseAgain(torch.autograd.Function):
    """∂∂y: what u of gx, v of gw and s of gb pull back to g, x and w."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        if triton_support.fusible_tasks(inputs[1]):
            from metabridge.models.fused_tasks import normalised_again

            return normalised_again(*inputs)
        return _pulled_back(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("a third derivative of batch norm. Two are what methods take.")

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        axes = (1, 1, 0, 0, 0, 1, 0, 0)
        folded = [fold(info, dim, value, axis) for dim, value, axis in zip(dims, inputs, axes)]
        return _tasks(info, _NormaliseAgain.apply(*folded), (1, 1, 0))


def _pulled_back(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, ...]:
    """Pull back u of gx, v of gw and s of gb; μ and r move with x and are accounted for there.

    With c = v − wr m(un) and e = wr m(gn), what n pulls is cg − eu, and everything else is u, g and n
    times numbers of each channel: few passes over the maps, which is where the time goes.
    """
    axes = [axis for axis in range(x.ndim) if axis != 1]
    w, v, s, mean, r = (_by_channel(value, x) for value in (weight, v, s, mean, r))

    def m(value: Tensor) -> Tensor:
        return value.mean(axes, keepdim=True, dtype=r.dtype)  # maps may have lower precision

    n = torch.addcmul(-mean * r, x, r)
    mg, mu, mgn, mun = m(g), m(u), m(g * n), m(u * n)
    product = m(g * u) - mu * mg - mun * mgn  # the mean of u gx, over wr
    c, e = v - w * r * mun, w * r * mgn
    towards_g = torch.addcmul(torch.addcmul(s - w * r * mu, n, c), u, w * r)
    fall = r * (c * mgn - e * mun) + w * r.square() * product
    towards_x = torch.addcmul(torch.addcmul(torch.addcmul(r * (e * mu - c * mg), n, -fall), g, r * c), u, -r * e)
    towards_w = (r * product).flatten() * (x.numel() // x.shape[1])
    return towards_g.to(g.dtype), towards_x.to(x.dtype), towards_w


def _tasks(info: Any, outputs: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Unfold the axis of channels of each of the outputs."""
    return tuple(unfold(info, value, axis) for value, axis in zip(outputs, axes)), axes


def _by_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.view(-1, *(1,) * (x.ndim - 2))


def replace_batch_norm(module: nn.Module, statistics: Statistics) -> nn.Module:
    """Return a copy of `module` whose PyTorch batch norms are `BatchNorm`s with the same values.

    What the batch norms share, with each other or with other layers, is shared in the copy too.

    >>> replace_batch_norm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "batch")[1]
    BatchNorm(3, statistics='batch')
    """
    module = copy.deepcopy(module)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _converted(module, statistics)
    replace_layers(module, nn.modules.batchnorm._BatchNorm, lambda layer: _converted(layer, statistics))
    return module


def replace_layers(net: nn.Module, kinds: type | types.UnionType, change: Callable[[Any], nn.Module]) -> None:
    """Put other layers in the place of those of some kinds; a layer in several places is changed once.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> replace_layers(net, nn.Tanh, lambda layer: nn.ReLU())
    >>> net[1]
    ReLU()
    """
    changed: dict[nn.Module, nn.Module] = {}
    for parent in list(net.modules()):
        for name, layer in list(parent._modules.items()):  # named_children() would skip a second name of a layer
            if layer is not None and isinstance(layer, kinds):
                if layer not in changed:
                    changed[layer] = change(layer)
                setattr(parent, name, changed[layer])


def group_count(channels: int, most: int = 16) -> int:
    """Return how many groups a group norm has: `most`, or as many below as divide the channels evenly.

    >>> group_count(48), group_count(24), group_count(8)
    (16, 12, 8)
    """
    return next(count for count in range(min(most, channels), 0, -1) if channels % count == 0)


def estimate_statistics(net: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the fixed statistics of every `running` batch norm in `net` from batches of inputs.

    Each layer's mean and variance are averaged over the batches with the weights as they are now,
    so that evaluation sees the trained net and not a moving average of its past.
    """
    layers = running_batch_norms(net)
    if not layers:
        return
    moments: dict[BatchNorm, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if layer not in moments:  # a copy of the net, which another thread applies
            return
        assert isinstance(layer, BatchNorm)
        x = inputs[0].float() if inputs[0].dtype == torch.bfloat16 else inputs[0]
        axes = [axis for axis in range(x.ndim) if axis != 1]
        variance, mean = torch.var_mean(x, axes, correction=0)
        moments[layer].append((mean, variance))

    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    training = net.training
    net.train()
    try:
        with torch.no_grad():
            for batch in batches:
                net(batch)
    finally:
        net.train(training)
        for hook in hooks:
            hook.remove()
    if not all(moments.values()):
        raise InputError("batches is empty. Give at least one batch of inputs to estimate the statistics from.")
    for layer, seen in moments.items():
        means, variances = (torch.stack(values) for values in zip(*seen))
        layer.mean.copy_(means.mean(0))
        # The mean square less the square of the mean would lose all digits where |mean| ≫ deviation.
        layer.variance.copy_(variances.mean(0) + means.var(0, correction=0))


def running_batch_norms(net: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of `net` that use fixed statistics in evaluation."""
    return [layer for layer in net.modules() if isinstance(layer, BatchNorm) and layer.statistics == "running"]


def normalises_each_set(net: nn.Module) -> bool:
    """Whether the prediction for a point depends on the others in its set, at test too."""
    return any(isinstance(layer, BatchNorm) and layer.statistics == "batch" for layer in net.modules())


def _converted(layer: nn.modules.batchnorm._BatchNorm, statistics: Statistics) -> BatchNorm:
    norm = BatchNorm(layer.num_features, statistics, layer.eps)
    norm.weight, norm.bias = layer.weight, layer.bias  # the same tensors, which other layers may share
    if statistics == "running" and layer.running_mean is not None and layer.running_var is not None:
        norm.mean, norm.variance = layer.running_mean, layer.running_var
    if layer.weight is not None:
        norm.to(layer.weight)  # the statistics too, where the layer has none
    return norm.train(layer.training)
