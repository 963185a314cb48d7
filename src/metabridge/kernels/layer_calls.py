"""Places in a forward pass where gradients are read off, and how those of every sample are formed there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from metabridge.kernels.layer_overrides import Picked, cached
from metabridge.models.network import Params


class Call(NamedTuple):
    """A place in a forward pass where gradients are read off: what arrives at `edge` is that of `output`.

    It is a linear layer's output, with the layer's input, or a norm's parameter, repeated for every sample, or
    the output of a pool behind a first convolution and its norm, with what it picks.
    """

    layer: nn.Module
    roles: dict[str, str]  # of parameters: "weight" or "bias" of a linear layer, or "copies"
    x: Tensor
    output: Tensor
    edge: GradientEdge
    picks: tuple[Picked, Params] | None = None  # with the parameters that the picked values depend on

    @property
    def linear(self) -> bool:
        """Whether it is a linear layer's output."""
        return "copies" not in self.roles.values()

    def forming(self, outputs: int) -> int:
        """Numbers held while its gradients are formed: what arrives from all outputs, patches, and gradients."""
        size = outputs * self.output.numel()
        if self.picks:
            picks = self.picks[0]
            size += 2 * outputs * picks.weight.numel()
            return size if cached(self.x) else size + picks.places.numel() * picks.patches.shape[2]
        if not self.linear:
            return 2 * size
        layer: Any = self.layer
        weight: Tensor = layer.weight
        numbers, rows = weight.numel(), len(weight)
        patches = numbers // rows * self.output.numel() * int(getattr(layer, "groups", 1)) // rows
        return size + self.x.numel() + patches + 2 * outputs * len(self.x) * numbers


def formed(call: Call, slopes: Sequence[Tensor], step: int) -> Iterator[tuple[slice, Params]]:
    """Yield the gradients (samples, outputs, ...) of a call's parameters, and for which samples they are.

    `slopes` is what arrives there from each output. Some samples are taken at a time.
    """
    if call.picks is not None:
        picks, params = call.picks
        yield slice(None), dict(zip(params, picks.pulled(slopes, list(params.values()), step)))
        return
    for start in range(0, len(call.x), step):
        place = slice(start, start + step)
        yield place, _formed(call, slopes, place)


def _formed(call: Call, slopes: Sequence[Tensor], place: slice) -> Params:
    g = gathered(call, [slope[place] for slope in slopes])
    found: Params = {}
    for name, role in call.roles.items():
        if role == "weight":
            groups = getattr(call.layer, "groups", 1)
            side = g.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)  # (samples, groups, channels, positions)
            product = _product(call.layer, call.x[place], side, slopes[0].shape[2:])  # one for all outputs
            found[name] = product.unflatten(2, (len(slopes), -1)).transpose(1, 2)
        else:
            found[name] = g.sum(-1) if role == "bias" else g
    return found


def gathered(call: Call, slopes: Sequence[Tensor]) -> Tensor:
    """What arrives from all outputs: (samples, outputs, channels, positions), or (samples, outputs, ...) for copies."""
    return torch.stack([_positions(call.layer, slope) for slope in slopes] if call.linear else list(slopes), 1)


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """What a linear layer multiplies by its weights: (samples, groups, inputs, positions).

    A convolution's are one copy of a view in which windows overlap.
    """
    if not isinstance(layer, nn.Conv2d):
        return _positions(layer, x).unsqueeze(1)
    views = windows(layer, x)
    return views.reshape(len(x), layer.groups, -1, math.prod(views.shape[4:]))


def windows(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """A view of what a convolution sees, (samples, channels, *window, *positions)."""
    x = _padded(layer, x)
    for axis, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation), 2):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x.permute(0, 1, 4, 5, 2, 3)


def _product(layer: nn.Module, x: Tensor, side: Tensor, shape: Sequence[int]) -> Tensor:
    """Σ_p g_p a_pᵀ, (samples, groups, channels, inputs).

    On a CPU that of a convolution is itself one, in which every sample is a group, and no patch is copied.
    """
    if not isinstance(layer, nn.Conv2d) or not cached(x):
        return side @ patches(layer, x).mT
    samples, groups, channels, _ = side.shape
    a, g = _padded(layer, x), side.reshape(1, -1, *shape)
    size = samples * groups * channels, *layer.weight.shape[1:]
    a = a.reshape(1, -1, *a.shape[2:])
    found: Tensor = conv2d_weight(a, size, g, layer.stride, 0, layer.dilation, samples * groups)
    return found.reshape(samples, groups, channels, -1)


def _padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def _positions(layer: nn.Module, value: Tensor) -> Tensor:
    """(samples, channels, positions) from a linear layer's input or output."""
    if isinstance(layer, nn.Linear):
        return value.reshape(len(value), -1, value.shape[-1]).mT
    return value.flatten(2)
