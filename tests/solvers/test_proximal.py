from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metabridge.models import mlp
from metabridge.solvers import Problem, Proximal, task_loss


@pytest.mark.parametrize("tolerance", [0.05, 0.3, 100.0])
def test_a_proximal_task_stops_when_the_norm_of_its_gradient_is_within_the_tolerance(tolerance):
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]
    net = mlp(1, 1, activation="tanh").double()
    params = {name: value.detach() for name, value in net.named_parameters()}
    problem = Problem(lambda p, x: torch.func.functional_call(net, p, x), task_loss, x, 3 * x)
    solver = Proximal(strength=1.0, steps=60, lr=0.05, tolerance=tolerance)
    norms, current = [], params
    for _ in range(solver.steps):
        updated = replace(solver, tolerance=0.0).step(problem, current, params, {}, exact=False)
        gradients = [(current[name] - updated[name]) / solver.lr for name in current]
        norms.append(sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5)
        if norms[-1] <= tolerance:
            break
        current = updated
    actual = solver.solve(problem, params, {}, exact=False)
    assert norms[-1] <= tolerance  # the loop above ended at the tolerance, not after the last step
    for name, value in actual.items():
        torch.testing.assert_close(value, current[name])
