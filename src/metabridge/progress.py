"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

Item = TypeVar("Item")


def progress_bar(show: bool) -> Progress:
    """Return a progress bar with the number of completed steps, the remaining time and a status text.

    Every `add_task` must set the status text, as `status=...`. If `show` is false, the bar prints nothing.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[status]}", markup=False),
        console=Console(stderr=True, markup=False),
        disable=not show,
    )


def track_progress(items: Sequence[Item], title: str, show: bool) -> Iterable[Item]:
    """Iterate over the items; show a progress bar if `show` is true and stderr is a terminal."""
    console = Console(stderr=True)
    return track(items, title, console=console, transient=True, disable=not (show and console.is_terminal))
