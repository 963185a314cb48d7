"""The forward pass of `Cells` in training on a GPU, with the layers of `cell_triton_layers` and `fused_layers`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, cast

import torch
from torch import Tensor, nn

from metabridge.models import cell_triton_layers, fused_layers
from metabridge.models.architecture import NODES, EdgeSets
from metabridge.models.batch_norm import BatchNorm
from metabridge.models.cells import Cell, Cells, Halving
from metabridge.models.drop_path import DropPath

P = ParamSpec("P")


def features(stack: Cells, x: Tensor) -> Tensor:
    """Return the features of images, of shape (points, dimension)."""
    layers: list[Any] = list(stack.stem)
    convolution, norm = layers
    before = last = _Source(_norm_relu(norm, convolution(x)), rectified=True)
    nodes: list[_Source] = []
    for cell, active in stack.cells_with_operators():
        if nodes:
            before, last = last, _Source(cell_triton_layers.relu_concat(*(node.x for node in nodes)), rectified=True)
        nodes = _nodes(cell, before, last, active)
    return torch.cat([node.x.mean((-2, -1)) for node in nodes], 1)


class _Source:
    """A map that several layers read, and whether it is already rectified.

    Each layer returns the map for the next reader, which adds up its gradients inside the kernels.
    """

    def __init__(self, x: Tensor, *, rectified: bool = False) -> None:
        self.x, self.rectified = x, rectified

    def apply(
        self, layer: Callable[Concatenate[Tensor, P], tuple[Tensor, Tensor]], *args: P.args, **options: P.kwargs
    ) -> Tensor:
        y, self.x = layer(self.x, *args, **options)
        return y


def _nodes(cell: Cell, before: _Source, last: _Source, active: EdgeSets) -> list[_Source]:
    sources = [_Source(_add_term(None, entry, source)) for entry, source in ((cell.before, before), (cell.last, last))]
    for node in range(NODES):
        operators = [(operator, sources[source]) for operator, source in cell.operators_into(node, active)]
        identities = [source.x for operator, source in operators if isinstance(operator, nn.Identity)]
        total = functools.reduce(torch.add, identities) if identities else None
        for operator, source in operators:
            if not isinstance(operator, nn.Identity):
                total = _add_term(total, operator, source, cell.drop)
        assert total is not None  # every node has an active operator
        sources.append(_Source(total))
    return sources[2:]


def _add_term(total: Tensor | None, operator: nn.Module, source: _Source, drop: nn.Module | None = None) -> Tensor:
    """Return the sum of a node after adding the output of an operator."""
    if isinstance(operator, Halving):
        x, _ = cell_triton_layers.conv_1x1(source.apply(cell_triton_layers.relu_even_odd), operator.joint_weight())
        norm: Any = operator.norm
    else:
        layers = list(cast(nn.Sequential, operator))
        norm = layers[-1]
        for layer, after in itertools.pairwise(layers):
            if not (isinstance(layer, nn.ReLU) and (source.rectified or _is_depthwise(after))):
                source = _Source(_apply_layer(layer, source), rectified=isinstance(layer, BatchNorm))
        x = source.x
    factor = drop.factor(x) if isinstance(drop, DropPath) else None
    return fused_layers.add_norm(total, x, norm.weight, norm.bias, norm.eps, factor)


def _apply_layer(layer: nn.Module, source: _Source) -> Tensor:
    """Return the output of a layer, including the ReLU after a norm or before a depthwise convolution."""
    match layer:
        case nn.ReLU():
            return source.apply(cell_triton_layers.relu)
        case BatchNorm():
            return _norm_relu(layer, source.x)
        case nn.MaxPool2d():
            return source.apply(cell_triton_layers.max_pool, cast(int, layer.stride))
        case nn.AvgPool2d():
            return source.apply(cell_triton_layers.mean_pool, cast(int, layer.stride))
        case nn.Conv2d(kernel_size=(1, 1)):
            return source.apply(cell_triton_layers.conv_1x1, layer.weight)
        case nn.Conv2d() if _is_depthwise(layer):
            stride, dilation = layer.stride[0], layer.dilation[0]
            return source.apply(cell_triton_layers.relu_depthwise_conv, layer.weight, stride, dilation)
        case _:
            return layer(source.x)  # type: ignore[no-any-return]


def _norm_relu(norm: BatchNorm, x: Tensor) -> Tensor:
    assert norm.weight is not None  # the norms of cells have both
    assert norm.bias is not None
    return fused_layers.norm_leaky_relu(x, norm.weight, norm.bias, norm.eps, 0.0)


def _is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.groups > 1
