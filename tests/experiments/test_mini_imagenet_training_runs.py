from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from metabridge import InputError
from metabridge.environments import LabeledImages
from metabridge.experiments import (
    ExperimentOptions,
    bridge_table3,
    bridge_table4,
    bridge_table5,
    load_experiment,
    mini_imagenet_training_runs,
)
from metabridge.experiments.mini_imagenet_training_runs import EVALUATIONS, VIEWS
from metabridge.experiments.training_records import TrainingRecord, config_dict
from metabridge.report.results import Machine, Result
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.head_selection import SplitAccuracy

EXPERIMENTS = ("bridge-table3", "bridge-table4", "bridge-table5", "bridge-fig2")


def shrink(patch: pytest.MonkeyPatch, glyphs: LabeledImages) -> None:
    """Shorten all training runs to two steps on a few classes, and evaluate them on four tasks."""
    few_classes = replace(glyphs, splits={split: classes[:8] for split, classes in glyphs.splits.items()})
    configs = mini_imagenet_training_runs.configs

    def small_configs(scale: str) -> dict[str, ImageTrainingConfig]:
        small = {}
        for name, config in configs(scale).items():
            options = {"filters": 4} if config.model == "conv4" else {"widths": [4, 4, 8, 8]}
            config = replace(config, iterations=2, validate_every=1, validate_tasks=2, batch_size=2, training_ways=None)
            small[name] = replace(config, model_options={**config.model_options, **options})
        return small

    for module in (mini_imagenet_training_runs, bridge_table3):
        patch.setattr(module, "configs", small_configs)
    patch.setitem(EVALUATIONS, "quick", replace(EVALUATIONS["quick"], tasks=4, views=VIEWS[1:2]))
    patch.setattr(ExperimentOptions, "load_images", lambda *_, **__: few_classes)


@pytest.fixture
def small(monkeypatch, glyphs) -> None:
    """The experiments have small settings during the test."""
    shrink(monkeypatch, glyphs)


@pytest.fixture(scope="module")
def out(glyphs, tmp_path_factory) -> Path:
    """A folder with the records of all training runs."""
    folder = tmp_path_factory.mktemp("bridge")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, glyphs)
        load_experiment("bridge-table3").run(ExperimentOptions("quick", out=folder, progress=False))
    return folder


@pytest.fixture
def no_training(monkeypatch) -> None:
    """Let the test fail if a network is trained."""
    monkeypatch.setattr(
        "metabridge.experiments.training_records.train_on_images", lambda *_, **__: pytest.fail("trained")
    )


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_records_are_read_instead_of_training_again(small, out, no_training, monkeypatch, tmp_path, id):
    monkeypatch.setattr(ExperimentOptions, "load_images", lambda *_, **__: pytest.fail("loaded images"))
    first, again = (load_experiment(id).run(ExperimentOptions("quick", out=out, progress=False)) for _ in range(2))
    assert first.result == again.result
    assert Result.read(first.result.write(tmp_path)).rows == first.result.rows
    load_experiment(id).draw(first, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def rows(id: str, out: Path, **options):
    """Run an experiment, and return the rows of its result by name."""
    return {
        row.name: row
        for row in load_experiment(id).run(ExperimentOptions("quick", out=out, progress=False, **options)).result.rows
    }


def test_table_3_has_a_row_for_every_published_accuracy(small, out):
    table = rows("bridge-table3", out)
    published = {
        f"{name}, {shots}-shot": value
        for name, by_shots in bridge_table3.PUBLISHED.items()
        for shots, (value, _) in by_shots.items()
    }
    assert {name: row.published for name, row in table.items()} == published
    assert all(0 <= row.ours <= 100 for row in table.values())
    assert {row.agrees for row in table.values()} == {None}  # the quick scale cannot agree or disagree


def test_table_4_has_the_hours_of_both_methods_and_their_ratio(small, out):
    table = rows("bridge-table4", out)
    assert {name: row.published for name, row in table.items()} == {
        "mtl, training": 3.7,
        "metaoptnet, training": 85.6,
        "metaoptnet / mtl": 85.6 / 3.7,
    }


def test_table_5_has_a_row_for_every_published_penalty(small, out):
    table = rows("bridge-table5", out)
    assert {name: row.published for name, row in table.items()} == {
        f"penalty {penalty:g}": value for penalty, value in bridge_table5.PUBLISHED.items()
    }


def test_figure_2_has_accuracy_and_minutes_of_every_method(small, out):
    table = rows("bridge-fig2", out)
    for name in ("mtl", "rfs", "r2d2", "metaoptnet"):
        assert {f"{name}, 1-shot", f"{name}, 5-shot", f"{name}, training"} <= set(table)
        assert table[f"{name}, training"].ours > 0


def test_unselected_methods_are_not_trained(small, tmp_path):
    table = rows("bridge-table4", tmp_path, only=("metaoptnet",))
    assert set(table) == {"metaoptnet, training"}
    assert [file.name for file in (tmp_path / "records").iterdir()] == ["glyphs-metaoptnet-quick-0.json"]
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["glyphs-metaoptnet-quick-0"]


def test_selecting_an_unknown_training_run_raises_an_error(tmp_path):
    with pytest.raises(InputError, match=r"only is maml-1, .* its parts are mtl, metaoptnet\."):
        load_experiment("bridge-table4").run(ExperimentOptions("quick", out=tmp_path, only=("maml-1",), progress=False))


def test_interrupted_training_runs_leave_no_record_and_resume(small, tmp_path):
    with pytest.raises(InputError, match="no part of bridge-table5 is finished"):
        rows("bridge-table5", tmp_path, minutes=0)
    assert not (tmp_path / "records").exists()
    assert len(rows("bridge-table5", tmp_path)) == len(bridge_table5.PUBLISHED)


@pytest.mark.parametrize(
    ("data", "problem"),
    [(None, "no --data is passed"), (Path("nowhere"), "--data nowhere does not contain it")],
)
def test_the_paper_scale_without_its_dataset_raises_an_error(tmp_path, data, problem):
    with pytest.raises(InputError) as caught:
        load_experiment("bridge-table3").run(ExperimentOptions("paper", out=tmp_path, data=data, progress=False))
    assert str(caught.value) == (
        f"the paper scale needs mini-imagenet, but {problem}. Pass the folder that contains it with --data, or use "
        "--scale quick to run a smaller experiment without it."
    )


def test_records_of_other_configurations_are_ignored(small, out):
    options = ExperimentOptions("quick", out=out, progress=False)
    config = replace(mini_imagenet_training_runs.configs("quick")["mtl"], seed=0)
    assert TrainingRecord.load(options, "glyphs-mtl-quick-0", config_dict(config)) is not None
    assert TrainingRecord.load(options, "glyphs-mtl-quick-0", config_dict(replace(config, lr=0.5))) is None
    assert TrainingRecord.load(options, "glyphs-mtl-quick-1", config_dict(config)) is None


def test_malformed_records_raise_an_error(small, tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "glyphs-mtl-quick-0.json").write_text(json.dumps({"name": "mtl"}))
    with pytest.raises(InputError, match=r"glyphs-mtl-quick-0\.json is not a record of this version"):
        rows("bridge-table5", tmp_path)


def record(name: str, curve: list[tuple[float, float]], scores: tuple[SplitAccuracy, ...] = ()) -> TrainingRecord:
    """Return a record with a learning curve of (minutes, accuracy) points."""
    points = tuple(
        {"minutes": minutes, "iteration": index, "accuracy": accuracy, "ci95": 0.01}
        for index, (minutes, accuracy) in enumerate(curve)
    )
    machine, plan = Machine("abacus", "0", "0", None), {"model": "resnet12"}
    return TrainingRecord(name, plan, machine, curve[-1][0], "none", len(curve), 1, points, scores, None)


@pytest.mark.parametrize(
    ("mtl_curve", "metaoptnet_curve", "target", "ratio"),
    [
        # MTL becomes better: the times to reach MetaOptNet's best accuracy
        ([(1, 0.5), (2, 0.6), (4, 0.7)], [(10, 0.4), (20, 0.6), (30, 0.55)], "60.0 %", 20 / 2),
        # MetaOptNet becomes better: the times to reach MTL's best accuracy
        ([(1, 0.5), (2, 0.55), (4, 0.5)], [(10, 0.5), (20, 0.58), (30, 0.7)], "55.0 %", 20 / 2),
        ([(3, 0.5)], [(6, 0.5)], "50.0 %", 2.0),
    ],
)
def test_the_ratio_of_hours_compares_the_times_to_the_best_accuracy_that_both_methods_reach(
    monkeypatch, tmp_path, mtl_curve, metaoptnet_curve, target, ratio
):
    records = {"mtl": record("mtl", mtl_curve), "metaoptnet": record("metaoptnet", metaoptnet_curve)}
    monkeypatch.setattr(bridge_table4, "train_or_load_all", lambda *_: records)
    table = rows("bridge-table4", tmp_path)
    assert table["metaoptnet / mtl"].ours == pytest.approx(ratio)
    assert target in table["metaoptnet / mtl"].note
    assert table["mtl, training"].ours == pytest.approx(mtl_curve[-1][0] / 60)


def test_training_runs_have_the_seed_of_the_options(monkeypatch, tmp_path):
    seeds = {}

    def record_seed(options: ExperimentOptions, run_name: str, name: str, config: ImageTrainingConfig, *_) -> None:
        seeds[name] = config.seed

    monkeypatch.setattr(mini_imagenet_training_runs, "train_or_load", record_seed)
    mini_imagenet_training_runs.train_or_load_all(ExperimentOptions("quick", out=tmp_path, seed=3), ("mtl", "maml-5"))
    assert seeds == {"glyphs-mtl-quick-3": 3, "glyphs-maml-5-quick-3": 3}
