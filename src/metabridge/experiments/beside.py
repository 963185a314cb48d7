"""The figure of a table: ours beside the published numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def figure(outcome: Any, file: Path) -> None:
    """Draw ours beside the published numbers, of the first row's metric."""
    from metabridge.report import figures, result_figures

    figures.save(result_figures.published_and_ours(outcome.result), file)
