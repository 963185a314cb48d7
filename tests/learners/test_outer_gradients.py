from __future__ import annotations

import torch

from metabridge.learners.outer_gradients import conjugate_gradient


def test_conjugate_gradient_does_not_step_along_a_direction_without_positive_curvature():
    target = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([2.0])}
    for curvature in (-1.0, 0.0):
        solution = conjugate_gradient(lambda v: {n: curvature * x for n, x in v.items()}, target, 3)  # noqa: B023
        assert all(torch.equal(value, torch.zeros_like(value)) for value in solution.values())


def test_conjugate_gradient_solves_a_definite_system_and_stays_at_its_solution():
    matrix = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    target = {"a": torch.tensor([1.0, -1.0], dtype=torch.float64)}
    solution = conjugate_gradient(lambda v: {"a": matrix @ v["a"]}, target, 10)
    torch.testing.assert_close(solution["a"], torch.linalg.solve(matrix, target["a"]))
