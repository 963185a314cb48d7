"""Searches that metabridge 0.1.0 wrote, in `tests/data/v0.1.0/search`, are read and continued.

They were written by `metabridge search --data glyphs --kernel maml --cells 3 --channels 2 --tasks 1 --ways 2
--repeats 1 --inputs 20 --operators skip,conv_3x3 --device cpu`.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from metabridge.datasets import load
from metabridge.environments import LabeledImages
from metabridge.errors import InputError
from metabridge.nas import Architecture, SearchConfig, run_search

STORED_SEARCH = Path(__file__).parent.parent / "data" / "v0.1.0" / "search"
CONFIG = SearchConfig(cells=3, channels=2, tasks=1, ways=2, repeats=1, region_inputs=20, operators=("skip", "conv_3x3"))
ARCHITECTURE = Architecture.load(STORED_SEARCH / "architecture.json")
EVALUATED = (1 + 18 * 2) + (1 + 18)  # per round: the whole network, and one without each operator on the 18 edges


@pytest.fixture(scope="module")
def images() -> LabeledImages:
    return load("glyphs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED_SEARCH, tmp_path / "search"))


def test_a_finished_search_is_read_without_computing_scores_again(images: LabeledImages, folder: Path) -> None:
    log_before = (folder / "search.jsonl").read_text()
    result = run_search(images, CONFIG, out=folder, progress=False)
    assert result.architecture == ARCHITECTURE
    assert result.evaluated == EVALUATED
    added_lines = (folder / "search.jsonl").read_text().removeprefix(log_before).splitlines()
    assert len(added_lines) == 1
    assert added_lines[0].startswith('{"seconds": ')


def test_an_unfinished_search_is_continued(images: LabeledImages, folder: Path) -> None:
    log = folder / "search.jsonl"
    lines = log.read_text().splitlines(keepends=True)[:30]
    log.write_text("".join(lines))
    (folder / "architecture.json").unlink()
    result = run_search(images, CONFIG, out=folder, progress=False)
    assert log.read_text().startswith("".join(lines))
    assert result.evaluated == EVALUATED
    assert result.architecture == Architecture.load(folder / "architecture.json") == ARCHITECTURE


def test_a_search_of_other_images_is_still_rejected(images: LabeledImages, folder: Path) -> None:
    with pytest.raises(InputError, match="images='14180 images, checksum 79f6465b'"):
        run_search(replace(images, images=255 - images.images), CONFIG, out=folder, progress=False)
