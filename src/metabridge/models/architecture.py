"""The space of cells (B §6.1): which operators may stand on which edges, as plain data.

A network is a stack of two kinds of cells. A cell takes the outputs of the two cells before it, sources 0 and 1, to
its three nodes, which are sources 2, 3 and 4 for the nodes after them. A node adds up what arrives on its edges, one
from every source before it: 2 + 3 + 4 = 9 edges. The cell's output is its nodes side by side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from metabridge.errors import InputError
from metabridge.files import read_regular_file, write_atomically

OPERATORS = (
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip",
    "conv_1x5_5x1",
    "conv_3x3",
    "sep_conv_3x3",
    "dil_conv_3x3",
)
NODES = 3
EDGES = tuple((node, source) for node in range(NODES) for source in range(node + 2))
SOURCES = ("c_{k-2}", "c_{k-1}", *map(str, range(NODES - 1)))  # their names
INPUTS_PER_NODE = 2  # edges that a node of an architecture keeps

CellKind = Literal["normal", "reduction"]
CELLS: tuple[CellKind, ...] = get_args(CellKind)
EdgeOperator: TypeAlias = tuple[CellKind, int, str]  # cell, index of the edge in EDGES, operator
Cell: TypeAlias = tuple[tuple[tuple[int, str], ...], ...]  # for each node its pairs (source, operator)
Edges: TypeAlias = tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Architecture:
    """A normal and a reduction cell: for each node two pairs (source, operator), in the order of their sources.

    >>> cell = [[[0, "conv_3x3"], [1, "skip"]], [[0, "skip"], [2, "skip"]], [[1, "max_pool_3x3"], [3, "skip"]]]
    >>> architecture = Architecture.from_dict({"normal": cell, "reduction": cell})
    >>> print(architecture)
    normal     0: conv_3x3(c_{k-2}) + skip(c_{k-1})
               1: skip(c_{k-2}) + skip(0)
               2: max_pool_3x3(c_{k-1}) + skip(1)
    reduction  0: conv_3x3(c_{k-2}) + skip(c_{k-1})
               1: skip(c_{k-2}) + skip(0)
               2: max_pool_3x3(c_{k-1}) + skip(1)
    """

    normal: Cell
    reduction: Cell

    def __post_init__(self) -> None:
        for kind in CELLS:
            _check_cell(kind, getattr(self, kind))

    @classmethod
    def from_dict(cls, data: object) -> Architecture:
        """Return the architecture of what JSON holds: nested lists of pairs under "normal" and "reduction"."""
        if not isinstance(data, Mapping) or set(data) != set(CELLS):
            found = ", ".join(map(repr, data)) or "none" if isinstance(data, Mapping) else type(data).__name__
            raise InputError(f"an architecture has a 'normal' and a 'reduction' cell and nothing else, not {found}.")
        return cls(*(_read_cell(kind, data[kind]) for kind in CELLS))

    @classmethod
    def from_json(cls, text: str) -> Architecture:
        """Return the architecture that `to_json` wrote."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the architecture is not JSON ({error}).") from error
        return cls.from_dict(data)

    @classmethod
    def load(cls, file: str | Path) -> Architecture:
        """Read an architecture from a file."""
        try:
            return cls.from_json(read_regular_file(Path(file)).decode())
        except OSError as error:
            raise InputError(f"the architecture {file} cannot be read ({error.strerror}).") from error
        except ValueError as error:
            raise InputError(f"{file} holds no architecture: {error}") from error

    def to_json(self) -> str:
        """Write it as JSON, a line for each node."""
        cells = (
            f'  "{kind}": [\n' + ",\n".join(f"    {json.dumps(node)}" for node in getattr(self, kind)) + "\n  ]"
            for kind in CELLS
        )
        return "{\n" + ",\n".join(cells) + "\n}\n"

    def save(self, file: str | Path) -> Path:
        """Write it to a file, for `metabridge train --model FILE`."""
        return write_atomically(Path(file), self.to_json().encode())

    def draw(self, file: str | Path) -> Path:
        """Draw both cells as graphs, into a PNG or an SVG by the file's ending."""
        from metabridge.models.architecture_drawing import draw

        return draw(self, file)

    @property
    def active_operators(self) -> ActiveOperators:
        """The operators of this architecture alone, with nothing on the other edges."""
        cells = ({(node, *pair) for node, pairs in enumerate(getattr(self, kind)) for pair in pairs} for kind in CELLS)
        return ActiveOperators(
            *(
                tuple(frozenset(operator for operator in OPERATORS if (*edge, operator) in cell) for edge in EDGES)
                for cell in cells
            )
        )

    def __str__(self) -> str:
        lines = []
        for kind in CELLS:
            for node, pairs in enumerate(getattr(self, kind)):
                told = " + ".join(f"{operator}({SOURCES[source]})" for source, operator in pairs)
                lines.append(f"{kind if node == 0 else '':<10} {node}: {told}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ActiveOperators:
    """The operators that are still candidates on each of the nine edges of either cell.

    A search by pruning starts with all operators on every edge and removes them round by round.

    >>> ActiveOperators.full().without(("normal", 8, "skip")).normal[8] == set(OPERATORS) - {"skip"}
    True
    """

    normal: Edges
    reduction: Edges

    def __post_init__(self) -> None:
        for kind in CELLS:
            edges = getattr(self, kind)
            if len(edges) != len(EDGES):
                raise InputError(f"the {kind} cell has {len(edges)} edges, but must have {len(EDGES)}.")
            for operator in frozenset().union(*edges):
                _check_operator(operator)
            for node in range(NODES):
                if not any(edges[edge] for edge in edges_of(node)):
                    raise InputError(f"no operator is active on any edge of node {node} of the {kind} cell. Keep one.")

    @classmethod
    def full(cls, operators: Iterable[str] = OPERATORS) -> ActiveOperators:
        """Return the state before any pruning, with these operators on every edge."""
        edges = (frozenset(operators),) * len(EDGES)
        return cls(edges, edges)

    def __iter__(self) -> Iterator[EdgeOperator]:
        """Iterate over all active operators, ordered by cell, edge and operator."""
        for kind in CELLS:
            for edge, operators in enumerate(getattr(self, kind)):
                yield from ((kind, edge, operator) for operator in OPERATORS if operator in operators)

    @property
    def at_most_one_per_edge(self) -> bool:
        """Whether no edge has more than one operator."""
        return all(len(operators) <= 1 for operators in (*self.normal, *self.reduction))

    def without(self, removed: EdgeOperator | None) -> ActiveOperators:
        """Return the operators without one of them, or all of them if `removed` is None."""
        if removed is None:
            return self
        cell, edge, operator = removed
        if removed not in self:
            raise InputError(f"{operator!r} is not active on edge {edge} of the {cell} cell, so it cannot be removed.")
        edges = list(getattr(self, cell))
        edges[edge] -= {operator}
        return replace(self, **{cell: tuple(edges)})

    def best_architecture(self, scores: Mapping[EdgeOperator, float]) -> Architecture:
        """Keep the best operator of each edge, and the two best edges of each node, as DARTS does.

        The highest score is the best, and the first of equals. Every active operator must have a score.
        """
        for choice in self:
            if math.isnan(scores.get(choice, math.nan)):
                cell, edge, operator = choice
                raise InputError(f"scores has no number for {operator!r} on edge {edge} of the {cell} cell.")
        return Architecture(*(self._cell(kind, scores) for kind in CELLS))

    def _cell(self, kind: CellKind, scores: Mapping[EdgeOperator, float]) -> Cell:
        best: list[list[EdgeOperator]] = [[] for _ in range(NODES)]
        for edge, (node, _) in enumerate(EDGES):
            own = [choice for choice in self if choice[:2] == (kind, edge)]
            if own:
                best[node].append(max(own, key=scores.__getitem__))
        kept = (sorted(node, key=scores.__getitem__, reverse=True)[:INPUTS_PER_NODE] for node in best)
        return tuple(
            tuple((EDGES[edge][1], operator) for _, edge, operator in sorted(node, key=lambda choice: choice[1]))
            for node in kept
        )


def random_architecture(generator: torch.Generator, operators: Sequence[str] = OPERATORS) -> Architecture:
    """Draw two sources for each node and an operator for each of them, all equally likely.

    >>> generator = torch.Generator().manual_seed(0)
    >>> random_architecture(generator) == random_architecture(generator)
    False
    """

    def cell() -> Cell:
        nodes = []
        for node in range(NODES):
            sources = sorted(torch.randperm(node + 2, generator=generator)[:INPUTS_PER_NODE].tolist())
            drawn = torch.randint(len(operators), (INPUTS_PER_NODE,), generator=generator).tolist()
            nodes.append(tuple((source, operators[index]) for source, index in zip(sources, drawn)))
        return tuple(nodes)

    return Architecture(cell(), cell())


def edges_of(node: int) -> list[int]:
    """Return the places in EDGES of those that end in a node.

    >>> edges_of(1)
    [2, 3, 4]
    """
    return [edge for edge, (target, _) in enumerate(EDGES) if target == node]


def _read_cell(kind: str, data: Any) -> Cell:
    try:
        return tuple(tuple((source, operator) for source, operator in node) for node in data)
    except (TypeError, ValueError):
        raise InputError(
            f"the {kind} cell must be a list of {NODES} nodes, each a list of {INPUTS_PER_NODE} pairs "
            "such as [0, 'skip']."
        ) from None


def _check_cell(kind: str, cell: Cell) -> None:
    if len(cell) != NODES:
        raise InputError(f"the {kind} cell has {len(cell)} nodes, but must have {NODES}.")
    for node, pairs in enumerate(cell):
        sources = [source for source, _ in pairs]
        allowed = range(node + 2)
        valid = all(type(source) is int and source in allowed for source in sources)
        if len(sources) != INPUTS_PER_NODE or not valid:
            raise InputError(
                f"node {node} of the {kind} cell has the sources {sources}, "
                f"but must have {INPUTS_PER_NODE} of {list(allowed)}."
            )
        if sources != sorted(set(sources)):
            raise InputError(
                f"node {node} of the {kind} cell has the sources {sources}, but they must differ and rise."
            )
        for _, operator in pairs:
            _check_operator(operator)


def _check_operator(operator: object) -> None:
    if operator not in OPERATORS:
        raise InputError(f"there is no operator {operator!r}. The operators are {', '.join(OPERATORS)}.")
