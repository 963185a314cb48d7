"""The commands `demo`, `reproduce` and `methods`."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.cli.json_output import JsonOption, JsonOutput, versions
from metabridge.cli.options import Device, DeviceOption, SeedOption, app, device_name, reject_nan
from metabridge.cli.terminal import print_table
from metabridge.errors import InputError
from metabridge.experiments import experiment_modules

if TYPE_CHECKING:
    from metabridge.experiments.glyph_methods import Comparison
    from metabridge.learners import Method
    from metabridge.report.results import Result


class Scale(StrEnum):
    """Scales at which an experiment can be run."""

    quick = "quick"
    paper = "paper"


BUILTIN_TASKS = 200  # number of test tasks for the built-in model in the demo


@app.command()
def demo(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for the page index.html, its pictures, and glyphs.json with all numbers."
        ),
    ] = Path("demo"),
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    json_file: JsonOption = None,
) -> None:
    """Train and compare four methods on the built-in drawings of characters, in a few minutes on a CPU.

    Trains MAML, ANIL, multi-task learning (MTL) and non-adaptive learning (NAL) to classify five new characters from
    one example of each, and tests them and the built-in model for characters on new alphabets. Prints the
    accuracies with 95 % confidence intervals, and writes an HTML page with learning curves and pictures of correct and
    wrong predictions.

    Example: **metabridge demo --out demo --seed 1**
    """
    from metabridge.experiments import ExperimentOptions, glyph_methods
    from metabridge.files import make_folder
    from metabridge.report import demo_page
    from metabridge.training import evaluate, load_model

    make_folder(out)
    output = JsonOutput(json_file)
    outcome = glyph_methods.EXPERIMENT.run(ExperimentOptions("quick", device_name(device), seed))
    if not output.is_stdout:
        _print_scores(outcome.data)
    outcome.result.write(out)
    builtin = load_model("characters", device=device_name(device))
    builtin_score = evaluate(builtin, outcome.data.test_environment, tasks=BUILTIN_TASKS, seed=seed)
    output.print_message(f"Without training, the built-in model characters reaches {builtin_score} on such tasks.")
    page = demo_page.write(out, outcome.result, *outcome.data, builtin=builtin, builtin_score=builtin_score)
    output.print_message(f"The page is in {page}")
    builtin_report = {"accuracy": builtin_score.mean, "ci95": builtin_score.ci95, "tasks": builtin_score.tasks}
    output.write(asdict(outcome.result) | {"builtin": builtin_report, "page": page, "versions": versions()})


@app.command()
def reproduce(
    name: Annotated[
        str,
        typer.Argument(metavar="ID", help=f"Experiment to run: {', '.join(experiment_modules())}."),
    ],
    scale: Annotated[
        Scale,
        typer.Option(
            help="quick: takes minutes on a CPU; paper: as large as the published experiment, with the exceptions that "
            "docs/results.md lists."
        ),
    ] = Scale.quick,
    device: DeviceOption = Device.auto,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for ID.json, ID.png and training runs.")] = Path(
        "runs"
    ),
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder that contains data sets in subfolders such as omniglot and mini-imagenet. Default: none; "
            "the quick scale then uses the built-in glyphs.",
            envvar="METABRIDGE_DATA",
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Run only these parts of the experiment, such as maml,anil. An unknown name lists all "
            "names. Default: all.",
        ),
    ] = "",
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=reject_nan,
            help="Time limit in minutes for each training run. Runs that are trained together "
            "share one limit. Run the same command again to continue. Default: no limit.",
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Run an experiment and compare its results with the published ones.

    Writes ID.json with the settings, the machine and all numbers, and ID.png with the figure. The quick scale runs the
    same code as the paper scale with smaller settings, and uses the built-in glyphs if the data set is not available.
    Scores of training runs are cached in OUT/records and reused by other experiments that need the same run.

    Example: **metabridge reproduce glyphs --scale quick --out runs**
    """
    from metabridge.experiments import ExperimentOptions, load_experiment
    from metabridge.files import make_folder

    experiment = load_experiment(name)
    selected_parts = tuple(part for part in only.split(",") if part)
    for option, is_used in (("--only", bool(selected_parts)), ("--minutes", minutes is not None)):
        if is_used and not experiment.resumable:
            raise InputError(
                f"{name} does not support {option}, because it cannot be split into parts or resumed. Omit {option}."
            )
    if data is not None and not data.exists():
        raise InputError(
            f"--data is {data}, which does not exist. Pass a folder of data sets, or omit --data to use the built-in "
            "glyphs."
        )
    make_folder(out)
    output = JsonOutput(json_file)
    outcome = experiment.run(
        ExperimentOptions(scale.value, device_name(device), seed, out, data, selected_parts, minutes)
    )
    if not output.is_stdout:
        _print_result(outcome.result)
    output.print_message(f"The results are in {outcome.result.write(out)}")
    file = out / f"{name}.png"
    try:
        experiment.draw(outcome, file)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        output.print_message(f"{file} was not drawn, because matplotlib is not installed.")
    else:
        output.print_message(f"The figure is in {file}")
    output.write(asdict(outcome.result) | {"versions": versions()})


@app.command()
def methods(json_file: JsonOption = None) -> None:
    """List the training methods: which parameters adapt to a task, by which solver, and how the gradient is computed.

    The table shows the default settings of each method; docs/methods.md explains its columns. Pass the name of a method
    to **metabridge train --method** or, in Python, to **metabridge.method**.

    Example: **metabridge methods**
    """
    from metabridge.learners.method import PRESETS
    from metabridge.report.method_table import taxonomy_row

    output = JsonOutput(json_file)
    rows = {name: taxonomy_row(method) for name, method in PRESETS.items()}
    columns = ("method", *next(iter(rows.values())))
    if not output.is_stdout:
        print_table(columns, [[name, *row.values()] for name, row in rows.items()], left_aligned=columns)
    output.write([{"name": name, **_method_report(method)} for name, method in PRESETS.items()])


def _method_report(method: Method) -> dict[str, object]:
    """Return the fields of a method with JSON types. A solver is a dictionary of its name and options."""
    return {
        "adapts": method.adapts,
        "inner": None if method.inner is None else method.inner.to_dict(),
        "outer": method.outer,
        "training_head": method.training_head,
        "split": method.split,
        "test_solver": None if method.test_solver is None else method.test_solver.to_dict(),
        "trains": method.trains,
    }


def _print_scores(comparison: Comparison) -> None:
    rows = []
    for name, scores in comparison.scores.items():
        accuracies = [str(score).removesuffix(" %") for score in scores.values()]
        rows.append([name, *accuracies, f"{comparison.runs[name].seconds:.0f} s"])
    columns = ("method", *next(iter(comparison.scores.values())), "training time")
    title = "Accuracy on new alphabets in percent, with 95 % confidence intervals"
    print_table(columns, rows, left_aligned=("method",), title=title)


def _print_result(result: Result) -> None:
    rows = []
    for row in result.rows:
        cells = ["" if number is None else f"{number:.4g}" for number in (row.published, row.ours, row.ci95)]
        rows.append([row.name, row.metric, *cells, {None: "", True: "yes", False: "no"}[row.agrees]])
    columns = ("row", "metric", "published", "ours", "± 95 %", "agrees")
    title = f"{result.id}, {result.scale}, on {result.environment.device}"
    print_table(columns, rows, left_aligned=("row", "metric"), title=title)
