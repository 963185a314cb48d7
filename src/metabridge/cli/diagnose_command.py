"""The command `diagnose`, which recommends a method for a data set before anything is trained."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from metabridge.cli.options import (
    MODELS,
    Device,
    DeviceOption,
    MinImagesOption,
    QueriesOption,
    SeedOption,
    ShotsOption,
    SizeOption,
    WaysOption,
    app,
    device_name,
    images_for,
)
from metabridge.cli.terminal import say
from metabridge.cli.train_commands import DataOption
from metabridge.errors import InputError


class Groups(StrEnum):
    """How tasks are divided into hard and easy ones."""

    hardness = "hardness"
    superclasses = "superclasses"


@app.command()
def diagnose(
    data: DataOption = "glyphs",
    model: Annotated[
        str,
        typer.Option(help=f"Network that computes the features: {MODELS} (untrained), or the folder of a trained run."),
    ] = "conv4",
    out: Annotated[
        Path, typer.Option(help="Folder for the report: index.html, its figures, and diagnosis.json with all numbers.")
    ] = Path("diagnosis"),
    split: Annotated[str, typer.Option(help="Split of the data set: train, validation or test.")] = "train",
    ways: WaysOption = 5,
    shots: ShotsOption = 1,
    queries: QueriesOption = 15,
    tasks: Annotated[int, typer.Option(min=10, max=10_000, help="Number of tasks to sample.")] = 200,
    groups: Annotated[
        Groups,
        typer.Option(
            help="How to divide tasks into hard and easy ones. hardness: by the estimated hardness of each task; "
            "superclasses: tasks within one superclass, such as one alphabet of Omniglot, are hard, and tasks across "
            "superclasses easy."
        ),
    ] = Groups.hardness,
    alpha: Annotated[
        float | None,
        typer.Option(help="Inner learning rate. Default: chosen so that adaptation diverges on no task."),
    ] = None,
    kernels: Annotated[
        bool, typer.Option(help="Also predict accuracies with the kernels of infinitely wide networks.")
    ] = True,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Recommend plain pre-training, ANIL or MAML for a data set, without training a network.

    Samples tasks and fits a linear model of the network's features to each. From these models it estimates how hard
    the tasks are and how far apart their solutions are. It predicts how much adaptation in training lowers the risk,
    and compares this gain with the cost.

    If --model is a run, --data and --ways still default to glyphs and 5: pass the data and the ways of the run.

    Example: **metabridge diagnose --data omniglot:data/omniglot --groups superclasses --out diagnosis**
    """
    from metabridge.datasets import load
    from metabridge.diagnosis import diagnose as diagnose_tasks
    from metabridge.diagnosis import untrained_network
    from metabridge.files import make_folder
    from metabridge.kernels import fully_connected_kernel
    from metabridge.models import builder
    from metabridge.report import diagnosis_page
    from metabridge.training import load as load_run

    torch_device, run, is_run = device_name(device), None, Path(model).is_dir()
    if not is_run:
        try:
            builder(model)  # raises InputError before the images are loaded
        except InputError as error:
            raise InputError(
                f"{error} --model can also be the folder of a run, but {model} is not a folder."
            ) from error
    make_folder(out)
    if is_run:
        run = load_run(model, device=torch_device)
        images = images_for(run, data, min_images)
        if size not in (None, images.images.shape[-1]):
            raise InputError(
                f"--size is {size}, but the run was trained on images of {images.images.shape[-1]} pixels. Omit --size."
            )
    else:
        images = load(data, size=size, min_images=min_images)
    images = images.to(torch_device)
    diagnosis = diagnose_tasks(
        images.tasks(split, ways=ways, shots=shots, queries=queries),
        run or untrained_network(images, model, seed=seed),
        kernel=fully_connected_kernel(depth=3, bias_variance=0.1) if kernels else None,
        groups=groups.value,
        tasks=tasks,
        alpha=alpha,
        seed=seed,
        progress=True,
    )
    for line in str(diagnosis).splitlines():
        say(line)
    say(f"The report is {diagnosis_page.write(diagnosis, out)}")
