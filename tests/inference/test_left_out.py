from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from metabridge.heads import Head, create_head
from metabridge.inference.left_out import MAX_FOLDS, assign_folds, predict_left_out
from metabridge.learners import method, parameters
from metabridge.learners.adapt import adapt_to_features
from metabridge.models import mlp


def support_set(counts, features=6):
    generator = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    centers = torch.randn(len(counts), features, generator=generator)
    return centers[labels] + torch.randn(len(labels), features, generator=generator), labels


@pytest.mark.parametrize("counts", [(2, 2), (5, 5, 5), (3, 1, 4), (25, 2, 1), (12, 11)])
def test_every_image_that_has_another_image_of_its_class_is_left_out_once(counts):
    labels = support_set(counts)[1]
    folds = assign_folds(labels, features=4)
    counts_of = labels.bincount()[labels]
    assert torch.equal(folds < 0, counts_of == 1)
    assert int(folds.max()) + 1 == min(max(counts), MAX_FOLDS)
    for fold in range(int(folds.max()) + 1):
        assert set(labels[folds != fold].tolist()) == set(range(len(counts)))  # no class is missing in the fit


def test_a_large_support_set_has_fewer_folds():
    labels = torch.arange(2).repeat_interleave(5000)
    assert int(assign_folds(labels, features=16).max()) + 1 == MAX_FOLDS
    assert int(assign_folds(labels, features=64).max()) + 1 == 3
    assert int(assign_folds(labels, features=10**9).max()) + 1 == 2


@pytest.mark.parametrize("name", [*Head.registry, "r2d2"])
def test_outputs_equal_those_of_separate_fits_without_the_images(name):
    features, labels = support_set((5, 3, 1, 4))
    learner = method("r2d2") if name == "r2d2" else replace(method("frozen"), test_solver=create_head(name))
    net = mlp(6, 4)
    params = parameters(learner, net)
    left_out = predict_left_out(learner, params, features, labels)
    folds = assign_folds(labels, 6)
    assert left_out.rows.tolist() == (folds >= 0).nonzero()[:, 0].tolist()
    assert torch.equal(left_out.labels, labels[left_out.rows])
    for row, outputs in zip(left_out.rows.tolist(), left_out.outputs):
        is_support = folds != folds[row]
        adapted = adapt_to_features(learner, net, params, features[is_support], labels[is_support])
        np.testing.assert_allclose(adapted.outputs(features[row][None])[0], outputs, atol=1e-4)


def test_nothing_is_left_out_if_every_class_has_one_image():
    features, labels = support_set((1, 1, 1))
    left_out = predict_left_out(method("frozen"), {}, features, labels)
    assert left_out.rows.tolist() == []
    assert left_out.outputs.shape == (0, 3)
