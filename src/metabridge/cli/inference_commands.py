"""The commands that use a trained model: `adapt`, `predict` and `export`."""

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
    from metabridge.inference import FewShotClassifier

PRINTED_ROWS = 10  # predictions in the printed table

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
QueryOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder of images to classify; subfolders are included.")
]
OutOption = Annotated[Path, typer.Option(metavar="FILE", help="CSV file of the predictions. `-` is standard output.")]


@app.command()
def adapt(
    run: RunArgument,
    support: Annotated[Path, typer.Option(metavar="DIR", help="Folder with one subfolder of images per class.")],
    query: QueryOption,
    out: OutOption = Path("predictions.csv"),
    head: HeadOption = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save the adapted model in this folder, for metabridge predict.")
    ] = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Adapt a trained run to new classes and classify images.

    Writes one line per query image: its path, the predicted class, the probability of that class, and the
    probabilities of all classes. If query images are in folders named after the classes, prints the accuracy on them.

    Query images that cannot be read are skipped and listed at the end. The exit status is then 1.

    Example: **metabridge adapt runs/photos --support new/labeled --query new/unlabeled --out predictions.csv**
    """
    from metabridge.files import STDOUT, make_folder, make_parent_folder

    query_files = _query_files(query)
    make_parent_folder(out)
    if save is not None:
        make_folder(save)
    classifier = _adapted_classifier(run, support, head, device)
    if save is not None:
        (note if str(out) == STDOUT else say)(f"The adapted model is in {classifier.save(save)}")
    _write_predictions(classifier, query, query_files, out)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder written by metabridge adapt --save.")],
    query: QueryOption,
    out: OutOption = Path("predictions.csv"),
    device: DeviceOption = Device.auto,
) -> None:
    """Classify images with a saved adapted model.

    Output and exit status are the same as for **metabridge adapt**.

    Example: **metabridge predict adapted --query new/unlabeled --out predictions.csv**
    """
    from metabridge.files import make_parent_folder
    from metabridge.inference import FewShotClassifier

    query_files = _query_files(query)
    make_parent_folder(out)
    _write_predictions(FewShotClassifier.load(model, device=device_name(device)), query, query_files, out)


@app.command()
def export(
    run: RunArgument,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="File of the ONNX graph. `-` is standard output, which is not possible with --support."
        ),
    ] = Path("features.onnx"),
    support: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with one subfolder of images per class: also adapt to these classes and export the head.",
        ),
    ] = None,
    head: HeadOption = None,
) -> None:
    """Export the feature network of a run as an ONNX graph, for programs without PyTorch.

    The graph takes any number of images, of shape (n, channels, size, size) with values from 0 to 1. If onnxruntime is
    installed, the graph is compared with PyTorch and written only if they agree.

    With --support, adapts to these classes and writes the head to a JSON file next to the graph: its kind, weight and
    bias, the names of the classes, and whether features must be L2-normalized first.

    Example: **metabridge export runs/photos --out photos.onnx --support new/labeled**
    """
    from metabridge.files import STDOUT, make_parent_folder
    from metabridge.inference import export_onnx, write_head
    from metabridge.models.batch_norm import uses_batch_statistics
    from metabridge.training import load

    if head is not None and support is None:
        raise InputError(f"--head is {head}, but fitting a head needs labeled images. Add --support.")
    make_parent_folder(out)
    to_stdout = str(out) == STDOUT
    if support is not None and to_stdout:
        raise InputError(
            "--out is -, but --support writes a second file next to the graph. Name a file, such as features.onnx."
        )
    print_message = note if to_stdout else say
    head_file = out.with_suffix(".json")
    if support is not None and head_file == out:
        raise InputError(f"--out is {out}, but the head is written there. Use another name, such as {out.stem}.onnx.")
    classifier = None if support is None else _adapted_classifier(run, support, head, Device.cpu)
    model = load(run) if classifier is None else classifier.adapted_
    difference = export_onnx(model, out)
    if difference is None:
        print_message(f"The features are in {out}. They were not checked: onnxruntime is not installed.")
    else:
        print_message(f"The features are in {out}. They differ from PyTorch's by at most {difference:.1e}.")
    if classifier is not None:
        say(f"The head for {len(classifier.classes_)} classes is in {write_head(classifier, head_file)}")
    if uses_batch_statistics(model.net):
        note("Batch norms use the statistics of each batch: the features of an image depend on the rest of its batch.")


def _adapted_classifier(run: Path, support: Path, head: str | None, device: Device) -> FewShotClassifier:
    """Return a classifier adapted to a folder with one subfolder per class."""
    from metabridge.datasets.image_files import find_class_folders
    from metabridge.inference import FewShotClassifier

    _require_folder("support", support)
    classes, notes = find_class_folders(support)
    for message in notes:
        note(f"Note: {message}")
    empty = [name for name, images in classes.items() if not images]
    if empty and len(empty) < len(classes):
        raise InputError(f"class '{empty[0]}' in {support} has no images. Add some, or remove the folder.")
    if len(classes) - len(empty) < 2:
        raise InputError(
            f"support is {support}, which has {len(classes) - len(empty)} folders with images, but at least 2 classes "
            "are needed. Make one folder per class, with its images inside."
        )
    files = [support / image for images in classes.values() for image in images]
    labels = [name for name, images in classes.items() for _ in images]
    classifier = FewShotClassifier(run, head=head, device=device_name(device))
    return classifier.fit(files, labels)


def _query_files(query: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders."""
    from metabridge.datasets.image_files import IMAGE_SUFFIXES, READABLE_SUFFIXES, list_tree

    _require_folder("query", query)
    files = [file for file in list_tree(query) if file.suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        raise InputError(f"query is {query}, which contains no images ({', '.join(READABLE_SUFFIXES)}).")
    return files


def _require_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{option} is {folder}, which {problem}. Name a folder of images.")


def _write_predictions(classifier: FewShotClassifier, query: Path, files: list[Path], out: Path) -> None:
    """Classify images, write the predictions and print a summary. Exit with status 1 if some images cannot be read."""
    import numpy as np

    from metabridge.datasets.image_decoding import Unreadable
    from metabridge.datasets.image_files import join_names, read_image_file
    from metabridge.files import STDOUT, write_output
    from metabridge.inference.image_input import decode_all

    results = list(
        zip(files, decode_all([partial(read_image_file, file) for file in files], classifier.decode_options_))
    )
    unreadable = [(file, result.reason) for file, result in results if isinstance(result, Unreadable)]
    decoded = [(file, result) for file, result in results if not isinstance(result, Unreadable)]
    if not decoded:
        raise InputError(
            f"query is {query}, but none of its {len(files)} images can be read ({files[0]}: {unreadable[0][1]})."
        )
    read_files = [file for file, _ in decoded]
    probabilities = classifier.predict_proba([np.moveaxis(image, 0, -1) for _, image in decoded])
    names, predicted = [str(name) for name in classifier.classes_], probabilities.argmax(1)
    predictions = [
        (str(file), names[label], probabilities[row, label])
        for row, (file, label) in enumerate(zip(read_files, predicted))
    ]
    to_stdout = str(out) == STDOUT
    to_terminal = to_stdout and sys.stdout is not None and sys.stdout.isatty()
    to_text = printable if to_terminal else str  # files keep control characters in names
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "prediction", "probability", *map(to_text, names)])
    writer.writerows(
        [to_text(file), to_text(name), probability, *row]
        for (file, name, probability), row in zip(predictions, probabilities.tolist())
    )
    print_message = note if to_stdout else say
    print_message(f"{len(names)} classes: {join_names(names, limit=10)}")
    write_output(out, text.getvalue().encode(errors="backslashreplace"))
    if not to_stdout:
        _print_predictions(predictions)
    folders = [file.parent.relative_to(query).as_posix() for file in read_files]
    correct = [folder == name for folder, (_, name, _) in zip(folders, predictions) if folder in names]
    if correct:
        accuracy = sum(correct) / len(correct)
        print_message(f"Accuracy {100 * accuracy:.1f} %: {sum(correct)} of {len(correct)} images in class folders.")
    if not to_stdout:
        say(f"The predictions are in {out}")
    if unreadable:
        note(f"{len(unreadable)} of {len(files)} images could not be read:")
        for file, reason in unreadable:
            note(f"  {file} ({reason})")
        raise typer.Exit(1)


def _print_predictions(predictions: list[tuple[str, str, Any]]) -> None:
    """Print a table of the first predictions."""
    title = None if len(predictions) <= PRINTED_ROWS else f"First {PRINTED_ROWS} of {len(predictions)} images"
    rows = [[file, name, f"{probability:.3f}"] for file, name, probability in predictions[:PRINTED_ROWS]]
    print_table(("image", "prediction", "probability"), rows, text=("image", "prediction"), title=title)
