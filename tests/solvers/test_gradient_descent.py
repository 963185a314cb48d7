from __future__ import annotations

import torch

from metabridge.solvers import GradientDescent, Problem, task_loss


def test_the_longest_matching_prefix_decides_the_step_size():
    names = ("features.1.weight", "features.10.weight", "head.weight")
    start = {name: torch.zeros(1) for name in names}
    problem = Problem(lambda p, x: sum(p.values()).expand(2, 1), task_loss, torch.ones(2, 1), torch.ones(2, 1))
    lr_by_prefix = {"features": 0.1, "features.1": 0.2, "features.1.weight": 0.3, "head": 0.4}
    for lr in (lr_by_prefix, dict(reversed(lr_by_prefix.items()))):
        adapted = GradientDescent(steps=1, lr=lr).solve(problem, start, {}, exact=False)  # the gradient is −1
        assert [round(float(adapted[name]), 6) for name in names] == [0.3, 0.1, 0.4]
