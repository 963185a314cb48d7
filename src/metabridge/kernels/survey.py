"""What one sample's passage through a network tells: whose parameters are whose, and what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from metabridge.kernels.jacobian import Block, Call, Gradients, formed, patches
from metabridge.models.network import Params


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


def examine(gradients: Gradients, y: Tensor, exact: Params, calls: list[Call], outputs: int, graph: int) -> Survey:
    """Measure every parameter, and find those whose gradients are not the `exact` ones of the summed outputs.

    They are used in other ways than by the layers that own them.
    """
    names = [name for name in gradients.params if name in gradients.names]
    roles = [{name: role for name, role in call.roles.items() if name in gradients.names} for call in calls]
    calls = [call._replace(roles=own) for call, own in zip(calls, roles) if own]
    edges = [call.edge for call in calls]
    slopes = torch.autograd.grad(y.sum(), edges, allow_unused=True) if edges else ()
    found: dict[str, Tensor] = {}
    uses: dict[str, list[Call]] = {name: [] for name in names}
    for call, slope in zip(calls, slopes):
        for name in call.roles:
            uses[name].append(call)
        if slope is not None:
            for name, gradient in formed(call, [slope]).items():
                found[name] = found.get(name, torch.zeros_like(exact[name])) + gradient.reshape_as(exact[name])
    others = frozenset(name for name in names if not _close(found.get(name), exact[name]))
    blocks = tuple(_block(name, exact[name], uses[name], name in others) for name in names)
    itemsize = y.element_size()
    largest = max((_passing(call, outputs) for call in calls), default=0)
    kept = sum(call.picks[0].patches.nbytes + call.picks[0].places.nbytes for call in calls if call.picks)
    return Survey(
        blocks,
        others,
        outputs,
        sum(block.work for block in blocks),
        graph + kept,
        itemsize * sum(call.output.numel() for call in calls),
        itemsize * (largest + 2 * outputs * max(block.size for block in blocks)),
        itemsize,
    )


def _close(found: Tensor | None, exact: Tensor) -> bool:
    difference = exact if found is None else found - exact
    return bool(difference.abs().max() <= 1e-3 * exact.abs().max())


def _passing(call: Call, outputs: int) -> int:
    """Numbers around a call: its maps, what arrives there, and its patches."""
    size = call.x.numel() + (4 + outputs) * call.output.numel()
    if call.picks:  # all maps, and patches as they are and centred
        picks = call.picks[0]
        return size + 2 * picks.patches.numel() + 2 * len(picks.patches[0]) * picks.weight.shape[1]
    return size + (patches(call.layer, call.x).numel() if call.linear else 0)


def _block(name: str, value: Tensor, uses: list[Call], other: bool) -> Block:
    rows = value.shape[0] if value.ndim else 1
    positions = [call.output.numel() // rows for call in uses]
    block = Block(name, value.numel(), value.numel() * (sum(positions) or 1))
    if other or len(uses) != 1 or value.ndim < 2 or not uses[0].linear or getattr(uses[0].layer, "groups", 1) > 1:
        return block
    return replace(block, inputs=value.numel() // rows, outputs=rows, positions=positions[0])
