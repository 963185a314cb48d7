"""The typer application, and the options shared by several commands."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metabridge.choices import DEFAULT_MODEL
from metabridge.cli.help_format import App
from metabridge.errors import MAX_COUNT, InputError

if TYPE_CHECKING:
    from metabridge.environments import LabeledImages
    from metabridge.training import Model

app = App(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


class Device(StrEnum):
    """Device to compute on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


MAX_SEED = 2**63 - 1


def reject_nan(param: typer.CallbackParam, value: float | None) -> float | None:
    """Option callback that rejects NaN, which typer's range check accepts."""
    if value is not None and math.isnan(value):
        raise InputError(f"{param.opts[0]} is nan, but must be a number of at least 0.")
    return value


def at_most(maximum: int) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """Return an option callback that rejects integers above a technical limit, which help texts need not show."""

    def check(param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value > maximum:
            raise InputError(f"{param.opts[0]} is {value}, which is too large. Use {maximum} or less.")
        return value

    return check


DeviceOption = Annotated[Device, typer.Option(help="Device to compute on; auto uses a GPU if one is available.")]
SeedOption = Annotated[
    int,
    typer.Option(
        min=0, callback=at_most(MAX_SEED), help="Random seed. Results are deterministic for a given seed and machine."
    ),
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        min=8,
        max=1024,
        help="Width and height to which images are resized, in pixels. Default: 32 for CIFAR data sets, 28 for "
        "Omniglot, 84 for all others. Glyphs are always 28×28.",
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=reject_nan,
        help="Stop after this number of minutes. Run the same command again to continue. Default: no limit.",
    ),
]
MinImagesOption = Annotated[
    int | None,
    typer.Option(
        min=1, callback=at_most(MAX_COUNT), help="Omit classes with fewer images than this. Default: use all classes."
    ),
]
WaysOption = Annotated[int, typer.Option(min=2, callback=at_most(MAX_COUNT), help="Number of classes per task.")]
ShotsOption = Annotated[
    int, typer.Option(min=1, callback=at_most(MAX_COUNT), help="Number of support images per class.")
]
SplitOption = Annotated[str, typer.Option(metavar="train|validation|test", help="Split of the data set.")]
MODEL_HELP = (
    "Trained model: photos or characters (built in), the folder of a run, timm:NAME or hf:NAME (pretrained backbones), "
    "or package.module:function"
)
ModelOption = Annotated[str | None, typer.Option("--model", metavar="MODEL", help=f"{MODEL_HELP}. Default: photos.")]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="File with the weights of a pretrained backbone: safetensors, or a PyTorch file without code. Default: "
        "from the local cache of the model hub.",
    ),
]
ModelOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-option",
        metavar="KEY=VALUE",
        help="Option of a pretrained backbone, such as size=224. Can be repeated.",
    ),
]
QueriesOption = Annotated[
    int, typer.Option(min=1, callback=at_most(MAX_COUNT), help="Number of query images per class.")
]


def load_source(
    run: Path | None,
    model: str | None,
    weights: Path | None = None,
    model_options: list[str] | None = None,
    *,
    device: str = "cpu",
) -> Model:
    """Return the trained model that the argument RUN or the options of a command name; by default, "photos".

    Raises:
        InputError: If both RUN and --model are passed, or the model cannot be loaded.
    """
    from metabridge.cli.config_options import parse_key_values
    from metabridge.training import load_model

    if run is not None and model is not None:
        raise InputError(f"both RUN ({run}) and --model ({model}) are passed, but one of them is enough. Omit one.")
    options = parse_key_values(model_options or [], "--model-option")
    return load_model(run or model or DEFAULT_MODEL, device=device, weights=weights, **options)


def images_for(model: Model, data: str, min_images: int | None) -> LabeledImages:
    """Load a data set with the image size and number of channels that a trained network expects."""
    from metabridge.datasets import load
    from metabridge.datasets.loading import parse_name
    from metabridge.training.model_images import image_shape

    channels, size = image_shape(model.net)
    if model.net.decode_options is not None and parse_name(data)[0] != "glyphs":
        return load(data, decode_options=model.net.decode_options, min_images=min_images)
    if parse_name(data)[0] != "glyphs":  # glyphs have a fixed size
        return load(data, size=size, channels=channels, min_images=min_images)
    images = load(data, min_images=min_images)
    if images.images.shape[1:] != (channels, size, size):
        raise InputError(
            f"glyphs have 1 channel and 28×28 pixels, but the model needs {channels} channels and "
            f"{size}×{size} pixels. Use another data set."
        )
    return images


def device_name(device: Device) -> str:
    """Return the name of the PyTorch device, with `auto` resolved.

    Raises:
        InputError: If the device is cuda and no CUDA device is available.
    """
    import torch

    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        raise InputError("device is cuda, but no CUDA device is available. Use --device cpu.")
    return device.value


@app.callback(invoke_without_command=True)
def metabridge(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Few-shot learning with gradient-based meta-learning and multi-task learning.

    Start with **metabridge demo**, which takes a few minutes and needs no data.

    To train on your own images, put them into a folder with one subfolder per class. Check the folder with
    **metabridge data check FOLDER**, and then run **metabridge train** and **evaluate**. Training needs many classes.
    **metabridge adapt** then classifies images of new classes, from a few labeled images of each.
    """
    if version:
        from metabridge import __version__

        print(f"metabridge {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
