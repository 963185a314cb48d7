"""Error messages name the points whose kernel is undefined or singular, and how to fix that."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from metabridge import Episodes, InputError
from metabridge.kernels import KernelLearner, conv4_kernel, fully_connected_kernel

KERNEL = fully_connected_kernel(depth=3)
LEARNERS = [
    KernelLearner(KERNEL, "mtl"),
    KernelLearner(KERNEL, "anil", inner_time=0.3),
    KernelLearner(KERNEL, "maml", inner_time=0.3),
    KernelLearner(KERNEL, "anil-split", inner_time=0.3),
]


def method_name(learner):
    return learner.method


def make_tasks(count=4, shape=(6,), seed=0):
    """Return tasks with two support points, three query points and one output."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, *shape, generator=generator, dtype=torch.float64)
    y = torch.randn(count, 5, 1, generator=generator, dtype=torch.float64)
    return Episodes(x[:, :2], y[:, :2], x[:, 2:], y[:, 2:])


def with_point(episodes, field, task, point, value):
    """Return the episodes with one point of the tensor `field` replaced."""
    x = getattr(episodes, field).clone()
    x[task, point] = value
    return replace(episodes, **{field: x})


@pytest.mark.parametrize("learner", LEARNERS, ids=method_name)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_points_are_named_by_task_in_training_and_at_test(learner, value):
    broken = with_point(make_tasks(), "query_x", 2, 1, value)
    with pytest.raises(InputError, match="query points of training tasks are NaN or infinite: 1 of training task 2"):
        learner.fit(broken)
    fitted = learner.fit(make_tasks())
    with pytest.raises(InputError, match=r"query points of test tasks are NaN or infinite: 1 of test task 2. Remove"):
        fitted.predict(broken)


@pytest.mark.parametrize("learner", LEARNERS, ids=method_name)
def test_zero_points_are_named_unless_the_kernel_has_a_bias(learner):
    blank = with_point(make_tasks(), "support_x", 3, 0, 0.0)
    for call in (lambda: learner.fit(blank), lambda: learner.fit(make_tasks()).predict(blank)):
        with pytest.raises(InputError, match=r"support points of \w+ tasks are zero.*: 0 of \w+ task 3.*bias_variance"):
            call()
    biased = replace(learner, kernel=fully_connected_kernel(depth=3, bias_variance=0.1))
    assert biased.fit(blank).predict(blank).isfinite().all()


def test_no_more_than_three_points_are_named():
    broken = replace(make_tasks(), query_x=torch.full((4, 3, 6), math.nan, dtype=torch.float64))
    with pytest.raises(
        InputError, match=r"0 of training task 0, 1 of training task 0, 2 of training task 0, …. Remove"
    ):
        LEARNERS[0].fit(broken)


@pytest.mark.parametrize("learner", LEARNERS, ids=method_name)
def test_duplicate_training_points_are_named_and_their_order_explained(learner):
    x = make_tasks().query_x
    order = "queries before supports" if learner.uses_split else "supports before queries"
    # A task has 2 support and 3 query points; point 5 is the first of task 1. The original is query 1 of task 1.
    original_index = 5 * 1 + (1 if learner.uses_split else 3)
    for task, point in ((1, 0), (2, 2)):  # replace query 0 of the same task, or query 2 of another task
        duplicate_index = 5 * task + point + (0 if learner.uses_split else 2)
        low, high = sorted((original_index, duplicate_index))
        duplicated = with_point(make_tasks(), "query_x", task, point, x[1, 1])
        message = f"points {low} and {high} of the training tasks are equal.*use a ridge.*, 5 per task, {order}"
        with pytest.raises(InputError, match=message):
            learner.fit(duplicated)
        assert replace(learner, ridge=0.1).fit(duplicated).predict(make_tasks(seed=1)).isfinite().all()


def test_task_with_indistinguishable_points_is_named_if_the_matrix_does_not_fit_in_memory():
    """With a linear kernel, task 1 is singular: its third point is the exact sum of the other two."""
    independent = torch.eye(4).double()[:3]
    dependent = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 2, 1, 0]]).double()
    x = torch.stack([independent, dependent])
    train = Episodes(x[:, :2], torch.ones(2, 2, 1).double(), x[:, 2:], torch.ones(2, 1, 1).double())
    # For points with 4 features, this weight variance makes the kernel their inner product.
    linear = KernelLearner(fully_connected_kernel(depth=1, weight_variance=4.0), "mtl", memory=1)
    with pytest.raises(InputError, match=r"training task 1 has a singular kernel matrix.*use a ridge"):
        linear.fit(train)
    assert replace(linear, ridge=0.1).fit(train).predict(train).isfinite().all()


def test_duplicate_support_points_are_named_with_their_task():
    test = with_point(make_tasks(7), "support_x", 5, 1, make_tasks(7).support_x[5, 0])
    for learner in (KernelLearner(KERNEL, "mtl"), KernelLearner(KERNEL, "maml", 0.3, test_time=math.inf)):
        fitted = learner.fit(make_tasks())
        with pytest.raises(InputError, match=r"support set of task 5 is singular.*0 and 1.*ridge or a finite time"):
            fitted.predict(test)
        assert replace(learner, inner_ridge=0.1).fit(make_tasks()).predict(test).isfinite().all()


def test_test_tasks_must_match_the_training_tasks():
    fitted = LEARNERS[0].fit(make_tasks())
    with pytest.raises(
        InputError,
        match=r"points of the test tasks have shape \(4,\), but the points of the training tasks.*same features",
    ):
        fitted.predict(make_tasks(shape=(4,)))
    test = make_tasks()
    two_outputs = replace(test, support_y=test.support_y.repeat(1, 1, 2), query_y=test.query_y.repeat(1, 1, 2))
    with pytest.raises(InputError, match="the test tasks have 2 outputs, but the training tasks have 1 outputs"):
        fitted.predict(two_outputs)
    labels = replace(test, support_y=torch.tensor([[0, 1]] * 4), query_y=torch.tensor([[0, 1, 1]] * 4))
    with pytest.raises(InputError, match="the test tasks have 2 classes, but the training tasks have 1 outputs"):
        fitted.predict(labels)


def test_class_without_support_points_is_an_output_too():
    labeled = replace(make_tasks(), support_y=torch.tensor([[0, 1]] * 4), query_y=torch.tensor([[0, 1, 2]] * 4))
    assert KernelLearner(KERNEL, "maml", 0.3).fit(labeled).predict(labeled).shape == (4, 3, 3)


@pytest.mark.parametrize("learner", LEARNERS, ids=method_name)
def test_images_are_flattened_for_a_kernel_of_vectors(learner):
    train, test = make_tasks(shape=(2, 3, 4)), make_tasks(shape=(2, 3, 4), seed=1)
    flat = [episodes.map_inputs(lambda x: x.flatten(2)) for episodes in (train, test)]
    assert torch.equal(learner.fit(train).predict(test), learner.fit(flat[0]).predict(flat[1]))


def test_kernel_of_images_rejects_vectors():
    with pytest.raises(InputError, match="but must be images"):
        KernelLearner(conv4_kernel(), "mtl").fit(make_tasks())
