"""The command that says beforehand which method pays."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from metabridge.cli.options import MOST, Device, DeviceOption, MinImagesOption, SeedOption, app, device_name, images_for
from metabridge.cli.terminal import say
from metabridge.cli.train_commands import DataOption
from metabridge.errors import InputError


class Groups(StrEnum):
    """How hard and easy tasks are told apart."""

    hardness = "hardness"
    superclasses = "superclasses"


@app.command()
def diagnose(
    data: DataOption = "glyphs",
    model: Annotated[str, typer.Option(help="conv4, resnet12, mlp or timm:NAME, or the folder of a run.")] = "conv4",
    out: Annotated[Path, typer.Option(help="Folder for the page, its pictures and the numbers.")] = Path("diagnosis"),
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    ways: Annotated[int, typer.Option(min=2, max=MOST, help="Classes in a task.")] = 5,
    shots: Annotated[int, typer.Option(min=1, max=MOST, help="Support images of each class.")] = 1,
    queries: Annotated[int, typer.Option(min=1, max=MOST, help="Query images of each class.")] = 15,
    tasks: Annotated[int, typer.Option(min=10, max=10_000, help="Tasks to sample.")] = 200,
    groups: Annotated[Groups, typer.Option(help="How hard and easy tasks are found.")] = Groups.hardness,
    alpha: Annotated[float | None, typer.Option(help="Step of adaptation (default: stable on every task).")] = None,
    twins: Annotated[bool, typer.Option(help="Let kernels of wide nets predict as well.")] = True,
    size: Annotated[
        int | None, typer.Option(min=8, max=1024, help="Side of the images in pixels: smaller is faster.")
    ] = None,
    min_images: MinImagesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Say which method pays on this data before any training: plain pre-training, ANIL or MAML.

    Samples tasks, measures how hard each is for the network's features and where its solution lies,
    predicts what adaptation in training gains, and weighs that against its cost. Writes
    diagnosis.json and index.html, a page with pictures.

    Example: **metabridge diagnose --data omniglot:data/omniglot --groups superclasses --out diagnosis**
    """
    from metabridge.datasets import load
    from metabridge.diagnosis import diagnose as diagnosed
    from metabridge.diagnosis import untrained
    from metabridge.files import make_folder
    from metabridge.kernels import fully_connected_kernel
    from metabridge.models import builder
    from metabridge.report import diagnosis_page as report
    from metabridge.training import load as load_run

    where, run, trained = device_name(device), None, Path(model).is_dir()
    if not trained:
        try:
            builder(model)  # a wrong one is refused before images are read
        except InputError as error:
            raise InputError(f"{error} Or name the folder of a run; there is none at {model}.") from error
    make_folder(out)
    if trained:
        run = load_run(model, device=where)
        images = images_for(run, data, min_images)
        if size not in (None, images.images.shape[-1]):
            raise InputError(f"size is {size}, but the run takes {images.images.shape[-1]} pixels. Leave --size out.")
    else:
        images = load(data, size=size, min_images=min_images)
    images = images.to(where)
    found = diagnosed(
        images.tasks(split, ways=ways, shots=shots, queries=queries),
        run or untrained(images, model, seed=seed),
        kernel=fully_connected_kernel(depth=3, bias_variance=0.1) if twins else None,
        groups=groups.value,
        tasks=tasks,
        alpha=alpha,
        seed=seed,
        progress=True,
    )
    for line in found.told().splitlines():
        say(line)
    say(f"The page is {report.write(found, out)}")
