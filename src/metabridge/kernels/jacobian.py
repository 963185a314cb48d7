"""Gradients of a network's outputs for every sample by itself, layer by layer.

A layer y = Wa, applied at P positions, has for sample i and output o the gradient Σ_p g_iop a_ipᵀ, where g is what
reaches y from the output. A backward pass for each output, on a GPU for many of them, gives g for a whole batch,
since samples do not mix, and no gradient of a weight is asked of it. A norm is given its parameters once for every
sample, and automatic differentiation keeps them apart. A first convolution, its norm and its max pooling are taken
together (`stand_ins`). Parameters of layers that are not known here go through `vmap` of `jacrev`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import jacrev, vmap

from metabridge.errors import InputError
from metabridge.kernels.layer_calls import Call, formed, gathered, patches, windows
from metabridge.kernels.layer_overrides import NORMS, StandIn, cached, normed, picked, pooled, standing_in, window
from metabridge.models.batch_norm import BatchNorm
from metabridge.models.functional_call import shallow_copy
from metabridge.models.network import Params, call_with_params
from metabridge.threads import stream_over_threads

LINEAR = (nn.Linear, nn.Conv2d)
PASSES = 2  # in which all outputs go back on a GPU
SPARSE = 3  # multiplications of a matrix product in the time of one by a patch that is looked up
CACHED = 2**21  # bytes of a layer's gradients that are taken at a time on a CPU: what is copied stays in its cache


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
class _Tracing:
    """What is noted of a forward pass, by hooks and by layers' stand-ins."""

    leaves: Params
    owned: dict[nn.Module, dict[str, str]]  # names of the parameters in each role of a layer
    wanted: frozenset[str]
    calls: list[Call] = field(default_factory=list)

    def record(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs:
            roles = {name: role for role, name in self.owned[layer].items() if name in self.wanted}
            self.calls.append(Call(layer, roles, inputs[0].detach(), output, get_gradient_edge(output)))

    def norm(self, layer: nn.Module, x: Tensor) -> Tensor:
        copies = self._copies(layer, len(x))
        for role, name in self.owned[layer].items():
            if name in self.wanted:
                edge = get_gradient_edge(copies[role])
                self.calls.append(Call(layer, {name: "copies"}, x.detach(), copies[role], edge))
        return normed(layer, x, copies)

    def chain(self, layers: nn.Sequential, x: Tensor) -> Tensor:
        """Take a convolution, its norm and its pool together where they are the net's first layers."""
        own: list[Any] = list(layers)
        convolution, norm, *rest = own
        if x.requires_grad or x.ndim != 4:
            for layer in own:
                x = layer(x)
            return x
        weights, copies = self._copies(convolution, len(x)), self._copies(norm, len(x))
        pool = next(layer for layer in rest if isinstance(layer, nn.MaxPool2d))
        picks = picked(pool, windows(convolution, x), norm, weights, copies)
        named = {self.owned[convolution][role]: value for role, value in weights.items()}
        named |= {self.owned[norm][role]: value for role, value in copies.items()}
        moving = {name: value for name, value in named.items() if name in self.wanted}
        y = picks.largest.requires_grad_().clone()  # a leaf could not be rectified in place
        roles = dict.fromkeys(moving, "copies")
        self.calls.append(Call(convolution, roles, x, y, get_gradient_edge(y), (picks, moving)))
        del rest[rest.index(pool)]  # its first use
        for layer in rest:
            y = layer(y)
        return y

    def _copies(self, layer: nn.Module, samples: int) -> Params:
        values = {role: self.leaves[name] for role, name in self.owned[layer].items()}
        return {role: value.expand(samples, *value.shape) for role, value in values.items()}


def _roles(layer: nn.Module, known: dict[int, str]) -> dict[str, str]:
    """The names of a layer's weight and bias. One that is both is in neither role."""
    found = {
        role: known[id(value)]
        for role, value in layer.named_parameters(recurse=False, remove_duplicate=False)
        if role in ("weight", "bias")
    }
    return found if len({*found.values()}) == len(found) else {}


def _pools_first(layers: nn.Sequential) -> bool:
    """Whether layers are a convolution, a norm of its channels, and a max pool, before which maps may be rectified.

    Rectifying and pooling may change places.
    """
    found: list[Any] = [*layers, None, None, None, None]
    convolution, norm, after, last = found[:4]
    pool = last if type(after) is nn.ReLU else after
    return bool(
        type(convolution) is nn.Conv2d
        and convolution.groups == 1
        and type(norm) in (BatchNorm, nn.BatchNorm2d, nn.GroupNorm)
        and type(pool) is nn.MaxPool2d
        and not pool.return_indices
        and math.prod(window(pool)[1]) >= SPARSE
        and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    )


@dataclass(frozen=True)
class Gradients:
    """The per-sample gradients of `net` at `params` with respect to the parameters `names`."""

    net: nn.Module
    params: Params
    names: frozenset[str]
    summed: bool
    others: frozenset[str] = field(default_factory=frozenset)  # those that only automatic differentiation knows
    batched: bool = False  # whether a pass goes back for many outputs

    def trace(self, x: Tensor) -> tuple[Tensor, Params, list[Call]]:
        """Run `net`, and return its outputs, the parameters they depend on, and where their gradients are found."""
        leaves = {name: value.detach().requires_grad_(name in self.names) for name, value in self.params.items()}
        known = {id(value): name for name, value in self.net.named_parameters()}
        modules = list(self.net.modules())
        owned = {layer: _roles(layer, known) for layer in modules if type(layer) in (*LINEAR, *NORMS)}
        wanted = self.names - self.others
        layers = [layer for layer, roles in owned.items() if wanted.intersection(roles.values())]
        tracing = _Tracing(leaves, owned, wanted)
        others: dict[nn.Module, StandIn] = {layer: tracing.norm for layer in layers if isinstance(layer, NORMS)}
        for layer in modules:
            if type(layer) is nn.MaxPool2d and not layer.return_indices:
                others[layer] = pooled
            elif type(layer) is nn.Sequential and _pools_first(layer) and {*list(layer)[:2]} <= {*layers}:
                others[layer] = tracing.chain
        hooks = [layer.register_forward_hook(tracing.record) for layer in layers if layer not in others]
        try:
            with torch.enable_grad(), standing_in(others):
                y = call_with_params(self.net, leaves, x.clone())  # which it may change
        finally:
            for hook in hooks:
                hook.remove()
        return y, leaves, tracing.calls

    def rows(
        self,
        x: Tensor,
        formed: Sequence[Block],
        factored: Sequence[Block],
        outputs: int,
        chunk: int,
        room: int,
        cores: int = 1,
    ) -> Rows:
        """The gradients for all samples `x`, `chunk` samples at a time on each of some cores.

        On a GPU a layer's are formed for as many samples at a time as `room` bytes hold.
        """
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
        places = [slice(start, start + chunk) for start in range(0, len(x), chunk)]
        cores = min(cores, len(places))

        def fill(share: Sequence[slice]) -> Iterator[None]:
            own = self if cores == 1 else replace(self, net=shallow_copy(self.net))
            for place in share:
                factors = {name: (a[place], g[place]) for name, (a, g) in result.factors.items()}
                own._fill(Rows(result.formed[place], factors), x[place], slots, room)
                yield

        for _ in fill(places) if cores == 1 else stream_over_threads(fill, places, cores):
            pass
        return result

    def _fill(self, rows: Rows, x: Tensor, slots: dict[str, slice], room: int) -> None:
        if self.names - self.others:
            y, _, calls = self.trace(x)
            seeds = torch.ones_like(y).unsqueeze(0)
            if not self.summed:
                seeds = torch.eye(y.shape[1], dtype=y.dtype, device=y.device).unsqueeze(1).repeat(1, len(y), 1)
            for call in calls:
                if len(call.x) != len(x):
                    raise InputError(
                        f"of {len(x)} samples {call.layer} sees {len(call.x)} rows, though it saw one for each at "
                        "first. A kernel needs layers that see every sample."
                    )
            arrived = slopes_at([call.edge for call in calls], y, seeds, self.batched)
            for call in reversed(calls):  # the last are the smallest: what is stored makes room for the first
                slopes = arrived.pop()
                if slopes is not None:
                    _store(rows, call, slopes, slots, room)
        for name, gradient in self._generic(x).items():
            rows.formed[..., slots[name]] = gradient.reshape(*rows.formed.shape[:2], -1)

    def _generic(self, x: Tensor) -> Params:
        if not self.others:
            return {}
        fixed = {name: value.detach() for name, value in self.params.items() if name not in self.others}

        def outputs(params: Params, point: Tensor) -> Tensor:
            y: Tensor = call_with_params(self.net, fixed | params, point.unsqueeze(0).clone())[0]
            return y.sum(0, keepdim=True) if self.summed else y

        others = {name: self.params[name].detach() for name in sorted(self.others)}
        try:
            return vmap(jacrev(outputs), (None, 0))(others, x)  # type: ignore[no-any-return]
        except RuntimeError:  # an operation that vmap does not know
            rows = [jacrev(outputs, chunk_size=1)(others, point) for point in x]
            return {name: torch.stack([row[name] for row in rows]) for name in others}


def slopes_at(
    edges: Sequence[GradientEdge], y: Tensor, seeds: Tensor, batched: bool, keep: bool = False
) -> list[tuple[Tensor, ...] | None]:
    """What arrives at the edges from every seed, in a few passes or in one for each.

    It is none where a layer is used, but not for the outputs. One pass for all would be little faster than two, and
    a convolution's library takes several times the room of what it sends back.
    """
    shares = seeds.chunk(PASSES if batched else len(seeds))
    pull = _together if batched else _alone
    passes = [pull(edges, y, share, keep or share is not shares[-1]) for share in shares]
    return [None if None in own else tuple(itertools.chain(*own)) for own in zip(*passes)]


def _alone(edges: Sequence[GradientEdge], y: Tensor, seeds: Tensor, keep: bool) -> list[tuple[Tensor, ...] | None]:
    slopes = torch.autograd.grad(y, edges, seeds[0], keep, allow_unused=True)
    return [None if slope is None else (slope,) for slope in slopes]


def _together(edges: Sequence[GradientEdge], y: Tensor, seeds: Tensor, keep: bool) -> list[tuple[Tensor, ...] | None]:
    used: list[bool] = []

    def back(seed: Tensor) -> tuple[Tensor, ...]:
        slopes = torch.autograd.grad(y, edges, seed, keep, allow_unused=True)
        used.extend(slope is not None for slope in slopes)
        return tuple(slope for slope in slopes if slope is not None)

    found = iter(vmap(back)(seeds))
    return [next(found).unbind() if own else None for own in used]


def _store(rows: Rows, call: Call, slopes: Sequence[Tensor], slots: dict[str, slice], room: int) -> None:
    """Add a call's gradients to those formed, or keep its factors, from which only a bias is formed."""
    weight = next((name for name in call.roles if name in rows.factors), None)
    if weight is not None:
        a, g = rows.factors[weight]
        a.copy_(patches(call.layer, call.x)[:, 0])
        g.copy_(gathered(call, slopes))
        call = call._replace(roles={name: role for name, role in call.roles.items() if name != weight})
    if not call.roles:
        return
    size, most = call.output.element_size() * call.forming(len(slopes)), room
    if cached(call.x):
        size, most = len(slopes) * slopes[0].nbytes, CACHED
    step = max(1, len(call.x) // max(1, -(-size // most)))
    for place, gradients in formed(call, slopes, step):
        for name, gradient in gradients.items():
            rows.formed[place, :, slots[name]] += gradient.flatten(2)
