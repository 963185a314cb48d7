"""Architectures for few-shot learning, found without training any (B §5).

What searches is imported from its own file: models are built of the space here, and the search of models.
"""

from metabridge.models.architecture import (
    CELLS,
    EDGES,
    NODES,
    OPERATORS,
    ActiveOperators,
    Architecture,
    CellKind,
    EdgeOperator,
    random_architecture,
)

__all__ = [
    "CELLS",
    "EDGES",
    "NODES",
    "OPERATORS",
    "ActiveOperators",
    "Architecture",
    "CellKind",
    "EdgeOperator",
    "random_architecture",
]
