from __future__ import annotations

import numpy as np
import torch

from metabridge.inference.support_set import SupportSet, pixel_digests


def support_set(labels, pixels):
    images = np.array(pixels, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2), dtype=np.uint8)
    features = torch.tensor(pixels, dtype=torch.float32)[:, None]
    return SupportSet(np.array(labels), pixel_digests(images), ("",) * len(labels), features)


def test_the_canonical_order_is_by_class_and_independent_of_the_order_of_the_images():
    labels, pixels = ["b", "a", "b", "c", "a", "a"], [1, 2, 3, 4, 5, 6]
    expected = None
    for seed in range(5):
        permutation = np.random.default_rng(seed).permutation(6)
        support = support_set([labels[row] for row in permutation], [pixels[row] for row in permutation])
        order, indices = support.canonical_order()
        assert indices.tolist() == [0, 0, 0, 1, 1, 2]
        features = support.features[order].flatten().tolist()
        expected = expected or features
        assert features == expected


def test_adding_keeps_longer_names_and_the_order():
    support = support_set(["a"], [1]).add(support_set(["longer"], [2]))
    assert support.labels.tolist() == ["a", "longer"]
    assert support.features.flatten().tolist() == [1, 2]
    assert len(support.names) == len(support.digests) == 2
    assert support.images is None


def test_digests_depend_only_on_pixels():
    images = np.random.default_rng(0).integers(0, 3, (500, 1, 2, 2), dtype=np.uint8)
    digests = pixel_digests(images)
    assert len(np.unique(digests)) == len(np.unique(images.reshape(500, -1), axis=0))
    np.testing.assert_array_equal(pixel_digests(images[::-1]), digests[::-1])
