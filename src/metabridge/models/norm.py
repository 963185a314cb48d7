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
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from metabridge.errors import InputError

Statistics = Literal["batch", "running"]


class BatchNorm(nn.Module):
    """Normalise each channel (axis 1) over all other axes, then scale and shift it.

    >>> norm = BatchNorm(3)
    >>> norm(5 + torch.randn(8, 3, 4, 4)).mean().abs().item() < 1e-6
    True
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int, statistics: Statistics = "batch", eps: float = 1e-5) -> None:
        super().__init__()
        if statistics not in ("batch", "running"):
            raise InputError(f"statistics is {statistics!r}, but must be 'batch' or 'running'.")
        self.statistics, self.eps = statistics, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        if statistics == "running":
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape (points, channels, ...)."""
        if self.statistics == "running" and not self.training:
            mean, variance = self.mean, self.variance
        else:
            wide = x.float() if x.dtype == torch.bfloat16 else x
            variance, mean = torch.var_mean(wide, [axis for axis in range(x.ndim) if axis != 1], correction=0)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        shape = (-1,) + (1,) * (x.ndim - 2)
        return torch.addcmul(shift.view(shape).to(x.dtype), x, scale.view(shape).to(x.dtype))

    def extra_repr(self) -> str:
        """Show what decides the result."""
        return f"{self.weight.numel()}, statistics={self.statistics!r}"


def replace_batch_norm(module: nn.Module, statistics: Statistics) -> nn.Module:
    """Return a copy of `module` whose PyTorch batch norms are `BatchNorm`s with the same values.

    >>> replace_batch_norm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "batch")[1]
    BatchNorm(3, statistics='batch')
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _converted(module, statistics)
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, _converted(child, statistics))
    return module


def estimate_statistics(net: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the fixed statistics of every `running` batch norm in `net` from batches of inputs.

    Each layer's mean and variance are averaged over the batches with the weights as they are now,
    so that evaluation sees the trained net and not a moving average of its past.
    """
    layers = running_layers(net)
    if not layers:
        return
    moments: dict[BatchNorm, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, BatchNorm)
        x = inputs[0].float() if inputs[0].dtype == torch.bfloat16 else inputs[0]
        axes = [axis for axis in range(x.ndim) if axis != 1]
        moments[layer].append((x.mean(axes), x.square().mean(axes)))

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
        mean = torch.stack([m for m, _ in seen]).mean(0)
        layer.mean.copy_(mean)
        layer.variance.copy_(torch.stack([s for _, s in seen]).mean(0) - mean.square())


def running_layers(net: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of `net` that use fixed statistics in evaluation."""
    return [layer for layer in net.modules() if isinstance(layer, BatchNorm) and layer.statistics == "running"]


def normalises_each_set(net: nn.Module) -> bool:
    """Whether the prediction for a point depends on the others in its set, at test too."""
    return any(isinstance(layer, BatchNorm) and layer.statistics == "batch" for layer in net.modules())


def _converted(layer: nn.modules.batchnorm._BatchNorm, statistics: Statistics) -> BatchNorm:
    norm = BatchNorm(layer.num_features, statistics, layer.eps)
    if layer.affine:
        norm.load_state_dict({"weight": layer.weight, "bias": layer.bias}, strict=False)
    if statistics == "running" and layer.running_mean is not None and layer.running_var is not None:
        norm.mean.copy_(layer.running_mean)
        norm.variance.copy_(layer.running_var)
    return norm.to(layer.weight.device if layer.affine else None)
