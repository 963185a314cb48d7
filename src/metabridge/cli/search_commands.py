"""The commands `search`, which finds an architecture without training, and `score`, which prints its proxies."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

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


class ScoreKernel(StrEnum):
    """The kernels that `score` knows."""

    maml = "maml"
    anil = "anil"
    ntk = "ntk"


class SearchKernel(StrEnum):
    """The kernels that can guide a search; see `metabridge.nas.SearchConfig`."""

    maml = "maml"
    anil = "anil"
    ntk = "ntk"
    none = "none"
    random = "random"


CellsOption = Annotated[int, typer.Option(min=3, max=1000, help="Number of cells of the network.")]
ChannelsOption = Annotated[int, typer.Option(min=1, max=4096, help="Number of channels of the first cells.")]
TasksOption = Annotated[int, typer.Option(min=1, max=1000, help="Number of tasks that the kernel is computed on.")]
WaysOption = Annotated[int, typer.Option(min=2, max=MOST, help="Number of classes per task.")]
ShotsOption = Annotated[int, typer.Option(min=1, max=MOST, help="Number of support images per class.")]
QueriesOption = Annotated[int, typer.Option(min=1, max=MOST, help="Number of query images per class.")]
RepeatsOption = Annotated[
    int, typer.Option(min=1, max=1000, help="Number of initializations and batches of tasks to average over.")
]
AdaptationTimeOption = Annotated[
    float,
    typer.Option(
        min=0, callback=is_number, help="Adaptation of the kernel: learning rate times steps; inf for convergence."
    ),
]
RidgeOption = Annotated[
    float,
    typer.Option(
        min=0, callback=is_number, help="Number added to the diagonal of the kernel matrices that adaptation inverts."
    ),
]
RegionInputsOption = Annotated[
    int, typer.Option(min=2, max=100_000, help="Number of image patches used to count linear regions.")
]


@app.command()
def search(
    data: DataOption = "glyphs",
    kernel: Annotated[
        SearchKernel,
        typer.Option(
            help="Kernel whose condition number guides the search, together with linear regions. "
            "none: linear regions alone; random: random cells, without any evaluation."
        ),
    ] = SearchKernel.maml,
    cells: CellsOption = 5,
    channels: ChannelsOption = 48,
    out: Annotated[Path, typer.Option(help="Folder for the architecture and the search log.")] = Path("runs/search"),
    tasks: TasksOption = 3,
    ways: WaysOption = 5,
    shots: ShotsOption = 1,
    queries: QueriesOption = 1,
    repeats: RepeatsOption = 3,
    adaptation_time: AdaptationTimeOption = math.inf,
    ridge: RidgeOption = 1e-3,
    region_inputs: RegionInputsOption = 3000,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    operators: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Operators to choose from, such as skip,conv_3x3. Default: all."),
    ] = None,
    minutes: MinutesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
) -> None:
    """Search a network architecture for few-shot learning, without training any network.

    Starts from a network with all operators on all edges and removes operators by two proxies: the condition
    number of the network's kernel and its number of linear regions. Writes architecture.json, a drawing of the
    cells (cells.png) and all scores (search.jsonl). Running the same command again continues a stopped search.

    Example: **metabridge search --data mini-imagenet:data --size 32 --cells 5 --kernel maml --out runs/search**
    """
    from metabridge.datasets import load
    from metabridge.models.architecture import OPERATORS
    from metabridge.nas import SearchConfig, TimeLimitError
    from metabridge.nas import search as search_architecture

    if (out / "settings.json").exists():
        raise InputError(f"--out is {out}, which has a training run. Choose another folder.")
    options: dict[str, Any] = {
        "kernel": kernel.value,
        "cells": cells,
        "channels": channels,
        "tasks": tasks,
        "ways": ways,
        "shots": shots,
        "queries": queries,
        "repeats": repeats,
        "adaptation_time": adaptation_time,
        "ridge": ridge,
        "region_inputs": region_inputs,
        "operators": OPERATORS if operators is None else tuple(filter(None, map(str.strip, operators.split(",")))),
        "seed": seed,
    }
    SearchConfig(**options)  # raises InputError before the images are loaded
    try:
        images = load(data, size=size, min_images=min_images)
        result = search_architecture(images, **options, device=device_name(device), out=out, minutes=minutes)
    except TimeLimitError:
        say(f"Stopped after {minutes:g} minutes. The scores are saved in {out}; run the same command to continue.")
        return
    result.architecture.draw(out / "cells.png")
    for line in str(result.architecture).splitlines():
        say(line)
    if result.failed:
        say(f"A proxy failed for {result.failed} of {result.evaluated} networks; search.jsonl has the reasons.")
    say(f"The architecture is in {out}.")
    words = ["--model", out / "architecture.json", "--data", data]
    words += ["--model-option", f"cells={cells}", "--model-option", f"channels={channels}"]
    words += [*(["--size", size] if size else []), *(["--min-images", min_images] if min_images else [])]
    say(f"Next: metabridge train {shlex.join(map(str, words))}")


@app.command()
def score(
    model: Annotated[str, typer.Option(help="An architecture.json, or conv4, resnet12, mlp or timm:NAME.")],
    data: DataOption = "glyphs",
    kernel: Annotated[
        list[ScoreKernel] | None, typer.Option(help="Kernel to compute; can be repeated. Default: all.")
    ] = None,
    cells: CellsOption = 5,
    channels: ChannelsOption = 48,
    tasks: TasksOption = 3,
    ways: WaysOption = 5,
    shots: ShotsOption = 1,
    queries: QueriesOption = 1,
    repeats: RepeatsOption = 3,
    adaptation_time: AdaptationTimeOption = math.inf,
    ridge: RidgeOption = 1e-3,
    region_inputs: RegionInputsOption = 3000,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the scores to this JSON file; - prints only JSON.")
    ] = None,
) -> None:
    """Print the proxies of an untrained network: condition numbers of its kernels and its number of linear regions.

    Batch norms are replaced by group norms, so that images do not influence each other. For an architecture,
    linear regions are counted as in a search: in a thin network, on image patches. For other models they are
    counted in the model itself, on whole images.

    Example: **metabridge score --model runs/search/architecture.json --data glyphs**
    """
    from metabridge.datasets import load
    from metabridge.files import STDOUT, json_bytes, make_parent_folder, write_output
    from metabridge.models import builder
    from metabridge.nas import SearchConfig, score_model

    builder(model)  # raises InputError before the images are loaded
    if json_file is not None:
        make_parent_folder(json_file)
    images, torch_device = load(data, size=size, min_images=min_images), device_name(device)
    rows: list[list[str]] = []
    report: list[dict[str, object]] = []
    config = SearchConfig(
        cells=cells,
        channels=channels,
        tasks=tasks,
        ways=ways,
        shots=shots,
        queries=queries,
        repeats=repeats,
        adaptation_time=adaptation_time,
        ridge=ridge,
        region_inputs=region_inputs,
        seed=seed,
    )
    for search_kernel in (*(SearchKernel(name) for name in kernel or ScoreKernel), SearchKernel.none):
        score = score_model(model, images, replace(config, kernel=search_kernel.value), device=torch_device)
        is_regions = search_kernel is SearchKernel.none
        proxy = "linear regions" if is_regions else f"condition number, {search_kernel.upper()}"
        values = ", ".join(f"{repeat.value:.4g}" for repeat in score.repeats)
        rows.append([proxy, f"{score.mean.value:.4g}", values, score.mean.failure or ""])
        json_values = [repeat.value if math.isfinite(repeat.value) else None for repeat in score.repeats]
        failures = [repeat.failure for repeat in score.repeats]
        report.append({"proxy": proxy, "values": json_values, "failures": failures})
    columns = ("proxy", "mean", "per initialization", "failure")
    if str(json_file) != STDOUT:
        title = f"{model}, initializations: {repeats}"
        print_table(columns, rows, text=("proxy", "per initialization", "failure"), title=title)
    if json_file is not None:
        write_output(json_file, json_bytes(report, indent=2))
        if str(json_file) != STDOUT:
            say(f"The scores are in {json_file}")
