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
from metabridge.experiments import ExperimentOptions, Result, kernel_fewshot, load_experiment
from metabridge.experiments.kernel_fewshot import (
    ALONE,
    KERNELS,
    RIDGES,
    SCALES,
    SIZE,
    TWINS,
    Numbered,
    Outcome,
    Pool,
    Table,
    choices,
    pooled,
    small,
    standardised,
)
from metabridge.kernels import Conv, Dense, Flatten, KernelLearner, convolutional_kernel, fully_connected_kernel

TINY = replace(
    SCALES["quick"],
    training_tasks=(2, 4),
    train={"fully connected": Pool(10, 3), "conv4": Pool(5, 3)},
    validation=Pool(5, 3),
    test=Pool(6, 3),
    validation_tasks=4,
    test_tasks=6,
    plans=tuple(replace(plan, iterations=2, validate_tasks=2) for plan in SCALES["quick"].plans[1:2]),
)
CHEAP = {
    "fully connected": KERNELS["fully connected"],
    "conv4": convolutional_kernel([Conv(3, stride=4), Flatten(), Dense()]),
}


@pytest.fixture(scope="module")
def images(glyphs):
    return small(glyphs)


@pytest.fixture(scope="module")
def outcome(glyphs) -> Iterator[Outcome]:
    """The experiment at a scale of seconds, with a kernel of images that costs little in place of conv4's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "quick", TINY)
        patch.setattr(kernel_fewshot, "KERNELS", CHEAP)
        yield kernel_fewshot.run(ExperimentOptions("quick", progress=False))


def three_ways(tasks, seed):
    """Tasks of three classes, one support and two queries of each."""
    x = torch.randn(tasks, 9, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels = torch.arange(3).repeat(tasks, 1)
    return Episodes(x[:, :3], labels, x[:, 3:], labels.repeat(1, 2))


@pytest.mark.parametrize("twin", TWINS)
def test_training_tasks_in_all_their_labellings_teach_a_kernel_nothing_about_which_class_it_is(twin):
    train, test = three_ways(3, 0), three_ways(4, 1)
    orders = torch.tensor(list(permutations(range(3))))
    copies = [replace(train, support_y=order[train.support_y], query_y=order[train.query_y]) for order in orders]
    joined = {name: torch.cat([getattr(c, name) for c in copies]) for name in ("support_x", "support_y")}
    joined |= {name: torch.cat([getattr(c, name) for c in copies]) for name in ("query_x", "query_y")}
    for learner in choices(fully_connected_kernel(depth=3), twin):
        if learner.ridge > RIDGES[0]:
            continue
        alone = replace(learner, method="maml" if twin == "maml" else "anil-split", outer_time=0.0)
        base = alone.fit(train).predict(test)
        learnt = learner.fit(Episodes(**joined)).predict(test) - base
        assert torch.allclose(learnt, learnt[..., :1].expand_as(learnt), atol=1e-9)
        noise = learner.fit(train).predict(test) - base
        assert not torch.allclose(noise, noise[..., :1].expand_as(noise), atol=1e-2)


@pytest.mark.parametrize("twin", TWINS)
def test_centred_targets_change_every_output_of_a_query_by_the_same(twin):
    def valued(episodes, shift):
        y = [torch.nn.functional.one_hot(y, 3).double() - shift for y in (episodes.support_y, episodes.query_y)]
        return replace(episodes, support_y=y[0], query_y=y[1])

    train, test = three_ways(3, 0), three_ways(4, 1)
    learner = choices(fully_connected_kernel(depth=3), twin)[0]
    plain, centred = (learner.fit(valued(train, by)).predict(valued(test, by)) for by in (0, 1 / 3))
    change = plain - centred
    assert torch.allclose(change, change[..., :1].expand_as(change), atol=1e-9)


@pytest.mark.parametrize(("name", "twin"), ALONE.items())
def test_a_twin_trained_for_no_time_is_regression_on_the_support(name, twin):
    kernel, episodes = fully_connected_kernel(depth=3), Quadratic().sample(3, torch.Generator().manual_seed(0))
    episodes = episodes.to(dtype=torch.float64)
    gram = kernel.ntk if name == "NTK" else kernel.nngp
    found = KernelLearner(kernel, twin, outer_time=0.0).fit(episodes[:1]).predict(episodes)
    for task in range(3):
        support = episodes.support_x[task]
        weights = torch.linalg.solve(gram(support), episodes.support_y[task])
        assert torch.allclose(found[task], gram(episodes.query_x[task], support) @ weights, atol=1e-8)


def test_a_table_holds_the_kernel_of_the_pictures_and_no_pair_of_validation_and_test(images):
    pool = pooled(images, TINY, "fully connected", 0)
    table = Table.of(CHEAP["fully connected"], pool)
    rows = {split: pool.tasks(split, shots=1, queries=1).image_indices[:, None].double() for split in pool.splits}
    x = standardised(pool).flatten(1)
    scale = CHEAP["fully connected"].ntk(x).diagonal().mean()
    for one, other in (("train", "train"), ("train", "test"), ("validation", "train"), ("test", "test")):
        points = (x[rows[split][:, 0].long()] for split in (one, other))
        for found, wanted in zip(table.both(rows[one], rows[other]), CHEAP["fully connected"].both(*points)):
            assert torch.allclose(found, wanted / scale)
    assert table.ntk(rows["validation"], rows["test"]).isnan().all()


def test_kernels_and_nets_are_judged_on_the_same_pictures(images):
    drawn = []
    for name in CHEAP:
        pool = pooled(images, TINY, name, 0)
        tasks = TINY.judging(pool, "test", 1)
        drawn.append(tasks.sample(5, torch.Generator().manual_seed(1)))
        numbers = Numbered(tasks).sample(5, torch.Generator().manual_seed(1)).query_x[..., 0].long()
        assert torch.equal(pool.float_images(numbers), drawn[-1].query_x)
    assert torch.equal(drawn[0].query_x, drawn[1].query_x)
    assert torch.equal(drawn[0].support_x, drawn[1].support_x)


def test_with_an_order_labels_go_by_the_value_of_the_support(images):
    pool = pooled(images, TINY, "conv4", 0)
    order = torch.randn(len(pool.images), generator=torch.Generator().manual_seed(0))
    tasks = pool.tasks("test", shots=2, queries=1)
    ordered = Numbered(tasks, order).sample(8, torch.Generator().manual_seed(1))
    means = order[ordered.support_x[..., 0].long()].unflatten(1, (5, 2)).mean(-1)
    assert (means.diff(dim=1) > 0).all()
    labels = pool.labels[ordered.support_x[..., 0].long()].unflatten(1, (5, 2))
    queries = pool.labels[ordered.query_x[..., 0].long()]
    assert torch.equal(labels[..., 0], queries)
    assert torch.equal(labels[..., 0], labels[..., 1])


def test_small_images_are_means_of_the_large(glyphs, images):
    assert images.images.shape[1:] == (1, SIZE, SIZE)
    means = [x.images[:50].double().mean((1, 2, 3)) for x in (glyphs, images)]
    assert torch.allclose(means[0], means[1], atol=1.0, rtol=0.1)


def test_every_learner_has_its_accuracy_and_its_gain_on_the_same_tasks(outcome):
    rows = {row.name: row for row in outcome.result.rows}
    assert len(rows) == len(outcome.result.rows)
    for kernel in CHEAP:
        for twin in TWINS:
            alone = rows[f"glyphs, 1-shot, {kernel} {'NTK' if twin == 'maml' else 'NNGP'}, support alone"].ours
            for tasks in TINY.training_tasks:
                name = f"glyphs, 1-shot, {kernel} {twin.upper()}, {tasks} tasks"
                assert rows[f"{name}, gain"].ours == pytest.approx(rows[name].ours - alone)
            assert f"glyphs, 1-shot, {kernel}, labels by ink, {twin.upper()}, 4 tasks" in rows
    assert rows["glyphs, 1-shot, conv4 net ANIL, fresh tasks"].ours >= 0
    assert {trial.score.tasks for trial in outcome.trials} == {TINY.test_tasks}
    assert all(row.agrees is None and row.published is None for row in rows.values())


def test_the_result_reads_back_and_the_figure_is_drawn(outcome, tmp_path):
    stored = Result.read(outcome.result.write(tmp_path))
    assert stored.rows == outcome.result.rows
    assert stored.settings["size"] == SIZE
    kernel_fewshot.figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert load_experiment(kernel_fewshot.ID) is kernel_fewshot.EXPERIMENT


@pytest.mark.parametrize("twin", TWINS)
def test_every_inner_time_at_test_meets_every_ridge(twin):
    grid = choices(fully_connected_kernel(depth=3), twin)
    times = {learner.test_time or learner.inner_time for learner in grid}
    assert {learner.ridge for learner in grid} == set(RIDGES)
    assert math.inf in times
    assert len(grid) == len(times) * len(RIDGES)


def test_omniglot_without_a_folder_is_refused(monkeypatch):
    monkeypatch.setitem(SCALES, "paper", replace(TINY, datasets=("omniglot",)))
    with pytest.raises(InputError, match="data is missing: name the folder that holds omniglot with --data"):
        kernel_fewshot.run(ExperimentOptions("paper", progress=False))
