from __future__ import annotations

from dataclasses import replace

import pytest

from metabridge.diagnosis import estimates
from metabridge.diagnosis.estimates import Interval
from metabridge.experiments import ExperimentOptions, diagnose_worlds, load_experiment
from metabridge.experiments.diagnose_worlds import (
    CLEAR,
    SCALES,
    Outcome,
    Pair,
    Scale,
    Trial,
    World,
    figure,
    pair_rows,
    run,
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """The experiment at a scale of seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "quick", Scale(worlds=8, pairs=2, tasks=60))
        patch.setattr(diagnose_worlds, "TRAINED", 100)
        patch.setattr(estimates, "REPEATS", 20)
        return run(ExperimentOptions("quick", progress=False))


def test_the_experiment_can_be_asked_for():
    assert load_experiment("diagnose-worlds") is diagnose_worlds.EXPERIMENT


def test_predictions_follow_what_training_realises(outcome):
    correlation = next(row for row in outcome.result.rows if row.metric == "correlation")
    assert correlation.ours > 0.8
    assert len(outcome.trials) == 8


def test_intervals_are_judged_by_what_they_hold_and_by_their_width(outcome):
    rows = {row.name: row for row in outcome.result.rows}
    held = [abs(trial.miss) <= 1 for trial in outcome.trials]
    assert held == [trial.covered for trial in outcome.trials]
    assert rows["linear worlds, exact ratio in the 95 % interval"].ours == 100 * sum(held) / len(held)
    assert 0 < rows["linear worlds, width of the 95 % interval"].ours < 100


def test_pairs_of_worlds_are_ranked_by_both_measures(outcome):
    rows = [row for row in outcome.result.rows if row.metric == "pairs right %"]
    assert [row.name.split("ranked by ")[1] for row in rows] == ["ratio", "1 + R²/r_H"]
    found = outcome.trials[0].diagnosis
    better = replace(found, ratio=Interval(3.0, 2.5, 3.5), limit=None)
    worse = replace(found, ratio=Interval(2.0, 1.5, 2.4), limit=5.0)
    right, wrong = pair_rows([Pair(better, worse)]), pair_rows([Pair(worse, better)])
    assert [row.ours for row in right] == [100, 100]
    assert [row.ours for row in wrong] == [0, 0]
    assert "apart in 1, and then right in 1" in right[0].note


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
    undecided = replace(found, advice=replace(found.advice, method=None, adapts=None, doubt="why"))
    assert Trial(undecided, CLEAR[1] + 0.1, 1.0).right is False
    assert Trial(undecided, CLEAR[0] - 0.05, 1.0).right is False


def test_steps_of_drawn_worlds_do_not_diverge():
    assert World.drawn(700007).exact().ratio >= 1
