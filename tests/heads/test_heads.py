"""Test-time heads compared with the estimators of scikit-learn, task by task."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import optimize
from sklearn import linear_model, neighbors, svm
from torch import Tensor

from metabridge.errors import InputError
from metabridge.heads import SVM, LinearHead, LogisticRegression, NearestCentroid, PairwiseHead, RidgeClassifier, newton

# With small tolerances, rounding errors stop some solvers of scikit-learn. A class with one example has no variance.
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning"),
]


class Tasks(NamedTuple):
    """Tasks whose classes are Gaussian clusters."""

    x: Tensor
    y: Tensor
    query: Tensor
    ways: int


def gaussian_tasks(count: int, shots: list[int], features: int, *, spread: float = 1.0, seed: int = 0) -> Tasks:
    generator = torch.Generator().manual_seed(seed)
    ways = len(shots)
    means = torch.randn(count, ways, features, generator=generator, dtype=torch.float64)
    sizes = torch.stack([torch.tensor(shots)[torch.randperm(ways, generator=generator)] for _ in range(count)])
    y = torch.stack([torch.arange(ways).repeat_interleave(size) for size in sizes])
    y = torch.stack([labels[torch.randperm(len(labels), generator=generator)] for labels in y])
    x = torch.stack([mean[labels] for mean, labels in zip(means, y)])
    query = means.repeat(1, 3, 1) + 1.0  # as in x, the offset 1 keeps the mean of the features away from 0
    x, query = (t + spread * torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (x + 1.0, query))
    # Multiples of 1/16, since libsvm stores its kernel matrix in float32, in which products of such numbers are exact.
    return Tasks((16 * x).round() / 16, y, query, ways)


# 25 tasks of each kind: fewer ("wide") or more ("tall") examples than features, one shot, unbalanced, overlapping.
TASKS = {
    "5-way 5-shot, wide": gaussian_tasks(25, [5] * 5, 64),
    "5-way 1-shot": gaussian_tasks(25, [1] * 5, 32),
    "5-way 8-shot, tall": gaussian_tasks(25, [8] * 5, 6, spread=2.0),
    "4-way unbalanced": gaussian_tasks(25, [1, 2, 5, 9], 40),
    "3-way unbalanced, tall": gaussian_tasks(25, [2, 7, 9], 4, spread=1.5),
    "10-way 2-shot": gaussian_tasks(25, [2] * 10, 24),
    "5-way as many points as features": gaussian_tasks(25, [3] * 5, 15),
    "3-way 4-shot, overlapping": gaussian_tasks(25, [4] * 3, 50, spread=5.0),
}
TWO_WAYS = gaussian_tasks(25, [3, 5], 12)
every_kind_of_tasks = pytest.mark.parametrize("tasks", TASKS.values(), ids=TASKS.keys())

HEADS = [
    LogisticRegression(0.1),
    SVM(),
    SVM(loss="hinge"),
    RidgeClassifier(normalize=True),
    NearestCentroid(normalize=True),
]
every_head = pytest.mark.parametrize("head", HEADS, ids=repr)


def sklearn_decisions(estimator: object, tasks: Tasks, method: str = "decision_function") -> Tensor:
    return torch.stack(
        [
            torch.from_numpy(np.asarray(getattr(estimator.fit(x.numpy(), y.numpy()), method)(query.numpy())))
            for x, y, query in zip(tasks.x, tasks.y, tasks.query)
        ]
    )


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Assert that decisions agree to a relative tolerance, and that predictions agree except for ties."""
    scale = theirs.abs().amax((-2, -1), keepdim=True).clamp_min(1)
    assert ((ours - theirs) / scale).abs().max() < tolerance
    best, second = theirs.topk(2, -1).values.unbind(-1)
    is_clear = best - second > 2 * tolerance * scale[..., 0]
    assert is_clear.double().mean() > 0.99
    assert (ours.argmax(-1) == theirs.argmax(-1))[is_clear].all()


@every_kind_of_tasks
@pytest.mark.parametrize("penalty", [1e-4, 0.01, 0.33, 10.0])
def test_logistic_regression_equals_that_of_scikit_learn(tasks, penalty):
    reference = linear_model.LogisticRegression(C=1 / penalty, solver="newton-cholesky", tol=1e-13, max_iter=1000)
    theirs = sklearn_decisions(reference, tasks)
    # A constant added to all biases changes nothing: ours sum to 0, those of scikit-learn do not.
    theirs = theirs - theirs.mean(-1, keepdim=True)
    assert_same(
        LogisticRegression(penalty, normalize=False).fit(tasks.x, tasks.y, tasks.ways).scores(tasks.query), theirs, 1e-5
    )


@pytest.mark.parametrize("penalty", [1e-4, 0.33, 10.0])
def test_logistic_regression_with_two_classes_equals_that_of_scikit_learn_with_half_the_penalty(penalty):
    reference = linear_model.LogisticRegression(C=2 / penalty, solver="newton-cholesky", tol=1e-13, max_iter=1000)
    scores = LogisticRegression(penalty, normalize=False).fit(TWO_WAYS.x, TWO_WAYS.y, 2).scores(TWO_WAYS.query)
    difference = scores[..., 1] - scores[..., 0]
    torch.testing.assert_close(difference, sklearn_decisions(reference, TWO_WAYS), rtol=1e-5, atol=1e-5)


@every_kind_of_tasks
@pytest.mark.parametrize("C", [0.1, 1.0, 10.0])
def test_the_squared_hinge_svm_equals_linear_svc(tasks, C):
    reference = svm.LinearSVC(C=C, tol=1e-9, max_iter=1_000_000, random_state=0)
    head = SVM(C, normalize=False).fit(tasks.x, tasks.y, tasks.ways)
    assert_same(head.scores(tasks.query), sklearn_decisions(reference, tasks), 1e-5)


@every_kind_of_tasks
@pytest.mark.parametrize("C", [0.01, 1.0, 10.0])
def test_the_hinge_svm_has_the_votes_and_confidences_of_svc(tasks, C):
    reference = svm.SVC(C=C, kernel="linear", tol=1e-9)
    head = SVM(C, loss="hinge", normalize=False).fit(tasks.x, tasks.y, tasks.ways)
    assert_same(head.scores(tasks.query), sklearn_decisions(reference, tasks), 1e-5)


@every_kind_of_tasks
@pytest.mark.parametrize("C", [0.01, 1.0, 10.0])
def test_the_hinge_svm_has_the_pairwise_decisions_of_svc(tasks, C):
    reference = svm.SVC(C=C, kernel="linear", tol=1e-9, decision_function_shape="ovo")
    head = SVM(C, loss="hinge", normalize=False).fit(tasks.x, tasks.y, tasks.ways)
    theirs = sklearn_decisions(reference, tasks)
    torch.testing.assert_close(LinearHead(*head).scores(tasks.query), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["squared-hinge", "hinge"])
def test_svms_with_two_classes_predict_as_scikit_learn(loss):
    reference = svm.LinearSVC(tol=1e-9, max_iter=1_000_000) if loss == "squared-hinge" else svm.SVC(kernel="linear")
    scores = SVM(loss=loss, normalize=False).fit(TWO_WAYS.x, TWO_WAYS.y, 2).scores(TWO_WAYS.query)
    assert (scores.argmax(-1) == sklearn_decisions(reference, TWO_WAYS, "predict")).all()


@every_kind_of_tasks
@pytest.mark.parametrize("penalty", [1e-4, 1.0, 100.0])
def test_the_ridge_classifier_equals_ridge_of_scikit_learn(tasks, penalty):
    targets = torch.nn.functional.one_hot(tasks.y, tasks.ways).double()
    reference = linear_model.Ridge(alpha=penalty, solver="svd")
    theirs = sklearn_decisions(reference, tasks._replace(y=targets), "predict")
    assert_same(RidgeClassifier(penalty).fit(tasks.x, tasks.y, tasks.ways).scores(tasks.query), theirs, 1e-9)
    head = RidgeClassifier(penalty).fit(tasks.x, 3 * targets, tasks.ways)
    torch.testing.assert_close(head.scores(tasks.query), 3 * theirs)


@pytest.mark.parametrize("penalty", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_the_ridge_classifier_is_accurate_in_float32_with_small_penalties_and_large_means(penalty, offset):
    tasks = TASKS["5-way 5-shot, wide"]
    x, query = tasks.x + offset, (16 * (tasks.query + offset)).round() / 16  # exact in float32
    exact = RidgeClassifier(penalty).fit(x, tasks.y, tasks.ways).scores(query)
    single = RidgeClassifier(penalty).fit(x.float(), tasks.y, tasks.ways).scores(query.float())
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-4)


@every_head
def test_heads_of_many_tasks_equal_those_of_single_tasks(head):
    tasks = gaussian_tasks(200, [5, 3, 4], 300)
    batched = head.fit(tasks.x, tasks.y, tasks.ways).scores(tasks.query)
    for subset in (slice(0, 3), slice(99, 102), slice(197, 200)):
        single = head.fit(tasks.x[subset], tasks.y[subset], tasks.ways).scores(tasks.query[subset])
        torch.testing.assert_close(single, batched[subset])


@every_kind_of_tasks
def test_nearest_centroid_predicts_the_nearest_class_mean(tasks):
    head = NearestCentroid().fit(tasks.x, tasks.y, tasks.ways)
    theirs = sklearn_decisions(neighbors.NearestCentroid(), tasks, "predict")
    assert (head.scores(tasks.query).argmax(-1) == theirs).all()
    centroid = head.weight + tasks.x.mean(-2, keepdim=True)
    distance = (tasks.query[..., None, :] - centroid[..., None, :, :]).square().sum(-1)
    constant = head.scores(tasks.query) + distance / 2
    torch.testing.assert_close(constant, constant[..., :1].expand_as(constant))


@every_head
def test_heads_that_normalize_ignore_the_length_of_features(head):
    tasks = TASKS["5-way 5-shot, wide"]
    fitted = head.fit(tasks.x, tasks.y, tasks.ways)
    fitted_to_scaled_features = head.fit(3 * tasks.x, tasks.y, tasks.ways)
    unit_x, unit_query = (torch.nn.functional.normalize(tensor, dim=-1) for tensor in (tasks.x, tasks.query))
    unnormalized_head = type(head)(**{**vars(head), "normalize": False})
    fitted_to_unit_features = unnormalized_head.fit(unit_x, tasks.y, tasks.ways)
    scores = fitted.scores(tasks.query)
    torch.testing.assert_close(fitted_to_scaled_features.scores(5 * tasks.query), scores)
    torch.testing.assert_close(fitted_to_unit_features.scores(unit_query), scores)


@every_head
def test_heads_in_float32_score_as_in_float64(head):
    tasks = TASKS["4-way unbalanced"]
    exact = head.fit(tasks.x, tasks.y, tasks.ways).scores(tasks.query)
    single = head.fit(tasks.x.float(), tasks.y, tasks.ways).scores(tasks.query.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-4)


@every_head
def test_task_axes_may_have_any_shape(head):
    tasks = TASKS["5-way 1-shot"]
    folded = head.fit(tasks.x.unflatten(0, (5, 5)), tasks.y.unflatten(0, (5, 5)), tasks.ways)
    scores = head.fit(tasks.x, tasks.y, tasks.ways).scores(tasks.query)
    torch.testing.assert_close(folded.scores(tasks.query.unflatten(0, (5, 5))), scores.unflatten(0, (5, 5)))


@every_head
def test_heads_of_duplicate_points_are_finite(head):
    tasks = TASKS["5-way 5-shot, wide"]
    x = tasks.x[:, :1].expand_as(tasks.x)
    assert head.fit(x, tasks.y, tasks.ways).scores(x).isfinite().all()


@every_head
def test_invalid_inputs_raise_errors_that_name_them(head):
    x, y = torch.randn(2, 4, 3), torch.tensor([[0, 1, 0, 1], [0, 1, 1, 1]])
    with pytest.raises(InputError, match="class 2 of task 0 has no support example"):
        head.fit(x, y, 3)
    with pytest.raises(InputError, match="labels has values from -1 to 0"):
        head.fit(x, y - 1, 2)
    with pytest.raises(InputError, match="labels is int64 of shape"):
        head.fit(x, y[:, :3], 2)
    with pytest.raises(InputError, match="features contains NaN or infinite values"):
        head.fit(x.where(x < x.max(), torch.nan), y, 2)
    with pytest.raises(InputError, match="the head was fitted to task dimensions"):
        head.fit(x, y, 2).scores(torch.randn(2, 4, 5))


def test_a_head_that_overflows_its_dtype_raises_an_error():
    tasks = gaussian_tasks(2, [3, 3], 16)
    x = 1e25 * tasks.x
    with pytest.raises(InputError, match=r"features is .*float32.* overflow torch.float32\. Use float64"):
        NearestCentroid().fit(x.float(), tasks.y, tasks.ways)
    assert NearestCentroid().fit(x.double(), tasks.y, tasks.ways).bias.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 8e3])
@pytest.mark.parametrize("head", [*HEADS, RidgeClassifier(), NearestCentroid()], ids=repr)
def test_heads_of_half_precision_features_equal_those_of_the_features_in_float32(head, scale, dtype):
    x, y, query, ways = gaussian_tasks(2, [6, 6, 6], 8)
    x, query = ((scale * points).to(dtype) for points in (x, query))
    fitted, expected = head.fit(x, y, ways), head.fit(x.float(), y, ways)
    assert fitted.weight.dtype == torch.float32
    assert torch.equal(fitted.scores(query), expected.scores(query.float()))
    assert fitted.scores(query).isfinite().all()


@pytest.mark.parametrize("head", [LogisticRegression(), SVM(), SVM(loss="hinge"), NearestCentroid()], ids=repr)
def test_classifiers_reject_real_targets(head):
    with pytest.raises(
        InputError, match=r"labels is float32 of shape \(2, 4, 1\).*For real-valued targets, use RidgeClassifier"
    ):
        head.fit(torch.randn(2, 4, 3), torch.randn(2, 4, 1), 1)


def test_options_out_of_range_raise_errors():
    for make in (lambda: LogisticRegression(0.0), lambda: SVM(-1.0), lambda: RidgeClassifier(float("nan"))):
        with pytest.raises(InputError, match="must be a positive number"):
            make()
    with pytest.raises(InputError, match="squared-hinge"):
        SVM(loss="huber")


def test_a_pairwise_head_counts_votes():
    head = PairwiseHead(torch.zeros(3, 1), torch.tensor([1.0, -1.0, -1.0]))
    assert head.scores(torch.zeros(1, 1)).round().tolist() == [[1.0, 0.0, 2.0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_head
def test_heads_score_on_a_gpu_as_on_the_cpu(head):
    tasks = TASKS["4-way unbalanced"]
    gpu_scores = head.fit(tasks.x.cuda(), tasks.y.cuda(), tasks.ways).scores(tasks.query.cuda())
    torch.testing.assert_close(gpu_scores.cpu(), head.fit(tasks.x, tasks.y, tasks.ways).scores(tasks.query))


@pytest.mark.parametrize(
    ("head", "remedy"), [(LogisticRegression(1e-3), "a larger penalty"), (SVM(1e3), "a smaller C")], ids=repr
)
def test_a_head_that_is_not_solved_logs_one_warning(head, remedy, monkeypatch, caplog):
    tasks = gaussian_tasks(3, [5, 5], 4, spread=2.0)
    monkeypatch.setattr("metabridge.heads.newton.MAX_STEPS", 1)
    monkeypatch.setattr("metabridge.heads.newton.MAX_HINGE_STEPS", 1)
    monkeypatch.setattr("metabridge.heads.svm_duals.MAX_EXAMPLES", 1)
    head.fit(tasks.x, tasks.y, tasks.ways)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{head!r} did not converge in 3 of 3 tasks")
    assert record.getMessage().endswith(f"Use {remedy}, or normalize=True.")


def test_a_hinge_svm_that_is_not_solved_logs_one_warning(monkeypatch, caplog):
    tasks = gaussian_tasks(3, [9, 9], 4, spread=2.0)
    monkeypatch.setattr("metabridge.heads.svm_duals._MAX_ACTIVE_SET_STEPS", 0)
    monkeypatch.setattr("metabridge.heads.svm_duals.MAX_INTERIOR_POINT_STEPS", 3)
    SVM(10.0, "hinge").fit(tasks.x, tasks.y, tasks.ways)
    assert [record.getMessage().split(" did not converge ")[0] for record in caplog.records] == [
        repr(SVM(10.0, "hinge"))
    ]


def test_a_head_warns_if_its_objective_is_more_than_1e_5_above_the_minimum(monkeypatch, caplog):
    tasks, minimize = gaussian_tasks(2, [3, 3], 4), newton.minimize
    for suboptimality, expected_count in ((0.9e-5, 0), (1.1e-5, 1)):
        suboptimalities = torch.tensor([[0.0], [suboptimality]])
        monkeypatch.setattr(newton, "minimize", lambda *args: (minimize(*args)[0], suboptimalities))  # noqa: B023
        LogisticRegression().fit(tasks.x, tasks.y, tasks.ways)
        assert len(caplog.records) == expected_count


@pytest.mark.parametrize("penalty", [1e-2, 1e-4, 1e-6])
def test_the_ridge_classifier_of_equal_points_with_different_labels_is_accurate_in_float32(penalty):
    x, labels = torch.randn(1, 6, 40, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 1, 0, 1, 0, 1]])
    x[:, 1] = x[:, 0]  # the same point with another label
    queries = torch.randn(1, 9, 40, generator=torch.Generator().manual_seed(1))
    single, double = (
        RidgeClassifier(penalty).fit(x.to(dtype), labels, 2).scores(queries.to(dtype)).double()
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single, double, rtol=0, atol=1e-3)


@pytest.mark.parametrize("head", [RidgeClassifier(1e-4), SVM(10.0, "hinge", normalize=False)])
def test_heads_of_points_far_from_zero_are_accurate_in_float32(head):
    """Products of these points are not exact in float32, unlike those of the points of `gaussian_tasks`."""
    generator = torch.Generator().manual_seed(0)
    x, queries = (torch.randn(8, n, 64, generator=generator) + 30 for n in (25, 10))
    labels = torch.arange(5).repeat(5).expand(8, -1)
    single, double = (
        head.fit(x.to(dtype), labels, 5).scores(queries.to(dtype)).double() for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single, double, rtol=0, atol=1e-3)


class Transformation(NamedTuple):
    """A transformation of features: a scale, an offset, and the relative distance between near-duplicates."""

    scale: float = 1.0
    offset: float = 0.0
    duplicate_distance: float | None = None

    def tasks(self, shots: list[int], features: int) -> Tasks:
        tasks = gaussian_tasks(2, shots, features, spread=2.0)
        x = tasks.x.clone()
        if self.duplicate_distance is not None:
            # Every second point becomes a near-duplicate of the point before it, whatever their classes.
            x[:, 1::2] = x[:, : 2 * (x.shape[1] // 2) : 2] + self.duplicate_distance * x[:, 1::2]
        x, query = (self.scale * (tensor + self.offset) for tensor in (x, tasks.query))
        return tasks._replace(x=x, query=query)


TRANSFORMATIONS = {
    "small": Transformation(1e-3),
    "standard": Transformation(),
    "large": Transformation(1e2),
    "very large": Transformation(1e6),
    "far from zero": Transformation(offset=1e3),
    "near-duplicate points": Transformation(duplicate_distance=1e-6),
}
SHAPES = {
    "5-way 5-shot, wide": ([5] * 5, 64),
    "5-way 5-shot, as many points as features": ([5] * 5, 24),
    "3-way 1-shot": ([1] * 3, 16),
    "2-way 20-shot, tall": ([20] * 2, 8),
    "12-way 2-shot": ([2] * 12, 18),
}
every_transformation = pytest.mark.parametrize("transformation", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys())
every_shape = pytest.mark.parametrize(("shots", "d"), SHAPES.values(), ids=SHAPES.keys())
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
STRENGTHS = (1e-4, 1.0, 1e4)  # values of the penalty, or of C


def assert_scores(ours: Tensor, theirs: np.ndarray, transformation: Transformation, dtype: torch.dtype) -> None:
    """Assert that scores agree to 1e-4, or to 1e-3 for float32 features far from 0."""
    tolerance = 1e-3 if transformation.offset and dtype == torch.float32 else 1e-4
    assert np.abs(ours.double().numpy() - theirs).max() < tolerance * max(1.0, np.abs(theirs).max())


def test_a_squared_hinge_svm_warns_if_rounding_moves_it_from_its_minimum(caplog):
    x, y, _, ways = gaussian_tasks(2, [8] * 5, 6, spread=6.0)
    for scale, expected_count in ((1e4, 0), (1e12, 1)):
        SVM(1e4, normalize=False).fit(scale * x + 1e6, y, ways)
        assert len(caplog.records) == expected_count


@every_transformation
@every_shape
@both_dtypes
def test_the_ridge_classifier_of_raw_features_equals_the_solution_by_svd(transformation, shots, d, dtype, caplog):
    x, y, query, ways = transformation.tasks(shots, d)
    x, query = x.to(dtype), query.to(dtype)
    for penalty in STRENGTHS:
        scores = RidgeClassifier(penalty).fit(x, y, ways).scores(query)
        for points, labels, queries, ours in zip(x.double().numpy(), y.numpy(), query.double().numpy(), scores):
            mean, targets = points.mean(0), np.eye(ways)[labels]
            left, values, right = np.linalg.svd(points - mean, full_matrices=False)
            weight = right.T * (values / (values**2 + penalty)) @ left.T @ (targets - targets.mean(0))
            assert_scores(ours, (queries - mean) @ weight + targets.mean(0), transformation, dtype)
    assert not caplog.records


@every_transformation
@every_shape
@both_dtypes
def test_the_hinge_svm_of_raw_features_equals_svc_of_standardized_ones(transformation, shots, d, dtype, caplog):
    x, y, query, ways = transformation.tasks(shots, d)
    x, query = x.to(dtype), query.to(dtype)
    tall = x.shape[-2] > d
    for C in STRENGTHS:
        if tall and C * transformation.scale**2 > 1e9:
            continue  # with overlapping classes, coefficients as large as C cancel; the head warns
        head = SVM(C, "hinge", normalize=False).fit(x, y, ways)
        points, queries, labels = x[0].double().numpy(), query[0].double().numpy(), y[0].numpy()
        mean, size = points.mean(0), np.abs(points - points.mean(0)).max()
        reference = svm.SVC(C=C * size**2, kernel="linear", tol=1e-9, decision_function_shape="ovo", max_iter=10**6)
        theirs = reference.fit((points - mean) / size, labels).decision_function((queries - mean) / size)
        if (reference.n_iter_ >= 10**6).any() or (transformation.duplicate_distance and C * size**2 > 1):
            continue  # libsvm has not converged, or its float32 kernel matrix does not resolve near-duplicates
        # With two classes, a positive decision value of SVC is a vote for the second class, not for the first.
        ours = LinearHead(*head).scores(query)[0] * (-1 if ways == 2 else 1)
        assert_scores(ours.squeeze(-1), theirs, transformation, dtype)
    assert not caplog.records


def squared_hinge_decisions(points: np.ndarray, sign: np.ndarray, C: float, queries: np.ndarray) -> np.ndarray:
    """Return the decision values of a squared-hinge SVM, whose dual is solved by non-negative least squares."""
    points, queries = (np.c_[array, np.ones(len(array))] for array in (points, queries))
    size = np.abs(points).max()
    slack_scale = np.sqrt(2 * C) * size
    # For α = size² · (dual variables), the squared residual is 2 size² times the dual objective plus a constant.
    system = np.r_[(points * sign[:, None]).T / size, np.eye(len(points)) / slack_scale]
    target = np.r_[np.zeros(points.shape[1]), np.full(len(points), slack_scale)]
    alpha, _ = optimize.nnls(system, target, maxiter=10_000)
    return queries @ (points.T @ (sign * alpha)) / size**2


@every_transformation
@every_shape
@both_dtypes
def test_the_squared_hinge_svm_of_raw_features_equals_the_solution_of_its_dual(transformation, shots, d, dtype, caplog):
    x, y, query, ways = transformation.tasks(shots, d)
    x, query = x.to(dtype), query.to(dtype)
    tall = x.shape[-2] > d
    for C in STRENGTHS:
        scores = SVM(C, normalize=False).fit(x, y, ways).scores(query)
        if tall and C * max(transformation.scale, transformation.offset) ** 2 > 1e6:
            continue  # coefficients of near-duplicates, as large as C, cancel
        for output in range(2):
            sign = np.where(y[0].numpy() == output, 1.0, -1.0)
            theirs = squared_hinge_decisions(x[0].double().numpy(), sign, C, query[0].double().numpy())
            assert_scores(scores[0, :, output], theirs, transformation, dtype)
    assert not caplog.records


@pytest.mark.parametrize(("scale", "C"), [(1e2, 1e10), (1e3, 1e8)])
def test_the_squared_hinge_svm_of_overlapping_classes_does_not_depend_on_the_scale(scale, C, caplog):
    x, y, query, ways = gaussian_tasks(25, [8] * 5, 6, spread=6.0)
    # In both fits, C is so large that ½‖w‖² is negligible, so scaling the features does not change the scores.
    scores = SVM(C, normalize=False).fit(scale * x, y, ways).scores(scale * query)
    torch.testing.assert_close(scores, SVM(1e8, normalize=False).fit(x, y, ways).scores(query), rtol=0, atol=1e-3)
    assert not caplog.records


@every_transformation
@every_shape
@both_dtypes
def test_the_gradient_is_zero_at_the_logistic_regression_of_raw_features(transformation, shots, d, dtype, caplog):
    x, y, query, ways = transformation.tasks(shots, d)
    x, query = x.to(dtype), query.to(dtype)
    for penalty in (*STRENGTHS, 1e-8):
        head = LogisticRegression(penalty, normalize=False)
        scores = head.fit(x, y, ways).scores(query)
        fitted = head.fit(x.double(), y, ways)
        assert_scores(scores, fitted.scores(query.double()).numpy(), transformation, dtype)
        if penalty < 1e-4 * transformation.scale**2 / 1e2:
            continue  # probabilities too close to 1 for the derivative below
        points = x.double() - x.double().mean(-2, keepdim=True)
        error = fitted.scores(x.double()).softmax(-1) - torch.nn.functional.one_hot(y, ways)
        gradient = penalty * fitted.weight + error.mT @ points
        assert gradient.norm() < 1e-5 * (error.abs().mT @ points.abs()).norm()
    assert not caplog.records


@every_transformation
@every_shape
def test_nearest_centroid_of_raw_features_is_accurate_in_float32(transformation, shots, d):
    x, y, query, ways = transformation.tasks(shots, d)
    scores = NearestCentroid().fit(x.float(), y, ways).scores(query.float())
    one_hot_labels = torch.nn.functional.one_hot(y, ways).double()
    distance = torch.cdist(query, (one_hot_labels / one_hot_labels.sum(-2, keepdim=True)).mT @ x) / transformation.scale
    nearest = distance.topk(2, -1, largest=False).values
    is_clear = nearest[..., 1] - nearest[..., 0] > 1e-2
    assert (scores.argmax(-1) == distance.argmin(-1))[is_clear].all()


def test_the_hinge_svm_of_duplicate_points_is_at_its_minimum():
    count, ways, shots = 30, 3, 5
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(count, ways, 32, generator=generator)
    x = centers.repeat_interleave(shots, 1) + torch.randn(count, ways * shots, 32, generator=generator)
    x[:, 1] = x[:, 0]
    x, y = torch.nn.functional.normalize(x, dim=-1).double(), torch.arange(ways).repeat_interleave(shots)
    head = SVM(C=1.0, loss="hinge", normalize=True).fit(x, y.expand(count, -1), ways)

    def objective(weight, bias, points, sign):
        return 0.5 * (weight**2).sum() + np.maximum(1 - sign * (points @ weight + bias), 0).sum()

    for task in range(count):
        for pair, (i, j) in enumerate([(0, 1), (0, 2), (1, 2)]):
            in_pair = (y == i) | (y == j)
            points, sign = x[task][in_pair].numpy(), np.where(y[in_pair] == i, 1.0, -1.0)
            reference = svm.SVC(kernel="linear", C=1.0, tol=1e-9).fit(points, sign)
            minimum = objective(reference.coef_[0], reference.intercept_[0], points, sign)
            ours = objective(head.weight[task, pair].numpy(), head.bias[task, pair].numpy(), points, sign)
            assert ours <= minimum * (1 + 1e-5)
