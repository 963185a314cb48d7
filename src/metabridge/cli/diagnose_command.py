"""The command `diagnose`, which recommends a method for a data set without training."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from metabridge.choices import BUILTIN_MODELS, alternatives, model_names
from metabridge.cli.json_output import JsonOption, JsonOutput, versions
from metabridge.cli.options import (
    Device,
    DeviceOption,
    MinImagesOption,
    QueriesOption,
    SeedOption,
    ShotsOption,
    SizeOption,
    SplitOption,
    WaysOption,
    WeightsOption,
    app,
    device_name,
    images_for,
    load_source,
)
from metabridge.cli.train_commands import DataOption
from metabridge.errors import InputError

UNTRAINED_MODELS = [name for name in model_names() if ":" not in name]


class Groups(StrEnum):
    """Criteria for dividing tasks into hard and easy ones."""

    hardness = "hardness"
    superclasses = "superclasses"


@app.command()
def diagnose(
    data: DataOption = "glyphs",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|DIR",
            help=f"Feature extractor: an untrained network ({alternatives(UNTRAINED_MODELS)}), or a trained model: "
            "the folder of a run, photos or characters (built in), timm:NAME, hf:NAME or package.module:function. wide "
            "is an MLP in the NTK parameterization.",
        ),
    ] = "conv4",
    weights: WeightsOption = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for the report: index.html, its figures, and diagnosis.json with all numbers."
        ),
    ] = Path("diagnosis"),
    split: SplitOption = "train",
    ways: WaysOption = 5,
    shots: ShotsOption = 1,
    queries: QueriesOption = 15,
    tasks: Annotated[int, typer.Option(min=10, max=10_000, help="Number of tasks to sample.")] = 200,
    groups: Annotated[
        Groups,
        typer.Option(
            help="How to divide the tasks into hard and easy ones. hardness: by their estimated hardness (defined in "
            "docs/diagnose.md); superclasses: tasks with classes from one superclass, such as one alphabet of "
            "Omniglot, are hard, and tasks with classes from several superclasses are easy."
        ),
    ] = Groups.hardness,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Inner learning rate α of MAML. Default: a value for which the inner step is stable on every task."
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            help="Also predict the accuracies of MTL, ANIL and MAML in infinitely wide networks, with the NTK."
        ),
    ] = True,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    json_file: JsonOption = None,
) -> None:
    """Recommend how to train on a data set: with MAML, with ANIL, or without adaptation. No network is trained.

    Samples tasks and, for each task, fits a linear model on the features of --model. From these models, estimates how
    hard the tasks are and how far apart their optimal weights are. Predicts by how much MAML would lower the expected
    loss compared with training without adaptation (non-adaptive learning, NAL), and compares this gain with the
    additional gradients that MAML computes.

    If --model is a run, pass the --data and --ways that it was trained with. The defaults do not depend on the run.

    Example: **metabridge diagnose --data omniglot:data/omniglot --groups superclasses --out diagnosis**
    """
    from metabridge.datasets import load
    from metabridge.diagnosis import diagnose as diagnose_tasks
    from metabridge.diagnosis import untrained_network
    from metabridge.files import make_folder
    from metabridge.kernels import fully_connected_kernel
    from metabridge.models import builder
    from metabridge.report import diagnosis_page

    torch_device, trained_model = device_name(device), None
    is_trained = Path(model).is_dir() or model in BUILTIN_MODELS or ":" in model
    if not is_trained:
        try:
            builder(model)  # raises InputError before the images are loaded
        except InputError as error:
            raise InputError(
                f"{error} --model can also be the folder of a run, but there is no folder {model}."
            ) from error
    make_folder(out)
    output = JsonOutput(json_file)
    if is_trained:
        trained_model = load_source(None, model, weights, device=torch_device)
        images = images_for(trained_model, data, min_images)
        if size not in (None, images.images.shape[-1]):
            raise InputError(
                f"--size is {size}, but the model was trained on images of "
                f"{images.images.shape[-1]}×{images.images.shape[-1]} pixels. Omit --size."
            )
    else:
        images = load(data, size=size, min_images=min_images)
    images = images.to(torch_device)
    diagnosis = diagnose_tasks(
        images.tasks(split, ways=ways, shots=shots, queries=queries),
        trained_model or untrained_network(images, model, seed=seed),
        kernel=fully_connected_kernel(depth=3, bias_variance=0.1) if kernels else None,
        groups=groups.value,
        tasks=tasks,
        alpha=alpha,
        seed=seed,
        progress=True,
    )
    for line in () if output.is_stdout else str(diagnosis).splitlines():
        output.print_message(line)
    page = diagnosis_page.write(diagnosis, out)
    output.print_message(f"The report is in {page}")
    output.write(json.loads(diagnosis.to_json()) | {"page": page, "versions": versions()})
