"""Measure how many images per second ResNet-12 trains on in bfloat16, with and without fused kernels.

    python benchmarks/resnet12.py --device cuda --json results/bench-resnet12-h200.json

A step includes indexing images that are stored on the device in uint8, augmentation, the gradient of the 64-class loss
through `Engine`, and SGD with momentum. The table also shows the rate of a large bfloat16 matrix product on the same
GPU and the fraction of it that training reaches, counting 3 × 2 × the multiplications of one forward pass.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from metabridge.episodes import Episodes
from metabridge.learners import Engine, method, parameters
from metabridge.models import fused_triton_kernels, resnet12
from metabridge.report.results import Machine
from metabridge.training.augment import Augment

CLASSES, IMAGES = 64, 2000
WIDTHS = (64, 160, 320, 640)
REPEATS = 3


def seconds(step: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the duration of one `step` after a warm-up: the best of several means over `times` steps."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    means = []
    for _ in range(REPEATS + 1):
        finish()
        start = time.perf_counter()
        for _ in range(times):
            step()
        finish()
        means.append((time.perf_counter() - start) / times)
    return min(means[1:])


def operations(size: int) -> float:
    """Return the floating-point operations of the convolutions for one image, forward and backward."""
    total, inputs = 0, 3
    for width in WIDTHS:
        total += size**2 * (10 * inputs + 18 * width) * width
        inputs, size = width, size // 2
    return 3 * 2 * total


def matrix_rate(side: int, device: torch.device) -> float:
    """Return the operations per second of a bfloat16 matrix product."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: left @ right, 20, device)


def training_step(batch_size: int, size: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs one training step on `batch_size` images."""
    net, rfs = resnet12(3, size, widths=WIDTHS).train(), method("rfs")
    net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # so that no step converts weights
    params = parameters(rfs, net, classes=CLASSES)
    engine = Engine(rfs, net, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(
        [value for value in params.values() if value.requires_grad], lr=0.01, momentum=0.9, weight_decay=5e-4
    )
    augment, generator = Augment(), torch.Generator(device).manual_seed(0)
    images = torch.randint(256, (IMAGES, 3, size, size), dtype=torch.uint8, device=device)
    labels = torch.randint(CLASSES, (IMAGES,), device=device)
    classes = torch.arange(CLASSES, device=device)[None]

    def step() -> None:
        indices = torch.randint(IMAGES, (1, batch_size), generator=generator, device=device)
        x, y = images[indices].float() / 255, labels[indices]
        engine(params, augment.episodes(Episodes(x, y, x, y, classes), generator)).assign(params)
        optimizer.step()

    return step


def main() -> None:
    """Measure both variants at every batch size, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--size", type=int, default=84, help="side of an image in pixels")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256], help="images per step")
    parser.add_argument("--steps", type=int, default=30, help="steps per measurement")
    parser.add_argument("--matrix", type=int, default=8192, help="side of the matrices of the matrix product")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True

    device, rows = options.device, []
    rate = matrix_rate(options.matrix, device)
    paths = (
        {"plain": False, "fused": True}
        if fused_triton_kernels.AVAILABLE and device.type == "cuda"
        else {"plain": False}
    )
    for batch in options.batches:
        for path, available in paths.items():
            fused_triton_kernels.AVAILABLE = available
            speed = batch / seconds(training_step(batch, options.size, device), options.steps, device)
            share = speed * operations(options.size) / rate
            Console().print(f"batch {batch}, {path}: {speed:.0f} images/s")
            rows.append({"batch": batch, "path": path, "images_per_second": speed, "share_of_matrix_rate": share})

    table = Table(title=f"ResNet-12 at {options.size} pixels; a matrix product runs at {rate / 1e12:.1f} TFLOP/s")
    for heading in ("batch", "path", "images/s", "of the matrix rate"):
        table.add_column(heading, justify="left" if heading == "path" else "right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            str(row["path"]),
            f"{row['images_per_second']:.0f}",
            f"{100 * row['share_of_matrix_rate']:.0f} %",
        )
    Console().print(table)
    if options.json:
        document = {
            "id": options.json.stem,
            "environment": asdict(Machine.current(device)),
            "size": options.size,
            "matrix_tflops": rate / 1e12,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
