"""The command line: parses, calls, prints. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer
from rich.console import Console
from rich.table import Table

from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.experiments.glyphs import Trial
    from metabridge.experiments.result import Result

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

# Typer shows one of the usage errors; this is the class they all come from.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])
INTERRUPTED = 130


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Scale(StrEnum):
    """How much to compute."""

    quick = "quick"
    paper = "paper"


DeviceOption = Annotated[Device, typer.Option(help="Where to compute; auto takes a GPU if there is one.")]
SeedOption = Annotated[int, typer.Option(min=0, help="The same seed gives the same result on the same machine.")]


@app.callback(invoke_without_command=True)
def metabridge(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Learn from few examples: gradient-based meta-learning and multi-task learning, side by side.

    Start with **metabridge demo**, which needs no data and a few minutes.
    """
    if version:
        from metabridge import __version__

        print(f"metabridge {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page, its pictures and the numbers.")] = Path("demo"),
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Train and compare four methods on the built-in glyphs.

    Trains MAML, ANIL, MTL and NAL to tell five unknown characters apart from one example of each,
    tests them on alphabets that they never saw, prints their accuracies with 95 % intervals, and
    writes a page with learning curves and pictures of their right and wrong answers.

    Example: **metabridge demo --out demo --seed 1**
    """
    from metabridge.experiments import glyphs
    from metabridge.report import page
    from metabridge.report.files import make_folder

    make_folder(out)
    outcome = glyphs.run("quick", _device(device), seed)
    _print_trials(outcome.trials)
    outcome.result.write(out)
    print(f"The page is {page.write(outcome, out)}")


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="ID", help="The experiment, such as glyphs.")],
    scale: Annotated[Scale, typer.Option(help="quick: minutes on a CPU; paper: the full size.")] = Scale.quick,
    device: DeviceOption = Device.auto,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="Folder for ID.json and ID.png.")] = Path("runs"),
) -> None:
    """Run one experiment and set its numbers beside the published ones.

    Writes ID.json, which holds the settings, the machine and a row for every number, and ID.png, the
    figure. The quick scale runs the same code as the paper scale, only less of it.

    Example: **metabridge reproduce glyphs --scale quick --out runs**
    """
    from metabridge.experiments import experiment
    from metabridge.report.files import make_folder

    chosen = experiment(name)
    make_folder(out)
    outcome = chosen.run(scale.value, _device(device), seed)
    _print_rows(outcome.result)
    print(f"The numbers are in {outcome.result.write(out)}")
    picture = out / f"{name}.png"
    try:
        chosen.figure(outcome, picture)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print(f"{picture} is left out, since matplotlib is not installed.")
    else:
        print(f"The figure is {picture}")


@app.command()
def methods() -> None:
    """List the methods: what each adapts, how, and how its outer gradient sees that.

    The names are those that metabridge.method takes; the settings shown are the ones it starts from.

    Example: **metabridge methods**
    """
    from metabridge.learners.method import PRESETS
    from metabridge.report.taxonomy import described

    lines = {name: described(method) for name, method in PRESETS.items()}
    table = Table("method", *next(iter(lines.values())))
    for name, columns in lines.items():
        table.add_row(name, *columns.values())
    Console().print(table)


def main() -> None:
    """Run the command line; what the user can mend ends in one sentence and the status 2."""
    try:
        status = app(prog_name="metabridge", standalone_mode=False)
    except InputError as error:
        _end(str(error), 2)
    except UsageError as error:
        _end(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    if status == INTERRUPTED:
        _end("interrupted.", INTERRUPTED)
    sys.exit(status)


def _end(message: str, status: int) -> NoReturn:
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    command = next((word for word in sys.argv[1:] if word in known), None)
    print(f"metabridge {command}: {message}" if command else f"metabridge: {message}", file=sys.stderr)
    sys.exit(status)


def _device(device: Device) -> str:
    import torch

    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        raise InputError("device is cuda, but PyTorch finds no GPU here. Use --device cpu.")
    return device.value


def _print_trials(trials: tuple[Trial, ...]) -> None:
    table = Table("method", title="Accuracy on new alphabets in percent, with 95 % intervals")
    for heading in (*trials[0].scores(), "training"):
        table.add_column(heading, justify="right")
    for trial in trials:
        told = [score.told().removesuffix(" %") for score in trial.scores().values()]
        table.add_row(trial.name, *told, f"{trial.run.seconds:.0f} s")
    Console().print(table)


def _print_rows(result: Result) -> None:
    table = Table("row", "metric", title=f"{result.id}, {result.scale}, on {result.environment.device}")
    for heading in ("published", "ours", "± 95 %", "agrees"):
        table.add_column(heading, justify="right")
    for row in result.rows:
        numbers = ["" if value is None else f"{value:.4g}" for value in (row.published, row.ours, row.ci95)]
        table.add_row(row.name, row.metric, *numbers, {None: "", True: "yes", False: "no"}[row.agrees])
    Console().print(table)
