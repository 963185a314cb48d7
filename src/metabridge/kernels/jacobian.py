"""Gradients of a network's outputs for every sample by itself, layer by layer.

A layer y = Wa, applied at P positions, has for sample i and output o the gradient Σ_p g_iop a_ipᵀ, where
g is what reaches y from the output. One backward pass an output gives g for a whole batch, since samples
do not mix, and no gradient of a weight is asked of it. A norm is given its parameters once for every sample,
and automatic differentiation keeps them apart. Parameters of layers that are not known here go through
`vmap` of `jacrev`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from metabridge.models.norm import BatchNorm

Params = dict[str, Tensor]
StandIn = Callable[[Any, Tensor], Tensor]  # what a layer makes of its input

NORMS = (BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)
LINEAR = (nn.Linear, nn.Conv2d)
CACHED = 2**21  # bytes of a layer's gradients that are taken at a time on a CPU: what is copied stays in its cache


class Call(NamedTuple):
    """A place in a forward pass where gradients are read off: what arrives at `edge` is that of `output`.

    It is a linear layer's output, with the layer's input, or a norm's parameter, repeated for every sample.
    """

    layer: nn.Module
    roles: dict[str, str]  # of parameters: "weight" or "bias" of a linear layer, "copies" of a norm
    x: Tensor
    output: Tensor
    edge: GradientEdge

    @property
    def linear(self) -> bool:
        """Whether it is a linear layer's."""
        return isinstance(self.layer, LINEAR)


@dataclass(frozen=True)
class Block:
    """One parameter: how many numbers, and multiplications in a forward pass of one sample.

    Where the gradient is a product Σ_p g_p a_pᵀ of one call, its `outputs`, `inputs` and `positions`.
    """

    name: str
    size: int
    work: int
    inputs: int = 0
    outputs: int = 0
    positions: int = 0


Factors = dict[str, tuple[Tensor, Tensor]]  # a (samples, inputs, positions), g (samples, outputs, channels, positions)


@dataclass(frozen=True)
class Rows:
    """Gradients of some samples: formed ones side by side, (samples, outputs, size), and factors of the others."""

    formed: Tensor
    factors: Factors


@dataclass(frozen=True)
class Gradients:
    """The per-sample gradients of `net` at `params` with respect to the parameters `names`."""

    net: nn.Module
    params: Params
    names: frozenset[str]
    summed: bool
    others: frozenset[str] = field(default_factory=frozenset)  # those that only automatic differentiation knows

    def trace(self, x: Tensor) -> tuple[Tensor, Params, list[Call]]:
        """Run `net`, and return its outputs, the parameters they depend on, and where their gradients are found."""
        leaves = {name: value.detach().requires_grad_(name in self.names) for name, value in self.params.items()}
        known = {id(value): name for name, value in self.net.named_parameters()}
        owned = {
            layer: {role: known[id(value)] for role, value in layer.named_parameters(recurse=False)}
            for layer in self.net.modules()
            if type(layer) in (*LINEAR, *NORMS)
        }
        wanted = self.names - self.others
        layers = [layer for layer, roles in owned.items() if wanted.intersection(roles.values())]
        calls: list[Call] = []

        def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if inputs:
                roles = {name: role for role, name in owned[layer].items() if name in wanted}
                calls.append(Call(layer, roles, inputs[0].detach(), output, get_gradient_edge(output)))

        def normed(layer: nn.Module, point: Tensor) -> Tensor:
            values = {role: leaves[name] for role, name in owned[layer].items()}
            copies = {role: value.expand(len(point), *value.shape) for role, value in values.items()}
            for role, name in owned[layer].items():
                if name in wanted:
                    edge = get_gradient_edge(copies[role])
                    calls.append(Call(layer, {name: "copies"}, point.detach(), copies[role], edge))
            return _normed(layer, point, copies)

        others: dict[nn.Module, StandIn] = {layer: normed for layer in layers if isinstance(layer, NORMS)}
        if x.device.type == "cpu":
            pools = [layer for layer in self.net.modules() if type(layer) is nn.MaxPool2d and not layer.return_indices]
            others |= dict.fromkeys(pools, _pooled)
        hooks = [layer.register_forward_hook(record) for layer in layers if layer not in others]
        try:
            with torch.enable_grad(), _standing_in(others):
                y = functional_call(self.net, leaves, (x,))
        finally:
            for hook in hooks:
                hook.remove()
        return y, leaves, calls

    def rows(self, x: Tensor, formed: Sequence[Block], factored: Sequence[Block], outputs: int, chunk: int) -> Rows:
        """The gradients for all samples `x`, `chunk` samples at a time."""
        shape = len(x), outputs
        result = Rows(
            x.new_zeros(*shape, sum(block.size for block in formed)),
            {
                block.name: (
                    x.new_zeros(len(x), block.inputs, block.positions),
                    x.new_zeros(*shape, block.outputs, block.positions),
                )
                for block in factored
            },
        )
        ends = itertools.accumulate((block.size for block in formed), initial=0)
        slots = {block.name: slice(*bounds) for block, bounds in zip(formed, itertools.pairwise(ends))}
        for start in range(0, len(x), chunk):
            place = slice(start, start + chunk)
            factors = {name: (a[place], g[place]) for name, (a, g) in result.factors.items()}
            self._fill(Rows(result.formed[place], factors), x[place], slots)
        return result

    def _fill(self, rows: Rows, x: Tensor, slots: dict[str, slice]) -> None:
        if self.names - self.others:
            y, _, calls = self.trace(x)
            targets = y.sum(1, keepdim=True) if self.summed else y
            edges = [call.edge for call in calls]
            last = targets.shape[1] - 1
            pulled = [
                torch.autograd.grad(targets[:, o].sum(), edges, retain_graph=o < last, allow_unused=True)
                for o in range(last + 1)
            ]
            for call, slopes in zip(calls, zip(*pulled)):
                if slopes[0] is not None:  # as it is where the layer is used, but not for the outputs
                    _store(rows, call, slopes, slots)
        for name, gradient in self._generic(x).items():
            rows.formed[..., slots[name]] = gradient.reshape(*rows.formed.shape[:2], -1)

    def _generic(self, x: Tensor) -> Params:
        if not self.others:
            return {}
        fixed = {name: value.detach() for name, value in self.params.items() if name not in self.others}

        def outputs(params: Params, point: Tensor) -> Tensor:
            y: Tensor = functional_call(self.net, fixed | params, (point.unsqueeze(0),))[0]
            return y.sum(0, keepdim=True) if self.summed else y

        others = {name: self.params[name].detach() for name in sorted(self.others)}
        return vmap(jacrev(outputs), (None, 0))(others, x)  # type: ignore[no-any-return]


def formed(call: Call, slopes: Sequence[Tensor], place: slice = slice(None)) -> Params:
    """The gradients (samples, outputs, ...) of a call's parameters for the samples at `place`.

    `slopes` is what arrives there from each output.
    """
    g = gathered(call, [slope[place] for slope in slopes])
    found: Params = {}
    for name, role in call.roles.items():
        if role == "weight":
            a = patches(call.layer, call.x[place])
            groups = a.shape[1]
            side = g.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)  # (samples, groups, channels, positions)
            product = (a @ side.mT).mT  # one product for all outputs, the faster way round
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
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    for axis, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation), 2):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x.permute(0, 1, 4, 5, 2, 3).reshape(len(x), layer.groups, -1, x.shape[2] * x.shape[3])


def _store(rows: Rows, call: Call, slopes: Sequence[Tensor], slots: dict[str, slice]) -> None:
    """Add a call's gradients to those formed, or keep its factors, from which only a bias is formed."""
    weight = next((name for name in call.roles if name in rows.factors), None)
    if weight is not None:
        a, g = rows.factors[weight]
        a.copy_(patches(call.layer, call.x)[:, 0])
        g.copy_(gathered(call, slopes))
        call = call._replace(roles={name: role for name, role in call.roles.items() if name != weight})
    if not call.roles:
        return
    samples = len(call.x)
    taken = len(slopes) * slopes[0].nbytes // CACHED if call.x.device.type == "cpu" else 1
    step = max(1, samples // max(1, taken))
    for start in range(0, samples, step):
        place = slice(start, start + step)
        for name, gradient in formed(call, slopes, place).items():
            rows.formed[place, :, slots[name]] += gradient.flatten(2)


def _positions(layer: nn.Module, value: Tensor) -> Tensor:
    """(samples, channels, positions) from a linear layer's input or output."""
    if isinstance(layer, nn.Linear):
        return value.reshape(len(value), -1, value.shape[-1]).mT
    return value.flatten(2)


@contextlib.contextmanager
def _standing_in(others: dict[nn.Module, StandIn]) -> Iterator[None]:
    """Let other functions of a layer and its input do what the layers do."""

    def bound(layer: nn.Module, function: StandIn) -> Callable[..., Tensor]:
        return lambda *inputs, **named: function(layer, *inputs, *named.values())

    own = {layer: vars(layer).get("forward") for layer in others}
    for layer, function in others.items():
        vars(layer)["forward"] = bound(layer, function)
    try:
        yield
    finally:
        for layer, forward in own.items():
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward


def _pooled(layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    sides = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    pairs = [[side, side] if isinstance(side, int) else list(side) for side in sides]
    pool: Callable[..., Tensor] = torch.max_pool2d if x.ndim == 3 else _MaxPool.apply
    return pool(x, *pairs, layer.ceil_mode)


class _MaxPool(torch.autograd.Function):
    """Max pooling as PyTorch's, whose forward pass on a CPU is about four times faster where channels are last.

    The maps themselves are not kept: only their shape is needed to pull a gradient back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        last = x.contiguous(memory_format=torch.channels_last)
        y, indices = torch.ops.aten.max_pool2d_with_indices(last, *window)
        ctx.save_for_backward(indices.contiguous())
        ctx.shape, ctx.window = x.shape, window
        return y.contiguous()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        like = slopes[0].new_empty(()).expand(ctx.shape)
        found = torch.ops.aten.max_pool2d_with_indices_backward(slopes[0], like, *ctx.window, *ctx.saved_tensors)
        return found, *(None,) * len(ctx.window)


def _normed(layer: Any, x: Tensor, copies: Params) -> Tensor:
    """What a norm makes of `x` with a weight and a bias for each sample."""
    if isinstance(layer, nn.GroupNorm):  # each sample has groups of its own
        flat = {role: value.flatten() for role, value in copies.items()}
        return F.group_norm(x.reshape(1, -1, *x.shape[2:]), len(x) * layer.num_groups, **flat, eps=layer.eps).view_as(x)
    if isinstance(layer, nn.LayerNorm):
        y = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        shape = len(x), *(1,) * (x.ndim - 1 - len(layer.normalized_shape)), *layer.normalized_shape
    else:
        mean, variance = ("mean", "variance") if isinstance(layer, BatchNorm) else ("running_mean", "running_var")
        y = F.batch_norm(x, getattr(layer, mean), getattr(layer, variance), eps=layer.eps)
        shape = *x.shape[:2], *(1,) * (x.ndim - 2)
    y = y * copies["weight"].view(shape)
    return y + copies["bias"].view(shape) if "bias" in copies else y
