from __future__ import annotations

import logging
import math

import pytest
import torch

from metabridge import InputError
from metabridge.kernels import fully_connected_kernel
from metabridge.kernels.kernel_systems import (
    check_duplicates,
    cholesky_solve,
    condition_number,
    conjugate_gradient_solve,
    extreme_eigenvalues,
)


def symmetric_matrix(size, smallest=1.0, seed=0):
    """Return a symmetric matrix with eigenvalues from `smallest` to 3."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
    return vectors @ torch.diag(torch.linspace(smallest, 3, size, dtype=torch.float64)) @ vectors.mT


def test_a_well_conditioned_matrix_is_solved_without_jitter():
    matrix, target = symmetric_matrix(20), torch.ones(20, 2, dtype=torch.float64)
    solution = cholesky_solve(matrix, target, ridge=0.5)
    assert solution.jitter == 0
    assert torch.allclose(solution.values, torch.linalg.solve(matrix + 0.5 * torch.eye(20).double(), target))


def test_jitter_is_logged_and_returned(caplog):
    matrix = symmetric_matrix(20, smallest=-1e-12)
    with caplog.at_level(logging.WARNING, "metabridge"):
        solution = cholesky_solve(matrix, torch.ones(20, 1, dtype=torch.float64))
    assert 1e-12 < solution.jitter < 1e-9
    assert f"added a jitter of {solution.jitter:.1e}" in caplog.text


def test_matrix_that_jitter_cannot_make_positive_definite_raises():
    with pytest.raises(InputError, match="a kernel matrix of 2 points is singular"):
        cholesky_solve(torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64), torch.ones(2, 1).double())


def test_extreme_eigenvalues_are_the_smallest_and_the_largest():
    assert extreme_eigenvalues(symmetric_matrix(20, smallest=-2.0)) == pytest.approx((-2, 3))


def test_condition_number_is_the_ratio_of_eigenvalues_or_infinite_if_the_smallest_is_a_rounding_error():
    assert condition_number(symmetric_matrix(20)) == pytest.approx(3)
    assert condition_number(symmetric_matrix(20), ridge=1.0) == pytest.approx(2)
    assert condition_number(symmetric_matrix(20, smallest=1e-18)) == math.inf


def test_conjugate_gradient_equals_a_direct_solve():
    matrix = symmetric_matrix(40, smallest=1e-3)
    target = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    solution = conjugate_gradient_solve(lambda v: matrix @ v, target, lambda v: v / matrix.diagonal()[:, None])
    assert torch.allclose(solution.values, torch.linalg.solve(matrix, target), rtol=1e-6)


def test_conjugate_gradient_logs_incomplete_convergence(caplog):
    matrix = symmetric_matrix(40, smallest=1e-6)
    with caplog.at_level(logging.WARNING, "metabridge"):
        conjugate_gradient_solve(lambda v: matrix @ v, torch.ones(40, 1).double(), lambda v: v, max_steps=2)
    assert "stopped after 2 steps with a relative residual" in caplog.text


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_points_equal_up_to_a_factor_are_named(factor):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    unbiased, biased = fully_connected_kernel(depth=3), fully_connected_kernel(depth=3, bias_variance=0.1)
    check_duplicates(unbiased, x, "the training tasks")
    x[4] = factor * x[1]
    message = "points 1 and 4 of the training tasks are equal up to a positive factor"
    with pytest.raises(InputError, match=message):
        check_duplicates(unbiased, x, "the training tasks")
    if factor == 1:
        with pytest.raises(InputError, match=message):
            check_duplicates(biased, x, "the training tasks")
    else:
        check_duplicates(biased, x, "the training tasks")
