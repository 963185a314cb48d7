"""The multi-class support vector machine compared with liblinear and finite differences."""

from __future__ import annotations

import pytest
import torch
from sklearn import svm
from torch import Tensor

from metabridge.interior_point import solve_qp
from metabridge.solvers.svm_solver import crammer_singer


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit_tasks(tasks: int, n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return unit vectors and their labels: five classes of the same size."""
    labels = torch.arange(n).expand(tasks, n) % 5
    x = points(tasks, n, d, seed=seed) + points(tasks, 5, d, seed=seed + 1)[:, labels[0]]
    return x / x.norm(dim=-1, keepdim=True), labels


every_shape = pytest.mark.parametrize(("n", "d"), [(25, 64), (25, 8), (5, 16), (40, 6)])


every_c = pytest.mark.parametrize("C", [0.01, 0.1, 1.0, 10.0])


def duality_gap(x: Tensor, labels: Tensor, alpha: Tensor, C: float) -> Tensor:
    """Return the primal objective at the weight that belongs to α, minus the dual objective at α."""
    weight = alpha @ x
    scores = x @ weight.mT
    true_scores = scores.gather(-1, labels[..., None])
    is_other_class = 1 - torch.nn.functional.one_hot(labels, alpha.shape[-2])
    squared_norm = weight.square().sum((-2, -1))
    return (
        squared_norm
        + C * (scores - true_scores + is_other_class).amax(-1).sum(-1)
        - (alpha.mT.gather(-1, labels[..., None])).sum((-2, -1))
    )


@every_shape
@every_c
def test_crammer_singer_closes_the_duality_gap(n, d, C):
    x, labels = unit_tasks(10, n, d)
    one_hot = torch.nn.functional.one_hot(labels, 5).mT.double()
    # The unknowns of this quadratic program are α / C.
    A = torch.eye(n, dtype=torch.float64).expand(10, 5, n, n)
    solution = solve_qp(
        C * (x @ x.mT)[:, None], one_hot, A, x.new_zeros(10, n), torch.full_like(one_hot, -torch.inf), one_hot
    )
    assert duality_gap(x, labels, C * solution.alpha, C).abs().max() < 1e-8
    assert solution.gap.max() < 1e-8
    assert solution.residual.max() < 1e-10
    torch.testing.assert_close(crammer_singer(x, labels, 5, C), C * solution.alpha @ x)


@every_shape
@every_c
def test_crammer_singer_equals_that_of_liblinear(n, d, C):
    x, labels = unit_tasks(5, n, d)
    weight = crammer_singer(x, labels, 5, C)
    reference = svm.LinearSVC(C=C, multi_class="crammer_singer", fit_intercept=False, tol=1e-9, max_iter=1_000_000)
    for ours, features, classes in zip(weight, x, labels):
        theirs = torch.from_numpy(reference.fit(features.numpy(), classes.numpy()).coef_)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def loss(x: Tensor, labels: Tensor, weights: Tensor, C: float) -> Tensor:
    return (crammer_singer(x, labels, 5, C).tanh() * weights).sum()


@every_shape
@pytest.mark.parametrize("C", [0.1, 1.0])
def test_the_derivative_of_crammer_singer_matches_finite_differences(n, d, C):
    x, labels = unit_tasks(4, n, d, seed=3)
    weights = points(4, 5, d, seed=5)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, labels, weights, C), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x, labels, weights, C), gradient)
    mapped = torch.func.vmap(torch.func.grad(loss), (0, 0, 0, None))(x, labels, weights, C)
    assert (mapped - gradient).abs().max() < 1e-6 * gradient.abs().max()
    for seed in range(6, 9):
        direction = points(4, n, d, seed=seed)
        ahead, behind = (loss(x + sign * 1e-5 * direction, labels, weights, C) for sign in (1, -1))
        difference = (ahead - behind) / 2e-5
        torch.testing.assert_close((gradient * direction).sum(), difference, rtol=0, atol=1e-6 * float(gradient.norm()))


def test_crammer_singer_of_duplicate_points_and_its_derivative_are_finite():
    x, labels = unit_tasks(3, 10, 4)
    x = x[:, [0, 0, 2, 3, 4, 0, 6, 3, 8, 9]].requires_grad_()
    weight = crammer_singer(x, labels, 5, 0.1)
    weight.square().sum().backward()
    assert weight.isfinite().all()
    assert x.grad.norm() < 10


def test_the_weight_has_the_dtype_of_the_features():
    x, labels = unit_tasks(2, 10, 4)
    single = crammer_singer(x.float(), labels, 5, 0.1)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), crammer_singer(x, labels, 5, 0.1), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_crammer_singer_and_its_derivative_replay_from_a_cuda_graph():
    x, labels = (tensor.cuda() for tensor in unit_tasks(8, 25, 64))
    new_features = unit_tasks(8, 25, 64, seed=7)[0].cuda()
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    leaf = x.clone().requires_grad_()
    with torch.cuda.stream(side_stream):
        torch.autograd.grad(crammer_singer(leaf, labels, 5, 0.1).square().sum(), leaf)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (gradient,) = torch.autograd.grad(crammer_singer(leaf, labels, 5, 0.1).square().sum(), leaf)
    leaf.data.copy_(new_features)
    graph.replay()
    new_leaf = new_features.cpu().requires_grad_()
    (expected,) = torch.autograd.grad(crammer_singer(new_leaf, labels.cpu(), 5, 0.1).square().sum(), new_leaf)
    torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("scale", "C"), [(1.0, 1e4), (100.0, 0.1), (1e4, 1e-4)])
def test_crammer_singer_of_large_features_equals_that_of_liblinear(scale, C):
    x, labels = unit_tasks(2, 40, 6)
    # If w is the weight for the features scale · x and for C, scale · w is the weight for x and C · scale².
    reference = svm.LinearSVC(
        C=C * scale**2, multi_class="crammer_singer", fit_intercept=False, tol=1e-9, max_iter=100_000
    )
    for ours, features, classes in zip(scale * crammer_singer(scale * x, labels, 5, C), x, labels):
        theirs = torch.from_numpy(reference.fit(features.numpy(), classes.numpy()).coef_)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
