"""HTML tables for displaying objects in notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table, in which all text is escaped.

    >>> html_table("a < b", ["x", "y"], [["1", "2"]])
    '<table><caption>a &lt; b</caption><tr><th>x</th><th>y</th></tr><tr><td>1</td><td>2</td></tr></table>'
    """
    lines = [_row("th", columns), *(_row("td", row) for row in rows)]
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
