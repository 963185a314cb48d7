"""Gradients of a network's outputs for every sample by itself, layer by layer, and their inner products.

A layer y = Wa, applied at P positions, has for sample i and output o the gradient Σ_p g_iop a_ipᵀ, where
g is what reaches y from the output. One backward pass an output gives g for a whole batch, since samples
do not mix, and no gradient of a weight is asked of it. Inner products of gradients then come either from
the gradients themselves (formed), or from Σ_pq (a_ip·a_jq)(g_iop·g_juq), which never forms them (factored).
Parameters of layers that are not known here go through `vmap` of `jacrev`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from metabridge.models.norm import BatchNorm

Params = dict[str, Tensor]
Outputs = Literal["mean", "sum", "full"]

CHANNELS_LAST = (nn.Linear, nn.LayerNorm)  # the others have their channels on axis 1
NORMS = (BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)
LAYERS = (nn.Linear, nn.Conv2d, *NORMS)


class Call(NamedTuple):
    """A layer's use in a forward pass: its input, and the place in the graph where its output's gradient arrives."""

    module: nn.Module
    x: Tensor
    edge: GradientEdge
    output: Tensor


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


@dataclass(frozen=True)
class Rows:
    """Gradients of some samples: formed ones side by side, (samples, outputs, size), and factors of the others."""

    formed: Tensor
    factors: dict[
        str, tuple[Tensor, Tensor]
    ]  # a (samples, inputs, positions) and g (samples, outputs, channels, positions)


@dataclass(frozen=True)
class Gradients:
    """The per-sample gradients of `net` at `params` with respect to the parameters `names`."""

    net: nn.Module
    params: Params
    names: frozenset[str]
    summed: bool
    others: frozenset[str] = field(default_factory=frozenset)  # those that only automatic differentiation knows

    def trace(self, x: Tensor) -> tuple[Tensor, Params, list[Call]]:
        """Run `net`, and return its outputs, the parameters they depend on, and what each known layer did."""
        leaves = {name: value.detach().requires_grad_(name in self.names) for name, value in self.params.items()}
        calls: list[Call] = []

        def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if inputs and output.requires_grad:
                calls.append(Call(module, inputs[0].detach(), get_gradient_edge(output), output))

        wanted = self.names - self.others
        layers = [layer for layer in self.net.modules() if type(layer) in LAYERS and wanted & self.own(layer).keys()]
        hooks = [layer.register_forward_hook(record) for layer in layers]
        try:
            with torch.enable_grad():
                y = functional_call(self.net, leaves, (x,))
        finally:
            for hook in hooks:
                hook.remove()
        return y, leaves, calls

    def own(self, layer: nn.Module) -> dict[str, str]:
        """The layer's own parameters, by the name that the whole net knows them by: "weight" or "bias"."""
        known = {id(value): name for name, value in self.net.named_parameters()}
        own = layer.named_parameters(recurse=False)
        return {known[id(value)]: role for role, value in own if known[id(value)] in self.names}

    def formed(self, call: Call, slopes: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """The gradients (samples, ...) of a layer's parameters for each output, from those of the layer's outputs."""
        g = [_positions(call.module, slope) for slope in slopes]
        return {
            name: _weight(call, g) if role == "weight" else [slope.sum(-1) for slope in g]
            for name, role in self.own(call.module).items()
            if name not in self.others
        }

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
        ends = [0]
        for block in formed:
            ends.append(ends[-1] + block.size)
        slots = {block.name: slice(*bounds) for block, bounds in zip(formed, itertools.pairwise(ends))}
        for start in range(0, len(x), chunk):
            place = slice(start, start + chunk)
            self._fill(Rows(result.formed[place], _sliced(result.factors, place)), x[place], slots)
        return result

    def _fill(self, rows: Rows, x: Tensor, slots: dict[str, slice]) -> None:
        known = self.names - self.others
        if known:
            y, _, calls = self.trace(x)
            targets = y.sum(1, keepdim=True) if self.summed else y
            pulled = [_pull(targets[:, o], calls, o < targets.shape[1] - 1) for o in range(targets.shape[1])]
            for call, slopes in zip(calls, zip(*pulled)):
                if slopes[0] is None:  # the layer is used, but not for the outputs
                    continue
                for name, gradients in self._place(rows, call, slopes).items():
                    for o, gradient in enumerate(gradients):
                        rows.formed[:, o, slots[name]] += gradient.flatten(1)
        if self.others:
            for name, gradient in self._generic(x).items():
                rows.formed[..., slots[name]] = gradient.reshape(*rows.formed.shape[:2], -1)

    def _place(self, rows: Rows, call: Call, slopes: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Store the factors of a layer that is factored, and return the gradients that must be formed."""
        own = self.own(call.module)
        weight = next((name for name, role in own.items() if role == "weight"), "")
        if weight not in rows.factors:
            return self.formed(call, slopes)
        a, g = rows.factors[weight]
        a.copy_(_patches(call)[:, 0])
        for o, slope in enumerate(slopes):
            g[:, o] = _positions(call.module, slope)
        return {name: list(g.sum(-1).unbind(1)) for name in own if name != weight}

    def _generic(self, x: Tensor) -> Params:
        fixed = {name: value.detach() for name, value in self.params.items() if name not in self.others}

        def outputs(params: Params, point: Tensor) -> Tensor:
            y: Tensor = functional_call(self.net, fixed | params, (point.unsqueeze(0),))[0]
            return y.sum(0, keepdim=True) if self.summed else y

        others = {name: self.params[name].detach() for name in sorted(self.others)}
        return vmap(jacrev(outputs), (None, 0))(others, x)  # type: ignore[no-any-return]


class Survey(NamedTuple):
    """What one sample's passage through the net tells."""

    blocks: tuple[Block, ...]
    others: frozenset[str]
    outputs: int  # gradients taken of a sample: 1 for their sum
    work: int  # multiplications of a forward pass
    graph: int  # bytes that it keeps for the backward pass
    slopes: int  # bytes of the layers' outputs
    largest: int  # bytes of what goes on in the largest layer: its maps, patches and gradients
    itemsize: int


@contextlib.contextmanager
def saved_bytes(params: Params) -> Iterator[list[int]]:
    """List the bytes of whatever a forward pass inside keeps for the backward pass, beside the parameters."""
    fixed = {value.data_ptr() for value in params.values()}
    sizes: dict[int, int] = {}
    result: list[int] = []

    def pack(value: Tensor) -> Tensor:
        if value.data_ptr() not in fixed:
            sizes[value.data_ptr()] = max(value.nbytes, sizes.get(value.data_ptr(), 0))
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield result
    result.extend(sizes.values())


def examine(gradients: Gradients, y: Tensor, leaves: Params, calls: list[Call], outputs: int, graph: int) -> Survey:
    """Measure every parameter, and find those that are used in other ways than by the layers that own them."""
    names = [name for name in gradients.params if name in gradients.names]
    edges: list[Any] = [call.edge for call in calls]
    found = torch.autograd.grad(y.sum(), edges + [leaves[name] for name in names], allow_unused=True)
    formed: dict[str, Tensor] = {}
    uses: dict[str, list[Call]] = {name: [] for name in names}
    for call, slope in zip(calls, found):
        for name in gradients.own(call.module):
            uses[name].append(call)
        if slope is not None:
            for name, (gradient,) in gradients.formed(call, [slope]).items():
                formed[name] = formed.get(name, torch.zeros_like(leaves[name])) + gradient.reshape_as(leaves[name])
    others = frozenset(
        name
        for name, exact in zip(names, found[len(calls) :])
        if exact is not None and not _close(formed.get(name), exact)
    )
    blocks = tuple(_block(name, leaves[name], uses[name], name in others) for name in names)
    itemsize = y.element_size()
    maps = [call.x.numel() + (4 + outputs) * call.output.numel() for call in calls]
    patches = [_patches(call).numel() if _linear(call) else 0 for call in calls]
    largest = max(map(sum, zip(maps, patches)), default=0)
    return Survey(
        blocks,
        others,
        outputs,
        sum(block.work for block in blocks),
        graph,
        itemsize * sum(call.output.numel() for call in calls),
        itemsize * (largest + 2 * outputs * max(block.size for block in blocks)),
        itemsize,
    )


def _close(found: Tensor | None, exact: Tensor) -> bool:
    return found is not None and bool((found - exact).abs().max() <= 1e-3 * exact.abs().max())


def _linear(call: Call) -> bool:
    return isinstance(call.module, nn.Linear | nn.Conv2d)


def _block(name: str, value: Tensor, uses: list[Call], other: bool) -> Block:
    rows = value.shape[0] if value.ndim else 1
    positions = [call.output.numel() // rows for call in uses]
    block = Block(name, value.numel(), value.numel() * (sum(positions) or 1))
    if other or len(uses) != 1 or value.ndim < 2 or not _linear(uses[0]) or getattr(uses[0].module, "groups", 1) > 1:
        return block
    return replace(block, inputs=value.numel() // rows, outputs=rows, positions=positions[0])


def inner(left: Rows, right: Rows, outputs: Outputs, work: int, into: Tensor) -> None:
    """Add to `into` (samples · r, samples · r) the inner products of two sets of gradients.

    r is the number of outputs for "full" and 1 otherwise: the trace over outputs is the product of gradients
    that stand end to end. `work` bounds the numbers held at a time.
    """
    rows = 2 if outputs == "full" else 1
    a, b = (side.formed.reshape(math.prod(side.formed.shape[:rows]), -1) for side in (left, right))
    steps = -(-len(a) // 8) if left is right else len(a)  # what is below the diagonal is left out, as far as blocks go
    for start in range(0, len(a), max(1, steps)):
        first = start if left is right else 0
        into[start : start + steps, first:].addmm_(a[start : start + steps], b[first:].mT)
    r = into.shape[0] // len(left.formed)
    grid = into.unflatten(0, (-1, r)).unflatten(2, (-1, r))
    for name in left.factors:
        _factored(left.factors[name], right.factors[name], work, grid, left is right)


def _factored(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], work: int, grid: Tensor, symmetric: bool
) -> None:
    """Add Σ_pq (a_ip·a_jq)(g_iop·g_juq) to the grid (i, o, j, u), a block of pairs (i, j) at a time."""
    r, positions = grid.shape[1], left[0].shape[-1]
    pairs = max(1, work // (positions**2 * (r**2 + 1) + 2 * r * left[1].shape[2] * positions))
    columns = min(grid.shape[2], pairs)
    lines = min(max(1, pairs // columns), -(-grid.shape[0] // 8) if symmetric else grid.shape[0])
    for i in range(0, grid.shape[0], lines):
        a, g = (factor[i : i + lines] for factor in left)
        for j in range(i if symmetric else 0, grid.shape[2], columns):
            b, h = (factor[j : j + columns] for factor in right)
            near = _gram(a.unsqueeze(1), b.unsqueeze(1))
            product = _gram(*(side.reshape(len(side), r, -1, positions) for side in (g, h))).mul_(near)
            grid[i : i + lines, :, j : j + columns] += (
                product.sum((2, 5)) if positions > 1 else product[:, :, 0, ..., 0]
            )


def _gram(a: Tensor, b: Tensor) -> Tensor:
    """(i, o, p, j, u, q) from a (i, o, c, p) and b (j, u, c, q)."""
    left, right = a.mT.reshape(-1, a.shape[2]), b.mT.reshape(-1, b.shape[2])
    return (left @ right.mT).view(*a.shape[:2], a.shape[3], *b.shape[:2], b.shape[3])


def _pull(target: Tensor, calls: list[Call], keep: bool) -> tuple[Tensor | None, ...]:
    edges = [call.edge for call in calls]
    return torch.autograd.grad(target.sum(), edges, retain_graph=keep, allow_unused=True)


def _weight(call: Call, slopes: list[Tensor]) -> list[Tensor]:
    if isinstance(call.module, NORMS):
        normal = _positions(call.module, _normal(call.module, call.x))
        return [(g * normal).sum(-1) for g in slopes]
    a = _patches(call)
    if a.shape[1] > 1:
        return [g.unflatten(1, (a.shape[1], -1)) @ a.mT for g in slopes]
    product = (a[:, 0] @ torch.cat(slopes, 1).mT).mT  # one product for all outputs, the faster way round
    return list(product.unflatten(1, (len(slopes), -1)).unbind(1))


def _positions(layer: nn.Module, value: Tensor) -> Tensor:
    """(samples, channels, positions) from a layer's input or output, which has its channels last or first."""
    if isinstance(layer, CHANNELS_LAST):
        channels = layer.normalized_shape if isinstance(layer, nn.LayerNorm) else value.shape[-1:]
        return value.reshape(len(value), -1, math.prod(channels)).mT
    return value.reshape(*value.shape[:2], -1)


def _patches(call: Call) -> Tensor:
    """What a linear layer multiplies by its weights: (samples, groups, inputs, positions)."""
    layer = call.module
    if not isinstance(layer, nn.Conv2d):
        return _positions(layer, call.x).unsqueeze(1)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(call.x, layer._reversed_padding_repeated_twice, mode=mode)
    size, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    patches = F.unfold(x, size, dilation=dilation, stride=stride)
    return patches.reshape(len(patches), layer.groups, -1, patches.shape[-1])


def _normal(layer: Any, x: Tensor) -> Tensor:
    """What a norm multiplies by its weights."""
    if isinstance(layer, BatchNorm):
        return F.batch_norm(x, layer.mean, layer.variance, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)


def _sliced(factors: dict[str, tuple[Tensor, Tensor]], place: slice) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (a[place], g[place]) for name, (a, g) in factors.items()}
