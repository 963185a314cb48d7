from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from metabridge import InputError
from metabridge.environments import LabelledImages
from metabridge.experiments import (
    ExperimentOptions,
    bridge_table3,
    bridge_table4,
    bridge_table5,
    load_experiment,
    mini_imagenet_trainings,
    training_runs,
)
from metabridge.experiments.result import Environment, Result
from metabridge.experiments.training_runs import Measured, Record
from metabridge.training import Views
from metabridge.training.config import Plan

NAMES = ("bridge-table3", "bridge-table4", "bridge-table5", "bridge-fig2")


def shrink(patch: pytest.MonkeyPatch, glyphs: LabelledImages) -> None:
    """Make every training a matter of two steps, on few classes, and every measurement one of four tasks."""
    few = replace(glyphs, splits={split: members[:8] for split, members in glyphs.splits.items()})
    made = mini_imagenet_trainings.plans

    def short(scale: str) -> dict[str, Plan]:
        small = {}
        for name, plan in made(scale).items():
            options = {"filters": 4} if plan.model == "conv4" else {"widths": [4, 4, 8, 8]}
            plan = replace(plan, iterations=2, validate_every=1, validate_tasks=2, batch=2, training_ways=None)
            small[name] = replace(plan, model_options={**plan.model_options, **options})
        return small

    def brief(*arguments, shots, tasks, looks):
        return training_runs.trial(*arguments, shots=shots, tasks=4, looks=looks[1:])

    for module in (mini_imagenet_trainings, bridge_table3):
        patch.setattr(module, "plans", short)
    patch.setattr(mini_imagenet_trainings, "trial", brief)
    patch.setattr(mini_imagenet_trainings, "load", lambda name: few)


@pytest.fixture
def small(monkeypatch, glyphs) -> None:
    shrink(monkeypatch, glyphs)


@pytest.fixture(scope="module")
def out(glyphs, tmp_path_factory) -> Path:
    """A folder with the records of every training, done once."""
    folder = tmp_path_factory.mktemp("bridge")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, glyphs)
        load_experiment("bridge-table3").run(ExperimentOptions("quick", out=folder, progress=False))
    return folder


@pytest.fixture
def untrainable(monkeypatch) -> None:
    monkeypatch.setattr(Plan, "train", lambda *_, **__: pytest.fail("trained"))


@pytest.mark.parametrize("name", NAMES)
def test_records_are_read_and_nothing_is_trained_again(small, out, untrainable, monkeypatch, tmp_path, name):
    monkeypatch.setattr(mini_imagenet_trainings, "load", lambda *_, **__: pytest.fail("loaded images"))
    first, again = (load_experiment(name).run(ExperimentOptions("quick", out=out, progress=False)) for _ in range(2))
    assert first.result == again.result
    assert Result.read(first.result.write(tmp_path)).rows == first.result.rows
    load_experiment(name).draw(first, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def rows(name: str, out: Path, **options):
    return {
        row.name: row
        for row in load_experiment(name).run(ExperimentOptions("quick", out=out, progress=False, **options)).result.rows
    }


def test_table_3_has_a_row_for_every_published_accuracy(small, out):
    found = rows("bridge-table3", out)
    published = {
        f"{name}, {shots}-shot": value
        for name, own in bridge_table3.PUBLISHED.items()
        for shots, (value, _) in own.items()
    }
    assert {name: row.published for name, row in found.items()} == published
    assert all(0 <= row.ours <= 100 for row in found.values())
    assert {row.agrees for row in found.values()} == {None}  # at the quick scale nothing is claimed


def test_table_4_has_the_hours_of_both_and_their_ratio(small, out):
    found = rows("bridge-table4", out)
    assert {name: row.published for name, row in found.items()} == {
        "mtl, training": 3.7,
        "metaoptnet, training": 85.6,
        "metaoptnet over mtl": 85.6 / 3.7,
    }


def test_table_5_has_a_row_for_every_published_penalty(small, out):
    found = rows("bridge-table5", out)
    assert {name: row.published for name, row in found.items()} == {
        f"penalty {penalty:g}": value for penalty, value in bridge_table5.PUBLISHED.items()
    }


def test_figure_2_has_accuracy_and_minutes_of_every_method(small, out):
    found = rows("bridge-fig2", out)
    for name in ("mtl", "rfs", "r2d2", "metaoptnet"):
        assert {f"{name}, 1-shot", f"{name}, 5-shot", f"{name}, training"} <= set(found)
        assert found[f"{name}, training"].ours > 0


def test_only_the_named_training_is_done_and_others_are_left_for_later(small, tmp_path):
    found = rows("bridge-table4", tmp_path, only=("metaoptnet",))
    assert set(found) == {"metaoptnet, training"}
    assert [file.name for file in (tmp_path / "records").iterdir()] == ["glyphs-metaoptnet-quick-0.json"]
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["glyphs-metaoptnet-quick-0"]


def test_only_refuses_a_training_that_is_not_of_the_experiment(tmp_path):
    with pytest.raises(InputError, match=r"only names maml-1, but the trainings are mtl, metaoptnet\."):
        load_experiment("bridge-table4").run(ExperimentOptions("quick", out=tmp_path, only=("maml-1",), progress=False))


def test_a_training_that_was_stopped_leaves_no_record_and_goes_on(small, tmp_path):
    with pytest.raises(InputError, match="no training of bridge-table5 is finished"):
        rows("bridge-table5", tmp_path, minutes=0)
    assert not (tmp_path / "records").exists()
    assert len(rows("bridge-table5", tmp_path)) == len(bridge_table5.PUBLISHED)


@pytest.mark.parametrize("data", [None, Path("nowhere")])
def test_the_paper_scale_without_its_data_is_refused_with_a_sentence(tmp_path, data):
    with pytest.raises(InputError) as caught:
        load_experiment("bridge-table3").run(ExperimentOptions("paper", out=tmp_path, data=data, progress=False))
    assert str(caught.value) == (
        "the paper scale needs mini-ImageNet, in the folder mini-imagenet of the one that --data names "
        f"(now {data}). Use --scale quick to try the experiment without it."
    )


def test_a_record_of_another_plan_is_not_taken_for_this_one(small, out):
    work = ExperimentOptions("quick", out=out, progress=False)
    plan = replace(mini_imagenet_trainings.plans("quick")["mtl"], seed=0)
    assert training_runs.recorded(work, "glyphs-mtl-quick-0", plan) is not None
    assert training_runs.recorded(work, "glyphs-mtl-quick-0", replace(plan, lr=0.5)) is None
    assert training_runs.recorded(work, "glyphs-mtl-quick-1", plan) is None


def test_a_record_of_another_form_is_named(small, tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "glyphs-mtl-quick-0.json").write_text(json.dumps({"name": "mtl"}))
    with pytest.raises(InputError, match=r"glyphs-mtl-quick-0\.json is not a record of this version"):
        rows("bridge-table5", tmp_path)


def record(name: str, curve: list[tuple[float, float]], scores: tuple[Measured, ...] = ()) -> Record:
    """A made-up record whose curve has (minutes, accuracy) points."""
    points = tuple(
        {"minutes": minutes, "iteration": index, "accuracy": accuracy, "ci95": 0.01}
        for index, (minutes, accuracy) in enumerate(curve)
    )
    machine = Environment("abacus", "0", "0", None)
    return Record(name, {"model": "resnet12"}, "none", machine, curve[-1][0], len(curve), 1, points, scores, None)


@pytest.mark.parametrize(
    ("mtl", "rival", "mark", "ratio"),
    [
        # MTL gets further: how long both take to MetaOptNet's best
        ([(1, 0.5), (2, 0.6), (4, 0.7)], [(10, 0.4), (20, 0.6), (30, 0.55)], "60.0 %", 20 / 2),
        # MetaOptNet gets further: how long both take to MTL's best
        ([(1, 0.5), (2, 0.55), (4, 0.5)], [(10, 0.5), (20, 0.58), (30, 0.7)], "55.0 %", 20 / 2),
        ([(3, 0.5)], [(6, 0.5)], "50.0 %", 2.0),
    ],
)
def test_the_ratio_of_hours_is_taken_at_the_best_accuracy_that_both_reach(
    monkeypatch, tmp_path, mtl, rival, mark, ratio
):
    made_up = {"mtl": record("mtl", mtl), "metaoptnet": record("metaoptnet", rival)}
    monkeypatch.setattr(bridge_table4, "records", lambda *_: made_up)
    found = rows("bridge-table4", tmp_path)
    assert found["metaoptnet over mtl"].ours == pytest.approx(ratio)
    assert mark in found["metaoptnet over mtl"].note
    assert found["mtl, training"].ours == pytest.approx(mtl[-1][0] / 60)


def test_the_test_score_is_that_of_the_head_which_was_best_in_validation():
    scores = (
        Measured("validation", 5, 0.70, 0.01, 10, 0.1),
        Measured("validation", 5, 0.75, 0.01, 10, 0.1, Views(5)),
        Measured("validation", 5, 0.72, 0.01, 10, 1.0, Views(5, True)),
        Measured("validation", 1, 0.99, 0.01, 10, 1.0, Views(5, True)),
        Measured("test", 5, 0.60, 0.01, 10, 0.1),
        Measured("test", 5, 0.61, 0.01, 10, 0.1, Views(5)),
        Measured("test", 5, 0.69, 0.01, 10, 1.0, Views(5, True)),
    )
    kept = record("mtl", [(1, 0.5)], scores)
    assert kept.chosen(5).mean == 0.61
    assert kept.score("test", 5, penalty=0.1).mean == 0.60
    with pytest.raises(InputError, match="the record of mtl has no such score on test with 1 shots"):
        kept.chosen(1)
