from __future__ import annotations

import pytest
import torch
from sklearn import linear_model

from metabridge.ridge_regression import ridge_weight


@pytest.mark.parametrize(("n", "d"), [(5, 12), (12, 5), (6, 6)])
def test_ridge_weight_equals_ridge_of_scikit_learn_without_intercept(n, d):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, n, size, generator=generator, dtype=torch.float64) for size in (d, 3))
    weight = ridge_weight(x, y, torch.tensor(0.7, dtype=torch.float64))
    for ours, features, targets in zip(weight, x, y):
        reference = linear_model.Ridge(alpha=0.7, fit_intercept=False).fit(features.numpy(), targets.numpy())
        torch.testing.assert_close(ours, torch.from_numpy(reference.coef_))


@pytest.mark.parametrize(("n", "d"), [(4, 6), (6, 4)])
def test_ridge_weight_is_differentiable_in_all_arguments_and_maps_over_tasks(n, d):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, n, size, generator=generator, dtype=torch.float64).requires_grad_() for size in (d, 3))
    penalty = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ridge_weight, (x, y, penalty))
    mapped = torch.func.vmap(ridge_weight, (0, 0, None))(x, y, penalty)
    torch.testing.assert_close(mapped, ridge_weight(x, y, penalty))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("n", "d"), [(5, 64), (64, 5)])
def test_ridge_weight_and_its_derivative_replay_from_a_cuda_graph(n, d):
    generator = torch.Generator().manual_seed(0)
    x, new_x, y = (torch.randn(8, n, size, generator=generator).cuda() for size in (d, d, 3))
    penalty, leaf = torch.tensor(0.7, device="cuda"), x.clone().requires_grad_()
    side_stream = torch.cuda.Stream()  # for the warm-up that PyTorch requires before a capture
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        torch.autograd.grad(ridge_weight(leaf, y, penalty).square().sum(), leaf)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (gradient,) = torch.autograd.grad(ridge_weight(leaf, y, penalty).square().sum(), leaf)
    leaf.data.copy_(new_x)
    graph.replay()
    new_leaf = new_x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(ridge_weight(new_leaf, y, penalty).square().sum(), new_leaf)
    torch.testing.assert_close(gradient, expected)
