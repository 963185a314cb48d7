from __future__ import annotations

import pytest
import torch

from cases import clusters
from metabridge import Episodes, InputError

X, Y = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)


def test_a_slice_keeps_the_tasks_it_names():
    episodes = clusters((4,), tasks=5)
    part = episodes[1:3]
    assert len(part) == 2
    assert torch.equal(part.query_x, episodes.query_x[1:3])
    assert torch.equal(part.classes, episodes.classes[1:3])
    assert torch.equal(episodes[-1].support_x, episodes.support_x[-1:])


def test_without_split_every_point_is_adapted_on_and_judged_on():
    episodes = clusters((4,))
    whole = episodes.without_split()
    assert whole.support_x.shape[1] == episodes.support_x.shape[1] + episodes.query_x.shape[1]
    assert whole.support_x is whole.query_x
    assert not whole.is_split
    part = whole[:1]
    assert part.query_y is part.support_y
    assert whole.without_split() is whole


def test_a_dtype_changes_points_and_values_but_not_labels():
    episodes = clusters((4,)).to(dtype=torch.float32)
    assert episodes.support_x.dtype == torch.float32
    assert episodes.support_y.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((X.int(), Y, X, Y), "support_x is int32 of shape (2, 3, 4), but inputs must be floating point"),
        ((X[0], Y, X, Y), "must have shape (tasks, points, features...)"),
        ((X, Y.int(), X, Y), "support_y is int32"),
        ((X, Y[:, :2], X, Y), "support_x has (tasks, points) = (2, 3), but support_y has (2, 2)"),
        ((X, Y, X[:1], Y[:1]), "support_x has 2 tasks, but query_x has 1"),
        ((X, Y, X[..., :3], Y), "Both sets of a task must have the same dtype and shape of points"),
        ((X, Y, X, torch.zeros(2, 3, 1)), "Both sets of a task must have the same dtype and shape of points"),
        ((X, Y, X[:, :0], Y[:, :0]), "query_x has no points"),
        ((X, Y, X, Y, torch.zeros(3, 5, dtype=torch.int64)), "classes is int64 of shape (3, 5)"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(arguments, sentence):
    with pytest.raises(InputError) as error:
        Episodes(*arguments)
    assert sentence in str(error.value)


def test_the_same_points_with_other_targets_are_split():
    x, y = torch.randn(3, 6, 2), torch.randn(3, 6, 1)
    episodes = Episodes(x, y, x, y + 1)
    assert episodes.is_split
    for same in (episodes.clone(), episodes.to(dtype=torch.float32), Episodes.concatenate([episodes[0], episodes[1:]])):
        assert torch.equal(same.query_y, y + 1)
    assert episodes.without_split().support_x.shape == (3, 12, 2)
