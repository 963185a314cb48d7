"""Commands that compare methods: demo, reproduce and methods."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.cli.options import Device, DeviceOption, SeedOption, app, device_name, is_number
from metabridge.cli.terminal import print_table, say
from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.experiments.glyph_methods import Comparison
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

    Trains MAML, ANIL, MTL and NAL to classify five new characters from one example of each, tests them on
    alphabets that they were not trained on, prints the accuracies with 95 % intervals, and writes an HTML page with
    learning curves and pictures of right and wrong answers.

    Example: **metabridge demo --out demo --seed 1**
    """
    from metabridge.experiments import ExperimentOptions, glyph_methods
    from metabridge.files import make_folder
    from metabridge.report import demo_page

    make_folder(out)
    outcome = glyph_methods.EXPERIMENT.run(ExperimentOptions("quick", device_name(device), seed))
    _print_scores(outcome.data)
    outcome.result.write(out)
    say(f"The page is {demo_page.write(out, outcome.result, *outcome.data)}")


@app.command()
def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="ID", help="Name of the experiment, such as glyphs; an unknown name lists all.")
    ],
    scale: Annotated[
        Scale, typer.Option(help="quick: minutes on a CPU; paper: the size of the published experiment.")
    ] = Scale.quick,
    device: DeviceOption = Device.auto,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="Folder for ID.json, ID.png and the training runs.")] = Path("runs"),
    data: Annotated[
        Path | None,
        typer.Option(help="Folder that contains the data sets omniglot/ and mini-imagenet/.", envvar="METABRIDGE_DATA"),
    ] = None,
    only: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="Run only these trainings; an unknown name lists all. Default: all."),
    ] = "",
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=is_number,
            help="Stop each training, or all that run at the same time, after this number of minutes; the same "
            "command continues. Default: no limit.",
        ),
    ] = None,
) -> None:
    """Run an experiment and compare its numbers with the published ones.

    Writes ID.json with the settings, the machine and all numbers, and ID.png with the figure. The quick scale runs the
    same code as the paper scale with smaller settings, and uses the built-in glyphs if the data set is not available.
    Experiments that share a training run it once: its scores are stored in OUT/records/.

    Example: **metabridge reproduce glyphs --scale quick --out runs**
    """
    from metabridge.experiments import ExperimentOptions, load_experiment
    from metabridge.files import make_folder

    experiment = load_experiment(name)
    trainings = tuple(training for training in only.split(",") if training)
    for option, is_given in (("--only", bool(trainings)), ("--minutes", minutes is not None)):
        if is_given and not experiment.resumable:
            raise InputError(f"{name} takes no {option}, since it is computed as a whole. Leave {option} out.")
    make_folder(out)
    outcome = experiment.run(ExperimentOptions(scale.value, device_name(device), seed, out, data, trainings, minutes))
    _print_result(outcome.result)
    say(f"The numbers are in {outcome.result.write(out)}")
    file = out / f"{name}.png"
    try:
        experiment.draw(outcome, file)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        say(f"{file} is not drawn, since matplotlib is not installed.")
    else:
        say(f"The figure is {file}")


@app.command()
def methods() -> None:
    """List the methods: which parameters adapt, with which inner solver, and how the outer gradient is computed.

    Use the names with --method or metabridge.method; the settings are the defaults.

    Example: **metabridge methods**
    """
    from metabridge.learners.method import PRESETS
    from metabridge.report.method_table import taxonomy_row

    lines = {name: taxonomy_row(method) for name, method in PRESETS.items()}
    columns = ("method", *next(iter(lines.values())))
    print_table(columns, [[name, *cells.values()] for name, cells in lines.items()], text=columns)


def _print_scores(comparison: Comparison) -> None:
    rows = []
    for name, scores in comparison.scores.items():
        percent = [str(score).removesuffix(" %") for score in scores.values()]
        rows.append([name, *percent, f"{comparison.runs[name].seconds:.0f} s"])
    columns = ("method", *scores, "training")
    print_table(columns, rows, text=("method",), title="Accuracy on new alphabets in percent, with 95 % intervals")


def _print_result(result: Result) -> None:
    rows = []
    for row in result.rows:
        numbers = ["" if value is None else f"{value:.4g}" for value in (row.published, row.ours, row.ci95)]
        rows.append([row.name, row.metric, *numbers, {None: "", True: "yes", False: "no"}[row.agrees]])
    columns = ("row", "metric", "published", "ours", "± 95 %", "agrees")
    title = f"{result.id}, {result.scale}, on {result.environment.device}"
    print_table(columns, rows, text=("row", "metric"), title=title)
