from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from metabridge.experiments import ExperimentOptions
from metabridge.experiments.glyph_methods import EXPERIMENT, SETTINGS
from metabridge.learners import PRESETS, method, parameters
from metabridge.models import conv4
from metabridge.training import Model, evaluate


@pytest.fixture
def outcome(tiny):
    """The outcome with the settings of the fixture `tiny`: 6 test tasks, and 4 tasks in the other evaluations."""
    return EXPERIMENT.run(ExperimentOptions("quick", progress=False))


def test_every_method_has_rows_for_its_scores_and_its_training_time(outcome):
    rows = {row.name: row for row in outcome.result.rows}
    for name, run in outcome.data.runs.items():
        for kind, score in outcome.data.scores[name].items():
            assert rows[f"{name}, {kind}"].ours == pytest.approx(100 * score.mean)
        assert rows[f"{name}, training"].ours == run.seconds
    assert len(rows) == 5 * len(outcome.data.runs)  # four scores and the training time


def test_scores_within_and_across_alphabets_are_those_on_tasks_within_and_across_alphabets(outcome, glyphs):
    for name, run in outcome.data.runs.items():
        for kind, superclass in (("same alphabet", "same"), ("different alphabets", "different")):
            score = evaluate(run, glyphs.tasks("test", superclass=superclass), tasks=4, seed=0)
            torch.testing.assert_close(outcome.data.scores[name][kind].values, score.values)


def test_the_untrained_score_is_that_of_the_initial_weights(outcome, glyphs):
    for name, run in outcome.data.runs.items():
        net = conv4(channels=1, size=28, seed=0)
        params = parameters(run.method, net, classes=glyphs.tasks("train").classes, seed=0)
        score = evaluate(Model(run.method, net, params), glyphs.tasks("test"), tasks=4, seed=0)
        torch.testing.assert_close(outcome.data.scores[name]["untrained"].values, score.values)


def test_scores_have_the_numbers_of_tasks_of_the_settings(outcome):
    for scores in outcome.data.scores.values():
        test_tasks, *other_tasks = (score.tasks for score in scores.values())
        assert test_tasks == SETTINGS["quick"].test_tasks
        assert set(other_tasks) == {SETTINGS["quick"].other_tasks}


def test_a_short_training_run_beats_the_untrained_network(outcome):
    scores = outcome.data.scores["anil"]
    assert scores["test tasks"].mean > scores["untrained"].mean + 0.1


def test_the_same_seed_gives_the_same_scores_and_another_seed_gives_others(outcome):
    seed_0, seed_0_again, seed_1 = (
        [scores["test tasks"].values for scores in each_outcome.data.scores.values()]
        for each_outcome in (
            outcome,
            EXPERIMENT.run(ExperimentOptions("quick", progress=False)),
            EXPERIMENT.run(ExperimentOptions("quick", seed=1, progress=False)),
        )
    )
    assert all(map(torch.equal, seed_0, seed_0_again))
    assert not all(map(torch.equal, seed_0, seed_1))


def test_the_result_has_the_settings_it_was_computed_with(outcome):
    assert outcome.result.settings["methods"]["anil"]["options"] == {"steps": 2, "lr": 0.3}
    assert outcome.result.settings["test_tasks"] == 6


def test_the_paper_scale_compares_every_method_that_can_learn_images():
    assert set(SETTINGS["paper"].methods) == set(PRESETS) - {"burer-monteiro", "frozen"}


@pytest.mark.parametrize("scale", SETTINGS)
def test_every_method_accepts_its_options(scale):
    for name, method_settings in SETTINGS[scale].methods.items():
        method(name, **method_settings.options)


def test_the_experiment_needs_neither_matplotlib_nor_jinja2():
    program = (
        "import sys; sys.modules.update(matplotlib=None, jinja2=None); "
        "import metabridge.experiments.glyph_methods, metabridge.report.results, metabridge.cli"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
