"""The subcommands of `metabridge data`, which inspect image data sets on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.cli.help_format import App
from metabridge.cli.json_output import JsonOption, JsonOutput, versions
from metabridge.cli.options import QueriesOption, ShotsOption, app, at_most
from metabridge.cli.terminal import print_stdout, print_table
from metabridge.errors import MAX_COUNT, InputError

if TYPE_CHECKING:
    from metabridge.datasets import DatasetReport

data_app = App()
app.add_typer(data_app, name="data")


@data_app.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    """Inspect image data sets on disk."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@data_app.command()
def check(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="Folder or file of the data set. NAME:PATH is short for PATH --format NAME."
        ),
    ],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format of the data set, such as omniglot. Default: detect it from the files.",
        ),
    ] = None,
    ways: Annotated[int, typer.Option(min=1, callback=at_most(MAX_COUNT), help="Number of classes per task.")] = 5,
    shots: ShotsOption = 5,
    queries: QueriesOption = 15,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 2 instead of 1 if there are problems.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Read every image of a data set, and report its splits and any problems.

    Problems are unreadable images, duplicate images across splits, empty classes, and splits with too few classes or
    images for tasks with these --ways, --shots and --queries. The validation split needs only two classes, because
    **metabridge train** reduces the ways and queries of validation tasks if necessary. The exit status is 0 if there
    are no problems, 1 if there are problems (2 with --strict), and 2 if the data set cannot be read.

    Example: **metabridge data check photos --ways 5 --shots 5**
    """
    from metabridge.datasets import check_dataset
    from metabridge.datasets.loading import DATASETS

    prefix, _, path_after_prefix = path.partition(":")
    if path_after_prefix and format_name is None and prefix in DATASETS:
        format_name, path = prefix, path_after_prefix
    if format_name is not None and format_name not in DATASETS:
        raise InputError(f"--format is '{format_name}', but must be one of {', '.join(DATASETS)}.")
    output = JsonOutput(json_file)
    report = check_dataset(path, data=format_name, ways=ways, shots=shots, queries=queries)
    if not output.is_stdout:
        _print_report(report, f"{ways}-way {shots}-shot tasks")
    tasks = {"ways": ways, "shots": shots, "queries": queries}
    output.write(_json_report(report) | {"tasks": tasks, "versions": versions()})
    if not report.fine:
        raise typer.Exit(2 if strict else 1)


def _json_report(report: DatasetReport) -> dict[str, object]:
    """Return a report with JSON types."""
    return {
        "data": report.data,
        "description": report.description,
        "fine": report.fine,
        "splits": [split._asdict() for split in report.splits],
        "sizes": [
            {"width": width, "height": height, "images": count} for (width, height), count in report.sizes.items()
        ],
        "modes": report.modes,
        "unreadable": [{"image": name, "reason": reason} for name, reason in report.unreadable],
        "duplicates": [[{"split": split, "image": name} for split, name in group] for group in report.duplicates],
        "empty_classes": report.empty_classes,
        "notes": report.notes,
    }


def _print_report(report: DatasetReport, tasks_column: str) -> None:
    """Print a report. `tasks_column` is the heading of the column that shows which splits are large enough."""
    print_stdout(f"{report.data}: {report.description}")
    rows = []
    for split in report.splits:
        counts = (split.classes, split.images, split.fewest, split.median, split.most)
        rows.append([split.name, *(f"{count:.10g}" for count in counts), "no" if split.obstacle else "yes"])
    columns = ("split", "classes", "images", "smallest class", "median class", "largest class", tasks_column)
    print_table(columns, rows, left_aligned=("split", tasks_column))
    lines = [f"modes: {_format_counts(report.modes)}", f"sizes: {_format_sizes(report.sizes)}"]
    lines += [f"{split.name}: {split.obstacle}." for split in report.splits if split.obstacle]
    lines += report.notes
    lines += [f"unreadable: {name} ({reason})" for name, reason in report.unreadable]
    lines += [
        f"duplicate in {' and '.join(f'{split} ({name})' for split, name in group)}" for group in report.duplicates
    ]
    lines += [f"empty class: {name}" for name in report.empty_classes]
    lines.append("No problems found." if report.fine else "Problems found; see above.")
    for line in lines:
        print_stdout(line)


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _format_sizes(sizes: dict[tuple[int, int], int]) -> str:
    if len(sizes) <= 3:
        return _format_counts({f"{width}×{height}": count for (width, height), count in sizes.items()})
    widths, heights = zip(*sizes)
    return (
        f"{len(sizes)} different sizes, widths {min(widths)} to {max(widths)}, heights {min(heights)} to {max(heights)}"
    )
