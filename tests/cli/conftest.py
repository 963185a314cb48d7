from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="module")
def runs(glyphs, tmp_path_factory) -> dict[str, Path]:
    """Finished runs on the glyphs."""
    from metabridge.datasets import load as load_images
    from metabridge.training.config import default_config
    from metabridge.training.image_training import train_on_images

    root, folders = tmp_path_factory.mktemp("runs"), {}
    for name in ("mtl", "anil"):
        small_options = {"iterations": 4, "validate_every": 2, "validate_tasks": 4, "queries": 2, "batch_size": 2}
        config = replace(default_config(name), **small_options, model_options={"filters": 6})
        train_on_images(config, load_images("glyphs"), out=root / name, progress=False)
        folders[name] = root / name
    return folders


@pytest.fixture
def photographs(tmp_path) -> Path:
    """Folders of small color images, one per class, in one folder per split. Each class has its own hue."""
    generator = np.random.default_rng(0)
    for split, classes in (("train", 4), ("validation", 3), ("test", 3)):
        for label in range(classes):
            folder = tmp_path / "photographs" / split / f"{split} {label}"
            folder.mkdir(parents=True)
            hue = generator.integers(0, 200, 3)
            for index in range(5):
                pixels = hue + generator.integers(0, 55, (20, 18 + index, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return tmp_path / "photographs"
