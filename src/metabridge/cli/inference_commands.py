"""The commands `adapt`, `predict` and `export`, which use a trained model."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.cli.json_output import JsonOption, JsonOutput, versions
from metabridge.cli.options import (
    Device,
    DeviceOption,
    ModelOption,
    ModelOptionsOption,
    WeightsOption,
    app,
    device_name,
    load_source,
)
from metabridge.cli.prediction_output import OutputFormat, write_predictions
from metabridge.cli.terminal import print_stderr
from metabridge.cli.train_commands import HeadOption
from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.inference import FewShotClassifier
    from metabridge.training import Model

RunArgument = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="Folder of a trained run; --model takes other models.")
]


class ExportFormat(StrEnum):
    """Formats of exported models."""

    onnx = "onnx"
    hub = "hub"


QueryOption = Annotated[
    list[Path],
    typer.Option(
        metavar="PATH",
        help="Image to classify, or folder of images, including its subfolders. Can be repeated.",
    ),
]
OutOption = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help="File for the predictions, or `-` for standard output. JSON lines if it ends in .jsonl."
    ),
]
RejectOption = Annotated[
    float | None,
    typer.Option(
        metavar="RATE",
        help="Predict 'none of these' for images that are unlike all classes, so that about this fraction of the "
        "images of known classes is rejected wrongly, such as 0.05. Needs two images of each of two classes, or three "
        "of one. Default: reject no images.",
    ),
]
FormatOption = Annotated[
    OutputFormat | None,
    typer.Option(
        help="Format of the predictions. Default: json (one object per line) for .jsonl files, otherwise csv."
    ),
]


@app.command()
def adapt(
    support: Annotated[Path, typer.Option(metavar="DIR", help="Folder with one subfolder of images per class.")],
    query: QueryOption,
    run: RunArgument = None,
    model: ModelOption = None,
    weights: WeightsOption = None,
    model_options: ModelOptionsOption = None,
    out: OutOption = Path("predictions.csv"),
    head: HeadOption = None,
    penalty: Annotated[
        float | None,
        typer.Option(
            help="L2 penalty of the head (1/C for svm). Default: that of the head; for a logistic regression, ten "
            "times more or less if this predicts left-out support images better."
        ),
    ] = None,
    reject: RejectOption = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder in which to save the adapted model, for metabridge predict."),
    ] = None,
    format: FormatOption = None,
    device: DeviceOption = Device.auto,
    json_file: JsonOption = None,
) -> None:
    """Adapt a trained model to new classes and classify images.

    Writes one line per query image: its path, the predicted class, the probability of that class, the path of the most
    similar support image, and the probabilities of all classes. With --reject, also the outlier score and whether the
    image was rejected.

    If query images are in folders named after the classes, also prints the accuracy and which classes are confused,
    and draws the confusion matrix next to the file of predictions. With --reject, images in other folders are expected
    to be rejected.

    Query images that cannot be read are skipped and listed on standard error, and the exit status is 1.

    Without RUN and --model, a model that is built in is used, which was trained on photos. It needs no network.

    Example: **metabridge adapt --support new/labeled --query new/unlabeled --out predictions.csv**

    Example: **metabridge adapt --model timm:resnet50 --support new/labeled --query new/unlabeled**

    Example: **metabridge adapt --support new/labeled --query photo.jpg --reject 0.05 --out -**
    """
    from metabridge.files import STDOUT, make_folder
    from metabridge.inference.query_files import find_query_files

    query_files = find_query_files(query)
    output = _prediction_output(out, json_file)
    if save is not None:
        make_folder(save)
    source = load_source(run, model, weights, model_options, device=device_name(device))
    classifier = _adapted_classifier(source, support, device, head=head, penalty=penalty, reject=reject)
    if save is not None:
        print_message = print_stderr if str(out) == STDOUT else output.print_message
        print_message(f"The adapted model is in {classifier.save(save)}")
    write_predictions(classifier, query, query_files, out, format, output)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that metabridge adapt --save has written.")],
    query: QueryOption,
    out: OutOption = Path("predictions.csv"),
    reject: RejectOption = None,
    format: FormatOption = None,
    device: DeviceOption = Device.auto,
    json_file: JsonOption = None,
) -> None:
    """Classify images with a saved adapted model.

    Output and exit status are the same as for **metabridge adapt**. Without --reject, images are rejected as when the
    model was saved.

    Example: **metabridge predict adapted --query new/unlabeled --out predictions.csv**
    """
    from metabridge.inference import FewShotClassifier
    from metabridge.inference.query_files import find_query_files

    query_files = find_query_files(query)
    output = _prediction_output(out, json_file)
    classifier = FewShotClassifier.load(model, reject=reject, device=device_name(device))
    write_predictions(classifier, query, query_files, out, format, output)


@app.command()
def export(
    run: RunArgument = None,
    model: ModelOption = None,
    weights: WeightsOption = None,
    model_options: ModelOptionsOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="ONNX file to write, or `-` for standard output (not together with --support); with --format hub, the "
            "folder. Default: features.onnx or hub.",
        ),
    ] = None,
    format: Annotated[
        ExportFormat,
        typer.Option(
            help="onnx: an ONNX model. hub: a folder in the layout of the Hugging Face hub, with a model card, "
            "config.json and model.safetensors, which mb.from_pretrained reads."
        ),
    ] = ExportFormat.onnx,
    half: Annotated[
        bool, typer.Option("--half", help="With --format hub: store the weights in float16, which halves the file.")
    ] = False,
    support: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with one subfolder of images per class. Adapts the model to these classes, and also exports "
            "the head.",
        ),
    ] = None,
    head: HeadOption = None,
    json_file: JsonOption = None,
) -> None:
    """Export the feature extractor of a model: as an ONNX model, for programs without PyTorch, or as a hub folder.

    The ONNX model takes any number of images, of shape (n, channels, size, size) with values from 0 to 1. If
    onnxruntime is installed, the outputs of the ONNX model are compared with those of PyTorch, and the file is written
    only if they agree.

    With --support, first adapts the model to the classes in that folder. The ONNX model is then the adapted feature
    extractor, and its head is written to a JSON file next to it: kind, weight and bias, the class names, and whether
    features must be L2-normalized first.

    Example: **metabridge export runs/photos --out photos.onnx --support new/labeled**

    Example: **metabridge export runs/photos --format hub --out hub**
    """
    from metabridge.files import STDOUT, make_parent_folder
    from metabridge.inference import export_onnx, write_head
    from metabridge.models.batch_norm import uses_batch_statistics

    output = JsonOutput(json_file)
    if format is ExportFormat.hub:
        folder = _export_to_hub(load_source(run, model, weights, model_options), out or Path("hub"), support, half=half)
        output.print_message(f"The model is in {folder}. Complete its model card, README.md.")
        output.write({"format": "hub", "folder": folder, "versions": versions()})
        return
    if half:
        raise InputError("--half needs --format hub. ONNX models are in float32.")
    if head is not None and support is None:
        raise InputError(f"--head is {head}, but fitting a head needs labeled images. Add --support.")
    out = out or Path("features.onnx")
    make_parent_folder(out)
    to_stdout = str(out) == STDOUT
    if to_stdout and output.is_stdout:
        raise InputError("--out and --json are both -, but only one can be written to standard output. Change one.")
    if support is not None and to_stdout:
        raise InputError(
            "--out is -, but --support writes a second file next to the model. Pass a file name, such as features.onnx."
        )
    print_message = print_stderr if to_stdout else output.print_message
    head_file = out.with_suffix(".json")
    if support is not None and head_file == out:
        raise InputError(
            f"--out is {out}, but the head is written to that file. Use another name, such as {out.stem}.onnx."
        )
    source = load_source(run, model, weights, model_options)
    classifier = None if support is None else _adapted_classifier(source, support, Device.cpu, head=head)
    exported = source if classifier is None else classifier.adapted_
    difference = export_onnx(exported, out)
    if difference is None:
        print_message(f"The ONNX model is in {out}. It was not checked, because onnxruntime is not installed.")
    else:
        print_message(f"The ONNX model is in {out}. Its features differ from PyTorch by at most {difference:.1e}.")
    if classifier is not None:
        print_message(f"The head for {len(classifier.classes_)} classes is in {write_head(classifier, head_file)}")
    head_path = None if classifier is None else head_file
    output.write({"format": "onnx", "file": out, "head": head_path, "difference": difference, "versions": versions()})
    if uses_batch_statistics(exported.net):
        print_stderr(
            "Batch norm uses batch statistics: the features of an image depend on the other images of its batch."
        )


def _prediction_output(out: Path, json_file: Path | None) -> JsonOutput:
    """Check that the files for predictions can be written, and return where to write JSON."""
    from metabridge.files import STDOUT, make_parent_folder

    make_parent_folder(out)
    output = JsonOutput(json_file)
    if str(out) == STDOUT and output.is_stdout:
        raise InputError("--out and --json are both -, but only one can be written to standard output. Change one.")
    return output


def _export_to_hub(model: Model, out: Path, support: Path | None, *, half: bool) -> Path:
    """Write the folder of a model in the layout of the Hugging Face hub, and return it."""
    from metabridge.training.model_folder import save_pretrained

    if support is not None:
        raise InputError("--support is for --format onnx. Use metabridge adapt --save to keep an adapted model.")
    return save_pretrained(model, out, half=half)


def _adapted_classifier(
    model: Model,
    support: Path,
    device: Device,
    *,
    head: str | None,
    penalty: float | None = None,
    reject: float | None = None,
) -> FewShotClassifier:
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
    classifier = FewShotClassifier(model, head=head, penalty=penalty, reject=reject, device=device_name(device))
    try:
        return classifier.fit(files, labels)
    except InputError as error:
        raise InputError(re.sub(r"^y has", "--support has", str(error))) from error


def _require_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{option} is {folder}, which {problem}. Pass a folder of images.")
