"""Measure the training speed of ResNet-12 in bfloat16 in images per second, with and without fused kernels.

    python benchmarks/resnet12.py --device cuda --json results/bench-resnet12-h200.json

A step indexes uint8 images on the device, augments them, computes the gradient of the 64-class loss with `Engine`, and
updates the weights by SGD with momentum. The table also compares the floating-point operations per second of training
with those of a large bfloat16 matrix product on the same GPU. For each multiplication of the forward pass, a training
step takes 6 operations: a multiplication and an addition each for the outputs, for the gradients with respect to the
inputs, and for the gradients with respect to the weights.
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


def seconds_per_step(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Return the duration of a step after a warm-up: the smallest of `REPEATS` means over `steps` steps."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    means = []
    for _ in range(REPEATS + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        means.append((time.perf_counter() - start) / steps)
    return min(means[1:])


def operations(size: int) -> float:
    """Return the number of floating-point operations of the convolutions for one image, forward and backward."""
    multiplications, in_channels = 0, 3
    for width in WIDTHS:
        # three 3×3 convolutions, the first of which has `in_channels` inputs, and the 1×1 convolution of the shortcut
        multiplications += size**2 * (10 * in_channels + 18 * width) * width
        in_channels, size = width, size // 2
    return 3 * 2 * multiplications


def matrix_rate(size: int, device: torch.device) -> float:
    """Return the floating-point operations per second of a product of two bfloat16 matrices, size × size."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_per_step(lambda: left @ right, 20, device)


def training_step(batch_size: int, size: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs one training step on `batch_size` images."""
    net, rfs = resnet12(3, size, widths=WIDTHS).train(), method("rfs")
    net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # so that steps do not convert weights
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
    """Measure both variants at every batch size, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--size", type=int, default=84, help="width and height of the images in pixels")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256], help="batch sizes")
    parser.add_argument("--steps", type=int, default=30, help="steps per measurement")
    parser.add_argument("--matrix", type=int, default=8192, help="rows and columns of the multiplied matrices")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True

    device, rows = options.device, []
    rate = matrix_rate(options.matrix, device)
    variants = (
        {"plain": False, "fused": True}
        if fused_triton_kernels.AVAILABLE and device.type == "cuda"
        else {"plain": False}
    )
    for batch in options.batches:
        for variant, fused in variants.items():
            fused_triton_kernels.AVAILABLE = fused
            speed = batch / seconds_per_step(training_step(batch, options.size, device), options.steps, device)
            share = speed * operations(options.size) / rate
            Console().print(f"batch size {batch}, {variant}: {speed:.0f} images/s")
            rows.append({"batch": batch, "path": variant, "images_per_second": speed, "share_of_matrix_rate": share})

    table = Table(title=f"ResNet-12 at {options.size} pixels; a matrix product runs at {rate / 1e12:.1f} TFLOP/s")
    for heading in ("batch size", "kernels", "images/s", "relative to matrix product"):
        table.add_column(heading, justify="left" if heading == "kernels" else "right")
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
