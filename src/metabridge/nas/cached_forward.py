"""A way through a stack of cells on which nothing is computed twice.

The networks of a round are one supernet, each without one operator. What such a network computes before the place of
that operator, or beside it, the supernet has computed already. So whoever walks through the stack keeps what every
layer made of every tensor and looks there first: a layer that is given the very same tensor is not run again.

Operators on edges from the same source share their first step as well: one ReLU, and one pooling of each kind.
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


class Step(Protocol):
    """What a walker notes of layers that were run: what they made, and whatever else it wants."""

    @property
    def output(self) -> Tensor:
        """What the layers made of their input."""


S = TypeVar("S", bound=Step)
R = TypeVar("R")
Layer = Callable[[Tensor], S]
Place = tuple[int, Layer[S]]  # a source of a cell, and the first step from there


class Memory:
    """What functions made of tensors. Tensors are the same if they are one object, whatever their values."""

    def __init__(self, known: Memory | None = None) -> None:
        self._known = known
        self._found: dict[tuple[object, ...], tuple[Sequence[Tensor], Any]] = {}  # with inputs, so that ids stay theirs

    def __call__(self, function: Callable[..., R], *inputs: Tensor) -> R:
        """Return what the function makes of the inputs, which it is run for once."""
        key = (function, *map(id, inputs))
        for memory in (self, self._known):
            if memory is not None and key in memory._found:
                return cast(R, memory._found[key][1])
        made = function(*inputs)
        self._found[key] = inputs, made
        return made


@dataclass(frozen=True)
class CellWalk(Generic[S]):
    """The steps through a cell: from its two inputs, from a source on, and from there to each of the nodes."""

    entries: list[tuple[S, S]]
    begun: dict[Place[S], S]
    arriving: list[list[tuple[Place[S], S]]]

    @property
    def steps(self) -> Iterator[S]:
        """All of them."""
        yield from (step for entry in self.entries for step in entry)
        yield from self.begun.values()
        yield from (step for node in self.arriving for _, step in node)


@dataclass(frozen=True)
class Walk(Generic[S]):
    """The steps through a network: its stem, its cells, and what stands before the pooling."""

    stem: S
    cells: list[CellWalk[S]]
    end: S

    @property
    def steps(self) -> Iterator[S]:
        """All of them."""
        yield from (self.stem, self.end)
        for cell in self.cells:
            yield from cell.steps


class Walker(Generic[S]):
    """Walks through a stack of cells, of which `run` says how some layers are run one after the other.

    A ReLU is taken off the halvings that begin with one, so `run` is given a halving for maps that are rectified.
    `sent` changes how an operator's last layers are run, given how they would be.
    """

    def __init__(
        self,
        stack: Cells,
        run: Callable[[Sequence[nn.Module]], Layer[S]],
        sent: Callable[[EdgeOperator, Layer[S]], Layer[S]] = lambda choice, layer: layer,
    ) -> None:
        self._stem, self._end = run(_layers(stack.stem)), run(_layers(stack.end))
        relu = run([nn.ReLU()])
        self._cells = [_Cell(cell, run, relu, sent) for cell in stack.cells]

    def __call__(self, x: Tensor, active: ActiveOperators, memory: Memory) -> Walk[S]:
        """Walk through what is active."""
        stem = memory(self._stem, x)
        before = last = stem.output
        cells = []
        for cell in self._cells:
            walk, output = cell(before, last, active, memory)
            cells.append(walk)
            before, last = last, output
        return Walk(stem, cells, memory(self._end, last))


class _Cell(Generic[S]):
    def __init__(
        self,
        cell: Any,
        run: Callable[[Sequence[nn.Module]], Layer[S]],
        relu: Layer[S],
        sent: Callable[[EdgeOperator, Layer[S]], Layer[S]],
    ) -> None:
        self._kind = CELLS[bool(cell.reduction)]
        self._entries = [(relu, run(_rectified(entry))) for entry in (cell.before, cell.last)]
        firsts: dict[tuple[int, type], Layer[S]] = {}
        self._operators: list[dict[str, tuple[Place[S], Layer[S]]]] = []
        for edge, operators in enumerate(cell.edges):
            source = EDGES[edge][1]
            self._operators.append({})
            for name, operator in operators.items():
                layers = _layers(operator)
                kind = type(layers[0])
                if issubclass(kind, nn.MaxPool2d | nn.AvgPool2d):
                    first, rest = firsts.setdefault((source, kind), run(layers[:1])), layers[1:]
                elif kind is nn.Identity:
                    first, rest = firsts.setdefault((source, kind), run([])), layers
                else:
                    first, rest = relu, _rectified(operator)
                self._operators[edge][name] = (source, first), sent((self._kind, edge, name), run(rest))

    def __call__(
        self, before: Tensor, last: Tensor, active: ActiveOperators, memory: Memory
    ) -> tuple[CellWalk[S], Tensor]:
        walk: CellWalk[S] = CellWalk([], {}, [])
        states = []
        for (relu, layer), x in zip(self._entries, (before, last)):
            first = memory(relu, x)
            walk.entries.append((first, memory(layer, first.output)))
            states.append(walk.entries[-1][1].output)
        for node in range(NODES):
            arriving = []
            for edge in edges_of(node):
                for name, (place, layer) in self._operators[edge].items():
                    if name in getattr(active, self._kind)[edge]:
                        source, begin = place
                        first = walk.begun.setdefault(place, memory(begin, states[source]))
                        arriving.append((place, memory(layer, first.output)))
            walk.arriving.append(arriving)
            states.append(memory(_total, *(step.output for _, step in arriving)))
        return walk, memory(_joined, *states[2:])


def _layers(module: nn.Module) -> list[nn.Module]:
    return [*module] if isinstance(module, nn.Sequential) else [module]


def _rectified(module: nn.Module) -> list[nn.Module]:
    """The layers of what begins with a ReLU, without it; a halving stays in one piece."""
    return _layers(module)[1:] if isinstance(module, nn.Sequential) else [module]


def _total(*arriving: Tensor) -> Tensor:
    return functools.reduce(torch.add, arriving)


def _joined(*nodes: Tensor) -> Tensor:
    return torch.cat(nodes, 1)
