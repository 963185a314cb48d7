from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from metabridge.environments import Quadratic
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.experiments import ExperimentOptions, Outcome, kernel_fewshot
from metabridge.experiments.kernel_fewshot import EXPERIMENT, KERNELS, SETTINGS, SIZE
from metabridge.experiments.kernel_fewshot_trials import BASELINES, METHODS, RIDGES, PoolSize, candidate_learners
from metabridge.kernels import Conv, Dense, Flatten, KernelLearner, convolutional_kernel, fully_connected_kernel
from metabridge.report.results import Result

TINY = replace(
    SETTINGS["quick"],
    training_tasks=(2, 4),
    train={"fully connected": PoolSize(10, 3), "conv4": PoolSize(5, 3)},
    validation=PoolSize(5, 3),
    test=PoolSize(6, 3),
    validation_tasks=4,
    test_tasks=6,
    # only the training run of ANIL
    plans=tuple(replace(config, iterations=2, validate_tasks=2) for config in SETTINGS["quick"].plans[1:2]),
)
CHEAP_KERNELS = {
    "fully connected": KERNELS["fully connected"],
    "conv4": convolutional_kernel([Conv(3, stride=4), Flatten(), Dense()]),
}


@pytest.fixture(scope="module")
def outcome(glyphs) -> Iterator[Outcome[kernel_fewshot.Comparison]]:
    """The outcome of the experiment with small settings, and with a small convolutional kernel instead of conv4's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "quick", TINY)
        patch.setattr(kernel_fewshot, "KERNELS", CHEAP_KERNELS)
        yield EXPERIMENT.run(ExperimentOptions("quick", progress=False))


def three_way_tasks(tasks, seed):
    """Return tasks of three classes with one support and two query points each."""
    x = torch.randn(tasks, 9, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels = torch.arange(3).repeat(tasks, 1)
    return Episodes(x[:, :3], labels, x[:, 3:], labels.repeat(1, 2))


@pytest.mark.parametrize("kernel_method", METHODS)
def test_training_on_all_permutations_of_the_labels_adds_the_same_value_to_all_outputs_of_a_query(kernel_method):
    train, test = three_way_tasks(3, 0), three_way_tasks(4, 1)
    orders = torch.tensor(list(permutations(range(3))))
    relabeled = [replace(train, support_y=order[train.support_y], query_y=order[train.query_y]) for order in orders]
    fields = ("support_x", "support_y", "query_x", "query_y")
    in_every_order = Episodes(*(torch.cat([getattr(tasks, field) for tasks in relabeled]) for field in fields))
    for learner in candidate_learners(fully_connected_kernel(depth=3), kernel_method):
        if learner.ridge > RIDGES[0]:
            continue  # training changes the outputs most with the smallest ridge
        # without outer training, "anil-split" is regression with the NNGP on the support set
        untrained = replace(learner, method="maml" if kernel_method == "maml" else "anil-split", outer_time=0.0)
        untrained_outputs = untrained.fit(train).predict(test)
        change = learner.fit(in_every_order).predict(test) - untrained_outputs
        assert torch.allclose(change, change[..., :1].expand_as(change), atol=1e-9)
        change_for_one_order = learner.fit(train).predict(test) - untrained_outputs
        first_output = change_for_one_order[..., :1].expand_as(change_for_one_order)
        assert not torch.allclose(change_for_one_order, first_output, atol=1e-2)


@pytest.mark.parametrize("kernel_method", METHODS)
def test_centering_the_targets_changes_all_outputs_of_a_query_equally(kernel_method):
    def with_one_hot_targets(episodes, shift):
        """Return the tasks with one-hot targets minus `shift`."""
        y = [torch.nn.functional.one_hot(y, 3).double() - shift for y in (episodes.support_y, episodes.query_y)]
        return replace(episodes, support_y=y[0], query_y=y[1])

    train, test = three_way_tasks(3, 0), three_way_tasks(4, 1)
    learner = candidate_learners(fully_connected_kernel(depth=3), kernel_method)[0]
    uncentered, centered = (
        learner.fit(with_one_hot_targets(train, shift)).predict(with_one_hot_targets(test, shift))
        for shift in (0, 1 / 3)
    )
    change = uncentered - centered
    assert torch.allclose(change, change[..., :1].expand_as(change), atol=1e-9)


@pytest.mark.parametrize(("kernel_name", "kernel_method"), BASELINES.items())
def test_a_baseline_is_kernel_regression_on_the_support_set(kernel_name, kernel_method):
    kernel, episodes = fully_connected_kernel(depth=3), Quadratic().sample(3, torch.Generator().manual_seed(0))
    episodes = episodes.to(dtype=torch.float64)
    gram = kernel.ntk if kernel_name == "NTK" else kernel.nngp
    predictions = KernelLearner(kernel, kernel_method, outer_time=0.0).fit(episodes[:1]).predict(episodes)
    for task in range(3):
        support = episodes.support_x[task]
        weights = torch.linalg.solve(gram(support), episodes.support_y[task])
        assert torch.allclose(predictions[task], gram(episodes.query_x[task], support) @ weights, atol=1e-8)


def test_kernels_and_networks_are_tested_on_the_same_images(glyphs):
    sampled = []
    for name in CHEAP_KERNELS:
        tasks = TINY.evaluation_tasks(TINY.pool(glyphs, name, 0), "test", 1)
        sampled.append(tasks.sample(5, torch.Generator().manual_seed(1)))
    assert torch.equal(sampled[0].query_x, sampled[1].query_x)
    assert torch.equal(sampled[0].support_x, sampled[1].support_x)


def test_rows_contain_all_accuracies_and_the_gains_of_trained_kernels(outcome):
    rows = {row.name: row for row in outcome.result.rows}
    assert len(rows) == len(outcome.result.rows)
    for kernel in CHEAP_KERNELS:
        for kernel_method in METHODS:
            baseline = "NTK" if kernel_method == "maml" else "NNGP"
            baseline_accuracy = rows[f"glyphs, 1-shot, {kernel} {baseline}, support alone"].ours
            for tasks in TINY.training_tasks:
                name = f"glyphs, 1-shot, {kernel} {kernel_method.upper()}, {tasks} tasks"
                assert rows[f"{name}, gain"].ours == pytest.approx(rows[name].ours - baseline_accuracy)
            assert f"glyphs, 1-shot, {kernel}, labels by ink, {kernel_method.upper()}, 4 tasks" in rows
    assert rows["glyphs, 1-shot, conv4 net ANIL, fresh tasks"].ours >= 0
    assert {trial.score.tasks for trial in outcome.data.trials} == {TINY.test_tasks}
    assert all(row.agrees is None and row.published is None for row in rows.values())


def test_the_result_can_be_read_back_and_the_figure_is_drawn(outcome, tmp_path):
    stored = Result.read(outcome.result.write(tmp_path))
    assert stored.rows == outcome.result.rows
    assert stored.settings["size"] == SIZE
    EXPERIMENT.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kernel_method", METHODS)
def test_candidate_learners_combine_every_inner_time_with_every_ridge(kernel_method):
    learners = candidate_learners(fully_connected_kernel(depth=3), kernel_method)
    times = {learner.test_time or learner.inner_time for learner in learners}
    assert {learner.ridge for learner in learners} == set(RIDGES)
    assert math.inf in times
    assert len(learners) == len(times) * len(RIDGES)


def test_omniglot_without_a_folder_raises_an_error(monkeypatch):
    monkeypatch.setitem(SETTINGS, "paper", replace(TINY, datasets=("omniglot",)))
    with pytest.raises(InputError, match="data is None, but omniglot is read from a folder"):
        EXPERIMENT.run(ExperimentOptions("paper", progress=False))
