"""Cell architectures, and the active operators of a search, as plain data (Wang et al. 2022, §6.1).

A network is a stack of cells of two kinds: normal cells, and reduction cells, which halve the height and width of the
feature maps. The inputs of a cell are the outputs of the two previous cells, called sources 0 and 1. A cell has three
nodes; nodes 0 and 1 are sources 2 and 3 for later nodes. Every node has an edge from each earlier source, so a cell has
2 + 3 + 4 = 9 edges. A node is the sum of the outputs of the operators on the edges into it, and the output of the cell
is the concatenation of its nodes.

In an `Architecture`, two edges into each node have one operator each, and the other edges have none. During a search,
several operators can be active on an edge (`ActiveOperators`).
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
EDGES = tuple((node, source) for node in range(NODES) for source in range(node + 2))  # pairs (target, source)
SOURCE_NAMES = ("c_{k-2}", "c_{k-1}", *map(str, range(NODES - 1)))  # c_{k-1} is the output of the previous cell
INPUTS_PER_NODE = 2  # number of edges into a node that have an operator in an architecture

CellKind = Literal["normal", "reduction"]
CELLS: tuple[CellKind, ...] = get_args(CellKind)  # the two kinds of cells
QUOTED_KEYS = " and ".join(map(repr, CELLS))  # the keys of an architecture in JSON, for error messages
EdgeOperator: TypeAlias = tuple[CellKind, int, str]  # kind of cell, index of an edge in EDGES, operator
CellSpec: TypeAlias = tuple[tuple[tuple[int, str], ...], ...]  # pairs (source, operator) of each node
OperatorSets: TypeAlias = tuple[frozenset[str], ...]  # set of operators on each edge of a cell


@dataclass(frozen=True)
class Architecture:
    """The normal cell and the reduction cell from which a network is built.

    Args:
        normal: Two pairs (source, operator) for each of the three nodes of the normal cell, ordered by source.
        reduction: The same for the reduction cell.

    Raises:
        InputError: If a cell has the wrong number of nodes or pairs, or an unknown source or operator, or if the two
            sources of a node are equal or not sorted.

    >>> import metabridge as mb
    >>> cell = [[[0, "conv_3x3"], [1, "skip"]], [[0, "skip"], [2, "skip"]], [[1, "max_pool_3x3"], [3, "skip"]]]
    >>> architecture = mb.Architecture.from_dict({"normal": cell, "reduction": cell})
    >>> print(architecture)
    normal     0: conv_3x3(c_{k-2}) + skip(c_{k-1})
               1: skip(c_{k-2}) + skip(0)
               2: max_pool_3x3(c_{k-1}) + skip(1)
    reduction  0: conv_3x3(c_{k-2}) + skip(c_{k-1})
               1: skip(c_{k-2}) + skip(0)
               2: max_pool_3x3(c_{k-1}) + skip(1)
    """

    normal: CellSpec
    reduction: CellSpec

    def __post_init__(self) -> None:
        for kind in CELLS:
            _check_cell(kind, getattr(self, kind))

    @classmethod
    def from_dict(cls, data: object) -> Architecture:
        """Return the architecture that parsed JSON describes.

        Args:
            data: A mapping with the keys "normal" and "reduction". Each value is a list of nodes, and each node a list
                of pairs (source, operator).

        Returns:
            The architecture.

        Raises:
            InputError: If `data` does not describe an architecture.
        """
        if not isinstance(data, Mapping):
            raise InputError(
                f"an architecture must be an object with the keys {QUOTED_KEYS}, but is a {type(data).__name__}."
            )
        if set(data) != set(CELLS):
            keys = ", ".join(map(repr, data)) or "none"
            raise InputError(f"an architecture must have the keys {QUOTED_KEYS} and no others, but has {keys}.")
        return cls(*(_read_cell(kind, data[kind]) for kind in CELLS))

    @classmethod
    def from_json(cls, text: str) -> Architecture:
        """Return the architecture that JSON text describes.

        Args:
            text: The text, as returned by `to_json`.

        Returns:
            The architecture.

        Raises:
            InputError: If `text` is not valid JSON or does not describe an architecture.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the architecture is not valid JSON ({error}).") from error
        return cls.from_dict(data)

    @classmethod
    def load(cls, file: str | Path) -> Architecture:
        """Read an architecture from a JSON file.

        Args:
            file: Path of the file, as written by `save`.

        Returns:
            The architecture.

        Raises:
            InputError: If the file cannot be read or does not contain an architecture.
        """
        try:
            return cls.from_json(read_regular_file(Path(file)).decode())
        except OSError as error:
            raise InputError(
                f"the architecture {file} cannot be read ({error.strerror}). Pass an architecture.json that metabridge "
                "search wrote."
            ) from error
        except ValueError as error:
            raise InputError(f"{file} does not contain an architecture: {error}") from error

    def to_json(self) -> str:
        """Return the architecture as JSON, with one line per node."""
        cells = (
            f'  "{kind}": [\n' + ",\n".join(f"    {json.dumps(node)}" for node in getattr(self, kind)) + "\n  ]"
            for kind in CELLS
        )
        return "{\n" + ",\n".join(cells) + "\n}\n"

    def save(self, file: str | Path) -> Path:
        """Write the architecture to a JSON file, for example for `metabridge train --model FILE`.

        Args:
            file: Path of the file, which should end in .json.

        Returns:
            The path.
        """
        return write_atomically(Path(file), self.to_json().encode())

    def draw(self, file: str | Path) -> Path:
        """Draw both cells as graphs.

        Args:
            file: Path of the figure, which must end in .png or .svg.

        Returns:
            The path.

        Raises:
            InputError: If the path does not end in .png or .svg.
        """
        from metabridge.models.architecture_drawing import draw

        return draw(self, file)

    @property
    def active_operators(self) -> ActiveOperators:
        """One active operator on each edge that the architecture uses, and none on the other edges."""
        operators_of_cells = (  # for each kind of cell, its triples (node, source, operator)
            {(node, *pair) for node, pairs in enumerate(getattr(self, kind)) for pair in pairs} for kind in CELLS
        )
        return ActiveOperators(
            *(
                tuple(frozenset(name for name in OPERATORS if (*edge, name) in cell_operators) for edge in EDGES)
                for cell_operators in operators_of_cells
            )
        )

    def __str__(self) -> str:
        lines = []
        for kind in CELLS:
            for node, pairs in enumerate(getattr(self, kind)):
                terms = " + ".join(f"{operator}({SOURCE_NAMES[source]})" for source, operator in pairs)
                lines.append(f"{kind if node == 0 else '':<10} {node}: {terms}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ActiveOperators:
    """The active operators on the nine edges of each cell.

    A search by pruning starts with all operators active on every edge and removes some of them in each round.

    Args:
        normal: The set of active operators on each edge of the normal cell, in the order of `EDGES`.
        reduction: The same for the reduction cell.

    Raises:
        InputError: If a cell does not have nine edges, an operator is unknown, or a node has no active operator.

    >>> ActiveOperators.full().without(("normal", 8, "skip")).normal[8] == set(OPERATORS) - {"skip"}
    True
    """

    normal: OperatorSets
    reduction: OperatorSets

    def __post_init__(self) -> None:
        for kind in CELLS:
            edges = getattr(self, kind)
            if len(edges) != len(EDGES):
                raise InputError(f"the {kind} cell has {len(edges)} edges, but must have {len(EDGES)}.")
            for operator in frozenset().union(*edges):
                _check_operator(operator)
            for node in range(NODES):
                if not any(edges[edge] for edge in edges_into(node)):
                    raise InputError(
                        f"no operator is active on any edge of node {node} of the {kind} cell. Keep at least one."
                    )

    @classmethod
    def full(cls, operators: Iterable[str] = OPERATORS) -> ActiveOperators:
        """Return the initial state of a search, in which the same operators are active on every edge.

        Args:
            operators: The operators that are active on every edge.

        Returns:
            The active operators of both cells.
        """
        edges = (frozenset(operators),) * len(EDGES)
        return cls(edges, edges)

    def __iter__(self) -> Iterator[EdgeOperator]:
        """Iterate over all active operators, ordered by cell, edge and operator."""
        for kind in CELLS:
            for edge, operators in enumerate(getattr(self, kind)):
                yield from ((kind, edge, operator) for operator in OPERATORS if operator in operators)

    @property
    def at_most_one_per_edge(self) -> bool:
        """Whether every edge has at most one active operator."""
        return all(len(operators) <= 1 for operators in (*self.normal, *self.reduction))

    def without(self, removed: EdgeOperator | None) -> ActiveOperators:
        """Return a copy without one operator.

        Args:
            removed: The operator that is no longer active. If None, nothing is removed.

        Returns:
            The remaining active operators.

        Raises:
            InputError: If the operator is not active.
        """
        if removed is None:
            return self
        kind, edge, operator = removed
        if removed not in self:
            raise InputError(f"{operator!r} is not active on edge {edge} of the {kind} cell, so it cannot be removed.")
        operator_sets = list(getattr(self, kind))
        operator_sets[edge] -= {operator}
        return replace(self, **{kind: tuple(operator_sets)})

    def best_architecture(self, scores: Mapping[EdgeOperator, float]) -> Architecture:
        """Select the best operator on each edge and then the two best edges into each node.

        The score of an edge is that of its best operator. DARTS (differentiable architecture search) selects
        in the same way.

        Args:
            scores: A score for every active operator. Higher is better; of equal scores, the first operator or edge
                (in the order of `OPERATORS` and `EDGES`) wins.

        Returns:
            The architecture.

        Raises:
            InputError: If the score of an operator is missing or NaN, or if fewer than two edges into a node have an
                active operator.
        """
        for edge_operator in self:
            if math.isnan(scores.get(edge_operator, math.nan)):
                kind, edge, operator = edge_operator
                raise InputError(f"scores has no number for {operator!r} on edge {edge} of the {kind} cell.")
        return Architecture(*(self._best_cell(kind, scores) for kind in CELLS))

    def _best_cell(self, kind: CellKind, scores: Mapping[EdgeOperator, float]) -> CellSpec:
        edge_winners: list[list[EdgeOperator]] = [[] for _ in range(NODES)]  # best operator on each edge into each node
        for edge, (node, _) in enumerate(EDGES):
            edge_operators = [edge_operator for edge_operator in self if edge_operator[:2] == (kind, edge)]
            if edge_operators:
                edge_winners[node].append(max(edge_operators, key=scores.__getitem__))
        selected_by_node = (
            sorted(winners, key=scores.__getitem__, reverse=True)[:INPUTS_PER_NODE] for winners in edge_winners
        )
        return tuple(
            tuple((EDGES[edge][1], operator) for _, edge, operator in sorted(winners, key=lambda winner: winner[1]))
            for winners in selected_by_node  # sorted by edge and therefore by source
        )


def random_architecture(generator: torch.Generator, operators: Sequence[str] = OPERATORS) -> Architecture:
    """Sample two sources for each node and an operator for each source, uniformly at random.

    Args:
        generator: Generator of the random numbers.
        operators: The operators to choose from.

    Returns:
        The architecture.

    >>> generator = torch.Generator().manual_seed(0)
    >>> random_architecture(generator) == random_architecture(generator)
    False
    """

    def random_cell() -> CellSpec:
        nodes = []
        for node in range(NODES):
            sources = sorted(torch.randperm(node + 2, generator=generator)[:INPUTS_PER_NODE].tolist())
            indices = torch.randint(len(operators), (INPUTS_PER_NODE,), generator=generator).tolist()
            nodes.append(tuple((source, operators[index]) for source, index in zip(sources, indices)))
        return tuple(nodes)

    return Architecture(random_cell(), random_cell())


def edges_into(node: int) -> list[int]:
    """Return the indices (in `EDGES`) of the edges into a node.

    >>> edges_into(1)
    [2, 3, 4]
    """
    return [edge for edge, (target, _) in enumerate(EDGES) if target == node]


def _read_cell(kind: str, data: Any) -> CellSpec:
    try:
        return tuple(tuple((source, operator) for source, operator in node) for node in data)
    except (TypeError, ValueError):
        raise InputError(
            f"the {kind} cell must be a list of {NODES} nodes, each a list of {INPUTS_PER_NODE} pairs "
            "such as [0, 'skip']."
        ) from None


def _check_cell(kind: str, cell: CellSpec) -> None:
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
                f"node {node} of the {kind} cell has the sources {sources}, but they must differ and be sorted."
            )
        for _, operator in pairs:
            _check_operator(operator)


def _check_operator(operator: object) -> None:
    if operator not in OPERATORS:
        raise InputError(f"operator {operator!r} is unknown. Use one of {', '.join(OPERATORS)}.")
