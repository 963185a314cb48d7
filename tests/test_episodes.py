from __future__ import annotations

import pytest
import torch

from cases import clusters
from metabridge import Episodes, InputError

X, Y = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)


def test_a_slice_selects_tasks():
    episodes = clusters((4,), tasks=5)
    selected = episodes[1:3]
    assert len(selected) == 2
    assert torch.equal(selected.query_x, episodes.query_x[1:3])
    assert torch.equal(selected.classes, episodes.classes[1:3])
    assert torch.equal(episodes[-1].support_x, episodes.support_x[-1:])


def test_without_split_returns_two_equal_sets_of_all_examples():
    episodes = clusters((4,))
    joint = episodes.without_split()
    assert joint.support_x.shape[1] == episodes.support_x.shape[1] + episodes.query_x.shape[1]
    assert joint.support_x is joint.query_x
    assert not joint.is_split
    selected = joint[:1]
    assert selected.query_y is selected.support_y
    assert joint.without_split() is joint


def test_map_targets_changes_neither_the_inputs_nor_whether_the_sets_are_split():
    episodes = clusters((2,))
    for original in (episodes, episodes.without_split()):
        mapped = original.map_targets(lambda y: y + 1)
        assert torch.equal(mapped.support_y, original.support_y + 1)
        assert torch.equal(mapped.query_y, original.query_y + 1)
        assert mapped.support_x is original.support_x
        assert mapped.is_split == original.is_split


def test_the_representation_is_one_short_line():
    expected = "Episodes(2 classification tasks, 3 support and 3 query examples of shape (4,))"
    assert repr(Episodes(X, Y, X, Y)) == expected


def test_notebooks_show_a_table_of_the_sets():
    html = Episodes(X, Y, X[:, :1], Y[:, :1])._repr_html_()
    assert "<tr><th>set</th><th>inputs</th><th>targets</th></tr>" in html
    assert "<tr><td>support</td><td>float32 of shape (2, 3, 4)</td><td>int64 of shape (2, 3)</td></tr>" in html
    assert "<tr><td>query</td><td>float32 of shape (2, 1, 4)</td><td>int64 of shape (2, 1)</td></tr>" in html


def test_to_with_a_dtype_converts_inputs_but_not_class_labels():
    episodes = clusters((4,)).to(dtype=torch.float32)
    assert episodes.support_x.dtype == torch.float32
    assert episodes.support_y.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.int(), Y, X, Y), "support_x is int32 of shape (2, 3, 4), but inputs must be floating point"),
        ((X[0], Y, X, Y), "must have shape (tasks, examples, features...)"),
        ((X, Y.int(), X, Y), "support_y is int32"),
        ((X, Y[:, :2], X, Y), "support_x has (tasks, examples) = (2, 3), but support_y has (2, 2)"),
        ((X, Y, X[:1], Y[:1]), "support_x has 2 tasks, but query_x has 1"),
        ((X, Y, X[..., :3], Y), "Both sets must have the same dtype, and their examples the same shape"),
        ((X, Y, X, torch.zeros(2, 3, 1)), "Both sets must have the same dtype, and their examples the same shape"),
        ((X, Y, X[:, :0], Y[:, :0]), "query_x has no examples"),
        ((X, Y, X, Y, torch.zeros(3, 5, dtype=torch.int64)), "classes is int64 of shape (3, 5)"),
    ],
)
def test_the_error_names_the_wrong_shape_or_dtype(arguments, message):
    with pytest.raises(InputError) as error:
        Episodes(*arguments)
    assert message in str(error.value)


def test_sets_with_equal_inputs_but_different_targets_count_as_split():
    x, y = torch.randn(3, 6, 2), torch.randn(3, 6, 1)
    episodes = Episodes(x, y, x, y + 1)
    assert episodes.is_split
    for same in (episodes.clone(), episodes.to(dtype=torch.float32), Episodes.concatenate([episodes[0], episodes[1:]])):
        assert torch.equal(same.query_y, y + 1)
    assert episodes.without_split().support_x.shape == (3, 12, 2)
