"""What has no kernel, or a singular one, ends in a sentence that names the points and the way out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from metabridge import Episodes, InputError
from metabridge.kernels import KernelLearner, conv4_kernel, fully_connected_kernel

KERNEL = fully_connected_kernel(depth=3)
TWINS = [
    KernelLearner(KERNEL, "mtl"),
    KernelLearner(KERNEL, "anil", 0.3),
    KernelLearner(KERNEL, "maml", 0.3),
    KernelLearner(KERNEL, "anil-split", 0.3),
]


def names(learner):
    return learner.method


def tasks(count=4, shape=(6,), seed=0):
    """Two supports and three queries a task, with values to predict."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, *shape, generator=generator, dtype=torch.float64)
    y = torch.randn(count, 5, 1, generator=generator, dtype=torch.float64)
    return Episodes(x[:, :2], y[:, :2], x[:, 2:], y[:, 2:])


def with_point(episodes, which, task, point, value):
    x = getattr(episodes, which).clone()
    x[task, point] = value
    return replace(episodes, **{which: x})


@pytest.mark.parametrize("learner", TWINS, ids=names)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_points_that_are_not_finite_are_named_by_task_in_training_and_at_test(learner, value):
    broken = with_point(tasks(), "query_x", 2, 1, value)
    with pytest.raises(InputError, match="query points of training tasks hold NaN or infinity: 1 of training task 2"):
        learner.fit(broken)
    fitted = learner.fit(tasks())
    with pytest.raises(InputError, match=r"query points of test tasks hold NaN or infinity: 1 of test task 2. Leave"):
        fitted.predict(broken)


@pytest.mark.parametrize("learner", TWINS, ids=names)
def test_zero_points_are_named_unless_the_kernel_has_a_bias(learner):
    blank = with_point(tasks(), "support_x", 3, 0, 0.0)
    for refused in (lambda: learner.fit(blank), lambda: learner.fit(tasks()).predict(blank)):
        with pytest.raises(InputError, match=r"support points of \w+ tasks are zero.*: 0 of \w+ task 3.*bias_variance"):
            refused()
    biased = replace(learner, kernel=fully_connected_kernel(depth=3, bias_variance=0.1))
    assert biased.fit(blank).predict(blank).isfinite().all()


def test_no_more_than_three_points_are_named():
    broken = replace(tasks(), query_x=torch.full((4, 3, 6), math.nan, dtype=torch.float64))
    with pytest.raises(InputError, match=r"0 of training task 0, 1 of training task 0, 2 of training task 0, …. Leave"):
        TWINS[0].fit(broken)


@pytest.mark.parametrize("learner", TWINS, ids=names)
def test_a_point_twice_in_the_training_tasks_is_named_with_how_points_are_counted(learner):
    x = tasks().query_x
    order = "queries before supports" if learner.splits else "supports before queries"
    places = {"within a task": (1, 0), "across tasks": (2, 2)}
    first = 5 * 1 + (1 if learner.splits else 3)
    for task, point in places.values():
        second = 5 * task + point + (0 if learner.splits else 2)
        low, high = sorted((first, second))
        twice = with_point(tasks(), "query_x", task, point, x[1, 1])
        words = f"points {low} and {high} of the training tasks are the same.*give a ridge.*, 5 each, {order}"
        with pytest.raises(InputError, match=words):
            learner.fit(twice)
        assert replace(learner, ridge=0.1).fit(twice).predict(tasks(seed=1)).isfinite().all()


def test_a_task_whose_points_the_kernel_cannot_tell_apart_is_named_where_no_matrix_is_formed():
    """A linear kernel, and in task 1 a point that is the sum of the other two: all numbers are exact."""
    first, second = torch.eye(4).double()[:3], torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 2, 1, 0]]).double()
    x = torch.stack([first, second])
    train = Episodes(x[:, :2], torch.ones(2, 2, 1).double(), x[:, 2:], torch.ones(2, 1, 1).double())
    linear = KernelLearner(fully_connected_kernel(depth=1, weight_variance=4.0), "mtl", memory=1)
    with pytest.raises(InputError, match=r"training task 1 has a singular kernel matrix.*give a ridge"):
        linear.fit(train)
    assert replace(linear, ridge=0.1).fit(train).predict(train).isfinite().all()


def test_a_support_with_a_point_twice_is_named_with_its_task_and_points():
    test = with_point(tasks(7), "support_x", 5, 1, tasks(7).support_x[5, 0])
    for learner in (KernelLearner(KERNEL, "mtl"), KernelLearner(KERNEL, "maml", 0.3, test_time=math.inf)):
        fitted = learner.fit(tasks())
        with pytest.raises(InputError, match=r"its points 0 and 1, in task 5, are the same.*ridge or a finite time"):
            fitted.predict(test)
        assert replace(learner, inner_ridge=0.1).fit(tasks()).predict(test).isfinite().all()


def test_test_tasks_of_another_form_are_refused():
    fitted = TWINS[0].fit(tasks())
    with pytest.raises(InputError, match=r"the points are of shape \(4,\), but those of the training tasks.*same"):
        fitted.predict(tasks(shape=(4,)))
    test = tasks()
    two = replace(test, support_y=test.support_y.repeat(1, 1, 2), query_y=test.query_y.repeat(1, 1, 2))
    with pytest.raises(InputError, match="the test tasks have 2 outputs, but the training tasks have 1 outputs"):
        fitted.predict(two)
    labels = replace(test, support_y=torch.tensor([[0, 1]] * 4), query_y=torch.tensor([[0, 1, 1]] * 4))
    with pytest.raises(InputError, match="the test tasks have 2 classes, but the training tasks have 1 outputs"):
        fitted.predict(labels)


def test_a_class_that_only_queries_have_is_an_output_like_any_other():
    labelled = replace(tasks(), support_y=torch.tensor([[0, 1]] * 4), query_y=torch.tensor([[0, 1, 2]] * 4))
    assert KernelLearner(KERNEL, "maml", 0.3).fit(labelled).predict(labelled).shape == (4, 3, 3)


@pytest.mark.parametrize("learner", TWINS, ids=names)
def test_images_are_flattened_for_a_kernel_of_vectors_as_a_fully_connected_net_does(learner):
    train, test = tasks(shape=(2, 3, 4)), tasks(shape=(2, 3, 4), seed=1)
    flat = [episodes.map_inputs(lambda x: x.flatten(2)) for episodes in (train, test)]
    assert torch.equal(learner.fit(train).predict(test), learner.fit(flat[0]).predict(flat[1]))


def test_vectors_given_to_a_kernel_of_images_are_refused():
    with pytest.raises(InputError, match="but must be images"):
        KernelLearner(conv4_kernel(), "mtl").fit(tasks())
