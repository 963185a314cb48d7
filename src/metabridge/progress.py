"""How far long work has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

Item = TypeVar("Item")


def progress_bar(shown: bool) -> Progress:
    """Return a bar on stderr with steps done, time left and the field `told`; if `shown` is false, print nothing."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[told]}", markup=False),
        console=Console(stderr=True, markup=False),
        disable=not shown,
    )


def tracked(items: Sequence[Item], title: str, shown: bool) -> Iterable[Item]:
    """Iterate over items with a bar that disappears at the end, if `shown` and stderr is a terminal."""
    console = Console(stderr=True)
    return track(items, title, console=console, transient=True, disable=not (shown and console.is_terminal))
