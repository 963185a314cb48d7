from __future__ import annotations

import math

import pytest
import torch

from metabridge.environments import HardEasy, Landscape, LinearTasks, LogisticTasks, TaskGroup
from metabridge.theory.landscape import maml_solution, nal_solution, noise_floor, risk_above_floor
from metabridge.theory.linear_sgd import (
    LinearLearner,
    LogisticLoss,
    SquaredLoss,
    label_entropy,
    maml_gradient,
    sampled_test_loss,
    train_linear_models,
)

LANDSCAPE = HardEasy(rho_hard=0.3, rho_easy=1.0, R=1.0, r_hard=0.2, r_easy=0.1, dimension=3, noise=0.1).landscape


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("logistic", [False, True])
def test_gradients_equal_those_of_automatic_differentiation(logistic):
    generator = seeded()
    x_in, x_out = torch.randn(2, 4, 6, 3, generator=generator, dtype=torch.float64)
    y_in, y_out = (torch.rand(2, 4, 6, generator=generator, dtype=torch.float64) > 0.5).double()
    w = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = LogisticLoss if logistic else SquaredLoss.from_points
    pointwise_loss = LogisticLoss.pointwise_loss if logistic else SquaredLoss.pointwise_loss

    def mean_loss(w, x, y):
        return pointwise_loss((x @ w[..., None]).squeeze(-1), y).mean(-1).sum()

    (inner,) = torch.autograd.grad(mean_loss(w, x_in, y_in), w, create_graph=True)
    torch.testing.assert_close(loss(x_in, y_in).grad(w), inner)
    (expected,) = torch.autograd.grad(mean_loss(w - 0.7 * inner, x_out, y_out), w)
    torch.testing.assert_close(maml_gradient(loss(x_in, y_in), loss(x_out, y_out), w, 0.7), expected)
    if logistic:
        reference = torch.nn.functional.binary_cross_entropy_with_logits((x_in @ w[..., None]).squeeze(-1), y_in)
        assert float(mean_loss(w, x_in, y_in).detach()) / 4 == pytest.approx(float(reference.detach()))


@pytest.mark.parametrize("name", ["nal", "maml"])
def test_sgd_converges_to_the_population_solution(name):
    """The steps are so short that the final weights vary less between runs than between the two solutions."""
    alpha, n2, runs = 0.8, 20, 20
    learner = LinearLearner(0.02) if name == "nal" else LinearLearner(0.05, alpha)
    tasks = LinearTasks(LANDSCAPE, n2, 10)
    w = train_linear_models(tasks, {name: learner}, seeded(), iterations=3000, runs=runs)[name].double()
    solutions = {"nal": nal_solution(LANDSCAPE), "maml": maml_solution(LANDSCAPE, alpha, n2)}
    error = w.std(0) / math.sqrt(runs)
    assert ((w.mean(0) - solutions[name]).abs() < 4.5 * error).all()
    assert float(error.max()) < 0.2 * float((solutions["nal"] - solutions["maml"]).norm())


def test_gradients_of_hard_tasks_are_multiplied_by_hard_weight():
    """One step from 0 is the learning rate times the weighted sum of Xᵀy/n over the batch."""
    tasks, learner = LinearTasks(LANDSCAPE, 4, 3), LinearLearner(0.1, hard_weight=5.0)
    w = train_linear_models(tasks, {"weighted": learner}, seeded(), iterations=1, runs=2, batch_size=3)["weighted"]
    episodes = tasks.sample(6, seeded()).without_split()
    products = (episodes.support_x.mT @ episodes.support_y).squeeze(-1) / 7  # 4 support and 3 query points
    weights = torch.where(episodes.classes[:, 0] == 0, 5.0, 1.0).unflatten(0, (2, 3))
    assert len(weights.unique()) == 2
    weights = weights / weights.sum(1, keepdim=True)
    torch.testing.assert_close(w, 0.1 * (weights[..., None] * products.unflatten(0, (2, 3))).sum(1))


@pytest.mark.parametrize("max_values", [1, 1000])
def test_training_uses_every_task_once_however_many_are_sampled_at_a_time(max_values, monkeypatch):
    monkeypatch.setattr("metabridge.theory.linear_sgd.MAX_SAMPLED_VALUES", max_values)
    tasks = LinearTasks(LANDSCAPE, 4, 3)
    result = train_linear_models(tasks, {"nal": LinearLearner(0.1)}, seeded(), iterations=3, runs=2)["nal"]
    generator, w = seeded(), torch.zeros(2, 3)
    chunks = [tasks.sample(2, generator) for _ in range(3)] if max_values == 1 else [tasks.sample(6, generator)]
    for episodes in (chunk[start : start + 2] for chunk in chunks for start in range(0, len(chunk), 2)):
        x, y = episodes.without_split().support_x, episodes.without_split().support_y
        w = w - 0.1 * (x.mT @ (x @ w[..., None] - y)).squeeze(-1) / 7  # 4 support and 3 query points
    torch.testing.assert_close(result, w)


def test_the_sampled_test_loss_is_the_risk_above_the_floor_plus_the_floor():
    alpha, m, w = 0.8, 6, torch.tensor([1.0, -1.0, 0.5])
    losses = sampled_test_loss(LinearTasks(LANDSCAPE, m, 10), w, alpha, seeded(), test_tasks=2000, runs=10).double()
    expected = float(risk_above_floor(LANDSCAPE, w, alpha, m)) + noise_floor(LANDSCAPE, alpha, m)
    assert losses.shape == (10,)
    assert abs(float(losses.mean()) - expected) < 4.5 * float(losses.std()) / math.sqrt(10)
    assert float(losses.std()) < 0.1 * expected


def test_the_label_entropy_is_the_loss_at_the_solution_of_each_task():
    groups = TaskGroup(0.5, torch.tensor([1.0, 2.0]), probability=0.3), TaskGroup(1.0, -1.0, probability=0.7)
    landscape = Landscape(groups, 2)
    episodes = LogisticTasks(landscape, 50, 50).sample(4000, seeded()).without_split()
    w = landscape.distribution.center.float()[episodes.classes[:, 0] // 2]  # two classes per group
    logits = (episodes.support_x @ w[..., None]).squeeze(-1)
    losses = LogisticLoss.pointwise_loss(logits, episodes.support_y.float()).mean(1).double()
    assert abs(float(losses.mean()) - label_entropy(landscape)) < 4.5 * float(losses.std()) / math.sqrt(4000)
