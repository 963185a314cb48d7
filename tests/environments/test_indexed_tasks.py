from __future__ import annotations

import torch

from metabridge.environments.indexed_tasks import IndexedTasks


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_indexed_tasks_have_the_indices_of_the_images_of_the_tasks(glyphs):
    environment = glyphs.tasks("test", shots=2, queries=3)
    with_images, indexed = environment.sample(4, seeded()), IndexedTasks(environment).sample(4, seeded())
    assert torch.equal(glyphs.float_images(indexed.support_x[..., 0].long()), with_images.support_x)
    assert torch.equal(glyphs.float_images(indexed.query_x[..., 0].long()), with_images.query_x)
    assert torch.equal(indexed.query_y, with_images.query_y)


def test_labels_are_the_ranks_of_the_mean_sort_keys_of_the_support_images(glyphs):
    sort_keys = torch.randn(len(glyphs.images), generator=seeded())
    tasks = IndexedTasks(glyphs.tasks("test", shots=2, queries=1), sort_keys).sample(8, seeded(1))
    means = sort_keys[tasks.support_x[..., 0].long()].unflatten(1, (5, 2)).mean(-1)  # of the 2 shots of each of 5 ways
    assert (means.diff(dim=1) > 0).all()
    support_classes = glyphs.labels[tasks.support_x[..., 0].long()].unflatten(1, (5, 2))
    query_classes = glyphs.labels[tasks.query_x[..., 0].long()]
    assert torch.equal(support_classes[..., 0], query_classes)
    assert torch.equal(support_classes[..., 0], support_classes[..., 1])
    assert torch.equal(support_classes[..., 0], glyphs.splits["test"][tasks.classes])
