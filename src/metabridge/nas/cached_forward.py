"""Forward passes through a stack of cells that reuse the layers computed in earlier passes.

The candidates of a search round are one supernet, each without one operator. Everything that does not depend on this
operator has the same value in the supernet and in the candidate. A `ForwardCache` therefore stores the result of
every layer for every input tensor, and a layer that receives the same tensor again is not run again.

Operators on edges from the same source also share their first step: one ReLU, and one pooling of each kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from metabridge.models.architecture import CELLS, EDGES, NODES, ActiveOperators, EdgeOperator, edges_of
from metabridge.models.cells import Cells


class LayerResult(Protocol):
    """The result of running some layers: their output, and anything else that the caller's runner records."""

    @property
    def output(self) -> Tensor:
        """The output of the layers."""


S = TypeVar("S", bound=LayerResult)
R = TypeVar("R")
LayerRunner = Callable[[Tensor], S]
FirstStep = tuple[int, LayerRunner[S]]  # the source in a cell, and the first layer that operators apply to it


class ForwardCache:
    """Results of functions by their input tensors. Tensors are compared by identity, not by value.

    With a `parent`, results that are stored there are used too, but new ones are not added to it.
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
    """The layer results of one cell, in order of computation.

    - `preprocessing`: for each of the two inputs, the ReLU and the layers after it
    - `first_steps`: the first step of each kind from each source, shared by the operators
    - `operators`: for each node, the rest of every operator on its edges, with the first step that it follows
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
    """The layer results of a whole forward pass: the stem, the cells, and the layers before the global pooling."""

    stem: S
    cells: list[CellTrace[S]]
    end: S

    @property
    def results(self) -> Iterator[S]:
        """All layer results of the pass."""
        yield from (self.stem, self.end)
        for cell in self.cells:
            yield from cell.results


class CachedForward(Generic[S]):
    """Runs a stack of cells layer by layer, taking results from a `ForwardCache` where it has them.

    `runner` turns a sequence of modules into a function from their input to a `LayerResult`. The ReLU at the start of
    an operator is a separate layer. A `Halving` contains its ReLU, but its input is already rectified. `wrap_operator`
    can replace the function of the last layers of each operator.
    """

    def __init__(
        self,
        stack: Cells,
        runner: Callable[[Sequence[nn.Module]], LayerRunner[S]],
        wrap_operator: Callable[[EdgeOperator, LayerRunner[S]], LayerRunner[S]] = lambda operator, layer: layer,
    ) -> None:
        self._stem, self._end = runner(_layers(stack.stem)), runner(_layers(stack.end))
        relu = runner([nn.ReLU()])
        self._cells = [_CachedCell(cell, runner, relu, wrap_operator) for cell in stack.cells]

    def __call__(self, x: Tensor, active: ActiveOperators, cache: ForwardCache) -> ForwardTrace[S]:
        """Run the active operators on `x` and return all layer results."""
        stem = cache(self._stem, x)
        before = last = stem.output
        cells = []
        for cell in self._cells:
            trace, output = cell(before, last, active, cache)
            cells.append(trace)
            before, last = last, output
        return ForwardTrace(stem, cells, cache(self._end, last))


class _CachedCell(Generic[S]):
    def __init__(
        self,
        cell: Any,
        runner: Callable[[Sequence[nn.Module]], LayerRunner[S]],
        relu: LayerRunner[S],
        wrap_operator: Callable[[EdgeOperator, LayerRunner[S]], LayerRunner[S]],
    ) -> None:
        self._kind = CELLS[bool(cell.reduction)]
        self._preprocessing = [(relu, runner(_without_relu(module))) for module in (cell.before, cell.last)]
        first_layers: dict[tuple[int, type], LayerRunner[S]] = {}
        self._operators: list[dict[str, tuple[FirstStep[S], LayerRunner[S]]]] = []
        for edge, operators in enumerate(cell.edges):
            source = EDGES[edge][1]
            self._operators.append({})
            for name, operator in operators.items():
                layers = _layers(operator)
                kind = type(layers[0])
                if issubclass(kind, nn.MaxPool2d | nn.AvgPool2d):
                    first, rest = first_layers.setdefault((source, kind), runner(layers[:1])), layers[1:]
                elif kind is nn.Identity:
                    first, rest = first_layers.setdefault((source, kind), runner([])), layers
                else:
                    first, rest = relu, _without_relu(operator)
                last_layers = wrap_operator((self._kind, edge, name), runner(rest))
                self._operators[edge][name] = (source, first), last_layers

    def __call__(
        self, before: Tensor, last: Tensor, active: ActiveOperators, cache: ForwardCache
    ) -> tuple[CellTrace[S], Tensor]:
        trace: CellTrace[S] = CellTrace([], {}, [])
        states = []
        for (relu, layer), x in zip(self._preprocessing, (before, last)):
            rectified = cache(relu, x)
            trace.preprocessing.append((rectified, cache(layer, rectified.output)))
            states.append(trace.preprocessing[-1][1].output)
        for node in range(NODES):
            results = []
            for edge in edges_of(node):
                for name, (first_step, layer) in self._operators[edge].items():
                    if name in getattr(active, self._kind)[edge]:
                        source, first_layer = first_step
                        first = trace.first_steps.setdefault(first_step, cache(first_layer, states[source]))
                        results.append((first_step, cache(layer, first.output)))
            trace.operators.append(results)
            states.append(cache(_add, *(result.output for _, result in results)))
        return trace, cache(_concatenate, *states[2:])


def _layers(module: nn.Module) -> list[nn.Module]:
    return [*module] if isinstance(module, nn.Sequential) else [module]


def _without_relu(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a module after its ReLU. A `Halving`, whose ReLU is inside it, stays in one piece."""
    return _layers(module)[1:] if isinstance(module, nn.Sequential) else [module]


def _add(*terms: Tensor) -> Tensor:
    return functools.reduce(torch.add, terms)


def _concatenate(*nodes: Tensor) -> Tensor:
    return torch.cat(nodes, 1)
