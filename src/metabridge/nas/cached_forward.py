"""Forward passes through a stack of cells that reuse the layer results of earlier forward passes.

Each candidate of a search round is the supernet without one operator. Layers that do not depend on this operator have
the same results in the supernet and in the candidate. A `ForwardCache` therefore stores the result of every layer for
every input tensor, and a layer that receives the same tensor again is not run again.

Operators on edges from the same source also share their first step: one ReLU, or one pooling layer of each kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from metabridge.models.architecture import CELLS, EDGES, NODES, ActiveOperators, EdgeOperator, edges_into
from metabridge.models.cells import Cells


class LayerResult(Protocol):
    """The result of running some layers: their output, and whatever else the `LayerRunner` that ran them recorded."""

    @property
    def output(self) -> Tensor:
        """The output of the layers."""


S = TypeVar("S", bound=LayerResult)
R = TypeVar("R")
LayerRunner = Callable[[Tensor], S]  # runs some layers on their input
FirstStep = tuple[int, LayerRunner[S]]  # the index of a source in a cell, and the first layer of operators on it


class ForwardCache:
    """Cache of function results by input tensors. Tensors are compared by identity, not by value.

    Results in `parent` are used too, but new results are not added to it.
    """

    def __init__(self, parent: ForwardCache | None = None) -> None:
        self._parent = parent
        # The inputs are stored with the result: as long as they exist, no other tensor can have their id.
        self._results: dict[tuple[object, ...], tuple[Sequence[Tensor], Any]] = {}

    def __call__(self, function: Callable[..., R], *inputs: Tensor) -> R:
        """Return `function(*inputs)`, computing it only the first time."""
        key = (function, *map(id, inputs))
        for cache in (self, self._parent):
            if cache is not None and key in cache._results:
                return cast(R, cache._results[key][1])
        result = function(*inputs)
        self._results[key] = inputs, result
        return result


@dataclass(frozen=True)
class CellTrace(Generic[S]):
    """The layer results of one cell.

    - `preprocessing`: for each of the two inputs, the results of the ReLU and of the layers after it
    - `first_steps`: the results of the first steps, which operators share
    - `operators`: for each node and each operator on its edges, the first step and the result of the remaining layers
    """

    preprocessing: list[tuple[S, S]]
    first_steps: dict[FirstStep[S], S]
    operators: list[list[tuple[FirstStep[S], S]]]

    @property
    def results(self) -> Iterator[S]:
        """All layer results of the cell."""
        yield from (result for pair in self.preprocessing for result in pair)
        yield from self.first_steps.values()
        yield from (result for node in self.operators for _, result in node)


@dataclass(frozen=True)
class ForwardTrace(Generic[S]):
    """The layer results of a forward pass: the stem, the cells, and the layers between them and the global pooling."""

    stem: S
    cells: list[CellTrace[S]]
    end: S

    @property
    def results(self) -> Iterator[S]:
        """All layer results of the forward pass."""
        yield from (self.stem, self.end)
        for cell in self.cells:
            yield from cell.results


class CachedForward(Generic[S]):
    """Runs a stack of cells layer by layer, and reuses the results in a `ForwardCache`.

    `make_runner` turns a sequence of modules into a function from their input to a `LayerResult`. The ReLU at the start
    of an operator is a separate layer. Only `FactorizedReduce` applies its own ReLU, to an input that is already
    rectified. `wrap_operator` can replace the function that runs the layers of an operator after its first step.
    """

    def __init__(
        self,
        stack: Cells,
        make_runner: Callable[[Sequence[nn.Module]], LayerRunner[S]],
        wrap_operator: Callable[[EdgeOperator, LayerRunner[S]], LayerRunner[S]] = lambda operator, runner: runner,
    ) -> None:
        self._stem, self._end = make_runner(_layers(stack.stem)), make_runner(_layers(stack.end))
        relu = make_runner([nn.ReLU()])
        self._cells = [_CachedCell(cell, make_runner, relu, wrap_operator) for cell in stack.cells]

    def __call__(self, x: Tensor, active: ActiveOperators, cache: ForwardCache) -> ForwardTrace[S]:
        """Run the active operators on `x` and return all layer results."""
        stem = cache(self._stem, x)
        inputs = stem.output, stem.output
        cells = []
        for cell in self._cells:
            trace, output = cell(inputs, active, cache)
            cells.append(trace)
            inputs = inputs[1], output
        return ForwardTrace(stem, cells, cache(self._end, inputs[1]))


class _CachedCell(Generic[S]):
    def __init__(
        self,
        cell: Any,
        make_runner: Callable[[Sequence[nn.Module]], LayerRunner[S]],
        relu: LayerRunner[S],
        wrap_operator: Callable[[EdgeOperator, LayerRunner[S]], LayerRunner[S]],
    ) -> None:
        self._cell_kind = CELLS[bool(cell.reduction)]
        # `before` and `last` are the layers that first process sources 0 and 1.
        self._preprocessing = [(relu, make_runner(_without_relu(module))) for module in (cell.before, cell.last)]
        shared_first_layers: dict[tuple[int, type], LayerRunner[S]] = {}
        self._operators: list[dict[str, tuple[FirstStep[S], LayerRunner[S]]]] = []
        for edge, operators in enumerate(cell.edges):
            source = EDGES[edge][1]  # an edge is a node and a source
            self._operators.append({})
            for name, operator in operators.items():
                layers = _layers(operator)
                first_type = type(layers[0])
                if issubclass(first_type, nn.MaxPool2d | nn.AvgPool2d):
                    first_layer = shared_first_layers.setdefault((source, first_type), make_runner(layers[:1]))
                    remaining_layers = layers[1:]
                elif first_type is nn.Identity:
                    first_layer = shared_first_layers.setdefault((source, first_type), make_runner([]))
                    remaining_layers = layers
                else:
                    first_layer, remaining_layers = relu, _without_relu(operator)
                remaining_runner = wrap_operator((self._cell_kind, edge, name), make_runner(remaining_layers))
                self._operators[edge][name] = (source, first_layer), remaining_runner

    def __call__(
        self, inputs: tuple[Tensor, Tensor], active: ActiveOperators, cache: ForwardCache
    ) -> tuple[CellTrace[S], Tensor]:
        """Return all layer results and the output; `inputs` are the outputs of the two previous cells."""
        trace: CellTrace[S] = CellTrace([], {}, [])
        source_outputs = []
        for (relu, remaining_runner), x in zip(self._preprocessing, inputs):
            rectified = cache(relu, x)
            preprocessed = cache(remaining_runner, rectified.output)
            trace.preprocessing.append((rectified, preprocessed))
            source_outputs.append(preprocessed.output)
        for node in range(NODES):
            results = []
            for edge in edges_into(node):
                for name, (first_step, remaining_runner) in self._operators[edge].items():
                    if name in getattr(active, self._cell_kind)[edge]:
                        source, first_layer = first_step
                        first_result = cache(first_layer, source_outputs[source])
                        trace.first_steps[first_step] = first_result
                        results.append((first_step, cache(remaining_runner, first_result.output)))
            trace.operators.append(results)
            source_outputs.append(cache(_add, *(result.output for _, result in results)))
        return trace, cache(_concatenate, *source_outputs[2:])  # the nodes, without the two inputs


def _layers(module: nn.Module) -> list[nn.Module]:
    return [*module] if isinstance(module, nn.Sequential) else [module]


def _without_relu(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a module after its ReLU, or the whole module if it is a `FactorizedReduce`."""
    return _layers(module)[1:] if isinstance(module, nn.Sequential) else [module]


def _add(*terms: Tensor) -> Tensor:
    return functools.reduce(torch.add, terms)


def _concatenate(*nodes: Tensor) -> Tensor:
    return torch.cat(nodes, 1)
