from __future__ import annotations

import torch

from metabridge.conjugate_gradients import conjugate_gradients


def test_a_system_that_is_solved_stays_as_it_is_while_others_go_on():
    scale = torch.tensor([[1.0], [4.0]])
    diagonal = torch.stack([torch.ones(3), torch.tensor([1.0, 2.0, 3.0])])
    target = torch.stack([torch.zeros(3), torch.ones(3)])
    v, solved = conjugate_gradients(lambda v: scale * diagonal * v, target, lambda v: v, over=1, fall=1e-12, steps=9)
    assert solved.all()
    torch.testing.assert_close(v, target / (scale * diagonal))
    assert torch.equal(v[0], torch.zeros(3))


def test_a_direction_without_curvature_below_the_floor_is_not_followed():
    """What is left of the target there is rounding, and over a curvature of about zero it would be huge."""
    diagonal = torch.tensor([[2.0, 1e-30]])
    target = torch.tensor([[1.0, 1e-9]])
    v, solved = conjugate_gradients(
        lambda v: diagonal * v, target, lambda v: v, over=1, fall=0.0, floor=1e-12, steps=20
    )
    assert solved.all()
    torch.testing.assert_close(v, torch.tensor([[0.5, 0.0]]), rtol=1e-5, atol=1e-5)


def test_a_system_whose_curvature_is_not_positive_is_not_followed():
    """Rounding makes it so, and a step over it would lead away or be infinite."""
    curvature = torch.tensor([[-1.0], [0.0], [2.0]])
    v, solved = conjugate_gradients(lambda v: curvature * v, torch.ones(3, 1), lambda v: v, over=1, fall=1e-12, steps=3)
    assert torch.equal(v, torch.tensor([[0.0], [0.0], [0.5]]))
    assert solved.flatten().tolist() == [False, False, True]
