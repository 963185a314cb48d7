from __future__ import annotations

import math

import pytest
import torch
from scipy.linalg import expm

from metabridge import InputError
from metabridge.kernels import EmpiricalKernel, fully_connected_kernel
from metabridge.kernels.meta_kernels import (
    adaptation_operator,
    anil_kernel,
    block_diagonal_product,
    diagonal_blocks,
    meta_ntk,
    mtl_kernel,
    query_residual_operator,
    residual_decay,
)
from metabridge.models import wide

KERNEL = fully_connected_kernel(depth=3)


@pytest.fixture
def tasks():
    """Return the query points, (3 tasks, 4 points, 5 features), and the support points, (3, 2, 5)."""
    x = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x[:, :4], x[:, 4:]


def is_positive_semidefinite(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return torch.allclose(matrix, matrix.mT, rtol=1e-12) and values[0] > -1e-12 * values[-1]


@pytest.mark.parametrize("time", [0.0, 1e-9, 0.3, 5.0, math.inf])
def test_adaptation_and_decay_equal_their_definition_by_gradient_flow(tasks, time):
    gram = KERNEL.ntk(tasks[0][0])
    decay = torch.zeros_like(gram) if math.isinf(time) else torch.from_numpy(expm(-time * gram.numpy()))
    assert torch.allclose(residual_decay(gram, time), decay, atol=1e-12)
    expected = torch.linalg.solve(gram, torch.eye(4, dtype=gram.dtype) - decay)
    assert torch.allclose(adaptation_operator(gram, time), expected, rtol=1e-6 if time == 1e-9 else 1e-10, atol=1e-16)


def test_adaptation_operator_of_a_short_time_is_time_times_identity_even_for_a_singular_matrix():
    ones = torch.ones(2, 2, dtype=torch.float64)
    assert torch.allclose(adaptation_operator(ones, 1e-12), 1e-12 * torch.eye(2, dtype=torch.float64), rtol=1e-9)
    with pytest.raises(InputError, match="the Gram matrix of the support set is singular"):
        adaptation_operator(ones, math.inf)
    assert torch.isfinite(adaptation_operator(ones, math.inf, ridge=0.1)).all()


def test_the_error_for_a_singular_gram_matrix_names_the_task_and_does_not_need_two_points():
    grams = torch.stack([torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 2.0], [0.0, 2.0, 2.0]])])
    with pytest.raises(InputError, match=r"of task 1 is singular\. The most similar of its 3 points are 1 and 2"):
        adaptation_operator(grams, math.inf)
    with pytest.raises(InputError, match="is singular: its only point has the kernel value 0"):
        adaptation_operator(torch.zeros(1, 1), math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residual_in_the_null_space_of_a_gram_matrix_remains_at_infinite_time(dtype):
    x = torch.randn(5, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    gram = x @ x.mT  # of rank 3
    limit = torch.eye(5, dtype=dtype) - x @ torch.linalg.pinv(x)
    assert torch.allclose(residual_decay(gram, math.inf), limit, atol=1e-5)
    assert torch.allclose(residual_decay(gram, 1e3), limit, atol=1e-3)
    assert torch.allclose(residual_decay(gram, math.inf, ridge=1e-9), limit, atol=1e-3)


def test_anil_kernel_at_infinite_time_is_the_limit_of_long_times_if_the_features_are_of_low_rank(tasks):
    kernel = EmpiricalKernel(wide(5, width=2, depth=2).double())  # two features of four points
    limit = anil_kernel(kernel, tasks[0], math.inf)
    assert limit.norm() > 1
    torch.testing.assert_close(limit, anil_kernel(kernel, tasks[0], 1e6), rtol=1e-6, atol=1e-6)


def test_mtl_kernel_is_the_ntk_within_tasks_and_the_ntk_of_the_body_or_zero_between_tasks(tasks):
    x = tasks[0]
    ntk, nngp = KERNEL.both(x.flatten(0, 1))
    for heads in ("shared", "independent"):
        kernel = mtl_kernel(KERNEL, x, heads)
        for i in range(3):
            for j in range(3):
                rows, columns = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
                between = ntk - nngp if heads == "shared" else 0 * ntk
                assert torch.allclose(kernel[rows, columns], (ntk if i == j else between)[rows, columns])
        assert is_positive_semidefinite(kernel)


def test_anil_kernel_applies_the_decay_of_both_tasks(tasks):
    x, time = tasks[0], 0.2
    ntk, nngp = KERNEL.both(x.flatten(0, 1))
    decay = torch.block_diag(*(torch.from_numpy(expm(-time * block.numpy())) for block in diagonal_blocks(nngp, 4)))
    kernel = anil_kernel(KERNEL, x, time)
    assert torch.allclose(kernel, decay @ ntk @ decay, atol=1e-12)
    assert is_positive_semidefinite(kernel)
    within_tasks = torch.block_diag(*diagonal_blocks(ntk, 4))
    assert torch.allclose(anil_kernel(KERNEL, x, time, "independent"), decay @ within_tasks @ decay, atol=1e-12)


@pytest.mark.parametrize("time", [0.3, math.inf])
@pytest.mark.parametrize("adapts", ["all", "head"])
def test_meta_ntk_equals_the_sum_of_its_four_terms(tasks, adapts, time):
    """Wang et al. 2022, eq. 106, and eq. 112 for ANIL."""
    (x, support), ntk = tasks, KERNEL.ntk
    inner = ntk if adapts == "all" else KERNEL.nngp
    result = meta_ntk(KERNEL, x, support, adapts=adapts, time=time)
    for i in range(3):
        for j in range(3):
            a = inner(x[i], support[i]) @ adaptation_operator(inner(support[i]), time)
            b = inner(x[j], support[j]) @ adaptation_operator(inner(support[j]), time)
            terms = (
                ntk(x[i], x[j])
                + a @ ntk(support[i], support[j]) @ b.mT
                - a @ ntk(support[i], x[j])
                - ntk(x[i], support[j]) @ b.mT
            )
            assert torch.allclose(result[4 * i : 4 * i + 4, 4 * j : 4 * j + 4], terms, atol=1e-10)
    assert is_positive_semidefinite(result)
    block = meta_ntk(KERNEL, x[:1], support[:1], (x[1:], support[1:]), adapts=adapts, time=time)
    assert torch.allclose(block, result[:4, 4:], atol=1e-10)


def test_block_diagonal_product_equals_the_product_of_block_diagonal_matrices():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 3, 4, generator=generator), torch.randn(5, 2, 6, generator=generator)
    matrix = torch.randn(8, 30, generator=generator)
    expected = torch.block_diag(*left) @ matrix @ torch.block_diag(*right).mT
    assert torch.allclose(block_diagonal_product(left, matrix, right), expected, atol=1e-5)


def gradients(net, x, head):
    """Return the gradients of the output of a head with respect to the body, one row per point."""
    body = list(net.features.parameters())
    rows = []
    for point in x:
        value = (net.features(point[None]) @ head).squeeze()
        rows.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(value, body)]))
    return torch.stack(rows)


def test_body_kernel_between_tasks_remains_with_shared_heads_and_vanishes_with_independent_heads(tasks):
    """At finite width the error (shared heads) and the norm (independent heads) fall like 1/√width."""
    x, z = tasks[0][0], tasks[0][1]
    ntk, nngp = KERNEL.both(x, z)
    limit = ntk - nngp
    shared_errors, independent_norms = {}, {}
    for width in (64, 1024):
        errors, norms = [], []
        for seed in range(8):
            net = wide(5, width=width, depth=3, seed=seed).double()
            generator = torch.Generator().manual_seed(100 + seed)
            first_head, second_head = torch.randn(2, width, dtype=torch.float64, generator=generator)
            left = gradients(net, x, first_head)
            errors.append((left @ gradients(net, z, first_head).mT - limit).norm() / limit.norm())
            norms.append((left @ gradients(net, z, second_head).mT).norm() / limit.norm())
        shared_errors[width] = float(torch.stack(errors).mean())
        independent_norms[width] = float(torch.stack(norms).mean())
    assert shared_errors[1024] < 0.16
    assert independent_norms[1024] < 0.1
    assert 1.8 < shared_errors[64] / shared_errors[1024] < 8  # √16 = 4 within a factor of about two
    assert 1.8 < independent_norms[64] / independent_norms[1024] < 8


def test_support_set_explains_its_points_completely_at_infinite_time(tasks):
    support = tasks[1]
    operator = query_residual_operator(KERNEL, support, support, "all", math.inf)
    assert torch.allclose(operator[..., :2] + operator[..., 2:], torch.zeros(3, 2, 2, dtype=torch.float64), atol=1e-10)


@pytest.mark.parametrize("time", [0.0, 0.3, 5.0, math.inf])
def test_decay_with_a_ridge_is_the_part_that_adaptation_does_not_explain(tasks, time):
    gram = KERNEL.ntk(tasks[0][0])
    decay = torch.eye(len(gram), dtype=gram.dtype) - gram @ adaptation_operator(gram, time, ridge=0.2)
    assert torch.allclose(residual_decay(gram, time, ridge=0.2), decay, atol=1e-12)
