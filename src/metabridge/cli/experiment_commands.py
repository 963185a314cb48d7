"""Commands that compare: the demo, the experiments and the list of methods."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.cli.options import Device, DeviceOption, SeedOption, app, device_name, is_number
from metabridge.cli.terminal import print_table, say
from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.experiments.glyph_methods import Trial
    from metabridge.report.results import Result


class Scale(StrEnum):
    """How much to compute."""

    quick = "quick"
    paper = "paper"


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
    from metabridge.experiments import ExperimentOptions, glyph_methods
    from metabridge.files import make_folder
    from metabridge.report import demo_page

    make_folder(out)
    outcome = glyph_methods.run(ExperimentOptions("quick", device_name(device), seed))
    _print_trials(outcome.trials)
    outcome.result.write(out)
    say(f"The page is {demo_page.write(outcome, out)}")


@app.command()
def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The experiment, such as glyphs; an unknown ID prints them all.")
    ],
    scale: Annotated[Scale, typer.Option(help="quick: minutes on a CPU; paper: the full size.")] = Scale.quick,
    device: DeviceOption = Device.auto,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="Folder for ID.json and ID.png, and for long trainings.")] = Path("runs"),
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with omniglot/ and mini-imagenet/.", envvar="METABRIDGE_DATA"),
    ] = None,
    only: Annotated[str, typer.Option(metavar="NAME,...", help="Do these parts alone, such as methods.")] = "",
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=is_number,
            help="Stop a training, or several in turns, after so long; the same command goes on.",
        ),
    ] = None,
) -> None:
    """Run one experiment and set its numbers beside the published ones.

    Writes ID.json, which holds the settings, the machine and a row for every number, and ID.png, the
    figure. The quick scale runs the same code as the paper scale, only less of it, and where the data
    set is not at hand on the built-in glyphs. Experiments that share a training do it once: what it
    measured stays in records/.

    Example: **metabridge reproduce glyphs --scale quick --out runs**
    """
    from metabridge.experiments import ExperimentOptions, load_experiment
    from metabridge.files import make_folder

    experiment = load_experiment(name)
    parts = tuple(part for part in only.split(",") if part)
    for option, given in (("--only", bool(parts)), ("--minutes", minutes is not None)):
        if given and not experiment.resumable:
            raise InputError(f"{option} is given, but {name} is done as a whole. Leave it out.")
    make_folder(out)
    outcome = experiment.run(ExperimentOptions(scale.value, device_name(device), seed, out, data, parts, minutes))
    _print_rows(outcome.result)
    say(f"The numbers are in {outcome.result.write(out)}")
    picture = out / f"{name}.png"
    try:
        experiment.draw(outcome, picture)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        say(f"{picture} is left out, since matplotlib is not installed.")
    else:
        say(f"The figure is {picture}")


@app.command()
def methods() -> None:
    """List the methods: what each adapts, how, and how its outer gradient sees that.

    The names are those that metabridge.method takes; the settings shown are the ones it starts from.

    Example: **metabridge methods**
    """
    from metabridge.heads import Head
    from metabridge.learners.method import PRESETS
    from metabridge.report.method_table import described

    lines = {name: described(method) for name, method in PRESETS.items()}
    columns = ("method", *next(iter(lines.values())))
    print_table(columns, [[name, *words.values()] for name, words in lines.items()], text=columns)
    say(f"Test-time heads (--head): {', '.join(sorted(Head.registry))}")


def _print_trials(trials: tuple[Trial, ...]) -> None:
    rows = []
    for trial in trials:
        told = [score.told().removesuffix(" %") for score in trial.scores().values()]
        rows.append([trial.name, *told, f"{trial.run.seconds:.0f} s"])
    columns = ("method", *trials[0].scores(), "training")
    print_table(columns, rows, text=("method",), title="Accuracy on new alphabets in percent, with 95 % intervals")


def _print_rows(result: Result) -> None:
    rows = []
    for row in result.rows:
        numbers = ["" if value is None else f"{value:.4g}" for value in (row.published, row.ours, row.ci95)]
        rows.append([row.name, row.metric, *numbers, {None: "", True: "yes", False: "no"}[row.agrees]])
    columns = ("row", "metric", "published", "ours", "± 95 %", "agrees")
    title = f"{result.id}, {result.scale}, on {result.environment.device}"
    print_table(columns, rows, text=("row", "metric"), title=title)
