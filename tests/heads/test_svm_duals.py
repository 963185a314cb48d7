"""One-vs-one support vector machines compared with libsvm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import svm
from torch import Tensor

from metabridge.heads import svm_duals
from metabridge.heads.svm_duals import one_vs_one


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_classes_may_have_different_sizes_in_one_batch():
    x = points(2, 9, 4)
    labels = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2, 2, 2, 2]])
    gram = x @ x.mT
    coefficient, bias, _ = one_vs_one(gram, labels, 3, 1.0)
    for task in range(2):
        single = one_vs_one(gram[task : task + 1], labels[task : task + 1], 3, 1.0)
        torch.testing.assert_close(single[:2], (coefficient[task : task + 1], bias[task : task + 1]))


def svm_tasks(n: int, d: int, *, class_distance: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return 20 tasks with three classes. Features are multiples of 1/16, so that libsvm's float32 kernel is exact."""
    labels = torch.arange(n).expand(20, n) % 3
    x = points(20, n, d, seed=seed) + class_distance * points(20, 3, d, seed=seed + 1)[:, labels[0]]
    return (16 * x).round() / 16, labels


def with_two_small_classes(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points with new labels: in each task, all points but two belong to class 0."""
    new_labels = torch.zeros_like(labels)
    for task, row in enumerate(new_labels):
        row[task % labels.shape[-1]], row[(task + 4) % labels.shape[-1]] = 1, 2
    return x, new_labels


def with_duplicates(x: Tensor, labels: Tensor, label_shift: int) -> tuple[Tensor, Tensor]:
    """Repeat every point, with its label or, if `label_shift` is not 0, with another label."""
    return x.repeat(1, 2, 1), torch.cat([labels, (labels + label_shift) % 3], -1)


TASKS = {
    "separable": svm_tasks(15, 40),
    "one shot": svm_tasks(3, 8),
    "no difference between classes": svm_tasks(15, 40, class_distance=0.0),
    # With seed 0, the bias of one SVM is not unique; libsvm has free points there only because of rounding errors.
    "overlapping": svm_tasks(18, 3, seed=2),
    "unequal classes": with_two_small_classes(*svm_tasks(12, 30)),
    "unequal and overlapping": with_two_small_classes(*svm_tasks(16, 4)),
    "the same point twice in a class": with_duplicates(*svm_tasks(9, 24), label_shift=0),
    "the same point in two classes": with_duplicates(*svm_tasks(9, 24), label_shift=1),
}


every_kind_of_tasks = pytest.mark.parametrize(("x", "labels"), TASKS.values(), ids=TASKS.keys())


def decisions(x: Tensor, labels: Tensor, C: float, query: Tensor) -> Tensor:
    coefficient, bias, _ = one_vs_one(x @ x.mT, labels, 3, C)
    return query @ (coefficient @ x).mT + bias[:, None]


@every_kind_of_tasks
@pytest.mark.parametrize("C", [0.001, 0.05, 1.0, 100.0])
def test_pairwise_svms_decide_as_svc_and_as_the_interior_point_method(x, labels, C, monkeypatch):
    query = points(20, 30, x.shape[-1], seed=9)
    ours = decisions(x, labels, C, query)
    reference = svm.SVC(C=C, kernel="linear", tol=1e-10, decision_function_shape="ovo")
    theirs = [reference.fit(a.numpy(), b.numpy()).decision_function(c.numpy()) for a, b, c in zip(x, labels, query)]
    torch.testing.assert_close(ours, torch.from_numpy(np.stack(theirs)), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(svm_duals, "_MAX_ACTIVE_SET_STEPS", 0)
    torch.testing.assert_close(ours, decisions(x, labels, C, query), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("C", [0.001, 0.05, 1.0, 100.0])
def test_pairwise_svms_of_few_points_in_many_features_need_no_interior_point_method(C, monkeypatch):
    monkeypatch.setattr(svm_duals, "solve_qp", None)  # the interior-point method would fail
    x, labels = svm_tasks(15, 200)
    assert decisions(x, labels, C, x).isfinite().all()


def test_the_bias_is_that_of_libsvm_if_all_dual_variables_are_at_their_bounds():
    x = torch.tensor([[[0.0], [1.0], [10.0], [11.0]]], dtype=torch.float64)
    labels = torch.tensor([[0, 1, 0, 1]])
    _, bias, _ = one_vs_one(x @ x.mT, labels, 2, 0.01)
    reference = svm.SVC(C=0.01, kernel="linear", tol=1e-10).fit(x[0].numpy(), labels[0].numpy())
    assert abs(bias.item() + reference.intercept_.item()) < 1e-6
