"""What every command shares: the application, its common options, and how they are read."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.errors import InputError

if TYPE_CHECKING:
    from metabridge.environments import LabelledImages
    from metabridge.training import Model

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


MOST = 1_000_000  # which no count of tasks, classes or images exceeds


def is_number(value: float | None) -> float | None:
    """Refuse NaN, which no comparison with a bound finds."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number.")
    return value


DeviceOption = Annotated[Device, typer.Option(help="Where to compute; auto takes a GPU if there is one.")]
SeedOption = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same result on the same machine.")
]
SizeOption = Annotated[int | None, typer.Option(min=8, max=1024, help="Side of the images in pixels.")]
MinutesOption = Annotated[
    float | None, typer.Option(min=0, callback=is_number, help="Stop after so long; the same command goes on.")
]
MinImagesOption = Annotated[int | None, typer.Option(min=1, max=MOST, help="Leave out classes with fewer images.")]


def images_for(model: Model, data: str, min_images: int | None) -> LabelledImages:
    """Load a data set in the form in which a trained network takes images."""
    from metabridge.datasets import load
    from metabridge.datasets.loading import parse_name
    from metabridge.use.image_input import image_shape

    channels, size = image_shape(model.net)
    if parse_name(data)[0] != "glyphs":  # which have one form
        return load(data, size=size, channels=channels, min_images=min_images)
    images = load(data, min_images=min_images)
    if images.images.shape[1:] != (channels, size, size):
        raise InputError(
            f"glyphs have 1 channel and 28×28 pixels, but the run takes images of {channels} and {size}×{size}. "
            "Name other data."
        )
    return images


def device_name(device: Device) -> str:
    """Return the device that was asked for, if it is there."""
    import torch

    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        raise InputError("device is cuda, but PyTorch finds no GPU here. Use --device cpu.")
    return device.value


@app.callback(invoke_without_command=True)
def metabridge(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Learn from few examples: gradient-based meta-learning and multi-task learning, side by side.

    Start with **metabridge demo**, which needs no data and a few minutes. With images of your own, a folder
    for every class: **metabridge data check FOLDER**, then train, evaluate and adapt.
    """
    if version:
        from metabridge import __version__

        print(f"metabridge {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
