from __future__ import annotations

import torch

from metabridge.environments.indexed_tasks import IndexedTasks


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_indexed_tasks_have_the_images_of_the_tasks(glyphs):
    tasks = glyphs.tasks("test", shots=2, queries=3)
    sampled, indexed = tasks.sample(4, seeded()), IndexedTasks(tasks).sample(4, seeded())
    assert torch.equal(glyphs.float_images(indexed.support_x[..., 0].long()), sampled.support_x)
    assert torch.equal(glyphs.float_images(indexed.query_x[..., 0].long()), sampled.query_x)
    assert torch.equal(indexed.query_y, sampled.query_y)


def test_with_an_order_labels_are_ranks_of_the_support_values(glyphs):
    order = torch.randn(len(glyphs.images), generator=seeded())
    ordered = IndexedTasks(glyphs.tasks("test", shots=2, queries=1), order).sample(8, seeded(1))
    means = order[ordered.support_x[..., 0].long()].unflatten(1, (5, 2)).mean(-1)
    assert (means.diff(dim=1) > 0).all()
    labels = glyphs.labels[ordered.support_x[..., 0].long()].unflatten(1, (5, 2))
    queries = glyphs.labels[ordered.query_x[..., 0].long()]
    assert torch.equal(labels[..., 0], queries)
    assert torch.equal(labels[..., 0], labels[..., 1])
    assert torch.equal(labels[..., 0], glyphs.splits["test"][ordered.classes])
