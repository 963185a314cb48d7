"""Commands that compare methods: demo, reproduce and methods."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.cli.options import Device, DeviceOption, SeedOption, app, device_name, reject_nan
from metabridge.cli.terminal import print_table, say
from metabridge.errors import InputError
from metabridge.experiments import experiment_modules

if TYPE_CHECKING:
    from metabridge.experiments.glyph_methods import Comparison
    from metabridge.report.results import Result


class Scale(StrEnum):
    """How large an experiment is."""

    quick = "quick"
    paper = "paper"


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the page index.html, its pictures, and glyphs.json with all numbers.")
    ] = Path("demo"),
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Train and compare four methods on the built-in glyphs, in a few minutes on a CPU.

    Trains MAML, ANIL, MTL and NAL to classify five new characters from one example of each, and tests them on
    alphabets that they were not trained on. Prints the accuracies with 95 % confidence intervals, and writes an HTML
    page with learning curves and pictures of correct and wrong predictions.

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
    name: Annotated[str, typer.Argument(metavar="ID", help=f"Experiment to run: {', '.join(experiment_modules())}.")],
    scale: Annotated[
        Scale, typer.Option(help="quick: takes minutes on a CPU; paper: as large as the published experiment.")
    ] = Scale.quick,
    device: DeviceOption = Device.auto,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="Folder for ID.json, ID.png and training runs.")] = Path("runs"),
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the data sets, in subfolders omniglot and mini-imagenet. Default: only built-in data.",
            envvar="METABRIDGE_DATA",
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Run only these parts of the experiment; an unknown name prints the names of all parts. Default: all.",
        ),
    ] = "",
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=reject_nan,
            help="Stop each training run, or all runs that are trained together, after this number of minutes. Run the "
            "same command again to continue. Default: no limit.",
        ),
    ] = None,
) -> None:
    """Run an experiment and compare its numbers with the published ones.

    Writes ID.json with the settings, the machine and all numbers, and ID.png with the figure. The quick scale runs the
    same code as the paper scale with smaller settings, and uses the built-in glyphs if the data set is not available.
    Scores of training runs are stored in OUT/records, where other experiments that need the same run find them.

    Example: **metabridge reproduce glyphs --scale quick --out runs**
    """
    from metabridge.experiments import ExperimentOptions, load_experiment
    from metabridge.files import make_folder

    experiment = load_experiment(name)
    selected_parts = tuple(part for part in only.split(",") if part)
    for option, is_used in (("--only", bool(selected_parts)), ("--minutes", minutes is not None)):
        if is_used and not experiment.resumable:
            raise InputError(f"{name} has no option {option}, because it always runs as a whole. Omit {option}.")
    make_folder(out)
    outcome = experiment.run(
        ExperimentOptions(scale.value, device_name(device), seed, out, data, selected_parts, minutes)
    )
    _print_result(outcome.result)
    say(f"The numbers are in {outcome.result.write(out)}")
    file = out / f"{name}.png"
    try:
        experiment.draw(outcome, file)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        say(f"{file} was not drawn, because matplotlib is not installed.")
    else:
        say(f"The figure is {file}")


@app.command()
def methods() -> None:
    """List the methods: which parameters adapt, with which inner solver, and how the outer gradient is computed.

    The table shows each method's default settings. Pass the name to **metabridge train --method** or to
    **metabridge.method**.

    Example: **metabridge methods**
    """
    from metabridge.learners.method import PRESETS
    from metabridge.report.method_table import taxonomy_row

    rows = {name: taxonomy_row(method) for name, method in PRESETS.items()}
    columns = ("method", *next(iter(rows.values())))
    print_table(columns, [[name, *cells.values()] for name, cells in rows.items()], text=columns)


def _print_scores(comparison: Comparison) -> None:
    rows = []
    for name, scores in comparison.scores.items():
        accuracies = [str(score).removesuffix(" %") for score in scores.values()]
        rows.append([name, *accuracies, f"{comparison.runs[name].seconds:.0f} s"])
    columns = ("method", *next(iter(comparison.scores.values())), "training time")
    title = "Accuracy on new alphabets in percent, with 95 % confidence intervals"
    print_table(columns, rows, text=("method",), title=title)


def _print_result(result: Result) -> None:
    rows = []
    for row in result.rows:
        numbers = ["" if value is None else f"{value:.4g}" for value in (row.published, row.ours, row.ci95)]
        rows.append([row.name, row.metric, *numbers, {None: "", True: "yes", False: "no"}[row.agrees]])
    columns = ("row", "metric", "published", "ours", "± 95 %", "agrees")
    title = f"{result.id}, {result.scale}, on {result.environment.device}"
    print_table(columns, rows, text=("row", "metric"), title=title)
