"""Training forward pass of `Cells` on a GPU, with the fused layers of `cell_triton_layers` and `fused_layers`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, cast

import torch
from torch import Tensor, nn

from metabridge.models import cell_triton_layers, fused_layers
from metabridge.models.architecture import NODES, OperatorSets
from metabridge.models.batch_norm import BatchNorm
from metabridge.models.cells import Cell, Cells, FactorizedReduce
from metabridge.models.drop_path import DropPath

P = ParamSpec("P")


def features(net: Cells, x: Tensor) -> Tensor:
    """Return the features of n images, of shape (n, dimension)."""
    layers: list[Any] = list(net.stem)
    convolution, norm = layers
    source_0 = source_1 = _Source(_norm_relu(norm, convolution(x)), relu_applied=True)
    nodes: list[_Source] = []
    for cell, active in net.cells_with_operators():
        if nodes:
            output = cell_triton_layers.relu_concat(*(node.x for node in nodes))
            source_0, source_1 = source_1, _Source(output, relu_applied=True)
        nodes = _compute_nodes(cell, source_0, source_1, active)
    return torch.cat([node.x.mean((-2, -1)) for node in nodes], 1)


class _Source:
    """A feature map that several layers read; `relu_applied` says whether ReLU has already been applied to it.

    Each layer returns its output and the map, and the next layer reads the returned map. The backward kernels can
    therefore add up the gradients with respect to the map (see `cell_triton_layers`).
    """

    def __init__(self, x: Tensor, *, relu_applied: bool = False) -> None:
        self.x, self.relu_applied = x, relu_applied

    def apply(
        self, layer: Callable[Concatenate[Tensor, P], tuple[Tensor, Tensor]], *args: P.args, **options: P.kwargs
    ) -> Tensor:
        """Apply a layer to the map and return the layer's output."""
        y, self.x = layer(self.x, *args, **options)
        return y


def _compute_nodes(cell: Cell, source_0: _Source, source_1: _Source, active: OperatorSets) -> list[_Source]:
    first_layers = (cell.before, source_0), (cell.last, source_1)
    sources = [_Source(_add_term(None, layer, source)) for layer, source in first_layers]
    for node in range(NODES):
        operators_and_sources = [(operator, sources[index]) for operator, index in cell.operators_into(node, active)]
        identity_terms = [source.x for operator, source in operators_and_sources if isinstance(operator, nn.Identity)]
        total = functools.reduce(torch.add, identity_terms) if identity_terms else None
        for operator, source in operators_and_sources:
            if not isinstance(operator, nn.Identity):
                total = _add_term(total, operator, source, cell.drop)
        assert total is not None  # every node has an active operator
        sources.append(_Source(total))
    return sources[2:]


def _add_term(total: Tensor | None, operator: nn.Module, source: _Source, drop: nn.Module | None = None) -> Tensor:
    """Add the output of an operator, after drop path, to the sum of a node (None if empty) and return the new sum."""
    if isinstance(operator, FactorizedReduce):
        x, _ = cell_triton_layers.conv_1x1(source.apply(cell_triton_layers.relu_even_odd), operator.joint_weight())
        norm: Any = operator.norm
    else:
        layers = list(cast(nn.Sequential, operator))
        norm = layers[-1]
        for layer, next_layer in itertools.pairwise(layers):
            # skip a ReLU that is already applied, or that the kernel of the next, depthwise convolution includes
            if not (isinstance(layer, nn.ReLU) and (source.relu_applied or _is_depthwise(next_layer))):
                source = _Source(_apply_layer(layer, source), relu_applied=isinstance(layer, BatchNorm))
        x = source.x
    factor = drop.factor(x) if isinstance(drop, DropPath) else None
    return fused_layers.add_norm(total, x, norm.weight, norm.bias, norm.eps, factor)


def _apply_layer(layer: nn.Module, source: _Source) -> Tensor:
    """Return the output of a layer, with a ReLU after batch norms and before depthwise convolutions."""
    match layer:
        case nn.ReLU():
            return source.apply(cell_triton_layers.relu)
        case BatchNorm():
            return _norm_relu(layer, source.x)
        case nn.MaxPool2d():
            return source.apply(cell_triton_layers.max_pool, cast(int, layer.stride))
        case nn.AvgPool2d():
            return source.apply(cell_triton_layers.avg_pool, cast(int, layer.stride))
        case nn.Conv2d(kernel_size=(1, 1)):
            return source.apply(cell_triton_layers.conv_1x1, layer.weight)
        case nn.Conv2d() if _is_depthwise(layer):
            stride, dilation = layer.stride[0], layer.dilation[0]
            return source.apply(cell_triton_layers.relu_depthwise_conv, layer.weight, stride, dilation)
        case _:
            return layer(source.x)  # type: ignore[no-any-return]


def _norm_relu(norm: BatchNorm, x: Tensor) -> Tensor:
    assert norm.weight is not None  # batch norms of cells have weight and bias
    assert norm.bias is not None
    return fused_layers.norm_leaky_relu(x, norm.weight, norm.bias, norm.eps, 0.0)


def _is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.groups > 1
