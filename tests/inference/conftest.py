"""Two small runs, and image files of characters on which they were not trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from metabridge.environments import LabeledImages
from metabridge.heads import LogisticRegression
from metabridge.learners import method
from metabridge.models import conv4
from metabridge.training import fit

WAYS, SHOTS, QUERIES = 4, 5, 6


@pytest.fixture(scope="session")
def run(glyphs: LabeledImages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with running statistics, which adapts to any number of classes."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    net = conv4(1, 28, outputs=WAYS, statistics="running")
    tasks = glyphs.tasks("train", ways=WAYS, shots=5, queries=5)
    learner = method("r2d2", test_solver=LogisticRegression(penalty=0.33))
    fit(net, learner, tasks, iterations=40, lr=5e-3, validate_every=40, out=folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def anil(glyphs: LabeledImages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with batch statistics that adapts a head for four classes."""
    folder = tmp_path_factory.mktemp("runs") / "anil"
    net = conv4(1, 28, outputs=WAYS)
    tasks = glyphs.tasks("train", ways=WAYS, shots=5, queries=5)
    fit(net, method("anil", lr=0.5), tasks, iterations=40, lr=1e-2, out=folder, progress=False)
    return folder


@pytest.fixture(scope="session")
def folders(glyphs: LabeledImages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose subfolders `support` and `query` contain class folders of PNG files."""
    root = tmp_path_factory.mktemp("images")
    test_classes = glyphs.splits["test"].tolist()
    for number, label in enumerate(test_classes[:: len(test_classes) // WAYS][:WAYS]):
        images = glyphs.images[glyphs.labels == label, 0].numpy()
        for index, image in enumerate(images[: SHOTS + QUERIES]):
            folder = root / ("support" if index < SHOTS else "query") / f"character {number}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="session")
def support(folders: Path) -> tuple[list[Path], list[str]]:
    """Return the paths and labels of the support images."""
    files = sorted((folders / "support").rglob("*.png"))
    return files, [file.parent.name for file in files]


@pytest.fixture(scope="session")
def query(folders: Path) -> tuple[list[Path], list[str]]:
    """Return the paths and labels of the query images."""
    files = sorted((folders / "query").rglob("*.png"))
    return files, [file.parent.name for file in files]
