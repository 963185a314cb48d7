"""The commands `train` and `evaluate`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from metabridge.choices import alternatives, head_names
from metabridge.cli.config_options import with_config_options
from metabridge.cli.json_output import JsonOption, JsonOutput, versions
from metabridge.cli.options import (
    MODEL_HELP,
    Device,
    DeviceOption,
    MinImagesOption,
    MinutesOption,
    ModelOptionsOption,
    QueriesOption,
    SeedOption,
    SizeOption,
    SplitOption,
    WeightsOption,
    app,
    at_most,
    device_name,
    images_for,
    load_source,
)
from metabridge.cli.terminal import print_stderr, print_table
from metabridge.errors import MAX_COUNT, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from metabridge.environments import LabeledImages
    from metabridge.learners import Method
    from metabridge.training import Model, Run, Score, Trainer
    from metabridge.training.assessment import Assessment, OpenSetAssessment
    from metabridge.training.config import ImageTrainingConfig

T = TypeVar("T")

HeadOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Classifier to fit on the features of the support images: {alternatives(head_names())}. Default: the "
        "head of the method.",
    ),
]
DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Data set: glyphs (built in), a folder with one subfolder of images per class, or NAME:PATH, such as "
        "omniglot:data/omniglot, with a name from docs/data.md.",
    ),
]


@app.command()
@with_config_options
def train(
    data: DataOption = "glyphs",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder in which the run is saved.")] = Path("runs/run"),
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the training run whose model is the teacher for distillation (only mtl and rfs). Sets "
            "--distillation to 0.5 unless that option is passed. Default: no teacher.",
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Trained model to start from, which determines the network and the size of the images: the folder of "
            "a run, photos or characters (built in), timm:NAME or hf:NAME. Default: new weights.",
        ),
    ] = None,
    minutes: MinutesOption = None,
    device: DeviceOption = Device.auto,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Experiment tracker to which the learning curve is also sent: tensorboard, wandb or trackio. "
            "TensorBoard files are written to the folder tensorboard in OUT. Default: none.",
        ),
    ] = None,
    json_file: JsonOption = None,
    **config: Any,
) -> None:
    """Train a few-shot model.

    The defaults of many options depend on the method; docs/training.md lists them. The run folder contains the
    settings, the best weights, the learning curve and a checkpoint. Run the same command again to continue a stopped
    run.

    Example: **metabridge train --data photos --method mtl --out runs/photos**

    Example: **metabridge train --data photos --method maml --init runs/photos --freeze features.0 --out runs/maml**
    """
    from dataclasses import replace

    from metabridge.datasets import load as load_images
    from metabridge.training import load as load_run
    from metabridge.training.config import ImageTrainingConfig, SoftTargets, default_config
    from metabridge.training.fitting import run_to_end
    from metabridge.training.image_training import image_trainer
    from metabridge.training.initial_weights import network_like
    from metabridge.training.trackers import check_tracker

    # Check everything that does not depend on the images before reading them, which can take long.
    defaults = default_config(config.pop("method", ImageTrainingConfig.method))
    torch_device = device_name(device)
    targets = SoftTargets(**({"distillation": 0.5} if teacher else {}) | config.pop("soft_targets", {}))
    options = replace(defaults, **config, soft_targets=None if targets == SoftTargets() else targets)
    method = _create_method(options)
    _check_model(options, config, init)
    check_tracker("log", log)
    output = JsonOutput(json_file)
    if out.is_file():
        raise InputError(f"--out is {out}, which is a file. Pass a folder.")
    if init is None:
        source, net, check_init = None, None, True
        images = load_images(data, size=size, min_images=min_images)
    else:
        source, check_init = _load_init(init, out, torch_device)
        images = _images_for_init(source, data, size, min_images)
        net = network_like(source, outputs=options.ways, statistics=config.get("statistics"), seed=options.seed)
    teacher_run = None if teacher is None else load_run(teacher, device=torch_device)
    try:
        trainer = image_trainer(
            options,
            images,
            device=torch_device,
            out=out,
            teacher=teacher_run,
            init=source,
            check_init=check_init,
            method=method,
            net=net,
        )
    except InputError as error:
        if options.training_ways is None or not str(error).startswith(f"ways is {options.training_ways}, but split"):
            raise
        raise InputError(str(error).replace("ways", "training_ways")) from error
    _print_validation_ways(trainer, options.ways)
    _print_start(trainer, init)
    with output.messages_to_stderr():  # trackers print messages
        run = run_to_end(trainer, options.method, minutes=minutes, log=log)  # type: ignore[arg-type]  # checked above
    if trainer.stopped_early:
        count = trainer.validations_since_best
        print_stderr(
            f"Stopped early at iteration {trainer.iteration} of {trainer.config.iterations}, after "
            f"{count} validation{'s' if count > 1 else ''} without a new best score. To continue, use --patience "
            f"{count} or more."
        )
    _draw_curve(run, out, options.method)
    if run.best is not None:
        ways = getattr(trainer.validate, "ways", options.ways)
        output.print_message(f"Best score on {run.best.tasks} validation tasks ({ways}-way): {run.best}")
    if run.finished:
        output.print_message(f"The run is in {out}. {_next_step(out, images, options.ways)}")
    else:
        output.print_message(f"Stopped after {minutes:g} minutes. Run the same command again to continue.")
    output.write(_run_report(out, options.method, trainer, run))


def _run_report(out: Path, method: str, trainer: Trainer, run: Run) -> dict[str, object]:
    """Return the JSON report of `train`."""
    from metabridge.training.learning_curve import point_to_json

    curve = [point_to_json(point) for point in run.curve]
    return {
        "run": out,
        "method": method,
        "finished": run.finished,
        "iterations": trainer.iteration,
        "seconds": run.seconds,
        "best": next((point for point in reversed(curve) if point["best"]), None),
        "curve": curve,
        "versions": versions(),
    }


# Options of the model that other options of `train` set.
_FLAGS_OF_MODEL_OPTIONS = {"size": "--size", "outputs": "--ways", "statistics": "--statistics", "seed": "--seed"}


def _check_model(options: ImageTrainingConfig, passed: Mapping[str, Any], init: str | None) -> None:
    """Raise an `InputError` if the model is unknown, rejects an option, or another option determines it."""
    from metabridge.models import builder
    from metabridge.training.image_training import options_set_by_training

    if init is not None:
        for name, init_flag in (("model", "--model"), ("model_options", "--model-option")):
            if name in passed:
                raise InputError(f"{init_flag} is passed, but --init determines the network. Omit {init_flag}.")
        return
    builder(options.model, **options.model_options)
    for name in options_set_by_training(options.model):
        if name in options.model_options:
            value, flag = options.model_options[name], _FLAGS_OF_MODEL_OPTIONS.get(name)
            if flag is None:
                raise InputError(f"{name} is {value}, but the images determine it. Omit it.")
            raise InputError(f"{name} is {value}, but this option of the model is set by {flag}. Use {flag} {value}.")


def _load_init(init: str, out: Path, device: str) -> tuple[Model, bool]:
    """Return the model that --init names, and whether it was loaded.

    If it cannot be loaded, but there is a run in `out` that started from a model, return that run's network, without
    its weights: the state of the run contains them.
    """
    from metabridge.learners import method, parameters
    from metabridge.training import Model, load_model
    from metabridge.training.checkpoint import RunFolder, read_network

    try:
        return load_model(init, device=device), True
    except InputError as error:
        message = re.sub("^model is ", "--init is ", str(error))
        folder = RunFolder(out)
        settings, state = folder.resumable_settings(), folder.read("state")
        if settings is None or settings.get("init") is None or settings["model"] is None or state is None:
            raise InputError(message) from error
        net = read_network(settings, None, state[0])
    print_stderr(f"--init cannot be checked: {message} The run is continued from its saved state.")
    frozen = method("frozen")
    return Model(frozen, net, parameters(frozen, net)), False


def _images_for_init(source: Model, data: str, size: int | None, min_images: int | None) -> LabeledImages:
    """Load the data in the image size and channels of the network of --init."""
    images = images_for(source, data, min_images)
    network_size = images.images.shape[-1]
    if size not in (None, network_size):
        raise InputError(
            f"--size is {size}, but the network of --init needs images of size {network_size}. Omit --size."
        )
    return images


def _print_start(trainer: Trainer, init: str | None) -> None:
    """Print where training continues, or from which weights it starts."""
    if trainer.finished:
        return
    if trainer.iteration:
        print_stderr(f"Continuing the run at iteration {trainer.iteration} of {trainer.config.iterations}.")
    elif trainer.initial_weights is not None:
        print_stderr(f"Initial weights from {init}: {trainer.initial_weights.summary()}.")


def _create_method(config: ImageTrainingConfig) -> Method:
    """Return the method of a configuration, or raise an `InputError` if it rejects its options."""
    from metabridge.training.image_training import method_of

    try:
        return method_of(config)
    except InputError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        values = ", ".join(f"{name}={value}" for name, value in config.method_options.items())
        raise InputError(f"{config.method} does not accept --option {values} ({error}).") from error


def _print_validation_ways(trainer: Trainer, ways: int) -> None:
    """Print a message if validation is impossible or its tasks have fewer than `ways` classes."""
    if trainer.validate is None:
        print_stderr("Fewer than two validation classes: keeping the last weights instead of the best.")
        return
    validation_ways = getattr(trainer.validate, "ways", ways)
    if validation_ways < ways:
        print_stderr(f"Only {validation_ways} validation classes: validation tasks have {validation_ways} ways.")


def _next_step(out: Path, images: LabeledImages, ways: int) -> str:
    """Return a message with a command that evaluates the run on its test classes."""
    classes = images.splits.get("test", ())
    if len(classes) < 2:
        return "Fewer than two test classes: evaluate the run on other data with metabridge evaluate --data."
    fewest_images = min(int((images.labels == label).sum()) for label in classes)
    shots, queries = ("1,5", fewest_images - 5) if fewest_images > 5 else ("1", fewest_images - 1)
    queries_option = f" --queries {queries}" if queries < 15 else ""
    ways = min(ways, len(classes))
    return f"Next: metabridge evaluate {shlex.quote(str(out))} --ways {ways} --shots {shots}{queries_option}"


def _draw_curve(run: Run, folder: Path, name: str) -> None:
    """Draw the learning curve if there is one and matplotlib is installed."""
    from metabridge.files import write_atomically

    if run.best is None:
        return
    try:
        from metabridge.report import figures
    except ModuleNotFoundError:
        return
    picture = figures.png(figures.learning_curves({name: run}, "iterations"))
    write_atomically(folder / "curves.png", picture, follow=False)


@app.command()
def evaluate(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Folders of training runs.", show_default=False)
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help=f"{MODEL_HELP}. Needs --data. Can be repeated."),
    ] = None,
    weights: WeightsOption = None,
    model_options: ModelOptionsOption = None,
    shots: Annotated[
        str,
        typer.Option(metavar="K,...", help="Numbers of support images per class; each is evaluated separately."),
    ] = "1,5",
    tasks: Annotated[
        int, typer.Option(min=2, callback=at_most(MAX_COUNT), help="Number of tasks for each value of --shots.")
    ] = 2000,
    ways: Annotated[
        int | None,
        typer.Option(
            min=2,
            callback=at_most(MAX_COUNT),
            help="Number of classes per task. Default: the --ways that the first run was trained with.",
        ),
    ] = None,
    queries: QueriesOption = 15,
    split: SplitOption = "test",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Data set, as for metabridge train --data. Default: the data set that the runs were trained on.",
        ),
    ] = None,
    allow_same_names: Annotated[
        bool,
        typer.Option(
            "--allow-same-names",
            help="Allow test classes with the same names as training classes.",
        ),
    ] = False,
    min_images: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=at_most(MAX_COUNT),
            help="Omit classes with fewer images than this. Default: as in training; with --data, use all classes.",
        ),
    ] = None,
    head: HeadOption = None,
    penalty: Annotated[
        float | None,
        typer.Option(
            help="L2 penalty of the classifier selected with --head (1/C for svm). Default: depends on the head."
        ),
    ] = None,
    copies: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Test-time augmentation: add this many randomly augmented copies of each support image.",
        ),
    ] = 0,
    mirrored: Annotated[
        bool,
        typer.Option(
            "--mirrored",
            help="Test-time augmentation: average the features of each image and its horizontal flip.",
        ),
    ] = False,
    rotated: Annotated[
        bool,
        typer.Option(
            "--rotated",
            help="Test-time augmentation: concatenate the features of each image rotated by 0, 90, 180 and 270 "
            "degrees.",
        ),
    ] = False,
    cropped: Annotated[
        bool,
        typer.Option(
            "--cropped", help="Test-time augmentation: average the features of each image and five of its crops."
        ),
    ] = False,
    open_set: Annotated[
        bool,
        typer.Option(
            "--open-set",
            help="Also measure how well images of classes that are not part of a task are recognized, and the accuracy "
            "on the most confident queries.",
        ),
    ] = False,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    json_file: JsonOption = None,
) -> None:
    """Evaluate trained models on new tasks, with 95 % confidence intervals.

    Prints the mean accuracy over tasks, the class with the lowest accuracy, and the expected calibration error if the
    head predicts probabilities. All models are evaluated on the same tasks. With several runs, also prints the mean
    difference in accuracy between each run and the first, with its 95 % confidence interval, computed from the per-task
    differences.

    Example: **metabridge evaluate runs/mtl runs/maml --shots 1,5 --tasks 2000**

    Example: **metabridge evaluate --model photos --model timm:resnet50 --data photos**

    With --open-set, each task also has images of unknown classes: other classes of the split. A second table contains
    the AUROC of the outlier score, the percentages of known and of unknown images that are rejected with a threshold
    for 5 % of the known ones, and the accuracy on the 80 % of the queries with the highest confidence.

    Example: **metabridge evaluate runs/mtl --shots 5 --open-set**
    """
    from dataclasses import replace

    from metabridge.heads import create_head
    from metabridge.training import TestTimeAugmentation
    from metabridge.training.assessment import assess, assess_open_set, feature_table

    if penalty is not None and head is None:
        raise InputError("--penalty requires a head. Select one with --head.")
    test_head = None if head is None else create_head(head, penalty)
    output = JsonOutput(json_file)
    shot_counts = _parse_shots(shots)
    augmentation = TestTimeAugmentation(copies, mirrored, rotated, cropped)
    torch_device = device_name(device)
    sources = [*map(str, runs or []), *(models or [])]
    if not sources:
        raise InputError("no model is passed. Pass the folder of a run, or --model photos.")
    if data is None and models:
        raise InputError(f"--model is {models[0]}, which is not tied to a data set. Add --data.")
    loaded = [load_source(Path(run), None, device=torch_device) for run in runs or []]
    loaded += [load_source(None, model, weights, model_options, device=torch_device) for model in models or []]
    ways = ways or _default_ways(sources[0], loaded[0])
    load_arguments = _load_arguments(sources, loaded) if data is None else [None] * len(sources)
    rows: list[list[str]] = []
    unknown_rows: list[list[str]] = []
    report: list[dict[str, object]] = []
    first_assessments: dict[int, Assessment] = {}  # assessments of the first run, by number of shots
    for folder, run, arguments in zip(sources, loaded, load_arguments):
        model = run if test_head is None else replace(run, method=replace(run.method, test_solver=test_head))
        images = _images(folder, run, arguments, data, min_images).to(torch_device)
        if not allow_same_names:
            _check_new_classes(folder, run, images, split, same_data=data is None)
        environments = {
            count: images.tasks(split, ways=ways, shots=count, queries=queries)
            for count in sorted(shot_counts, reverse=True)  # largest first, so that an error names the largest count
        }
        table = None
        if open_set:
            first_environment = environments[shot_counts[0]]
            table = feature_table(model, first_environment, seed=seed, augmentation=augmentation, progress=True)
        for count in shot_counts:
            environment = environments[count]
            assessment = assess(
                model, environment, tasks=tasks, seed=seed, augmentation=augmentation, progress=True, table=table
            )
            unknown = None
            if table is not None:
                unknown = assess_open_set(model, environment, tasks=tasks, seed=seed, table=table)
                unknown_rows.append(_unknown_row(folder, count, assessment, unknown))
            first = first_assessments.setdefault(count, assessment)
            difference = None if assessment is first else assessment.score.minus(first.score)
            calibrated = _predicts_probabilities(model)
            rows.append(_table_row(folder, count, assessment, difference, calibrated=calibrated))
            report.append(_json_entry(folder, count, assessment, difference, unknown, calibrated=calibrated))
    columns = ["model", "shots", "accuracy, %", "worst class", "calibration error"]
    if len(sources) > 1:
        columns.append("difference from first model, points")
    title = f"{split.capitalize()} split, {ways}-way, {tasks} tasks per number of shots"
    if not output.is_stdout:
        print_table(columns, [row[: len(columns)] for row in rows], left_aligned=("model", "worst class"), title=title)
        if unknown_rows:
            print_table(_UNKNOWN_COLUMNS, unknown_rows, left_aligned=("model",), title="Images of unknown classes")
    output.write(report)


def _parse_shots(shots: str) -> list[int]:
    """Parse the value of --shots, such as "1,5"."""
    try:
        counts = [int(number) for number in shots.split(",")]
    except ValueError:
        raise InputError(f"--shots is {shots!r}, but must be integers separated by commas, such as 1,5.") from None
    if max(counts) > MAX_COUNT:
        raise InputError(f"--shots is {max(counts)}, but must be {MAX_COUNT} or less.")
    return counts


def _predicts_probabilities(run: Model) -> bool:
    """Return whether the softmax of the outputs estimates probabilities; outputs of some heads only rank classes."""
    from metabridge.heads import Head

    return not isinstance(run.method.test_solver, Head) or run.method.test_solver.calibrated


def _default_ways(source: str, model: Model) -> int:
    """Return the number of outputs of a run's network, which is the --ways of training, or 5 if it is unknown."""
    from metabridge.training.checkpoint import damage_error

    ways = (_settings(model).get("model") or {}).get("outputs", 5)
    if not isinstance(ways, int):
        raise damage_error(Path(source, "settings.json"), f"its number of outputs is {ways!r}")
    return ways


def _settings(model: Model) -> dict[str, Any]:
    """Return the settings of a run; a model that is no run has none."""
    return getattr(model, "settings", {})


def _task_setting(source: str, model: Model, key: str, expected_type: type[T]) -> T | None:
    """Return a setting of a run's training tasks, or None if it is not stored."""
    from metabridge.training.checkpoint import damage_error

    value = (_settings(model).get("tasks") or {}).get(key)
    if value is not None and not isinstance(value, expected_type):
        raise damage_error(Path(source, "settings.json"), f"{key} of its tasks is {value!r}")
    return value


def _load_arguments(folders: list[str], runs: list[Model]) -> list[dict[str, Any]]:
    """Return the arguments of `datasets.load` that load the training data of each run.

    Raises:
        InputError: If the settings of a run do not contain these arguments, or if the runs were trained on different
            data. Different image sizes and channels are allowed.
    """
    load_arguments, data_sets = [], []
    for folder, run in zip(folders, runs):
        stored_arguments = _task_setting(folder, run, "data", dict)
        if stored_arguments is None:
            raise InputError(
                f"the settings of the run in {folder} do not contain its data set. Specify one with --data."
            )
        is_glyphs = stored_arguments.get("name") == "glyphs"  # the root of glyphs is only a cache folder
        load_arguments.append(
            {key: value for key, value in stored_arguments.items() if not (is_glyphs and key == "root")}
        )
        data_sets.append(
            {key: value for key, value in stored_arguments.items() if key not in ("size", "channels", "decode_options")}
        )
        if data_sets[-1] != data_sets[0]:
            raise InputError(
                f"the runs in {folders[0]} and {folder} were trained on different data, so they cannot be evaluated on "
                "the same tasks. Specify a data set for both with --data, or evaluate them separately."
            )
    return load_arguments


def _images(
    folder: str, run: Model, arguments: dict[str, Any] | None, data: str | None, min_images: int | None
) -> LabeledImages:
    """Load `data` (default: the run's training data) in the image size and channels of its network."""
    from metabridge.datasets import load
    from metabridge.training.checkpoint import damage_error
    from metabridge.training.model_images import image_shape

    if data is not None:
        return images_for(run, data, min_images)
    arguments = arguments or {}
    try:
        images = load(**(arguments if min_images is None else arguments | {"min_images": min_images}))
    except (TypeError, AttributeError) as error:
        raise damage_error(Path(folder, "settings.json"), f"its data {arguments} cannot be read ({error})") from error
    channels, size = image_shape(run.net)
    if images.images.shape[1:] != (channels, size, size):
        raise damage_error(Path(folder, "settings.json"), f"the images of its data {arguments} do not fit its network")
    return images


def _check_new_classes(folder: str, run: Model, images: LabeledImages, split: str, *, same_data: bool) -> None:
    """Raise an `InputError` if a class of the split has the name of a training class. Allow the split "train"."""
    if split == "train" or split not in images.splits:
        return
    training_names = _task_setting(folder, run, "class_names", list) or []
    split_names = images.split_class_names(split)
    shared_names = [name for name in split_names if name in training_names]
    if not shared_names:
        return
    if same_data:
        raise InputError(
            f"class '{shared_names[0]}' is in the {split} split, but the run in {folder} was trained on it, "
            "because the data or --min-images have changed since. Restore them, or specify other data with --data."
        )
    raise InputError(
        f"{len(shared_names)} of {len(split_names)} classes in the {split} split, such as '{shared_names[0]}', have "
        f"names of classes that the run in {folder} was trained on, but evaluation needs new classes. Remove them from "
        "the data, or add --allow-same-names if only the names are the same."
    )


def _table_row(
    folder: str, shots: int, assessment: Assessment, difference: Score | None, *, calibrated: bool
) -> list[str]:
    """Return the cells of a table row."""
    worst_class, accuracy = assessment.worst_class
    return [
        folder,
        str(shots),
        str(assessment.score).removesuffix(" %"),
        f"{worst_class} {100 * accuracy:.1f} %",
        f"{assessment.calibration_error:.3f}" if calibrated else "",
        "" if difference is None else str(difference).removesuffix(" %"),
    ]


_UNKNOWN_COLUMNS = (
    "model",
    "shots",
    "AUROC, %",
    "known rejected, %",
    "unknown rejected, %",
    "accuracy on the most confident 80 %, %",
)


def _unknown_row(folder: str, shots: int, assessment: Assessment, unknown: OpenSetAssessment) -> list[str]:
    """Return the cells of a row of the table of unknown classes. One-shot tasks have no threshold."""
    scores = (unknown.auroc, unknown.rejected_known, unknown.rejected_unknown)
    cells = ["" if score is None else str(score).removesuffix(" %") for score in scores]
    return [folder, str(shots), *cells, f"{100 * assessment.accuracy_at_coverage[0.8]:.1f}"]


def _json_entry(
    folder: str,
    shots: int,
    assessment: Assessment,
    difference: Score | None,
    unknown: OpenSetAssessment | None,
    *,
    calibrated: bool,
) -> dict[str, object]:
    """Return one entry of the JSON report."""
    score = assessment.score
    bins = [dict(zip(("confidence", "accuracy", "share"), values)) for values in assessment.calibration]
    return {
        "model": folder,
        "shots": shots,
        "accuracy": score.mean,
        "ci95": score.ci95,
        "tasks": score.tasks,
        "diverged": score.diverged,
        "difference": None if difference is None else {"mean": difference.mean, "ci95": difference.ci95},
        "calibration_error": assessment.calibration_error if calibrated else None,
        "calibration": bins if calibrated else None,
        "accuracy_at_coverage": {str(fraction): value for fraction, value in assessment.accuracy_at_coverage.items()},
        "risk_coverage_area": assessment.risk_coverage_area,
        "open_set": None if unknown is None else _open_set_entry(unknown),
        "classes": assessment.classes,
    }


def _open_set_entry(unknown: OpenSetAssessment) -> dict[str, object]:
    """Return the entry of the JSON report with the results for unknown classes."""

    def entry(score: Score | None) -> dict[str, float] | None:
        return None if score is None else {"mean": score.mean, "ci95": score.ci95}

    return {
        "auroc": entry(unknown.auroc),
        "rate": unknown.rate,
        "rejected_known": entry(unknown.rejected_known),
        "rejected_unknown": entry(unknown.rejected_unknown),
    }
