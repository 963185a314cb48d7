from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from metabridge.errors import InputError
from metabridge.experiments import ExperimentOptions
from metabridge.experiments.glyph_methods import SETTINGS, run
from metabridge.learners import PRESETS, method, parameters
from metabridge.models import conv4
from metabridge.training import Model, evaluate


@pytest.fixture
def outcome(tiny):
    return run(ExperimentOptions("quick", progress=False))


def test_every_method_reports_its_untrained_score_beside_its_trained_ones(outcome):
    rows = {row.name: row for row in outcome.result.rows}
    for trial in outcome.trials:
        expected = {
            "test tasks": trial.test,
            "untrained": trial.untrained,
            "same alphabet": trial.same,
            "different alphabets": trial.different,
        }
        for kind, score in expected.items():
            assert rows[f"{trial.name}, {kind}"].ours == pytest.approx(100 * score.mean)
        assert rows[f"{trial.name}, training"].ours == trial.run.seconds
    assert len(rows) == 5 * len(outcome.trials)


def test_the_untrained_score_is_that_of_the_initial_weights(outcome, glyphs):
    for trial in outcome.trials:
        net = conv4(channels=1, size=28, seed=0)
        params = parameters(trial.run.method, net, classes=glyphs.tasks("train").classes, seed=0)
        score = evaluate(Model(trial.run.method, net, params), glyphs.tasks("test"), tasks=4, seed=0)
        torch.testing.assert_close(trial.untrained.values, score.values)


def test_scores_are_over_as_many_tasks_as_the_scale_says(outcome):
    for trial in outcome.trials:
        assert trial.test.tasks == SETTINGS["quick"].test_tasks
        assert {trial.untrained.tasks, trial.same.tasks, trial.different.tasks} == {SETTINGS["quick"].other_tasks}


def test_a_little_training_already_beats_the_untrained_network(outcome):
    anil = outcome.trials[0]
    assert anil.test.mean > anil.untrained.mean + 0.1


def test_the_same_seed_gives_the_same_scores_and_another_seed_others(outcome):
    again, other = (
        run(ExperimentOptions("quick", progress=False)),
        run(ExperimentOptions("quick", seed=1, progress=False)),
    )
    for first, second in zip(outcome.trials, again.trials):
        assert torch.equal(first.test.values, second.test.values)
    assert any(not torch.equal(a.test.values, b.test.values) for a, b in zip(outcome.trials, other.trials))


def test_the_result_holds_the_settings_it_was_computed_with(outcome):
    assert outcome.result.settings["methods"]["anil"]["options"] == {"steps": 2, "lr": 0.3}
    assert outcome.result.settings["test_tasks"] == 6


def test_examples_are_test_tasks_and_the_same_ones_each_time(outcome):
    assert outcome.environment.split == "test"
    assert torch.equal(outcome.examples(3).query_x, outcome.examples(3).query_x)


def test_the_paper_scale_compares_every_method_that_can_learn_images():
    assert set(SETTINGS["paper"].methods) == set(PRESETS) - {"burer-monteiro"}


@pytest.mark.parametrize("scale", SETTINGS)
def test_every_setting_is_one_that_its_method_takes(scale):
    for name, setting in SETTINGS[scale].methods.items():
        method(name, **setting.options)


def test_an_unknown_scale_is_refused_by_name():
    with pytest.raises(InputError, match="scale is 'huge', but must be 'quick' or 'paper'"):
        ExperimentOptions("huge")


def test_the_experiment_needs_neither_matplotlib_nor_jinja2():
    program = (
        "import sys; sys.modules.update(matplotlib=None, jinja2=None); "
        "import metabridge.experiments.glyph_methods, metabridge.experiments.result, metabridge.cli"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
