"""What `metabridge adapt` and `metabridge predict` write and print for the images they classify."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from metabridge.cli.json_output import JsonOutput, versions
from metabridge.cli.terminal import print_stderr, print_table, printable
from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.inference import FewShotClassifier
    from metabridge.inference.confusion import Confusion
    from metabridge.inference.predictions import Predictions
    from metabridge.inference.query_files import QueryFile

MAX_PRINTED_ROWS = 10  # the printed table is a preview of the file
MAX_PRINTED_CLASSES = 20  # confusion matrices of more classes are only drawn
MAX_PRINTED_PAIRS = 5


class OutputFormat(StrEnum):
    """Formats of predictions."""

    csv = "csv"
    json = "json"


def write_predictions(
    classifier: FewShotClassifier,
    query: Sequence[Path],
    files: Sequence[QueryFile],
    out: Path,
    output_format: OutputFormat | None,
    output: JsonOutput,
) -> None:
    """Classify images, write the predictions and print a summary.

    Args:
        classifier: A fitted classifier.
        query: The paths that were passed, for messages.
        files: The images that they contain.
        out: The file to write, or "-" for standard output.
        output_format: The format. Default: JSON lines if the file has the suffix .jsonl, otherwise CSV.
        output: Where to write all results as JSON.

    Raises:
        Exit: With status 1, if an image cannot be read.
    """
    from metabridge.datasets.image_files import join_names
    from metabridge.files import STDOUT, write_output

    try:
        predictions = classifier.predict_details([file.path for file in files], skip_unreadable=True)
    except InputError as error:
        start = f"--query is {join_names(map(str, query))}, but none of its images can be read"
        raise InputError(re.sub(r"^none of the \d+ images can be read", lambda _: start, str(error))) from error
    read_files = [files[index] for index in predictions.indices]
    class_names = [str(name) for name in classifier.classes_]
    rows = _rows(classifier, predictions, [str(file.path) for file in read_files])
    to_stdout = str(out) == STDOUT
    print_message = print_stderr if to_stdout else output.print_message
    print_message(f"{len(class_names)} classes: {join_names(class_names, limit=10)}")
    if output_format is None:
        output_format = OutputFormat.json if out.suffix.lower() == ".jsonl" else OutputFormat.csv
    text = _json_lines(rows) if output_format is OutputFormat.json else _csv(rows, class_names, to_stdout=to_stdout)
    write_output(out, text.encode(errors="backslashreplace"))
    if not (to_stdout or output.is_stdout):
        _print_preview(rows)
    confusion = _print_accuracy(classifier, predictions, [file.folder for file in read_files], print_message)
    if not to_stdout:
        print_message(f"The predictions are in {out}")
        if confusion is not None and out.is_file():
            file = out.with_name(f"{out.stem}-confusion.png")
            _write_figure(confusion, file)
            print_message(f"The confusion matrix is in {file}")
    output.write(
        {
            "classes": class_names,
            "threshold": classifier.threshold_,
            "predictions": rows,
            "accuracy": None if confusion is None else confusion.accuracy,
            "confusion": None if confusion is None else confusion.matrix.tolist(),
            "unreadable": [{"path": name, "reason": reason} for name, reason in predictions.unreadable.values()],
            "versions": versions(),
        }
    )
    if predictions.unreadable:
        print_stderr(f"{len(predictions.unreadable)} of {len(files)} images could not be read:")
        for name, reason in predictions.unreadable.values():
            print_stderr(f"  {name} ({reason})")
        raise typer.Exit(1)


def _rows(classifier: FewShotClassifier, predictions: Predictions, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return one dictionary per image, with the probabilities of all classes as a list."""
    columns: dict[str, Sequence[Any]] = {
        "path": paths,
        "prediction": [str(label) for label in predictions.labels],
        "probability": predictions.probabilities.max(1).tolist(),
    }
    if predictions.outlier_scores is not None:
        columns["outlier_score"] = predictions.outlier_scores.tolist()
        columns["rejected"] = predictions.rejected.tolist()
    if predictions.nearest is not None and classifier.support_ is not None:
        columns["nearest"] = [classifier.support_.names[index] for index in predictions.nearest]
    class_names = [str(name) for name in classifier.classes_]
    columns["probabilities"] = [dict(zip(class_names, row)) for row in predictions.probabilities.tolist()]
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def _json_lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _csv(rows: Sequence[dict[str, Any]], class_names: Sequence[str], *, to_stdout: bool) -> str:
    to_terminal = to_stdout and sys.stdout is not None and sys.stdout.isatty()
    # Escape control characters on a terminal, but not in a file.
    to_text: Callable[[object], str] = printable if to_terminal else str
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [column for column in rows[0] if column != "probabilities"]
    writer.writerow(map(to_text, [*columns, *class_names]))
    writer.writerows([*(to_text(row[column]) for column in columns), *row["probabilities"].values()] for row in rows)
    return text.getvalue()


def _print_preview(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the first predictions."""
    title = None if len(rows) <= MAX_PRINTED_ROWS else f"First {MAX_PRINTED_ROWS} of {len(rows)} images"
    cells = [[row["path"], row["prediction"], f"{row['probability']:.3f}"] for row in rows[:MAX_PRINTED_ROWS]]
    print_table(("image", "prediction", "probability"), cells, left_aligned=("image", "prediction"), title=title)


def _print_accuracy(
    classifier: FewShotClassifier,
    predictions: Predictions,
    folders: Sequence[str],
    print_message: Callable[[str], None],
) -> Confusion | None:
    """Print accuracy and confused classes, and return the confusion matrix; None if no image is in a class folder.

    If images can be rejected, images in other folders count as images of none of the classes.
    """
    import numpy as np

    from metabridge.inference.confusion import Confusion

    names, outlier = [str(name) for name in classifier.classes_], str(classifier.outlier_label_)
    can_reject = classifier.threshold_ is not None
    if classifier.threshold_ is not None:
        print_message(f"Images with an outlier score above {classifier.threshold_:.4g} are predicted as '{outlier}'.")
    index_of = {name: index for index, name in enumerate(names)}
    true = np.array([index_of.get(folder, len(names)) for folder in folders])
    is_known = true < len(names)
    is_stranger = ~is_known & np.array([folder != "." for folder in folders])
    if not is_known.any() and outlier not in folders:
        return None
    predicted = np.where(predictions.rejected, len(names), predictions.probabilities.argmax(1))
    if is_known.any():
        correct, total = int((predicted == true)[is_known].sum()), int(is_known.sum())
        print_message(f"Accuracy {100 * correct / total:.1f} %: {correct} of {total} images in class folders.")
    if can_reject:
        for selected, description in ((is_known, "images in class folders"), (is_stranger, "images in other folders")):
            total, rejected = int(selected.sum()), int(predictions.rejected[selected].sum())
            if total:
                print_message(f"Rejected {100 * rejected / total:.1f} %: {rejected} of {total} {description}.")
    selected = is_known | is_stranger if can_reject else is_known
    confusion = Confusion.of(true[selected], predicted[selected], [*names, outlier] if can_reject else names)
    if len(names) <= MAX_PRINTED_CLASSES:
        for line in str(confusion).split("\n"):
            print_message(line)
    for pair in confusion.most_confused(MAX_PRINTED_PAIRS):
        count = "1 image" if pair.images == 1 else f"{pair.images} images"
        print_message(f"{count} of '{pair.true}' predicted as '{pair.predicted}'")
    return confusion


def _write_figure(confusion: Confusion, file: Path) -> None:
    from metabridge.report.confusion_figure import confusion_figure
    from metabridge.report.figures import save

    save(confusion_figure(confusion), file)
