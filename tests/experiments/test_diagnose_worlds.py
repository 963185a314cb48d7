from __future__ import annotations

from dataclasses import replace

import pytest

from metabridge.diagnose import advice, estimate
from metabridge.experiments import EXPERIMENTS, Result, Row, Work, diagnose_worlds, experiment
from metabridge.experiments.diagnose_worlds import CLEAR, METHODS, SCALES, Outcome, Scale, Trial, World, figure, run
from metabridge.experiments.result import Environment

ACCURACIES = dict(zip(METHODS, (92.0, 93.0, 91.0, 90.0)))


@pytest.fixture(scope="module")
def outcome(glyphs, tmp_path_factory) -> Outcome:
    """The experiment at a scale of seconds, with accuracies of trained methods beside it."""
    out = tmp_path_factory.mktemp("out")
    rows = tuple(Row(f"{name}, test tasks", "accuracy %", ours=value) for name, value in ACCURACIES.items())
    Result("glyphs", "quick", 0, {}, Environment("cpu", "", "", None), 1.0, rows).write(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "quick", Scale(worlds=8, tasks=60, characters=16, ranking=2, seeds=1))
        patch.setattr(diagnose_worlds, "TRAINED", 100)
        patch.setattr(estimate, "REPEATS", 20)
        patch.setattr(advice, "TRAINING_POINTS", 160)
        patch.setattr(advice, "JUDGED_TASKS", 16)
        patch.setattr(advice, "CHOOSING_TASKS", 8)
        return run(Work("quick", out=out, progress=False))


def test_the_experiment_can_be_asked_for():
    assert experiment("diagnose-worlds") is diagnose_worlds
    assert "diagnose-worlds" in EXPERIMENTS


def test_predictions_follow_what_training_realises(outcome):
    correlation = next(row for row in outcome.result.rows if row.metric == "correlation")
    assert correlation.ours > 0.8
    assert len(outcome.trials) == 8


def test_every_setting_of_characters_is_ranked(outcome):
    assert set(outcome.settings) == {"glyphs, large r_H", "glyphs, small r_H"}
    ranked = [row for row in outcome.result.rows if row.metric == "seeds %"]
    assert len(ranked) == 2
    assert all(row.agrees == (row.ours == 100) for row in ranked)


def test_the_predicted_order_is_held_against_the_trained_one(outcome):
    rows = [row for row in outcome.result.rows if row.metric.startswith("trained accuracy")]
    assert {row.name.split(":")[0] for row in rows} == {"glyphs, formulas", "glyphs, kernels"}
    for row in rows:
        first, sign, second = row.name.split(": ")[1].split()
        assert row.ours == ACCURACIES[first] - ACCURACIES[second]
        assert row.agrees == ((row.ours > 0) == (sign == ">"))


def test_the_figure_is_drawn(outcome, tmp_path):
    figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("seed", [2, 3], ids=["of C's form", "with random covariances"])
def test_what_is_realised_approaches_the_population(seed, monkeypatch):
    monkeypatch.setattr(diagnose_worlds, "TRAINED", 2000)
    world = replace(World.drawn(seed), m=40)
    assert world.realised(0) == pytest.approx(world.exact(), rel=0.05)
    assert world.exact().ratio >= 1


def test_a_recommendation_is_judged_only_where_the_truth_is_clear(outcome):
    found = outcome.trials[0].diagnosis
    adapting = replace(found, advice=replace(found.advice, adapts=True))
    assert Trial(adapting, CLEAR[1] + 0.1, 1.0).right is True
    assert Trial(adapting, CLEAR[0] - 0.05, 1.0).right is False
    assert Trial(adapting, sum(CLEAR) / 2, 1.0).right is None
