"""What one sample's passage through a network tells: whose parameters are whose, and what they cost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from metabridge.kernels.jacobian import PASSES, Block, Gradients, slopes_at
from metabridge.kernels.layer_calls import Call, formed
from metabridge.kernels.layer_overrides import cached
from metabridge.models.network import Params


class Survey(NamedTuple):
    """What one sample's passage through the net tells."""

    blocks: tuple[Block, ...]
    others: frozenset[str]
    batched: bool  # whether a pass goes back for many outputs
    outputs: int  # gradients taken of a sample: 1 for their sum
    work: int  # multiplications of a forward pass
    graph: int  # bytes that it keeps for the backward pass
    passing: int  # most bytes held beside it on the way forth and back, with what arrives at every layer
    forming: int  # bytes held while the gradients of the layer with most of them are formed
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


def examine(
    gradients: Gradients,
    y: Tensor,
    calls: list[Call],
    pair: Tensor,
    seed: Tensor,
    exact: Mapping[str, Tensor | None],
    outputs: int,
    graph: int,
) -> Survey:
    """Measure every parameter at one sample, whose outputs are `y`, and find those whose gradients are not exact.

    `exact` are those of the `seed`'s sum of the outputs of the first sample of a `pair`. Those that differ are used in
    other ways than by the layers that own them, or by layers that see samples in another number or order. One that no
    layer owns is among them, though its gradient be zero at this sample, unless the outputs do not depend on it: its
    exact gradient is None.
    """
    names = [name for name in gradients.params if name in gradients.names]
    calls = _asked(calls, gradients.names)
    edges = [call.edge for call in calls]
    batched = bool(edges) and outputs > 1 and not cached(y) and _batches(edges, y)
    uses: dict[str, list[Call]] = {name: [] for name in names}
    for call in calls:
        for name in call.roles:
            uses[name].append(call)
    found = _found(gradients, pair, seed)
    used = {name: value for name in names if (value := exact[name]) is not None}
    owned = {name: (found[name], used.get(name, torch.zeros_like(found[name]))) for name in names if name in found}
    others = frozenset([*_apart(owned), *(used.keys() - found.keys())])
    blocks = tuple(_block(name, gradients.params[name], uses[name], name in others) for name in names)
    itemsize = y.element_size()
    kept = sum(call.picks[0].patches.nbytes + call.picks[0].places.nbytes for call in calls if call.picks)
    return Survey(
        blocks,
        others,
        batched,
        outputs,
        sum(block.work for block in blocks),
        graph + kept,
        itemsize * max(_back(calls, outputs, batched), *map(_forth, calls), 0),
        itemsize * max((call.forming(outputs) for call in calls), default=0),
        itemsize,
    )


def _asked(calls: list[Call], names: frozenset[str]) -> list[Call]:
    """The calls that hold some of the parameters, without the others."""
    roles = [{name: role for name, role in call.roles.items() if name in names} for call in calls]
    return [call._replace(roles=own) for call, own in zip(calls, roles) if own]


def _found(gradients: Gradients, pair: Tensor, seed: Tensor) -> Params:
    """The gradients for the first of two samples as layers tell them, as far as all of their calls see both."""
    y, _, calls = gradients.trace(pair)
    calls = _asked(calls, gradients.names)
    found: Params = {}
    slopes = slopes_at([call.edge for call in calls], y, seed.expand_as(y).unsqueeze(0), batched=False) if calls else []
    for call, slope in zip(calls, slopes):
        if slope is not None and len(call.x) == len(pair):
            for name, part in next(formed(call, slope, step=len(pair)))[1].items():
                own = part[0].reshape_as(gradients.params[name])
                found[name] = found[name] + own if name in found else own
    few = {name for call in calls if len(call.x) != len(pair) for name in call.roles}
    return {name: value for name, value in found.items() if name not in few}


def _batches(edges: list[GradientEdge], y: Tensor) -> bool:
    """Whether a pass can go back for several outputs, which some operations do not know."""
    try:
        slopes_at(edges, y, y.detach().unsqueeze(0), batched=True, keep=True)
    except RuntimeError:
        return False
    return True


def _apart(pairs: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Names of those that differ. The numbers are read all at once: on a GPU each reading waits for it."""
    if not pairs:
        return []
    far = torch.stack([(found - exact).abs().max() for found, exact in pairs.values()])
    large = torch.stack([exact.abs().max() for _, exact in pairs.values()])
    return [name for name, close in zip(pairs, (far <= 1e-3 * large).tolist()) if not close]


def _forth(call: Call) -> int:
    """Numbers held while layers are taken together: all maps, and patches as they are and centred."""
    if not call.picks:
        return 0
    picks = call.picks[0]
    maps = len(picks.patches[0]) * picks.weight.shape[1]
    return call.x.numel() + 4 * call.output.numel() + 2 * (picks.patches.numel() + maps)


def _back(calls: list[Call], outputs: int, batched: bool) -> int:
    """Numbers held on the way back: what arrives at every call, and the maps around the largest."""
    arriving = outputs * sum(call.output.numel() for call in calls)
    around = 2 * math.ceil(outputs / PASSES) if batched else 4
    return arriving + max((call.x.numel() + around * call.output.numel() for call in calls), default=0)


def _block(name: str, value: Tensor, uses: list[Call], other: bool) -> Block:
    rows = value.shape[0] if value.ndim else 1
    positions = [call.output.numel() // rows for call in uses]
    block = Block(name, value.numel(), value.numel() * (sum(positions) or 1))
    if other or len(uses) != 1 or value.ndim < 2 or not uses[0].linear or getattr(uses[0].layer, "groups", 1) > 1:
        return block
    return replace(block, inputs=value.numel() // rows, outputs=rows, positions=positions[0])
