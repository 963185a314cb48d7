"""Time `metabridge adapt` with the built-in model from the shell: 5 classes with 5 images each, and 100 query images.

The folder is new in every repetition, so nothing is cached. `--data` is a folder of images with one subfolder per
class; by default, random images of the size of a photo are written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from metabridge.report.results import Machine

CLASSES, SHOTS, QUERIES = 5, 5, 20


def write_images(folder: Path, size: int, seed: int) -> None:
    """Write random JPEG files for the support set and the queries."""
    rng = np.random.default_rng(seed)
    for label in range(CLASSES):
        for index in range(SHOTS + QUERIES):
            pixels = rng.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
            file = folder / ("labeled" if index < SHOTS else "unlabeled") / f"class {label}" / f"{index}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((size, size)).save(file)


def seconds(folder: Path, cache: Path) -> float:
    """Return the seconds that the command takes."""
    command = [sys.executable, "-m", "metabridge", "adapt", "--support", f"{folder}/labeled"]
    command += ["--query", f"{folder}/unlabeled", "--out", f"{folder}/predictions.csv"]
    shutil.rmtree(cache, ignore_errors=True)
    start_time = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "METABRIDGE_CACHE": str(cache)})
    return time.perf_counter() - start_time


def main() -> None:
    """Time the command, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[84, 1024], help="sizes of the images in pixels")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        times = []
        for repeat in range(options.repeats):
            with TemporaryDirectory() as folder:
                write_images(Path(folder), size, seed=repeat)
                times.append(seconds(Path(folder), Path(folder, "cache")))
        rows.append({"image size": size, "seconds": median(times), "slowest": max(times)})
        print(f"{size} px: {median(times):.1f} s (median of {len(times)}), at most {max(times):.1f} s")
    if options.json is not None:
        report = {"id": "bench-adapt-cpu", "environment": vars(Machine.current("cpu")), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
