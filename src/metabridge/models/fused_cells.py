"""Stacks of cells in training on a GPU, in few passes over memory: what `Cells` computes, by the kernels of `fused`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, cast

import torch
from torch import Tensor, nn

from metabridge.models import cell_triton_layers, fused_layers
from metabridge.models.architecture import NODES, Edges
from metabridge.models.batch_norm import BatchNorm
from metabridge.models.cells import Cell, Cells, Halving
from metabridge.models.drop_path import DropPath

P = ParamSpec("P")


def features(stack: Cells, x: Tensor) -> Tensor:
    """Map images to features (points, dimension)."""
    layers: list[Any] = list(stack.stem)
    convolution, norm = layers
    before = last = _Source(_rectified(norm, convolution(x)), rectified=True)
    nodes: list[_Source] = []
    for cell, active in stack.parts():
        if nodes:
            before, last = last, _Source(cell_triton_layers.joined(*(node.x for node in nodes)), rectified=True)
        nodes = _nodes(cell, before, last, active)
    return torch.cat([node.x.mean((-2, -1)) for node in nodes], 1)


class _Source:
    """A map that several take. Each hands it on to the next, which is how `fused` adds up its gradients."""

    def __init__(self, x: Tensor, *, rectified: bool = False) -> None:
        self.x, self.rectified = x, rectified

    def taken(
        self, by: Callable[Concatenate[Tensor, P], tuple[Tensor, Tensor]], *args: P.args, **options: P.kwargs
    ) -> Tensor:
        y, self.x = by(self.x, *args, **options)
        return y


def _nodes(cell: Cell, before: _Source, last: _Source, active: Edges) -> list[_Source]:
    sources = [_Source(_added(None, entry, source)) for entry, source in ((cell.before, before), (cell.last, last))]
    for node in range(NODES):
        arriving = [(operator, sources[source]) for operator, source in cell.arriving(node, active)]
        skipped = [source.x for operator, source in arriving if isinstance(operator, nn.Identity)]
        total = functools.reduce(torch.add, skipped) if skipped else None
        for operator, source in arriving:
            if not isinstance(operator, nn.Identity):
                total = _added(total, operator, source, cell.drop)
        assert total is not None  # as something is active
        sources.append(_Source(total))
    return sources[2:]


def _added(total: Tensor | None, operator: nn.Module, source: _Source, drop: nn.Module | None = None) -> Tensor:
    """What a node has received, with what now arrives through an operator."""
    if isinstance(operator, Halving):
        x, _ = cell_triton_layers.pointwise(source.taken(cell_triton_layers.halved), operator.both())
        norm: Any = operator.norm
    else:
        layers = list(cast(nn.Sequential, operator))
        norm = layers[-1]
        for layer, after in itertools.pairwise(layers):
            if not (isinstance(layer, nn.ReLU) and (source.rectified or _is_depthwise(after))):
                source = _Source(_made(layer, source), rectified=isinstance(layer, BatchNorm))
        x = source.x
    factor = drop.factor(x) if isinstance(drop, DropPath) else None
    return fused_layers.added(total, x, norm.weight, norm.bias, norm.eps, factor)


def _made(layer: nn.Module, source: _Source) -> Tensor:
    """What a layer makes of a map, with the rectifier after a norm and that before a depthwise convolution."""
    match layer:
        case nn.ReLU():
            return source.taken(cell_triton_layers.positive)
        case BatchNorm():
            return _rectified(layer, source.x)
        case nn.MaxPool2d():
            return source.taken(cell_triton_layers.max_pooled, cast(int, layer.stride))
        case nn.AvgPool2d():
            return source.taken(cell_triton_layers.mean_pooled, cast(int, layer.stride))
        case nn.Conv2d(kernel_size=(1, 1)):
            return source.taken(cell_triton_layers.pointwise, layer.weight)
        case nn.Conv2d() if _is_depthwise(layer):
            return source.taken(cell_triton_layers.depthwise, layer.weight, layer.stride[0], layer.dilation[0])
        case _:
            return layer(source.x)  # type: ignore[no-any-return]


def _rectified(norm: BatchNorm, x: Tensor) -> Tensor:
    assert norm.weight is not None  # cells are built with both
    assert norm.bias is not None
    return fused_layers.rectified(x, norm.weight, norm.bias, norm.eps, 0.0)


def _is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.groups > 1
