from __future__ import annotations

from pathlib import Path

import pytest
import torch

from metabridge import InputError
from metabridge.experiments import (
    ExperimentOptions,
    load_experiment,
    nas_searches,
    nas_table1,
    nas_table2,
    nas_training_runs,
)
from metabridge.experiments.nas_searches import DEEP, METANTK
from metabridge.nas import Architecture, random_architecture
from metabridge.report.results import Result
from metabridge.training import load
from small_searches import SEARCH, shrink_experiments

RESULTS = Path(__file__).resolve().parents[2] / "results"
EXPERIMENTS = ("nas-table1", "nas-table2", "nas-fig2")


@pytest.fixture(scope="module")
def out(glyphs, tmp_path_factory) -> Path:
    """A folder with the records of all searches and training runs."""
    folder = tmp_path_factory.mktemp("nas")
    with pytest.MonkeyPatch.context() as patch:
        shrink_experiments(patch, glyphs)
        for id in EXPERIMENTS:
            load_experiment(id).run(ExperimentOptions("quick", out=folder, progress=False))
    return folder


@pytest.fixture
def image_sizes(monkeypatch, glyphs) -> list[int]:
    """Make the experiments small; the list receives the image sizes that they load."""
    return shrink_experiments(monkeypatch, glyphs)


def run(id: str, out: Path, **options):
    """Run an experiment at the quick scale."""
    return load_experiment(id).run(ExperimentOptions("quick", out=out, progress=False, **options))


def rows(id: str, out: Path, **options):
    """Run an experiment, and return the rows of its result by name."""
    return {row.name: row for row in run(id, out, **options).result.rows}


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_records_are_read_instead_of_searching_and_training_again(image_sizes, out, tmp_path, id):
    first, second = run(id, out), run(id, out)
    assert image_sizes == []  # no images were loaded
    assert first.result == second.result
    assert Result.read(first.result.write(tmp_path)).rows == first.result.rows
    load_experiment(id).draw(first, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("id", "published"), [("nas-table1", nas_table1.PUBLISHED), ("nas-table2", nas_table2.PUBLISHED)]
)
def test_tables_contain_all_published_accuracies_and_no_verdicts_at_the_quick_scale(image_sizes, out, id, published):
    table = rows(id, out)
    for name, accuracies in published.items():
        for shots, (value, _) in accuracies.items():
            assert table[f"{name}, {shots}-shot"].published == value
            assert 0 <= table[f"{name}, {shots}-shot"].ours <= 100
    assert {row.agrees for row in table.values()} == {None}


def test_tables_share_the_records_of_the_same_searches(image_sizes, out):
    names = [file.name for file in (out / "records").iterdir()]
    # five variants with two seeds each, searched and trained; ResNet-12, and one architecture with two other recipes
    assert len(names) == 5 * 2 * 2 + 3
    assert "nas-search-maml-5-0-quick.json" in names
    assert "nas-train-resnet12-0-quick.json" in names


def test_training_runs_have_the_architectures_that_the_searches_selected(image_sizes, out):
    records = run("nas-table2", out).data
    for label in (label for name in records if (label := name.removeprefix("train-")) != name):
        search, training = records[f"search-{label}"], records[f"train-{label}"]
        assert training.parameters == search.parameters
        assert Architecture.from_dict(training.plan["model_options"]["architecture"]) == search.architecture
    for seed in (0, 1):
        drawn = random_architecture(torch.Generator().manual_seed(seed), SEARCH.operators)
        assert records[f"search-random-5-{seed}"].architecture == drawn


def test_other_recipes_change_only_what_they_name(image_sizes, out):
    records = run("nas-table1", out).data
    default, longer = records["train-maml-5-0"], records["train-maml-5-0-longer"]
    assert longer.plan == {**default.plan, "iterations": 10}
    assert (default.iterations, longer.iterations) == (1, 10)
    assert default.plan["model_options"]["drop_rate"] == nas_searches.SETTINGS["quick"].drop_rate
    assert "train-maml-5-1-longer" not in records
    assert records["train-maml-5-0-muon"].plan == {**default.plan, "optimizer": "muon", "lr": 0.2}


def test_only_selects_training_runs_and_interrupted_ones_resume(image_sizes, tmp_path):
    table = rows("nas-table2", tmp_path, only=("search-regions-5-1",))
    assert {name.partition(", ")[0] for name in table} == {"regions alone"}
    assert [file.name for file in (tmp_path / "records").iterdir()] == ["nas-search-regions-5-1-quick.json"]
    rows("nas-table2", tmp_path, only=("train-regions-5-1",), minutes=0)
    assert not (tmp_path / "records" / "nas-train-regions-5-1-quick.json").exists()
    rows("nas-table2", tmp_path, only=("train-regions-5-1",))
    assert (tmp_path / "records" / "nas-train-regions-5-1-quick.json").exists()


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            "train-maml-5-0",
            r"train-maml-5-0 needs search-maml-5-0, which is not finished\. Add search-maml-5-0 to --only",
        ),
        (
            "train-maml-5-0-longer",
            r"train-maml-5-0-longer needs search-maml-5-0, which is not finished\. Add search-maml-5-0 to --only",
        ),
        ("train-ntk-5-0", "only is train-ntk-5-0, .* its parts are search-maml-5-0,"),
    ],
)
def test_training_without_its_search_raises_an_error(image_sizes, tmp_path, training, message):
    with pytest.raises(InputError, match=message):
        run("nas-table1", tmp_path, only=(training,))


@pytest.mark.parametrize("variant", [METANTK, DEEP])
def test_searches_use_the_variant_and_training_runs_use_the_seed_of_the_search(image_sizes, tmp_path, variant):
    label = f"{variant.kernel}-{variant.cells}-1"
    records = run("nas-table1", tmp_path, only=(f"search-{label}", f"train-{label}")).data
    search, training = records[f"search-{label}"].plan, records[f"train-{label}"].plan
    settings = [search[key] for key in ("kernel", "cells", "time", "ridge", "seed")]
    assert settings == [variant.kernel, variant.cells, str(variant.adaptation_time), variant.ridge, 1]
    assert training["lr"] == nas_searches.SETTINGS["quick"].lr != nas_searches.SETTINGS["quick"].config.lr
    assert (training["seed"], training["model_options"]["cells"]) == (1, variant.cells)
    assert image_sizes == [nas_searches.IMAGE_SIZE, nas_training_runs.IMAGE_SIZE]
    (folder,) = (tmp_path / "runs").glob(f"nas-train-{label}*")
    assert records[f"train-{label}"].minutes == pytest.approx(load(folder).seconds / 60)


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_committed_results_follow_from_their_records(id):
    # `only` selects a search that has a record, so that nothing is searched or trained even if a record is missing.
    options = ExperimentOptions("paper", out=RESULTS, only=("search-maml-5-0",), progress=False)
    assert load_experiment(id).run(options).result.rows == Result.read(RESULTS / f"{id}.json").rows
