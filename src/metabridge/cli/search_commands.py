"""Commands that look for an architecture without training anything, and that score one."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from metabridge.cli.options import (
    MOST,
    Device,
    DeviceOption,
    MinImagesOption,
    MinutesOption,
    SeedOption,
    SizeOption,
    app,
    device_name,
    is_number,
)
from metabridge.cli.terminal import print_table, say
from metabridge.cli.train_commands import DataOption
from metabridge.errors import InputError


class Kernel(StrEnum):
    """Whose condition number is meant."""

    maml = "maml"
    anil = "anil"
    ntk = "ntk"


class Guide(StrEnum):
    """What a search goes by: a kernel and linear regions, regions alone, or nothing."""

    maml = "maml"
    anil = "anil"
    ntk = "ntk"
    none = "none"
    random = "random"


CellsOption = Annotated[int, typer.Option(min=3, max=1000, help="Cells of the network.")]
ChannelsOption = Annotated[int, typer.Option(min=1, max=4096, help="Channels of the first cells.")]
TasksOption = Annotated[int, typer.Option(min=1, max=1000, help="Tasks that the kernel is computed for.")]
WaysOption = Annotated[int, typer.Option(min=2, max=MOST, help="Classes in a task.")]
ShotsOption = Annotated[int, typer.Option(min=1, max=MOST, help="Support images of each class.")]
QueriesOption = Annotated[int, typer.Option(min=1, max=MOST, help="Query images of each class.")]
RepeatsOption = Annotated[int, typer.Option(min=1, max=1000, help="Initialisations and batches to average over.")]
TimeOption = Annotated[
    float,
    typer.Option(min=0, callback=is_number, help="λτ, rate times steps of the adaptation; inf adapts to the end."),
]
RidgeOption = Annotated[
    float, typer.Option(min=0, callback=is_number, help="Added to the kernel that adaptation inverts.")
]
InputsOption = Annotated[int, typer.Option(min=2, max=100_000, help="Inputs that linear regions are counted on.")]


@app.command()
def search(
    data: DataOption = "glyphs",
    kernel: Annotated[Guide, typer.Option(help="The kernel to go by; none takes regions alone.")] = Guide.maml,
    cells: CellsOption = 5,
    channels: ChannelsOption = 48,
    out: Annotated[Path, typer.Option(help="Folder of the search.")] = Path("runs/search"),
    tasks: TasksOption = 3,
    ways: WaysOption = 5,
    shots: ShotsOption = 1,
    queries: QueriesOption = 1,
    repeats: RepeatsOption = 3,
    time: TimeOption = math.inf,
    ridge: RidgeOption = 1e-3,
    inputs: InputsOption = 3000,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    operators: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Such as skip,conv_3x3; all unless told.")
    ] = None,
    minutes: MinutesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Find an architecture for few-shot learning without training anything.

    Prunes a network of all operators at once by the condition number of its kernel and its number of
    linear regions. Writes architecture.json, search.jsonl with every score, and cells.png. The same
    command given again goes on with a search that was stopped.

    Example: **metabridge search --data mini-imagenet:data --size 32 --cells 5 --kernel maml --out runs/search**
    """
    from metabridge.datasets import load
    from metabridge.models.architecture import OPERATORS
    from metabridge.nas.architecture_search import Search, TimeUpError
    from metabridge.training.checkpoint import RunFolder

    if RunFolder(out).started:
        raise InputError(f"--out is {out}, which holds a run. Name another folder.")
    chosen = OPERATORS if operators is None else tuple(name.strip() for name in operators.split(",") if name.strip())
    settings = Search(
        kernel.value,
        cells=cells,
        channels=channels,
        tasks=tasks,
        ways=ways,
        shots=shots,
        queries=queries,
        repeats=repeats,
        time=time,
        ridge=ridge,
        inputs=inputs,
        operators=chosen,
        seed=seed,
    )
    try:
        images = load(data, size=size, min_images=min_images)
        found = settings.run(images, device=device_name(device), out=out, minutes=minutes)
    except TimeUpError:
        say(f"Stopped after {minutes:g} minutes. The scores so far are in {out}; the same command goes on.")
        return
    found.architecture.draw(out / "cells.png")
    for line in str(found.architecture).splitlines():
        say(line)
    if found.troubled:
        say(f"{found.troubled} of {found.measured} networks had a proxy that could not be told; search.jsonl says why.")
    say(f"The architecture is in {out}.")
    words = ["--model", out / "architecture.json", "--data", data]
    words += ["--model-option", f"cells={cells}", "--model-option", f"channels={channels}"]
    words += [*(["--size", size] if size else []), *(["--min-images", min_images] if min_images else [])]
    say(f"Next: metabridge train {shlex.join(map(str, words))}")


@app.command()
def score(
    model: Annotated[str, typer.Option(help="An architecture.json, or conv4, resnet12, mlp or timm:NAME.")],
    data: DataOption = "glyphs",
    kernel: Annotated[list[Kernel] | None, typer.Option(help="Which kernels; all unless told.")] = None,
    cells: CellsOption = 5,
    channels: ChannelsOption = 48,
    tasks: TasksOption = 3,
    ways: WaysOption = 5,
    shots: ShotsOption = 1,
    queries: QueriesOption = 1,
    repeats: RepeatsOption = 3,
    time: TimeOption = math.inf,
    ridge: RidgeOption = 1e-3,
    inputs: InputsOption = 3000,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the scores there; - is stdout.")] = None,
) -> None:
    """Score an untrained network: how well its kernels are conditioned, and its number of linear regions.

    Batch norms are replaced by group norms, so that every image has a gradient of its own. An
    architecture is scored as a search does it, with regions of a thin network on patches of images; the
    regions of another model are its own, on whole images.

    Example: **metabridge score --model runs/search/architecture.json --data glyphs**
    """
    from metabridge.datasets import load
    from metabridge.files import STDOUT, json_bytes, make_parent_folder, write_output
    from metabridge.models import builder
    from metabridge.nas.architecture_search import Search, score_model

    builder(model)
    if json_file is not None:
        make_parent_folder(json_file)
    images, where = load(data, size=size, min_images=min_images), device_name(device)
    rows: list[list[str]] = []
    report: list[dict[str, object]] = []
    settings = Search(
        cells=cells,
        channels=channels,
        tasks=tasks,
        ways=ways,
        shots=shots,
        queries=queries,
        repeats=repeats,
        time=time,
        ridge=ridge,
        inputs=inputs,
        seed=seed,
    )
    for guide in (*(Guide(name) for name in kernel or Kernel), Guide.none):
        found = score_model(replace(settings, kernel=guide.value), model, images, device=where)
        told = "linear regions" if guide is Guide.none else f"condition number, {guide.upper()}"
        each = ", ".join(f"{one.value:.4g}" for one in found.each)
        rows.append([told, f"{found.mean.value:.4g}", each, found.mean.trouble or ""])
        values = [one.value if math.isfinite(one.value) else None for one in found.each]
        report.append({"proxy": told, "values": values, "troubles": [one.trouble for one in found.each]})
    columns = ("proxy", "mean", "of each", "trouble")
    if str(json_file) != STDOUT:
        print_table(columns, rows, text=("proxy", "of each", "trouble"), title=f"{model}, initialisations: {repeats}")
    if json_file is not None:
        write_output(json_file, json_bytes(report, indent=2))
        if str(json_file) != STDOUT:
            say(f"The scores are in {json_file}")
