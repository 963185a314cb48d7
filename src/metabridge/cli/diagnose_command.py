"""The command `diagnose`, which predicts before training which method is worth its cost."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from metabridge.cli.options import (
    MOST,
    Device,
    DeviceOption,
    MinImagesOption,
    SeedOption,
    SizeOption,
    app,
    device_name,
    images_for,
)
from metabridge.cli.terminal import say
from metabridge.cli.train_commands import DataOption
from metabridge.errors import InputError


class Groups(StrEnum):
    """How hard and easy tasks are separated."""

    hardness = "hardness"
    superclasses = "superclasses"


@app.command()
def diagnose(
    data: DataOption = "glyphs",
    model: Annotated[
        str, typer.Option(help="Network for the features: conv4, resnet12, mlp, timm:NAME, or the folder of a run.")
    ] = "conv4",
    out: Annotated[Path, typer.Option(help="Folder for the HTML report, its figures and the numbers.")] = Path(
        "diagnosis"
    ),
    split: Annotated[str, typer.Option(help="Split of the data set: train, validation or test.")] = "train",
    ways: Annotated[int, typer.Option(min=2, max=MOST, help="Number of classes per task.")] = 5,
    shots: Annotated[int, typer.Option(min=1, max=MOST, help="Number of support images per class.")] = 1,
    queries: Annotated[int, typer.Option(min=1, max=MOST, help="Number of query images per class.")] = 15,
    tasks: Annotated[int, typer.Option(min=10, max=10_000, help="Number of tasks to sample.")] = 200,
    groups: Annotated[
        Groups, typer.Option(help="Separate hard and easy tasks by their estimated hardness or by superclasses.")
    ] = Groups.hardness,
    alpha: Annotated[
        float | None, typer.Option(help="Step size of adaptation. Default: one that diverges on no task.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option(help="Also predict accuracies with the kernels of infinitely wide networks.")
    ] = True,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Predict which method is worth its cost on a data set: plain pre-training, ANIL or MAML.

    Samples tasks, estimates how hard each of them is for the network's features and where its solution lies,
    predicts the gain of adaptation in training, and compares it with the cost. Nothing is trained. Writes
    diagnosis.json and an HTML report, index.html.

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
            raise InputError(f"{error} --model can also be the folder of a run, but {model} is no folder.") from error
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
