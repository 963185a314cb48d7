from __future__ import annotations

import torch

from metabridge.conjugate_gradients import conjugate_gradients, fixed_conjugate_gradients


def test_a_solved_system_does_not_change_while_others_are_iterated():
    scale = torch.tensor([[1.0], [4.0]])
    diagonal = torch.stack([torch.ones(3), torch.tensor([1.0, 2.0, 3.0])])
    target = torch.stack([torch.zeros(3), torch.ones(3)])
    v, solved = conjugate_gradients(
        lambda v: scale * diagonal * v, target, lambda v: v, dim=1, tolerance=1e-12, steps=9
    )
    assert solved.all()
    torch.testing.assert_close(v, target / (scale * diagonal))
    assert torch.equal(v[0], torch.zeros(3))


def test_residuals_below_the_floor_are_ignored():
    """What is left of the target there is rounding, and over a curvature of about zero it would be huge."""
    diagonal = torch.tensor([[2.0, 1e-30]])
    target = torch.tensor([[1.0, 1e-9]])
    v, solved = conjugate_gradients(
        lambda v: diagonal * v, target, lambda v: v, dim=1, tolerance=0.0, floor=1e-12, steps=20
    )
    assert solved.all()
    torch.testing.assert_close(v, torch.tensor([[0.5, 0.0]]), rtol=1e-5, atol=1e-5)


def test_directions_without_positive_curvature_are_not_followed():
    """Rounding makes it so, and a step over it would lead away or be infinite."""
    curvature = torch.tensor([[-1.0], [0.0], [2.0]])
    v, solved = conjugate_gradients(
        lambda v: curvature * v, torch.ones(3, 1), lambda v: v, dim=1, tolerance=1e-12, steps=3
    )
    assert torch.equal(v, torch.tensor([[0.0], [0.0], [0.5]]))
    assert solved.flatten().tolist() == [False, False, True]


def test_fixed_steps_do_not_follow_directions_without_positive_curvature():
    target = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([2.0])}
    for curvature in (-1.0, 0.0):
        solution = fixed_conjugate_gradients(lambda v: {n: curvature * x for n, x in v.items()}, target, 3)  # noqa: B023
        assert all(torch.equal(value, torch.zeros_like(value)) for value in solution.values())


def test_fixed_steps_solve_a_definite_system_and_stay_at_the_solution():
    matrix = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    target = {"a": torch.tensor([1.0, -1.0], dtype=torch.float64)}
    solution = fixed_conjugate_gradients(lambda v: {"a": matrix @ v["a"]}, target, 10)
    torch.testing.assert_close(solution["a"], torch.linalg.solve(matrix, target["a"]))
