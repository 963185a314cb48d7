from __future__ import annotations

from dataclasses import replace

import pytest

from metabridge.diagnosis import advice, estimates
from metabridge.experiments import ExperimentOptions, Outcome, Result, Row, load_experiment
from metabridge.experiments.diagnose_images import EXPERIMENT, R_H, SETTINGS
from metabridge.experiments.method_rankings import METHODS, MethodRanking
from metabridge.report.results import Machine

GLYPH_ACCURACIES = dict(zip(METHODS, (92.0, 93.0, 91.0, 90.0)))
MLP_ACCURACIES = {"MTL": 80.0, "ANIL": 82.0, "MAML": 81.0}


@pytest.fixture(scope="module")
def outcome(glyphs, tmp_path_factory) -> Outcome:
    """The outcome of the experiment with small settings, and with results of other experiments in its folder."""
    out = tmp_path_factory.mktemp("out")
    method_rows = tuple(
        Row(f"{name}, test tasks", "accuracy %", ours=value) for name, value in GLYPH_ACCURACIES.items()
    )
    # "fresh tasks" marks the accuracies of trained networks in this result; see `NEW_TASKS`
    net_rows = tuple(
        Row(f"{data}, 5-shot, mlp net {name}, fresh tasks", "accuracy %", ours=value)
        for data in ("glyphs", "omniglot")
        for name, value in MLP_ACCURACIES.items()
    )
    for name, rows in {"glyphs": method_rows, "kernel-fewshot": net_rows}.items():
        Result(name, "quick", 0, {}, Machine("cpu", "", "", None), 1.0, rows).write(out)
    quick = SETTINGS["quick"]
    with pytest.MonkeyPatch.context() as patch:
        training = replace(quick.training, iterations=1, batch_size=1, test_tasks=4, filters=4)
        # `ranking` is the number of tasks per alphabet; results contain it under this name
        patch.setitem(SETTINGS, "quick", replace(quick, tasks=20, ranking=1, training=training))
        patch.setattr(estimates, "BOOTSTRAP_SAMPLES", 10)
        patch.setattr(advice, "TRAINING_EXAMPLES", 160)
        patch.setattr(advice, "TEST_TASKS", 16)
        patch.setattr(advice, "VALIDATION_TASKS", 8)
        return EXPERIMENT.run(ExperimentOptions("quick", out=out, progress=False))


def test_the_experiment_is_found_by_its_id():
    assert load_experiment("diagnose-images") is EXPERIMENT


def test_both_settings_of_r_h_are_diagnosed_and_their_order_is_compared_with_the_paper(outcome):
    (case,) = outcome.data.cases
    assert set(case.diagnoses) == set(R_H)
    assert len(case.hard_alphabets["large"]) == 10
    assert not set(case.easy_alphabets) & {*case.hard_alphabets["small"], *case.hard_alphabets["large"]}
    # "seeds %" is the percentage of seeds with a larger gain for small r_H. The gain is predicted by the ratio of risks
    # and by 1 + R²/r_H, and measured for trained MAML.
    order_rows = [row for row in outcome.result.rows if row.metric == "seeds %"]
    assert len(order_rows) == 3
    assert all(row.agrees == (row.ours == 100) for row in order_rows)


def test_rows_contain_the_measured_gains_of_maml(outcome):
    rows = {row.name: row for row in outcome.result.rows}
    (case,) = outcome.data.cases
    for setting in R_H:
        row, gain = rows[f"glyphs, {setting} r_H, trained MAML above NAL on hard tasks"], case.gain(setting)
        assert (row.ours, row.ci95) == pytest.approx((gain.value, gain.value - gain.low))


def test_rankings_are_predicted_for_all_trained_networks_with_stored_accuracies_on_glyphs(outcome):
    rankings = {(ranking.nets, ranking.source): ranking for ranking in outcome.data.rankings}
    conv4, mlp = "glyphs, 1-shot, conv4 net", "glyphs, 5-shot, mlp net at 16 px"  # labels of the networks
    assert set(rankings) == {(label, source) for label in (conv4, mlp) for source in ("formulas", "kernels")}
    assert rankings[conv4, "formulas"].accuracies == GLYPH_ACCURACIES
    assert rankings[mlp, "kernels"].accuracies == {name.lower(): value for name, value in MLP_ACCURACIES.items()}
    # Diagnoses also predict the score of "no meta-training", for which no network is trained.
    assert "no meta-training" not in rankings[conv4, "kernels"].predicted_scores


def test_a_ranking_counts_its_correct_pairs_and_computes_kendalls_tau():
    predicted = {"rfs": 1, "mtl": 1, "anil": 0, "maml": 0}
    ranking = MethodRanking("nets", "formulas", predicted, {**GLYPH_ACCURACIES, "anil": 92.5})
    # for (rfs, anil), (rfs, maml), (mtl, anil) and (mtl, maml); rfs is less accurate than anil
    assert ranking.pair_correctness == [False, True, True, True]
    assert str(ranking) == "rfs = mtl > anil = maml"
    accuracies = {"a": 9, "b": 8, "c": 7}
    assert MethodRanking("nets", "kernels", {"a": 3, "b": 2, "c": 1}, accuracies).tau == pytest.approx(1)
    assert MethodRanking("nets", "kernels", {"a": 1, "b": 2, "c": 3}, accuracies).tau == pytest.approx(-1)


def test_the_figure_is_drawn(outcome, tmp_path):
    EXPERIMENT.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    (case,) = outcome.data.cases
    without_training = replace(outcome, data=replace(outcome.data, cases=(replace(case, records={}),), rankings=()))
    EXPERIMENT.draw(without_training, tmp_path / "untrained.png")
    assert (tmp_path / "untrained.png").read_bytes().startswith(b"\x89PNG")
