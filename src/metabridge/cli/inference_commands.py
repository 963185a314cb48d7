"""The commands `adapt`, `predict` and `export`, which use a trained model."""

from __future__ import annotations

import csv
import re
import sys
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metabridge.cli.options import Device, DeviceOption, app, device_name
from metabridge.cli.terminal import print_stderr, print_stdout, print_table, printable
from metabridge.cli.train_commands import HeadOption
from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.inference import FewShotClassifier

MAX_PRINTED_ROWS = 10  # the printed table is a preview of the CSV file

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
QueryOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder of images to classify, including its subfolders.")
]
OutOption = Annotated[
    Path, typer.Option(metavar="FILE", help="CSV file for the predictions, or `-` for standard output.")
]


@app.command()
def adapt(
    run: RunArgument,
    support: Annotated[Path, typer.Option(metavar="DIR", help="Folder with one subfolder of images per class.")],
    query: QueryOption,
    out: OutOption = Path("predictions.csv"),
    head: HeadOption = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder in which to save the adapted model, for metabridge predict."),
    ] = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Adapt a trained model to new classes and classify images.

    Writes one line per query image: its path, the predicted class, the probability of that class, and the
    probabilities of all classes. Heads without probabilities (svm, ridge, centroid) give a softmax of their scores
    instead. If query images are in folders named after the classes, also prints the accuracy.

    Query images that cannot be read are skipped and listed on standard error, and the exit status is 1.

    Example: **metabridge adapt runs/photos --support new/labeled --query new/unlabeled --out predictions.csv**
    """
    from metabridge.files import STDOUT, make_folder, make_parent_folder

    query_files = _query_files(query)
    make_parent_folder(out)
    if save is not None:
        make_folder(save)
    classifier = _adapted_classifier(run, support, head, device)
    if save is not None:
        (print_stderr if str(out) == STDOUT else print_stdout)(f"The adapted model is in {classifier.save(save)}")
    _write_predictions(classifier, query, query_files, out)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that metabridge adapt --save has written.")],
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
            metavar="FILE", help="ONNX file to write, or `-` for standard output (not together with --support)."
        ),
    ] = Path("features.onnx"),
    support: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with one subfolder of images per class. Adapts the model to these classes, and also exports "
            "the head.",
        ),
    ] = None,
    head: HeadOption = None,
) -> None:
    """Export the feature extractor of a run as an ONNX model, for programs without PyTorch.

    The model takes any number of images, of shape (n, channels, size, size) with values from 0 to 1. If onnxruntime is
    installed, the outputs of the ONNX model are compared with those of PyTorch, and the file is written only if they
    agree.

    With --support, first adapts the model to the classes in that folder. The ONNX model is then the adapted feature
    extractor, and its head is written to a JSON file next to it: kind, weight and bias, the class names, and whether
    features must be L2-normalized first.

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
            "--out is -, but --support writes a second file next to the model. Pass a file name, such as features.onnx."
        )
    print_message = print_stderr if to_stdout else print_stdout
    head_file = out.with_suffix(".json")
    if support is not None and head_file == out:
        raise InputError(
            f"--out is {out}, but the head is written to that file. Use another name, such as {out.stem}.onnx."
        )
    classifier = None if support is None else _adapted_classifier(run, support, head, Device.cpu)
    model = load(run) if classifier is None else classifier.adapted_
    difference = export_onnx(model, out)
    if difference is None:
        print_message(f"The ONNX model is in {out}. It was not checked, because onnxruntime is not installed.")
    else:
        print_message(f"The ONNX model is in {out}. Its features differ from PyTorch by at most {difference:.1e}.")
    if classifier is not None:
        print_stdout(f"The head for {len(classifier.classes_)} classes is in {write_head(classifier, head_file)}")
    if uses_batch_statistics(model.net):
        print_stderr(
            "Batch norm uses batch statistics: the features of an image depend on the other images of its batch."
        )


def _adapted_classifier(run: Path, support: Path, head: str | None, device: Device) -> FewShotClassifier:
    """Return a classifier adapted to a folder with one subfolder per class."""
    from metabridge.datasets.image_files import find_class_folders
    from metabridge.inference import FewShotClassifier

    _require_folder("--support", support)
    classes, messages = find_class_folders(support)
    for message in messages:
        print_stderr(f"Note: {message}")
    empty = [name for name, images in classes.items() if not images]
    if empty and len(empty) < len(classes):
        raise InputError(f"class '{empty[0]}' in {support} has no images. Add some, or remove the folder.")
    if len(classes) - len(empty) < 2:
        raise InputError(
            f"--support is {support}, but at least 2 subfolders with images are needed, and it has "
            f"{len(classes) - len(empty)}. Create one subfolder of images per class."
        )
    files = [support / image for images in classes.values() for image in images]
    labels = [name for name, images in classes.items() for _ in images]
    classifier = FewShotClassifier(run, head=head, device=device_name(device))
    try:
        return classifier.fit(files, labels)
    except InputError as error:
        raise InputError(re.sub(r"^y has", "--support has", str(error))) from error


def _query_files(query: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders."""
    from metabridge.datasets.image_files import IMAGE_SUFFIXES, READABLE_SUFFIXES, list_tree

    _require_folder("--query", query)
    files = [file for file in list_tree(query) if file.suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        raise InputError(f"--query is {query}, which contains no images ({', '.join(READABLE_SUFFIXES)}).")
    return files


def _require_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{option} is {folder}, which {problem}. Pass a folder of images.")


def _write_predictions(classifier: FewShotClassifier, query: Path, files: list[Path], out: Path) -> None:
    """Classify images, write the predictions and print a summary. Exit with status 1 if an image cannot be read."""
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
        raise InputError(f"--query is {query}, but none of its images can be read ({files[0]}: {unreadable[0][1]}).")
    read_files = [file for file, _ in decoded]
    probabilities = classifier.predict_proba([np.moveaxis(image, 0, -1) for _, image in decoded])
    class_names, predicted = [str(name) for name in classifier.classes_], probabilities.argmax(1)
    predictions = [
        (str(file), class_names[label], probabilities[row, label])
        for row, (file, label) in enumerate(zip(read_files, predicted))
    ]
    to_stdout = str(out) == STDOUT
    to_terminal = to_stdout and sys.stdout is not None and sys.stdout.isatty()
    to_text = printable if to_terminal else str  # escape control characters on a terminal, but not in a CSV file
    csv_text = StringIO()
    writer = csv.writer(csv_text, lineterminator="\n")
    writer.writerow(["path", "prediction", "probability", *map(to_text, class_names)])
    writer.writerows(
        [to_text(file), to_text(name), probability, *row]
        for (file, name, probability), row in zip(predictions, probabilities.tolist())
    )
    print_message = print_stderr if to_stdout else print_stdout
    print_message(f"{len(class_names)} classes: {join_names(class_names, limit=10)}")
    write_output(out, csv_text.getvalue().encode(errors="backslashreplace"))
    if not to_stdout:
        _print_predictions(predictions)
    folders = [file.parent.relative_to(query).as_posix() for file in read_files]
    correct = [folder == name for folder, (_, name, _) in zip(folders, predictions) if folder in class_names]
    if correct:
        accuracy = sum(correct) / len(correct)
        print_message(f"Accuracy {100 * accuracy:.1f} %: {sum(correct)} of {len(correct)} images in class folders.")
    if not to_stdout:
        print_stdout(f"The predictions are in {out}")
    if unreadable:
        print_stderr(f"{len(unreadable)} of {len(files)} images could not be read:")
        for file, reason in unreadable:
            print_stderr(f"  {file} ({reason})")
        raise typer.Exit(1)


def _print_predictions(predictions: list[tuple[str, str, Any]]) -> None:
    """Print a table of the first predictions."""
    title = None if len(predictions) <= MAX_PRINTED_ROWS else f"First {MAX_PRINTED_ROWS} of {len(predictions)} images"
    rows = [[file, name, f"{probability:.3f}"] for file, name, probability in predictions[:MAX_PRINTED_ROWS]]
    print_table(("image", "prediction", "probability"), rows, left_aligned=("image", "prediction"), title=title)
