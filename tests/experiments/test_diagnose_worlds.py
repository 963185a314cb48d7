from __future__ import annotations

from dataclasses import replace

import pytest

from metabridge.diagnosis import Interval, estimates
from metabridge.experiments import ExperimentOptions, Outcome, diagnose_worlds, load_experiment
from metabridge.experiments.diagnose_worlds import (
    CLEAR_RATIOS,
    EXPERIMENT,
    SETTINGS,
    Settings,
    Trial,
    pair_rows,
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """The outcome of the experiment with small settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "quick", Settings(problems=8, pairs=2, tasks=60))
        patch.setattr(diagnose_worlds, "TRAINING_TASKS", 100)
        patch.setattr(estimates, "BOOTSTRAP_SAMPLES", 20)
        return EXPERIMENT.run(ExperimentOptions("quick", progress=False))


def test_the_experiment_is_found_by_its_id():
    assert load_experiment("diagnose-worlds") is EXPERIMENT


def test_predicted_ratios_correlate_with_the_exact_ratios_after_training(outcome):
    correlation = next(row for row in outcome.result.rows if row.metric == "correlation")
    assert correlation.ours > 0.8
    assert len(outcome.data.trials) == 8


def test_rows_contain_coverage_and_width_of_the_intervals(outcome):
    rows = {row.name: row for row in outcome.result.rows}
    is_covered = [
        abs(trial.diagnosis.ratio.relative_deviation(trial.population_ratio)) <= 1 for trial in outcome.data.trials
    ]
    assert is_covered == [trial.diagnosis.ratio.contains(trial.population_ratio) for trial in outcome.data.trials]
    assert rows["linear problems, exact ratio in the 95 % interval"].ours == 100 * sum(is_covered) / len(is_covered)
    assert 0 < rows["linear problems, width of the 95 % interval"].ours < 100


def test_pairs_are_ranked_by_both_quantities(outcome):
    rows = [row for row in outcome.result.rows if row.metric == "pairs right %"]
    assert [row.name.split("ranked by ")[1] for row in rows] == ["ratio", "1 + R²/r_H"]
    diagnosis = outcome.data.trials[0].diagnosis
    better = replace(diagnosis, ratio=Interval(3.0, 2.5, 3.5), ratio_limit=None)  # r_H = 0, an infinite limit
    worse = replace(diagnosis, ratio=Interval(2.0, 1.5, 2.4), ratio_limit=5.0)
    right, wrong = list(pair_rows([(better, worse)])), list(pair_rows([(worse, better)]))
    assert [row.ours for row in right] == [100, 100]
    assert [row.ours for row in wrong] == [0, 0]
    assert "1 with disjoint intervals, of which 1 are ranked correctly" in right[0].note


def test_the_figure_is_drawn(outcome, tmp_path):
    EXPERIMENT.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_recommendation_is_right_or_wrong_only_where_the_true_ratio_is_clear(outcome):
    diagnosis = outcome.data.trials[0].diagnosis
    recommends_adaptation = replace(diagnosis, advice=replace(diagnosis.advice, adapts=True))
    assert Trial(recommends_adaptation, CLEAR_RATIOS[1] + 0.1, population_ratio=1.0).is_right is True
    assert Trial(recommends_adaptation, CLEAR_RATIOS[0] - 0.05, population_ratio=1.0).is_right is False
    assert Trial(recommends_adaptation, sum(CLEAR_RATIOS) / 2, population_ratio=1.0).is_right is None
    undecided = replace(diagnosis, advice=replace(diagnosis.advice, method=None, adapts=None, problem="why"))
    assert Trial(undecided, CLEAR_RATIOS[1] + 0.1, population_ratio=1.0).is_right is False
    assert Trial(undecided, CLEAR_RATIOS[0] - 0.05, population_ratio=1.0).is_right is False
