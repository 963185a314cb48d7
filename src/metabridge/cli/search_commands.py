"""The commands `search`, a training-free architecture search, and `score`, which computes zero-cost proxies."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from metabridge.choices import alternatives, model_names
from metabridge.cli.json_output import JsonOption, JsonOutput, versions
from metabridge.cli.options import (
    Device,
    DeviceOption,
    MinImagesOption,
    MinutesOption,
    QueriesOption,
    SeedOption,
    ShotsOption,
    SizeOption,
    WaysOption,
    app,
    device_name,
    reject_nan,
)
from metabridge.cli.terminal import print_table
from metabridge.cli.train_commands import DataOption
from metabridge.errors import InputError


class ScoreKernel(StrEnum):
    """The values of `nas.proxies.KernelName`, repeated here because its module imports PyTorch."""

    maml = "maml"
    anil = "anil"
    ntk = "ntk"


class SearchKernel(StrEnum):
    """The values of `nas.architecture_search.SearchKernel`, repeated here because its module imports PyTorch."""

    maml = "maml"
    anil = "anil"
    ntk = "ntk"
    none = "none"
    random = "random"


CellsOption = Annotated[int, typer.Option(min=3, max=1000, help="Number of cells of the network.")]
ChannelsOption = Annotated[
    int,
    typer.Option(
        min=1,
        max=4096,
        help="Number of channels of the first cells; each reduction cell halves the "
        "height and width, and doubles the number of channels.",
    ),
]
TasksOption = Annotated[int, typer.Option(min=1, max=1000, help="Number of tasks for which the kernel is computed.")]
RepeatsOption = Annotated[
    int,
    typer.Option(
        min=1, max=1000, help="Number of evaluations to average over, each with a new initialization and new tasks."
    ),
]
AdaptationTimeOption = Annotated[
    float,
    typer.Option(
        min=0,
        callback=reject_nan,
        help="Inner-loop adaptation time assumed by the maml and anil kernels: learning rate × number of steps, or inf "
        "for convergence.",
    ),
]
RidgeOption = Annotated[
    float,
    typer.Option(
        min=0,
        callback=reject_nan,
        help="Ridge added to the diagonal of kernel matrices before they are inverted (maml and anil kernels).",
    ),
]
PatchesOption = Annotated[
    int, typer.Option(min=2, max=100_000, help="Number of image patches used to count linear regions.")
]
RegionInputsOption = Annotated[
    int,
    typer.Option(
        min=2,
        max=100_000,
        help="Number of inputs used to count linear regions: image patches for an architecture.json, whole training "
        "images for other networks (all of them, if there are fewer).",
    ),
]


@app.command()
def search(
    data: DataOption = "glyphs",
    kernel: Annotated[
        SearchKernel,
        typer.Option(
            help="What guides the search. maml, anil or ntk: the condition number of this kernel and the number of "
            "linear regions; none: only linear regions; random: no proxy, cells are drawn at random."
        ),
    ] = SearchKernel.maml,
    cells: CellsOption = 5,
    channels: ChannelsOption = 48,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for architecture.json, cells.png and the log search.jsonl.")
    ] = Path("runs/search"),
    tasks: TasksOption = 3,
    ways: WaysOption = 5,
    shots: ShotsOption = 1,
    queries: QueriesOption = 1,
    repeats: RepeatsOption = 3,
    adaptation_time: AdaptationTimeOption = math.inf,
    ridge: RidgeOption = 1e-3,
    region_inputs: PatchesOption = 3000,
    size: SizeOption = None,
    min_images: MinImagesOption = None,
    operators: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Candidate operators, separated by commas: max_pool_3x3, avg_pool_3x3, skip, conv_1x5_5x1, "
            "conv_3x3, sep_conv_3x3, dil_conv_3x3. Default: all.",
        ),
    ] = None,
    minutes: MinutesOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    json_file: JsonOption = None,
) -> None:
    """Run a training-free architecture search for few-shot learning.

    Starts from a supernet with all operators on all edges and removes operators step by step. Operators are ranked by
    two zero-cost proxies of the untrained network: the condition number of its kernel (--kernel) and its number of
    linear regions. Writes architecture.json, a drawing of the cells (cells.png) and all scores (search.jsonl). Run the
    same command again to continue a stopped search.

    Example: **metabridge search --data mini-imagenet:data --size 32 --cells 5 --kernel maml --out runs/search**
    """
    from metabridge.datasets import load
    from metabridge.models.architecture import OPERATORS
    from metabridge.nas import SearchConfig, TimeLimitError
    from metabridge.nas import search as search_architecture

    if (out / "settings.json").exists():
        raise InputError(f"--out is {out}, which contains a training run. Choose another folder.")
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
    output = JsonOutput(json_file)
    report: dict[str, object] = {"out": out, "kernel": kernel.value, "finished": False, "architecture": None}
    try:
        images = load(data, size=size, min_images=min_images)
        result = search_architecture(images, **options, device=device_name(device), out=out, minutes=minutes)
    except TimeLimitError:
        output.print_message(
            f"Stopped after {minutes:g} minutes. The scores are in {out}. Run the same command again to continue."
        )
        output.write(report | {"versions": versions()})
        return
    result.architecture.draw(out / "cells.png")
    for line in () if output.is_stdout else str(result.architecture).splitlines():
        output.print_message(line)
    if result.failed:
        output.print_message(
            f"A proxy failed for {result.failed} of {result.evaluated} networks. The reasons are in search.jsonl."
        )
    output.print_message(f"The architecture is in {out}.")
    train_options = ["--model", out / "architecture.json", "--data", data]
    train_options += ["--model-option", f"cells={cells}", "--model-option", f"channels={channels}"]
    train_options += [*(["--size", size] if size else []), *(["--min-images", min_images] if min_images else [])]
    output.print_message(f"Next: metabridge train {shlex.join(map(str, train_options))}")
    report |= {
        "finished": True,
        "architecture": json.loads(result.architecture.to_json()),
        "seconds": result.seconds,
        "evaluated": result.evaluated,
        "failed": result.failed,
    }
    output.write(report | {"versions": versions()})


@app.command()
def score(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"Network: {alternatives(model_names())}. wide is an MLP in the NTK parameterization."
        ),
    ],
    data: DataOption = "glyphs",
    kernel: Annotated[
        list[ScoreKernel] | None, typer.Option(help="Kernel to compute. Can be repeated. Default: all.")
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
    json_file: JsonOption = None,
) -> None:
    """Score an untrained network by proxies for its accuracy: condition numbers of kernels, and linear regions.

    For an architecture.json, condition numbers are those of a network with --cells cells and --channels channels.
    Linear regions are counted as in a search: with image patches, in a network of three cells whose first cell has one
    channel. For other models, the network itself is used, and linear regions are counted with whole images.

    Batch norm is replaced by group norm, so that the output for an image does not depend on the batch. When linear
    regions of an architecture.json are counted, batch norm is kept.

    Example: **metabridge score --model runs/search/architecture.json --data glyphs**
    """
    from metabridge.datasets import load
    from metabridge.models import builder
    from metabridge.nas import SearchConfig, score_model

    builder(model)  # raises InputError before the images are loaded
    output = JsonOutput(json_file)
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
        repeated_score = score_model(model, images, replace(config, kernel=search_kernel.value), device=torch_device)
        only_regions = search_kernel is SearchKernel.none
        proxy = "linear regions" if only_regions else f"condition number, {search_kernel.upper()}"
        values = ", ".join(f"{repeat.value:.4g}" for repeat in repeated_score.repeats)
        mean_score = repeated_score.mean
        rows.append([proxy, f"{mean_score.value:.4g}", values, mean_score.failure or ""])
        json_values = [repeat.value for repeat in repeated_score.repeats]
        failures = [repeat.failure for repeat in repeated_score.repeats]
        report.append({"proxy": proxy, "mean": mean_score.value, "values": json_values, "failures": failures})
    columns = ("proxy", "mean", "per initialization", "failure")
    if not output.is_stdout:
        title = f"{model}, initializations: {repeats}"
        print_table(columns, rows, left_aligned=("proxy", "per initialization", "failure"), title=title)
    output.write(report)
