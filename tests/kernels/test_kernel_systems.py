from __future__ import annotations

import logging
import math

import pytest
import torch

from metabridge import InputError
from metabridge.kernels import fully_connected_kernel
from metabridge.kernels.kernel_systems import (
    cholesky_solve,
    condition_number,
    conjugate_gradient_solve,
    refuse_duplicates,
)


def positive(size, least=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
    return vectors @ torch.diag(torch.linspace(least, 3, size, dtype=torch.float64)) @ vectors.mT


def test_a_well_conditioned_matrix_is_solved_without_jitter():
    matrix, target = positive(20), torch.ones(20, 2, dtype=torch.float64)
    solution = cholesky_solve(matrix, target, ridge=0.5)
    assert solution.jitter == 0
    assert torch.allclose(solution.values, torch.linalg.solve(matrix + 0.5 * torch.eye(20).double(), target))


def test_jitter_is_reported_and_never_silent(caplog):
    matrix = positive(20, least=-1e-12)
    with caplog.at_level(logging.WARNING, "metabridge"):
        solution = cholesky_solve(matrix, torch.ones(20, 1, dtype=torch.float64))
    assert 1e-12 < solution.jitter < 1e-9
    assert f"needed a jitter of {solution.jitter:.1e}" in caplog.text


def test_a_singular_matrix_is_refused():
    with pytest.raises(InputError, match="a kernel matrix of 2 points is singular"):
        cholesky_solve(torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64), torch.ones(2, 1).double())


def test_the_condition_number_is_that_of_the_eigenvalues_and_infinite_where_the_least_is_lost():
    assert condition_number(positive(20)) == pytest.approx(3)
    assert condition_number(positive(20), ridge=1.0) == pytest.approx(2)
    assert condition_number(positive(20, least=1e-18)) == math.inf


def test_conjugate_gradient_equals_a_direct_solve():
    matrix = positive(40, least=1e-3)
    target = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = conjugate_gradient_solve(lambda v: matrix @ v, target, lambda v: v / matrix.diagonal()[:, None])
    assert torch.allclose(found.values, torch.linalg.solve(matrix, target), rtol=1e-6)


def test_conjugate_gradient_says_where_it_stopped_short(caplog):
    matrix = positive(40, least=1e-6)
    with caplog.at_level(logging.WARNING, "metabridge"):
        conjugate_gradient_solve(lambda v: matrix @ v, torch.ones(40, 1).double(), lambda v: v, max_steps=2)
    assert "stopped after 2 steps with a relative residual" in caplog.text


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_points_that_are_the_same_up_to_length_are_named(factor):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    plain, biased = fully_connected_kernel(depth=3), fully_connected_kernel(depth=3, bias_variance=0.1)
    refuse_duplicates(plain, x, "the training tasks")
    x[4] = factor * x[1]
    words = "points 1 and 4 of the training tasks are the same, or the same up to length"
    with pytest.raises(InputError, match=words):
        refuse_duplicates(plain, x, "the training tasks")
    if factor == 1:
        with pytest.raises(InputError, match=words):
            refuse_duplicates(biased, x, "the training tasks")
    else:
        refuse_duplicates(biased, x, "the training tasks")
