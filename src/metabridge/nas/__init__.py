"""Architecture search for few-shot learning without training (Wang et al. 2022, sec. 5)."""

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
from metabridge.nas.architecture_search import (
    RepeatedScore,
    SearchConfig,
    SearchResult,
    TimeLimitError,
    run_search,
    score_model,
    search,
)
from metabridge.nas.proxies import ConditionNumber, ProxyScore, count_linear_regions

__all__ = [
    "CELLS",
    "EDGES",
    "NODES",
    "OPERATORS",
    "ActiveOperators",
    "Architecture",
    "CellKind",
    "ConditionNumber",
    "EdgeOperator",
    "ProxyScore",
    "RepeatedScore",
    "SearchConfig",
    "SearchResult",
    "TimeLimitError",
    "count_linear_regions",
    "random_architecture",
    "run_search",
    "score_model",
    "search",
]
