from __future__ import annotations

from dataclasses import replace

import pytest

from metabridge.diagnosis import advice, estimates
from metabridge.experiments import ExperimentOptions, Result, Row, diagnose_images, load_experiment
from metabridge.experiments.diagnose_images import SCALES, SETTINGS, Outcome, figure, run
from metabridge.experiments.method_orders import METHODS, Order
from metabridge.experiments.result import Environment

ACCURACIES = dict(zip(METHODS, (92.0, 93.0, 91.0, 90.0)))
NETS = {"MTL": 80.0, "ANIL": 82.0, "MAML": 81.0}


@pytest.fixture(scope="module")
def outcome(glyphs, tmp_path_factory) -> Outcome:
    """The experiment at a scale of seconds, with accuracies of trained methods beside it."""
    out = tmp_path_factory.mktemp("out")
    methods = tuple(Row(f"{name}, test tasks", "accuracy %", ours=value) for name, value in ACCURACIES.items())
    nets = tuple(
        Row(f"{data}, 5-shot, mlp net {name}, fresh tasks", "accuracy %", ours=value)
        for data in ("glyphs", "omniglot")
        for name, value in NETS.items()
    )
    for name, rows in {"glyphs": methods, "kernel-fewshot": nets}.items():
        Result(name, "quick", 0, {}, Environment("cpu", "", "", None), 1.0, rows).write(out)
    quick = SCALES["quick"]
    with pytest.MonkeyPatch.context() as patch:
        training = replace(quick.training, iterations=1, tasks=1, judged=4, filters=4)
        patch.setitem(SCALES, "quick", replace(quick, tasks=20, ranking=1, training=training))
        patch.setattr(estimates, "REPEATS", 10)
        patch.setattr(advice, "TRAINING_POINTS", 160)
        patch.setattr(advice, "JUDGED_TASKS", 16)
        patch.setattr(advice, "CHOOSING_TASKS", 8)
        return run(ExperimentOptions("quick", out=out, progress=False))


def test_the_experiment_can_be_asked_for():
    assert load_experiment("diagnose-images") is diagnose_images.EXPERIMENT


def test_both_settings_are_diagnosed_and_ranked(outcome):
    (case,) = outcome.cases
    assert set(case.found) == set(SETTINGS)
    assert len(case.hard["large"]) == 10
    assert not set(case.easy) & {*case.hard["small"], *case.hard["large"]}
    ranked = [row for row in outcome.result.rows if row.metric == "seeds %"]
    assert len(ranked) == 3
    assert all(row.agrees == (row.ours == 100) for row in ranked)


def test_what_training_gained_is_set_beside_it(outcome):
    rows = {row.name: row for row in outcome.result.rows}
    for setting in SETTINGS:
        row, (value, low, _) = (
            rows[f"glyphs, {setting} r_H, trained MAML above NAL on hard tasks"],
            outcome.gains["glyphs", 0, setting],
        )
        assert (row.ours, row.ci95) == pytest.approx((value, value - low))


def test_predicted_orders_are_held_against_all_trained_nets_of_the_data(outcome):
    found = {(order.nets, order.source): order for order in outcome.orders}
    nets = "glyphs, 1-shot, conv4 net", "glyphs, 5-shot, mlp net at 16 px"
    assert set(found) == {(net, source) for net in nets for source in ("formulas", "kernels")}
    assert found[nets[0], "formulas"].accuracy == ACCURACIES
    assert found[nets[1], "kernels"].accuracy == {name.lower(): value for name, value in NETS.items()}
    assert "support alone" not in found[nets[0], "kernels"].predicted


def test_hits_and_misses_of_an_order_are_counted():
    order = Order("nets", "formulas", {"rfs": 1, "mtl": 1, "anil": 0, "maml": 0}, {**ACCURACIES, "anil": 92.5})
    assert order.sides == [False, True, True, True]
    assert order.told() == "rfs = mtl > anil = maml"
    assert Order("nets", "kernels", {"a": 3, "b": 2, "c": 1}, {"a": 9, "b": 8, "c": 7}).tau == pytest.approx(1)
    assert Order("nets", "kernels", {"a": 1, "b": 2, "c": 3}, {"a": 9, "b": 8, "c": 7}).tau == pytest.approx(-1)


def test_the_figure_is_drawn(outcome, tmp_path):
    figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    figure(replace(outcome, gains={}, orders=()), tmp_path / "less.png")  # nothing trained at hand
    assert (tmp_path / "less.png").read_bytes().startswith(b"\x89PNG")
