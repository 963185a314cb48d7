"""Commands about data on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.cli.options import MOST, app
from metabridge.cli.terminal import print_table, say

if TYPE_CHECKING:
    from metabridge.datasets import DatasetReport

data = typer.Typer()
app.add_typer(data, name="data")


@data.callback(invoke_without_command=True)
def about(context: typer.Context) -> None:
    """Look at data sets on disk."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@data.command()
def check(
    path: Annotated[Path, typer.Argument(help="The folder or file that holds the data set.")],
    data: Annotated[str | None, typer.Option(metavar="NAME", help="What it is, if not as detected.")] = None,
    ways: Annotated[int, typer.Option(min=1, max=MOST, help="Classes of a task.")] = 5,
    shots: Annotated[int, typer.Option(min=1, max=MOST, help="Examples of a class.")] = 1,
    queries: Annotated[int, typer.Option(min=1, max=MOST, help="Query images per class.")] = 15,
    strict: Annotated[bool, typer.Option("--strict", help="Problems make the data unusable: status 2.")] = False,
) -> None:
    """Read every image and say what is there, what is wrong, and which tasks it allows.

    Names the files that cannot be read, pictures that are in more than one split, and empty classes.
    Ends with status 0 if all is fine, 1 if there are problems, and 2 if the data cannot be used.

    Example: **metabridge data check photographs --ways 5 --shots 1**
    """
    from metabridge.datasets import check_dataset

    report = check_dataset(path, data=data, ways=ways, shots=shots, queries=queries)
    _print_report(report, f"{ways}-way {shots}-shot")
    if not report.fine:
        raise typer.Exit(2 if strict else 1)


def _print_report(report: DatasetReport, tasks: str) -> None:
    say(f"{report.data}: {report.form}")
    rows = []
    for split in report.splits:
        numbers = (split.classes, split.images, split.fewest, split.median, split.most)
        rows.append([split.name, *(f"{number:.10g}" for number in numbers), "no" if split.obstacle else "yes"])
    possible = f"{tasks} tasks"
    columns = ("split", "classes", "images", "fewest a class", "median", "most", possible)
    print_table(columns, rows, text=("split", possible))
    lines = [f"modes: {_counted(report.modes)}", f"sizes: {_sizes(report.sizes)}"]
    lines += [f"{split.name}: {split.obstacle}." for split in report.splits if split.obstacle]
    lines += report.notes
    lines += [f"unreadable: {name} ({reason})" for name, reason in report.unreadable]
    lines += [f"in {' and '.join(f'{split} ({name})' for split, name in group)}" for group in report.duplicates]
    lines += [f"empty class: {name}" for name in report.empty]
    lines.append("No problems found." if report.fine else "There are problems.")
    for line in lines:
        say(line)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _sizes(sizes: dict[tuple[int, int], int]) -> str:
    if len(sizes) <= 3:
        return _counted({f"{width}×{height}": count for (width, height), count in sizes.items()})
    widths, heights = zip(*sizes)
    return f"{len(sizes)} of them, {min(widths)} to {max(widths)} wide and {min(heights)} to {max(heights)} high"
