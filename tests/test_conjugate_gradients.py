from __future__ import annotations

import torch

from metabridge.conjugate_gradients import conjugate_gradients, conjugate_gradients_fixed_steps


def test_a_solved_system_does_not_change_while_others_are_iterated():
    scale = torch.tensor([[1.0], [4.0]])
    diagonal = torch.stack([torch.ones(3), torch.tensor([1.0, 2.0, 3.0])])
    target = torch.stack([torch.zeros(3), torch.ones(3)])
    solution, solved = conjugate_gradients(
        lambda v: scale * diagonal * v, target, lambda v: v, dim=1, squared_rtol=1e-12, max_steps=9
    )
    assert solved.all()
    torch.testing.assert_close(solution, target / (scale * diagonal))
    assert torch.equal(solution[0], torch.zeros(3))


def test_residuals_below_the_absolute_tolerance_are_ignored():
    """The second entry of the target is a rounding error. Divided by a curvature close to zero, it would be huge."""
    diagonal = torch.tensor([[2.0, 1e-30]])
    target = torch.tensor([[1.0, 1e-9]])
    solution, solved = conjugate_gradients(
        lambda v: diagonal * v, target, lambda v: v, dim=1, squared_rtol=0.0, squared_atol=1e-12, max_steps=20
    )
    assert solved.all()
    torch.testing.assert_close(solution, torch.tensor([[0.5, 0.0]]), rtol=1e-5, atol=1e-5)


def test_directions_without_positive_curvature_are_not_followed():
    """Rounding errors can make a curvature negative or zero; a step would then diverge or be infinite."""
    curvature = torch.tensor([[-1.0], [0.0], [2.0]])
    solution, solved = conjugate_gradients(
        lambda v: curvature * v, torch.ones(3, 1), lambda v: v, dim=1, squared_rtol=1e-12, max_steps=3
    )
    assert torch.equal(solution, torch.tensor([[0.0], [0.0], [0.5]]))
    assert solved.flatten().tolist() == [False, False, True]


def test_fixed_steps_do_not_follow_directions_without_positive_curvature():
    target = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([2.0])}
    for curvature in (-1.0, 0.0):
        solution = conjugate_gradients_fixed_steps(lambda v: {n: curvature * x for n, x in v.items()}, target, 3)  # noqa: B023
        assert all(torch.equal(value, torch.zeros_like(value)) for value in solution.values())


def test_fixed_steps_solve_a_definite_system_and_stay_at_the_solution():
    matrix = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    target = {"a": torch.tensor([1.0, -1.0], dtype=torch.float64)}
    solution = conjugate_gradients_fixed_steps(lambda v: {"a": matrix @ v["a"]}, target, 10)
    torch.testing.assert_close(solution["a"], torch.linalg.solve(matrix, target["a"]))
