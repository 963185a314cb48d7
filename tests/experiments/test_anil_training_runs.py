from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from metabridge.errors import InputError
from metabridge.experiments import (
    ExperimentOptions,
    Outcome,
    Result,
    anil_fig2,
    anil_fig3,
    anil_mean,
    anil_relu,
    anil_table1,
    anil_training_runs,
    load_experiment,
)
from metabridge.experiments.anil_training_runs import METHODS, SETTINGS
from metabridge.training.linear_anil import LinearAnilConfig, steps_to_measure

LINEAR_EXPERIMENTS = (anil_fig2, anil_fig3, anil_table1, anil_mean)
SMALL = LinearAnilConfig(
    runs=2, tasks=20, steps=12, iterations=8, designs=20, dimension=6, width=6, variances=(1.0, 2.0, 3.0)
)


@pytest.fixture(scope="module")
def options_and_outcomes(tmp_path_factory) -> Iterator[dict[ModuleType, tuple[ExperimentOptions, Outcome]]]:
    """The options and outcome of every experiment, with small settings."""
    student_settings = replace(anil_relu.SETTINGS["quick"], iterations=2, test_tasks=4, pool=20, batch_size=4, width=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "quick", SMALL)
        patch.setitem(anil_relu.SETTINGS, "quick", student_settings)
        options = ExperimentOptions("quick", out=tmp_path_factory.mktemp("out"), progress=False)
        yield {module: (options, module.EXPERIMENT.run(options)) for module in (*LINEAR_EXPERIMENTS, anil_relu)}


@pytest.mark.parametrize("module", [*LINEAR_EXPERIMENTS, anil_relu], ids=lambda module: module.EXPERIMENT.id)
def test_results_can_be_read_again_and_figures_are_drawn(module, options_and_outcomes, tmp_path):
    experiment, (_, outcome) = module.EXPERIMENT, options_and_outcomes[module]
    assert load_experiment(experiment.id) is experiment
    assert Result.read(outcome.result.write(tmp_path)) == outcome.result
    assert len({row.name for row in outcome.result.rows}) == len(outcome.result.rows)
    experiment.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_figures_and_table_share_training_runs(options_and_outcomes, monkeypatch):
    options, outcome = options_and_outcomes[anil_fig2]
    assert set(outcome.data) == set(METHODS)
    for name in ("train_first_order", "train_burer_monteiro"):
        monkeypatch.setattr(anil_training_runs, name, None)  # training would raise an error
    for module in (anil_fig2, anil_fig3, anil_table1):
        assert module.EXPERIMENT.run(options).data == outcome.data


def test_every_published_risk_has_a_row_and_only_baselines_are_compared_at_the_quick_scale(options_and_outcomes):
    rows = [row for row in options_and_outcomes[anil_table1][1].result.rows if row.published is not None]
    published = [value for numbers in anil_table1.PUBLISHED.values() for value, _ in numbers]
    assert [row.published for row in rows] == published
    assert all((row.agrees is None) == (not row.name.startswith(("single", "oracle"))) for row in rows)


def test_a_risk_agrees_within_three_published_standard_deviations_and_one_of_ours():
    key = ("oracle", "ridge, 20 points")  # published as 0.50 ± 0.01; the tolerance is 3 × 0.01 + 0.02 = 0.05
    for value, agrees in ((0.549, True), (0.551, False), (0.451, True), (0.449, False)):
        offset = 0.02 / 2**0.5  # the standard deviation of the two risks is 0.02
        risks = {key: [value - offset, value + offset]}
        (row,) = anil_table1.risk_rows(risks, LinearAnilConfig(), "paper")
        assert row.agrees is agrees


def test_the_baselines_agree_with_the_paper():
    config = LinearAnilConfig(runs=2, designs=100)
    rows = list(anil_table1.risk_rows(anil_table1.baseline_risks(config, 0), config, "paper"))
    assert len(rows) == 4  # two baselines, each with 20 and with 30 points
    assert all(row.agrees for row in rows)


def test_curves_start_at_the_initial_network_and_end_with_the_last_step(options_and_outcomes):
    for name, record in options_and_outcomes[anil_fig2][1].data.items():
        num_steps = SMALL.iterations if name == "burer-monteiro" else SMALL.steps
        assert record.curves.steps == [0, *steps_to_measure(num_steps)]
        initial_value = 0.01 if name == "burer-monteiro" else 0.25 / SMALL.alpha  # initially BBᵀ is this times I
        for quantity in ("smallest", "largest", "orthogonal_mean", "orthogonal_largest"):
            curves = record.curves.values[quantity]
            assert [len(curve) for curve in curves] == [len(record.curves.steps)] * SMALL.runs
            assert [curve[0] for curve in curves] == pytest.approx([initial_value] * SMALL.runs)


def test_an_error_says_that_no_training_run_is_finished(tmp_path, monkeypatch):
    monkeypatch.setitem(SETTINGS, "quick", SMALL)
    with pytest.raises(InputError, match="no part of anil-fig2 is finished"):
        anil_fig2.EXPERIMENT.run(ExperimentOptions("quick", out=tmp_path, minutes=0.0, progress=False))


def test_unselected_methods_are_not_trained_and_unknown_names_raise_an_error(options_and_outcomes, tmp_path):
    with pytest.raises(InputError, match="only is reptile"):
        anil_fig2.EXPERIMENT.run(ExperimentOptions("quick", out=tmp_path, only=("reptile",), progress=False))
    options, _ = options_and_outcomes[anil_fig2]
    outcome = anil_fig2.EXPERIMENT.run(replace(options, out=tmp_path, only=("infinite-tasks",)))
    assert list(outcome.data) == ["infinite-tasks"]


def test_an_error_names_a_malformed_record(options_and_outcomes, tmp_path):
    options = replace(options_and_outcomes[anil_fig2][0], out=tmp_path)
    file = tmp_path / "records" / "anil-fo-anil-quick-0.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"name": "other"}))
    with pytest.raises(InputError, match=r"anil-fo-anil-quick-0.json is not a record of this version"):
        anil_fig2.EXPERIMENT.run(options)


def test_students_have_the_record_keys_of_version_0_1_0():
    plan = anil_relu.SETTINGS["paper"].to_dict()
    assert list(plan)[:4] == ["runs", "iterations", "lr", "judged"]
    assert (plan["judged"], plan["batch"]) == (1000, 100)  # now the fields test_tasks and batch_size


def test_tasks_with_a_nonzero_mean_have_separate_records(options_and_outcomes):
    _, outcome = options_and_outcomes[anil_mean]
    assert all(record.name.startswith("anil-mean-") for record in outcome.data.values())
    distances = outcome.data["infinite-tasks"].curves.values["start"]  # from the mean task
    assert all(curve[0] > 1 for curve in distances)  # about ‖(1, 1, 1)‖² = 3, because Bw is initially almost 0
