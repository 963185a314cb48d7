"""The figure of a table: ours beside the published numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def figure(outcome: Any, file: Path) -> None:
    """Draw ours beside the published numbers, of the first row's metric."""
    from metabridge.report import figures

    rows = outcome.result.rows
    picture = figures.beside([row for row in rows if row.metric == rows[0].metric])
    if outcome.result.scale == "quick":
        picture.suptitle("quick scale: far less data and training than published", fontsize=10)
    figures.save(picture, file)
