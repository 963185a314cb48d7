"""Commands that train a model and judge it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from metabridge.cli.options import (
    MOST,
    Device,
    DeviceOption,
    MinImagesOption,
    MinutesOption,
    SeedOption,
    SizeOption,
    app,
    device_name,
    images_for,
)
from metabridge.cli.terminal import note, print_table, say
from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.environments import LabelledImages
    from metabridge.training import Run, SoftTargets
    from metabridge.training.assessment import Assessment
    from metabridge.training.config import Plan


T = TypeVar("T")


HeadOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Solve this test-time head instead; `metabridge methods` lists the heads."),
]
DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="DATA",
        help="A data set: glyphs (built in), a folder of images, or NAME:PATH such as omniglot:data/omniglot.",
    ),
]


@app.command()
def train(
    data: DataOption = "glyphs",
    method: Annotated[str, typer.Option(help="One of those that `metabridge methods` lists.")] = "mtl",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="A setting of the method: steps=5.")
    ] = None,
    model: Annotated[str, typer.Option(help="conv4, resnet12, mlp, timm:NAME, or an architecture.json.")] = "conv4",
    model_option: Annotated[
        list[str] | None, typer.Option("--model-option", metavar="KEY=VALUE", help="Of the model: filters=64.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/run"),
    ways: Annotated[int, typer.Option(min=2, max=MOST, help="Classes in a task.")] = 5,
    shots: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Support images of each class, in training.")
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Query images of each class, in training.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tasks in a step; images in a step for rfs.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(min=1, max=10**9, help="Steps of training.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw, radam, sgd or muon.")] = None,
    lr: Annotated[float | None, typer.Option(help="The outer learning rate.")] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0, help="Of the optimizer.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of the rate: constant, step, cosine or plateau.")] = None,
    augment: Annotated[
        bool | None, typer.Option(help="Random crops, colours and flips; on for colour images unless told otherwise.")
    ] = None,
    validate_every: Annotated[int | None, typer.Option(min=1, max=MOST, help="Steps between validations.")] = None,
    validate_tasks: Annotated[
        int, typer.Option(min=2, max=MOST, help="Tasks of a validation, the same each time.")
    ] = 200,
    validate_shots: Annotated[
        int, typer.Option(min=1, max=MOST, help="Support images of each class, in validation.")
    ] = 1,
    patience: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Stop after more than so many validations without a new best.")
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, or bfloat16 for the features.")] = "float32",
    smoothing: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each label that is spread over all classes (mtl, rfs).")
    ] = 0.0,
    mixup: Annotated[
        float, typer.Option(min=0, max=100, help="Mix pairs of images with weights from Beta(A, A) (mtl, rfs).")
    ] = 0.0,
    teacher: Annotated[
        Path | None, typer.Option(help="Folder of a run whose predictions are learned as well (mtl, rfs).")
    ] = None,
    average: Annotated[
        float | None, typer.Option(help="Keep a moving average of the weights with this decay, such as 0.999.")
    ] = None,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    minutes: MinutesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Train a few-shot model.

    Settings left out are those that the method is usually trained with. The run's folder holds the
    settings, the best weights, the learning curve and all that is needed to go on: the same command
    given again continues a run that was stopped.

    Example: **metabridge train --data photos --method mtl --out runs/photos**
    """
    from dataclasses import replace

    from metabridge.datasets import load
    from metabridge.learners.method import method as checked
    from metabridge.models import builder
    from metabridge.training import load as load_run
    from metabridge.training import schedule as named
    from metabridge.training.config import PLANS

    checked(method)
    where = device_name(device)
    given = {
        "method_options": _settings(option, "--option"),
        "model": model,
        "model_options": _settings(model_option, "--model-option"),
        "ways": ways,
        "shots": shots,
        "queries": queries,
        "batch": batch,
        "iterations": iterations,
        "optimizer": optimizer,
        "lr": lr,
        "weight_decay": weight_decay,
        "schedule": None if schedule is None else named(schedule),
        "augment": augment,
        "validate_every": validate_every,
        "validate_tasks": validate_tasks,
        "validate_shots": validate_shots,
        "patience": patience,
        "precision": precision,
        "soft_targets": _soft_targets(smoothing, mixup, teacher),
        "average": average,
        "seed": seed,
    }
    plan = replace(PLANS[method], **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    _check_method(plan, option)
    plan.settings()  # what this and the next refuse is refused before images are read
    builder(plan.model, **plan.model_options)
    if out.is_file():
        raise InputError(f"--out is {out}, which is a file. Name a folder.")
    images = load(data, size=size, min_images=min_images)
    plan.training_tasks(images)  # what cannot be drawn is refused before anything is said or built
    _check_memory(plan, images)
    if len(images.splits.get("validation", ())) < 2:
        note("There are no two classes to validate on, so the last weights are kept.")
    else:
        judged = plan.validation_tasks(images).ways
        if judged < ways:
            note(f"There are {judged} classes to validate on, so tasks of validation have {judged} ways.")
    taught = None if teacher is None else load_run(teacher, device=where)
    run = plan.train(images, device=where, out=out, minutes=minutes, teacher=taught)
    _draw_curve(run, out, method)
    if run.best is not None:
        say(f"Best on {run.best.tasks} {judged}-way validation tasks: {run.best.told()}")
    if run.finished:
        say(f"The run is in {out}. {_next(out, images, plan.ways)}")
    else:
        say(f"Stopped after {minutes:g} minutes. The same command goes on from there.")


def _soft_targets(smoothing: float, mixup: float, teacher: Path | None) -> SoftTargets | None:
    from metabridge.training import SoftTargets

    if not (smoothing or mixup or teacher):
        return None
    return SoftTargets(smoothing, mixup, 0.5 if teacher else 0.0)


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of trained runs.")],
    shots: Annotated[str, typer.Option(metavar="K,...", help="Support images of each class.")] = "1,5",
    tasks: Annotated[int, typer.Option(min=2, max=MOST, help="Tasks to judge on.")] = 2000,
    ways: Annotated[
        int | None, typer.Option(min=2, max=MOST, help="Classes in a task; as in training unless told.")
    ] = None,
    queries: Annotated[int, typer.Option(min=1, max=MOST, help="Query images of each class.")] = 15,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    data: Annotated[str | None, typer.Option(metavar="DATA", help="Another data set than the run's own.")] = None,
    trained_classes: Annotated[
        bool, typer.Option("--trained-classes", help="Allow classes with names that the run was trained on.")
    ] = False,
    min_images: MinImagesOption = None,
    head: HeadOption = None,
    penalty: Annotated[float | None, typer.Option(help="Of the head's weights (1/C for svm).")] = None,
    copies: Annotated[
        int, typer.Option(min=0, max=1000, help="Changed copies of each support image to adapt to as well.")
    ] = 0,
    mirrored: Annotated[bool, typer.Option("--mirrored", help="Average over each image and its mirror image.")] = False,
    turned: Annotated[bool, typer.Option("--turned", help="Look at every quarter turn of an image too.")] = False,
    cropped: Annotated[bool, typer.Option("--cropped", help="Average over each image and five crops of it.")] = False,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all as JSON there; - is stdout.")] = None,
) -> None:
    """Judge trained runs on new tasks, with 95 % intervals.

    Prints the accuracy over tasks, the worst class and how far probabilities can be trusted (the
    expected calibration error). Every run is judged on the same tasks, so with several runs the
    differences from the first are given too, task by task, with their own intervals.

    Example: **metabridge evaluate runs/mtl runs/maml --shots 1,5 --tasks 2000**
    """
    from dataclasses import replace

    from metabridge.datasets import load as load_images
    from metabridge.files import STDOUT, json_bytes, make_parent_folder, write_output
    from metabridge.heads import Head, create_head
    from metabridge.training import Views, load
    from metabridge.training.assessment import assess
    from metabridge.training.checkpoint import damaged
    from metabridge.use.image_input import image_shape

    if penalty is not None and head is None:
        raise InputError("penalty is given without the head that it is of. Name it with --head.")
    test_head = None if head is None else create_head(head, penalty)
    if json_file is not None:
        make_parent_folder(json_file)
    ways = ways or _ways(runs[0])
    where = device_name(device)
    rows: list[list[str]] = []
    report: list[dict[str, object]] = []
    counts, views = _counts(shots), Views(copies, mirrored, turned, cropped)
    first: dict[int, Assessment] = {}
    sources: list[dict[str, Any]] = [{}] * len(runs) if data is not None else _sources(runs)
    for folder, source in zip(runs, sources):
        run = load(folder, device=where)
        if test_head is not None:
            run = replace(run, method=replace(run.method, test=test_head))
        if data is not None:
            images = images_for(run, data, min_images)
        else:
            try:
                images = load_images(**source if min_images is None else source | {"min_images": min_images})
            except (TypeError, AttributeError) as error:
                raise damaged(folder / "settings.json", f"its data {source} cannot be read ({error})") from error
            channels, side = image_shape(run.net)
            if images.images.shape[1:] != (channels, side, side):
                raise damaged(folder / "settings.json", f"its data {source} are not images that its network takes")
        images = images.to(where)
        if not trained_classes:
            _check_new(folder, images, split, own=data is None)
        environments = {
            count: images.tasks(split, ways=ways, shots=count, queries=queries)
            for count in sorted(counts, reverse=True)  # the most shots need the most images
        }
        for count in counts:
            found = assess(run, environments[count], tasks=tasks, seed=seed, views=views, progress=True)
            first.setdefault(count, found)
            gap = None if found is first[count] else found.score.minus(first[count].score)
            worst, lowest = found.worst
            told = [found.score.told().removesuffix(" %"), f"{worst} {100 * lowest:.1f} %"]
            ranked = isinstance(run.method.test, Head) and not run.method.test.calibrated
            told.append("" if ranked else f"{found.calibration_error:.3f}")
            told.append("" if gap is None else gap.told().removesuffix(" %"))
            rows.append([str(folder), str(count), *told])
            report.append(_reported(folder, count, found, gap, calibrated=not ranked))
    columns = ("run", "shots", "accuracy, %", "worst class", "calibration error", "against the first, %")
    title = f"{ways}-way tasks of the {split} split, {tasks} of each kind"
    if str(json_file) != STDOUT:
        print_table(columns, rows, text=("run", "worst class"), title=title)
    if json_file is not None:
        write_output(json_file, json_bytes(report, indent=2))
        if str(json_file) != STDOUT:
            say(f"Every class is in {json_file}")


def _check_new(folder: Path, images: LabelledImages, split: str, *, own: bool) -> None:
    """Refuse classes to test on that a run was trained on; in data other than its own, by their names."""
    if split == "train" or split not in images.splits:
        return
    trained = _trained_on(folder, "class_names", list) or []
    members = images.split_class_names(split)
    known = [name for name in members if name in trained]
    if not known:
        return
    if own:
        raise InputError(
            f"class '{known[0]}' is in the {split} split, but the run in {folder} was trained on it: the data, or what "
            "--min-images leaves of them, have changed since. Restore them, or name new classes with --data."
        )
    raise InputError(
        f"{len(known)} of {len(members)} classes in the {split} split, such as '{known[0]}', have names that the run "
        f"in {folder} was trained on: its accuracy on them is not that on new classes. Remove them from the data, or "
        "add --trained-classes if they only share the names."
    )


def _reported(folder: Path, shots: int, found: Assessment, gap: Any, *, calibrated: bool) -> dict[str, object]:
    score = found.score
    bins = [dict(zip(("confidence", "accuracy", "share"), bin)) for bin in found.calibration]
    return {
        "run": str(folder),
        "shots": shots,
        "accuracy": score.mean,
        "ci95": score.ci95,
        "tasks": score.tasks,
        "diverged": score.diverged,
        "difference": None if gap is None else {"mean": gap.mean, "ci95": gap.ci95},
        "calibration_error": found.calibration_error if calibrated else None,
        "calibration": bins if calibrated else None,
        "classes": found.classes,
    }


def _ways(folder: Path) -> int:
    """Return how many classes a task had in training."""
    from metabridge.training.checkpoint import RunFolder, damaged

    ways = (RunFolder(folder).settings()["model"] or {}).get("outputs", 5)
    if not isinstance(ways, int):
        raise damaged(folder / "settings.json", f"its outputs are {ways!r}")
    return ways


def _trained_on(folder: Path, key: str, kind: type[T]) -> T | None:
    """Return what the settings of a run say of its tasks, if anything."""
    from metabridge.training.checkpoint import RunFolder, damaged

    value = (RunFolder(folder).settings()["tasks"] or {}).get(key)
    if value is not None and not isinstance(value, kind):
        raise damaged(folder / "settings.json", f"its tasks have the {key} {value!r}")
    return value


def _counts(shots: str) -> list[int]:
    try:
        counts = [int(part) for part in shots.split(",")]
    except ValueError:
        raise InputError(f"shots is {shots!r}, but must be whole numbers with commas between, such as 1,5.") from None
    if max(counts) > MOST:
        raise InputError(f"shots is {max(counts)}, but must be {MOST} or less.")
    return counts


def _sources(runs: list[Path]) -> list[dict[str, Any]]:
    """Return what each run was trained on, which must be the same but for how its images are decoded."""
    found, origins = [], []
    for folder in runs:
        source = _trained_on(folder, "data", dict)
        if source is None:
            raise InputError(f"the run in {folder} does not say what data it was trained on. Name some with --data.")
        found.append({key: value for key, value in source.items() if source.get("name") != "glyphs" or key != "root"})
        origins.append({key: value for key, value in source.items() if key not in ("size", "channels")})
        if origins[-1] != origins[0]:
            raise InputError(
                f"the runs in {runs[0]} and {folder} were trained on different data, of which the same tasks cannot be "
                "drawn. Name some for both with --data, or evaluate them one by one."
            )
    return found


def _settings(texts: list[str] | None, flag: str) -> dict[str, Any]:
    """Read KEY=VALUE pairs; a value is JSON where it can be, and text otherwise."""
    settings: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"{flag} is {text!r}, but must be KEY=VALUE, such as steps=5.")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def _check_method(plan: Plan, texts: list[str] | None) -> None:
    """Refuse settings of a kind that the method or a saved run cannot take."""
    from metabridge.training.checkpoint import write_method

    try:
        write_method(plan.chosen())
    except InputError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"--option is {', '.join(texts or [])}, which {plan.method} cannot take ({error}).") from error


def _check_memory(plan: Plan, images: LabelledImages) -> None:
    """Refuse a step whose images alone are more than the machine's memory."""
    if not hasattr(os, "sysconf"):
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    alone = plan.chosen().training_head == "all-rows"  # a batch is of images, not of tasks
    each = 4 * images.images[0].numel() * (1 if alone else plan.ways * (plan.shots + plan.queries))  # in float32
    if plan.batch * each > memory:
        raise InputError(
            f"batch is {plan.batch}, but the images of such a step take {plan.batch * each / 2**30:.0f} GiB, and this "
            f"machine has {memory / 2**30:.0f} GiB of memory. Use batch={max(1, memory // (8 * each))} or fewer."
        )


def _next(out: Path, images: LabelledImages, ways: int) -> str:
    """Say how to judge a finished run, with no more classes in a task than are left to test on."""
    left = len(images.splits.get("test", ()))
    if left < 2:
        return "There is no second class left to test on: metabridge evaluate needs --data with more."
    fewest = min(int((images.labels == member).sum()) for member in images.splits["test"])
    shots, queries = ("1,5", fewest - 5) if fewest > 5 else ("1", fewest - 1)
    few = f" --queries {queries}" if queries < 15 else ""
    return f"Next: metabridge evaluate {shlex.quote(str(out))} --ways {min(ways, left)} --shots {shots}{few}"


def _draw_curve(run: Run, folder: Path, name: str) -> None:
    from metabridge.files import write_atomically

    if run.best is None:
        return  # there was no validation, or none yet
    try:
        from metabridge.report import figures
    except ModuleNotFoundError:
        return  # without matplotlib there is no picture, but metrics.jsonl has the numbers
    picture = figures.png(figures.learning_curves({name: run}, "iterations"))
    write_atomically(folder / "curves.png", picture, follow=False)
