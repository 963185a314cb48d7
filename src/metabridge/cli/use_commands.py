"""Commands that put a trained model to use: on images of new classes, and in other programs."""

from __future__ import annotations

import csv
import sys
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metabridge.cli.options import Device, DeviceOption, app, device_name
from metabridge.cli.terminal import note, print_table, printable, say
from metabridge.cli.train_commands import HeadOption
from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.use import FewShotClassifier

SHOWN = 10  # rows of predictions that are printed

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
QueryOption = Annotated[Path, typer.Option(metavar="DIR", help="Images to tell; folders within it are searched too.")]
OutOption = Annotated[Path, typer.Option(metavar="FILE", help="Where the predictions go, as CSV; - prints them.")]


@app.command()
def adapt(
    run: RunArgument,
    support: Annotated[Path, typer.Option(metavar="DIR", help="A folder for every class, with a few images of it.")],
    query: QueryOption,
    out: OutOption = Path("predictions.csv"),
    head: HeadOption = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the adapted model there, for metabridge predict.")
    ] = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Adapt a trained run to new classes and tell which of them images show.

    Writes a line for every image: its path, the class, the probability of that class and of each.
    Where query images lie in folders named after the classes, the accuracy is printed too.

    Query images that cannot be read are left out and named at the end: the status is then 1.

    Example: **metabridge adapt runs/photos --support new/labelled --query new/unlabelled --out told.csv**
    """
    from metabridge.files import STDOUT, make_folder, make_parent_folder

    queries = _queries(query)
    make_parent_folder(out)
    if save is not None:
        make_folder(save)
    classifier = _adapted(run, support, head, device)
    if save is not None:
        (note if str(out) == STDOUT else say)(f"The adapted model is {classifier.save(save)}")
    _tell(classifier, query, queries, out)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that metabridge adapt --save has made.")],
    query: QueryOption,
    out: OutOption = Path("predictions.csv"),
    device: DeviceOption = Device.auto,
) -> None:
    """Tell which classes images show, with a model that was adapted before.

    Writes and prints what **metabridge adapt** does, with the same status.

    Example: **metabridge predict adapted --query new/unlabelled --out told.csv**
    """
    from metabridge.files import make_parent_folder
    from metabridge.use import FewShotClassifier

    queries = _queries(query)
    make_parent_folder(out)
    _tell(FewShotClassifier.load(model, device=device_name(device)), query, queries, out)


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the ONNX graph goes; - is stdout.")] = Path(
        "features.onnx"
    ),
    support: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder for every class: adapt to them first.")
    ] = None,
    head: HeadOption = None,
) -> None:
    """Write a run's features as an ONNX graph, for programs without PyTorch.

    The graph takes images (n, channels, size, size) with values from 0 to 1, any number at a time. It
    is checked against PyTorch where onnxruntime is installed, and only written if it agrees.

    With --support, the head adapted to these classes is written beside it as JSON: its weight and
    bias, the names of the classes, and whether features are to be scaled to length 1 first.

    Example: **metabridge export runs/photos --out photos.onnx --support new/labelled**
    """
    from metabridge.files import STDOUT, make_parent_folder
    from metabridge.models.batch_norm import normalises_each_set
    from metabridge.training import load
    from metabridge.use import export_onnx, write_head

    if head is not None and support is None:
        raise InputError(f"--head is {head}, but a head is solved on labelled images. Give --support too.")
    make_parent_folder(out)
    printed = str(out) == STDOUT
    if support is not None and printed:
        raise InputError("--out is -, but the head goes beside the graph. Name a file, such as features.onnx.")
    tell = note if printed else say
    beside = out.with_suffix(".json")
    if support is not None and beside == out:
        raise InputError(f"--out is {out}, where the head goes. Name the graph otherwise, such as {out.stem}.onnx.")
    classifier = None if support is None else _adapted(run, support, head, Device.cpu)
    model = load(run) if classifier is None else classifier.adapted_
    difference = export_onnx(model, out)
    if difference is None:
        tell(f"The features are in {out}, not checked since onnxruntime is not installed.")
    else:
        tell(f"The features are in {out}; they differ from PyTorch's by at most {difference:.1e}.")
    if classifier is not None:
        written = write_head(classifier, beside)
        say(f"The head for {len(classifier.classes_)} classes is in {written}")
    if normalises_each_set(model.net):
        note("The network normalises each batch by itself, so the features of an image depend on the others with it.")


def _adapted(run: Path, support: Path, head: str | None, device: Device) -> FewShotClassifier:
    """Return a classifier adapted to a folder of class folders."""
    from metabridge.datasets.image_files import class_folders
    from metabridge.use import FewShotClassifier

    _require_folder("support", support)
    classes, notes = class_folders(support)
    for message in notes:
        note(f"Note: {message}")
    empty = [name for name, images in classes.items() if not images]
    if empty and len(empty) < len(classes):
        raise InputError(f"class '{empty[0]}' in {support} has no images. Put some there, or remove the folder.")
    if len(classes) - len(empty) < 2:
        raise InputError(
            f"support is {support}, which has too few folders with images ({len(classes) - len(empty)}): "
            "2 classes or more are needed. Make a folder for every class there, with its images inside."
        )
    files = [support / image for images in classes.values() for image in images]
    labels = [name for name, images in classes.items() for _ in images]
    classifier = FewShotClassifier(run, head=head, device=device_name(device))
    return classifier.fit(files, labels)


def _queries(query: Path) -> list[Path]:
    from metabridge.datasets.image_files import IMAGES, READ, tree

    _require_folder("query", query)
    files = [file for file in tree(query) if file.suffix.lower() in IMAGES]
    if not files:
        raise InputError(f"query is {query}, which holds no images ({', '.join(READ)}).")
    return files


def _require_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{option} is {folder}, which {what}. Name a folder of images.")


def _tell(classifier: FewShotClassifier, query: Path, files: list[Path], out: Path) -> None:
    """Predict, write and print; end with status 1 if some images could not be read."""
    import numpy as np

    from metabridge.datasets.image_decoding import Unreadable
    from metabridge.datasets.image_files import image_bytes, named
    from metabridge.files import STDOUT, write_output
    from metabridge.use.image_input import read

    found = list(zip(files, read([partial(image_bytes, file) for file in files], classifier.form_)))
    unreadable = [(file, result.reason) for file, result in found if isinstance(result, Unreadable)]
    pairs = [(file, result) for file, result in found if not isinstance(result, Unreadable)]
    if not pairs:
        raise InputError(
            f"query is {query}, of which no image can be read ({len(files)} tried; {files[0]}: {unreadable[0][1]})."
        )
    read_files = [file for file, _ in pairs]
    chances = classifier.predict_proba([np.moveaxis(image, 0, -1) for _, image in pairs])
    names, best = [str(name) for name in classifier.classes_], chances.argmax(1)
    told = [(str(file), names[place], chances[row, place]) for row, (file, place) in enumerate(zip(read_files, best))]
    printed = str(out) == STDOUT
    terminal = printed and sys.stdout is not None and sys.stdout.isatty()
    plain = printable if terminal else str  # a file has names as they are
    text = StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["path", "prediction", "probability", *map(plain, names)])
    lines.writerows(
        [plain(file), plain(name), chance, *row] for (file, name, chance), row in zip(told, chances.tolist())
    )
    tell = note if printed else say
    tell(f"{len(names)} classes: {named(names, most=10)}")
    write_output(out, text.getvalue().encode(errors="backslashreplace"))
    if not printed:
        _print_table(told)
    folders = [file.parent.relative_to(query).as_posix() for file in read_files]
    right = [folder == name for folder, (_, name, _) in zip(folders, told) if folder in names]
    if right:
        tell(f"Accuracy {100 * sum(right) / len(right):.1f} %: {sum(right)} of {len(right)} images in class folders.")
    if not printed:
        say(f"The predictions are in {out}")
    if unreadable:
        note(f"{len(unreadable)} of {len(files)} images could not be read:")
        for file, reason in unreadable:
            note(f"  {file} ({reason})")
        raise typer.Exit(1)


def _print_table(told: list[tuple[str, str, Any]]) -> None:
    title = None if len(told) <= SHOWN else f"The first {SHOWN} of {len(told)}"
    rows = [[file, name, f"{chance:.3f}"] for file, name, chance in told[:SHOWN]]
    print_table(("image", "prediction", "probability"), rows, text=("image", "prediction"), title=title)
