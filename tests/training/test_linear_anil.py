from __future__ import annotations

import pytest
import torch

from metabridge import meta_gradient, method, parameters
from metabridge.models import mlp
from metabridge.theory.finite_tasks import factorization_loss
from metabridge.training import linear_anil
from metabridge.training.checkpoint import RunFolder
from metabridge.training.linear_anil import LinearAnilConfig, train_first_order

SMALL = LinearAnilConfig(
    runs=2, tasks=20, steps=12, iterations=8, designs=20, dimension=6, width=6, variances=(1.0, 2.0, 3.0)
)


@pytest.mark.parametrize("name", ["fo-anil", "infinite-tasks"])
def test_a_stopped_and_resumed_training_run_equals_an_uninterrupted_one(name, tmp_path, monkeypatch):
    environments = SMALL.environments(0)
    expected = train_first_order(name, SMALL, environments, "cpu", RunFolder(tmp_path), float("inf"))
    folder = tmp_path / "stopped"
    folder.mkdir()
    seconds = iter(range(1000))  # the deadline passes after ten calls
    monkeypatch.setattr(linear_anil.time, "perf_counter", lambda: next(seconds))
    assert train_first_order(name, SMALL, environments, "cpu", RunFolder(folder), 10) is None
    monkeypatch.undo()
    resumed = train_first_order(name, SMALL, environments, "cpu", RunFolder(folder), float("inf"))
    assert expected is not None
    assert resumed is not None
    assert torch.equal(expected.B, resumed.B)
    assert expected.curves == resumed.curves


def test_the_burer_monteiro_loss_and_gradient_equal_those_of_the_method():
    environment = SMALL.environments(0)[0]
    learner, net = method("burer-monteiro"), mlp(6, 1, width=6, depth=1, activation="linear", bias=False).double()
    params = parameters(learner, net, classes=environment.classes)
    tasks = environment.tasks.to(dtype=torch.float64)
    expected = meta_gradient(learner, net, params, tasks, mode="vectorized")
    unsplit = tasks.without_split()
    B = params["features.1.weight"].detach().mT.clone().requires_grad_()
    heads = params["heads.weight"].detach().clone().requires_grad_()
    loss = factorization_loss(B, heads, unsplit.support_x, unsplit.support_y[..., 0])
    B_grad, heads_grad = torch.autograd.grad(loss, (B, heads))
    torch.testing.assert_close(B_grad.mT, expected.gradients["features.1.weight"])
    torch.testing.assert_close(heads_grad, expected.gradients["heads.weight"])
