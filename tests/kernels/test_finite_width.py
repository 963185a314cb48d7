"""Kernels between tasks, compared with Gram matrices of the gradients of finite networks.

Entries of such a Gram matrix are means over the units of a layer, so its error is proportional to 1/√width: networks
four times as wide have half the error. The tests require less than 0.7 times the error, which leaves room for the noise
of means over six networks.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from metabridge import Engine, Episodes, method, parameters
from metabridge.kernels import EmpiricalKernel, anil_kernel, fully_connected_kernel, meta_ntk, mtl_kernel
from metabridge.kernels.finite_width import (
    CenteredTraining,
    ConvergenceRate,
    empirical_meta_ntk,
    gradient_descent,
    squared_loss,
)
from metabridge.learners.adapt import predict
from metabridge.models import wide

KERNEL = fully_connected_kernel(depth=3)
WIDTHS = (32, 128, 512)
NETS = 6
TIME, STEPS = 0.1, 10  # the steps are so small that the inner loop follows gradient flow
INNER = {"steps": STEPS, "lr": TIME / STEPS, "loss": squared_loss}


@pytest.fixture(scope="module")
def episodes():
    """Return three tasks, each with its own MTL head, of two support and three query points on a sphere."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 5, size, generator=generator, dtype=torch.float64) for size in (4, 1))
    x = 2 * torch.nn.functional.normalize(x, dim=-1)
    return Episodes(x[:, :2], y[:, :2], x[:, 2:], y[:, 2:], torch.arange(3)[:, None])


def mean_errors(compare):
    """Return the mean relative error over networks for every width; `compare` returns a result and its limit."""
    means = []
    for width in WIDTHS:
        pairs = [compare(wide(4, width=width, depth=3, seed=10 * net + width).double()) for net in range(NETS)]
        means.append(sum(float((result - expected).norm() / expected.norm()) for result, expected in pairs) / NETS)
    return means


def decreases_with_width(means):
    return all(wider < 0.7 * narrower for narrower, wider in pairwise(means))


def test_the_meta_ntk_of_the_empirical_ntk_converges_to_the_gram_matrix_of_meta_gradients(episodes):
    """Wang et al. 2022, eq. 106 and 4. At finite width they differ, because the NTK changes during adaptation."""
    maml = method("maml", **INNER)

    def compare(net):
        from_ntk = meta_ntk(EmpiricalKernel(net), episodes.query_x, episodes.support_x, adapts="all", time=TIME)
        return empirical_meta_ntk(maml, net, parameters(maml, net), episodes), from_ntk

    means = mean_errors(compare)
    assert decreases_with_width(means)
    assert means[-1] < 0.03


def test_mtl_kernel_is_the_limit_of_gram_matrices_of_gradients_with_one_head_per_task(episodes):
    mtl, x = method("mtl", loss=squared_loss), episodes.without_split().support_x
    for heads in ("shared", "independent"):

        def compare(net, heads=heads):
            params = parameters(mtl, net, classes=3)
            generator = torch.Generator().manual_seed(net.recipe["seed"])
            random_heads = torch.randn(params["heads.weight"].shape, dtype=torch.float64, generator=generator)
            params["heads.weight"].data.copy_(random_heads if heads == "independent" else random_heads[:1])
            return empirical_meta_ntk(mtl, net, params, episodes), mtl_kernel(KERNEL, x, heads)

        means = mean_errors(compare)
        assert decreases_with_width(means)
        assert means[-1] < 0.15


def test_mtl_kernel_between_tasks_with_independent_heads_vanishes(episodes):
    mtl, tasks, points = method("mtl", loss=squared_loss), 3, 5
    same_task_mask = torch.block_diag(*torch.ones(tasks, points, points, dtype=torch.float64))
    with_shared_heads = (1 - same_task_mask) * mtl_kernel(KERNEL, episodes.without_split().support_x)

    def compare(net):
        params = parameters(mtl, net, classes=tasks)
        generator = torch.Generator().manual_seed(net.recipe["seed"])
        params["heads.weight"].data.normal_(generator=generator)
        between = (1 - same_task_mask) * empirical_meta_ntk(mtl, net, params, episodes)
        return (
            with_shared_heads + between,
            with_shared_heads,
        )  # so the relative error is ‖between‖ / ‖with_shared_heads‖

    means = mean_errors(compare)
    assert decreases_with_width(means)
    assert means[-1] < 0.15


def test_anil_kernel_is_the_limit_of_gram_matrices_of_gradients_through_the_adaptation_of_the_head(episodes):
    anil = method("anil", **INNER, split=False)
    limit = anil_kernel(KERNEL, episodes.without_split().support_x, TIME)
    means = mean_errors(lambda net: (empirical_meta_ntk(anil, net, parameters(anil, net), episodes), limit))
    assert decreases_with_width(means)
    assert means[-1] < 0.15


def test_a_step_of_gradient_descent_moves_the_outputs_as_the_meta_ntk_predicts(episodes):
    """To first order F(θ − ηJᵀ(F − Y)) = F − ηΦ̂(F − Y)."""
    maml = method("maml", steps=3, lr=0.01, loss=squared_loss)
    net, lr = wide(4, width=16, activation="tanh").double(), 1e-5
    params = parameters(maml, net)
    kernel, outputs = empirical_meta_ntk(maml, net, params, episodes), predict(maml, net, params, episodes)
    initial_params = {name: value.detach().clone() for name, value in params.items()}
    (step,) = gradient_descent(Engine(maml, net), params, episodes, lr, 1)
    residual = (outputs - episodes.query_y).flatten()
    change = (predict(maml, net, params, episodes) - outputs).flatten()
    assert torch.allclose(change, -lr * kernel @ residual, rtol=1e-3, atol=1e-8)
    assert step.loss == pytest.approx(float(residual.square().sum() / 2))
    length = math.sqrt(sum(float((params[name].detach() - old).square().sum()) for name, old in initial_params.items()))
    assert step.length == pytest.approx(length)


def test_gradient_descent_on_a_quadratic_loss_converges_as_its_kernel_predicts():
    eigenvalues = torch.tensor([0.2, 0.7, 1.5], dtype=torch.float64)
    convergence = ConvergenceRate.from_kernel(torch.diag(eigenvalues))
    residuals = torch.stack([(1 - convergence.lr * eigenvalues) ** step for step in range(200)])
    losses = residuals.square().sum(1) / 2
    assert float(losses[-1] / losses[-2]) == pytest.approx(convergence.loss_contraction)
    assert all(later <= convergence.bound_contraction * earlier for earlier, later in pairwise(losses))
    steps = convergence.steps(0.01)
    slowest = residuals[:, 0]
    assert slowest[steps] <= 0.01 < slowest[steps - 1]


@pytest.mark.parametrize("name", ["mtl", "anil", "maml"])
def test_centered_training_starts_from_outputs_of_zero_and_reduces_the_loss(name, episodes):
    inner = {} if name == "mtl" else {"steps": 3, "lr": 0.01}
    options = {} if name == "maml" else {"split": False}
    training_method = method(name, loss=squared_loss, **inner, **options)
    test_method = method("maml" if name == "maml" else "anil", steps=3, lr=0.01, loss=squared_loss, **options)
    net = wide(4, width=64, depth=3).double()
    training = CenteredTraining(training_method, net, episodes)
    zero_targets = episodes.map_targets(torch.zeros_like)
    assert torch.allclose(training.predict(test_method, zero_targets), zero_targets.query_y, atol=1e-12)
    steps = training.descend(lr=0.01, steps=20) + training.descend(lr=0.01, steps=20)
    assert len(steps) == 40
    assert steps[-1].loss < steps[20].loss < steps[0].loss


def test_heads_of_all_tasks_start_from_the_values_of_the_network(episodes):
    net = wide(4, width=16).double()
    training = CenteredTraining(method("mtl", loss=squared_loss), net, episodes)
    assert torch.equal(training.params["heads.weight"], net.head.weight.expand(3, -1))
