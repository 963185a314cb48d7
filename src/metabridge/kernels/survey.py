"""What one sample's passage through a network tells: whose parameters are whose, and what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from metabridge.kernels.jacobian import Block, Call, Gradients, Params, formed, patches


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
    roles = [{name: role for name, role in call.roles.items() if name in gradients.names} for call in calls]
    calls = [call._replace(roles=own) for call, own in zip(calls, roles) if own]
    edges: list[Any] = [call.edge for call in calls]
    exact = torch.autograd.grad(y.sum(), edges + [leaves[name] for name in names], allow_unused=True)
    found: dict[str, Tensor] = {}
    uses: dict[str, list[Call]] = {name: [] for name in names}
    for call, slope in zip(calls, exact):
        for name in call.roles:
            uses[name].append(call)
        if slope is not None:
            for name, gradient in formed(call, [slope]).items():
                found[name] = found.get(name, torch.zeros_like(leaves[name])) + gradient.reshape_as(leaves[name])
    others = frozenset(
        name
        for name, wanted in zip(names, exact[len(calls) :])
        if wanted is not None and not _close(found.get(name), wanted)
    )
    blocks = tuple(_block(name, leaves[name], uses[name], name in others) for name in names)
    itemsize = y.element_size()
    maps = [call.x.numel() + (4 + outputs) * call.output.numel() for call in calls]
    copies = [patches(call.layer, call.x).numel() if call.linear else 0 for call in calls]
    largest = max(map(sum, zip(maps, copies)), default=0)
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


def _block(name: str, value: Tensor, uses: list[Call], other: bool) -> Block:
    rows = value.shape[0] if value.ndim else 1
    positions = [call.output.numel() // rows for call in uses]
    block = Block(name, value.numel(), value.numel() * (sum(positions) or 1))
    if other or len(uses) != 1 or value.ndim < 2 or not uses[0].linear or getattr(uses[0].layer, "groups", 1) > 1:
        return block
    return replace(block, inputs=value.numel() // rows, outputs=rows, positions=positions[0])
