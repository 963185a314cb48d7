"""The figure of a table: ours beside the published numbers."""

from __future__ import annotations

from pathlib import Path

from metabridge.experiments.result import Outcome


def figure(outcome: Outcome, file: Path) -> None:
    """Draw ours beside the published numbers, of the first row's metric."""
    from metabridge.report import figures

    rows = outcome.result.rows
    figures.save(figures.beside([row for row in rows if row.metric == rows[0].metric]), file)
