from __future__ import annotations

import math

import pytest
import torch

from kernels.test_predict import KERNEL, TWINS, quadratics
from metabridge.kernels import KernelLearner, mtl_kernel

RIDGE = 0.3


@pytest.fixture(scope="module")
def tasks():
    return quadratics(tasks=6, tests=2)


@pytest.mark.parametrize(("name", "times"), TWINS)
def test_without_room_for_the_matrix_the_ridge_counts_too(tasks, name, times):
    train, test = tasks
    whole, part = (KernelLearner(KERNEL, name, **times, ridge=RIDGE, memory=memory).fit(train) for memory in (2**32, 1))
    assert "matrix" not in vars(part)
    torch.testing.assert_close(part.predict(test), whole.predict(test), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "times"), TWINS)
def test_a_long_training_with_a_ridge_ends_as_one_to_the_end(tasks, name, times):
    train, test = tasks
    long, ended = (
        KernelLearner(KERNEL, name, **times, outer_time=outer, ridge=RIDGE).fit(train).predict(test)
        for outer in (1e9, math.inf)
    )
    torch.testing.assert_close(long, ended, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "times"), TWINS)
def test_the_condition_number_is_that_of_the_matrix_with_its_ridge(tasks, name, times):
    fitted = KernelLearner(KERNEL, name, **times, ridge=RIDGE).fit(tasks[0])
    values = torch.linalg.eigvalsh(fitted.matrix) + RIDGE
    assert fitted.condition_number() == pytest.approx(float(values[-1] / values[0]))


def test_the_matrix_of_independent_heads_is_their_kernel(tasks):
    train = tasks[0].to(dtype=torch.float64)
    fitted = KernelLearner(KERNEL, "mtl", heads="independent").fit(train)
    wanted = mtl_kernel(KERNEL, train.without_split().support_x, "independent")
    torch.testing.assert_close(fitted.matrix, wanted)
