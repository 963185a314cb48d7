from __future__ import annotations

import pytest
import torch

from metabridge import InputError
from metabridge.heads.outliers import OutlierDetector, fit_outlier_detector, squared_distances

# the number of examples of each class, and the number of features
TASKS = [([5] * 5, 40), ([2] * 5, 64), ([1, 4, 3, 2], 16), ([30, 20, 9], 8), ([3, 1, 1], 12)]


def labels_of(counts: list[int]) -> torch.Tensor:
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def random_task(counts: list[int], size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unit-norm features (n, size) of separate classes, and labels (n,)."""
    generator, labels = torch.Generator().manual_seed(seed), labels_of(counts)
    centers = torch.randn(len(counts), size, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), size, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(centers[labels] + noise, dim=-1), labels


def score_by_definition(x, labels, query, degrees: int | None = None) -> float:
    """Return the score of one query: the formula in the docstring of the module, with an inverse matrix."""
    classes = [x[labels == label] for label in labels.unique()]
    scatter = sum((c - c.mean(0)).mT @ (c - c.mean(0)) for c in classes)
    degrees = len(x) - len(classes) if degrees is None else degrees
    metric = torch.eye(x.shape[1], dtype=x.dtype)
    if scatter.trace() > 1e-12:
        metric += 0.5 * degrees * scatter / scatter.trace()
    return min(
        float((query - c.mean(0)) @ metric.inverse() @ (query - c.mean(0)) / (1 + 1 / len(c))) ** 0.5 for c in classes
    )


def left_out_scores_by_refitting(x, labels) -> torch.Tensor:
    """Return the score of each example whose class has others, under the detector that is fitted without it."""
    degrees, rows = len(x) - len(labels.unique()), torch.arange(len(x))
    return torch.tensor(
        [
            score_by_definition(x[rows != i], labels[rows != i], x[i], degrees)
            for i in rows.tolist()
            if (labels == labels[i]).sum() > 1
        ],
        dtype=x.dtype,
    )


@pytest.mark.parametrize(("counts", "size"), TASKS)
def test_scores_follow_their_definition(counts, size):
    x, labels = random_task(counts, size)
    queries = random_task([4] * len(counts), size, seed=1)[0]
    detector = fit_outlier_detector(x[None], labels[None], len(counts))
    expected = torch.tensor([score_by_definition(x, labels, query) for query in queries], dtype=x.dtype)
    torch.testing.assert_close(detector.scores(queries[None])[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("counts", "size"), TASKS)
def test_the_calibration_uses_the_scores_of_detectors_fitted_without_each_example(counts, size):
    x, labels = random_task(counts, size)
    scores, count = left_out_scores_by_refitting(x, labels), len(x) - len(counts)
    detector = fit_outlier_detector(x[None], labels[None], len(counts))
    deviations = (scores - scores.mean()).clamp_min(0)
    spread = (2 * deviations.square().mean() * count / (count - 1)).sqrt()
    torch.testing.assert_close(detector.left_out_mean[0], scores.mean())
    torch.testing.assert_close(detector.left_out_spread[0], spread)
    assert detector.left_out_count.tolist() == [count]


def test_the_threshold_is_the_end_of_a_prediction_interval():
    from scipy.stats import t

    x, labels = random_task([5] * 5, 40)
    detector = fit_outlier_detector(x[None], labels[None], 5)
    for rate in (0.01, 0.05, 0.3):
        margin = t.ppf(1 - rate, df=19) * (1 + 1 / 20) ** 0.5 * detector.left_out_spread
        torch.testing.assert_close(detector.threshold(rate), detector.left_out_mean + margin)


def gaussian_tasks(shots: int, size: int, tasks: int = 600):
    """Return features of supports (tasks, 5 · shots, size), their labels, and queries (tasks, 50, size)."""
    generator = torch.Generator().manual_seed(shots)
    centers = 2 * torch.randn(tasks, 5, 1, size, generator=generator)
    support, queries = (
        (centers + torch.randn(tasks, 5, count, size, generator=generator)).flatten(1, 2) for count in (shots, 10)
    )
    return support, labels_of([shots] * 5).expand(tasks, -1), queries


@pytest.mark.parametrize(("shots", "size"), [(2, 200), (5, 32), (5, 200), (10, 200)])
def test_the_promised_fraction_of_gaussian_queries_is_rejected(shots, size):
    support, labels, queries = gaussian_tasks(shots, size)
    detector = fit_outlier_detector(support, labels, 5, normalize=False)
    for rate in (0.05, 0.1, 0.2):
        rejected = (detector.scores(queries) > detector.threshold(rate)[:, None]).double().mean(-1)
        interval = 1.96 * float(rejected.std()) / len(rejected) ** 0.5
        assert abs(float(rejected.mean()) - rate) < interval + 0.1 * rate


def test_examples_of_unknown_classes_have_higher_scores_than_known_ones():
    support, labels, queries = gaussian_tasks(5, 200, tasks=20)
    detector = fit_outlier_detector(support, labels, 5)
    unknown = 2.2 * torch.randn(20, 50, 200, generator=torch.Generator().manual_seed(9))
    assert detector.scores(queries).max() < detector.scores(unknown).min()


def test_directions_in_which_classes_vary_count_less():
    noise = torch.tensor([10.0, 0.1, 0.1, 0.1]) * torch.randn(1, 20, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(2).repeat(10)[None]
    detector = fit_outlier_detector(noise, labels, 2, normalize=False)
    along, across = detector.scores(torch.tensor([[[50.0, 0.0, 0.0, 0.0], [0.0, 50.0, 0.0, 0.0]]]))[0]
    assert across > 2 * along


@pytest.mark.parametrize("shots", [1, 4])
def test_a_task_has_the_same_scores_alone_and_in_a_batch_of_several_dimensions(shots):
    x = torch.randn(2, 3, 5 * shots, 16)
    labels, queries = labels_of([shots] * 5).expand(2, 3, -1), torch.randn(2, 3, 7, 16)
    batch = fit_outlier_detector(x, labels, 5)
    alone = fit_outlier_detector(x[1, 2][None], labels[1, 2][None], 5)
    torch.testing.assert_close(batch.scores(queries)[1, 2], alone.scores(queries[1, 2][None])[0])
    if shots > 1:
        assert batch.threshold(0.1).shape == (2, 3)
        torch.testing.assert_close(batch.threshold(0.1)[1, 2], alone.threshold(0.1)[0])


def test_with_one_example_per_class_the_score_is_the_distance_to_the_nearest_one():
    x, labels = random_task([1] * 5, 16)
    queries = random_task([3] * 5, 16, seed=1)[0]
    scores = fit_outlier_detector(x[None], labels[None], 5).scores(queries[None])[0]
    torch.testing.assert_close(scores, torch.cdist(queries, x).amin(-1) / 2**0.5)


@pytest.mark.parametrize("counts", [[1] * 5, [2, 1, 1]])
def test_a_threshold_without_enough_left_out_scores_raises_an_error(counts):
    x, labels = random_task(counts, 16)
    detector = fit_outlier_detector(x[None], labels[None], len(counts))
    with pytest.raises(InputError, match="needs two classes with at least two support examples, or one class with"):
        detector.threshold(0.05)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_a_rate_outside_0_to_1_raises_an_error(rate):
    x, labels = random_task([3] * 5, 16)
    with pytest.raises(InputError, match=f"rate is {rate}, but must be between 0 and 1"):
        fit_outlier_detector(x[None], labels[None], 5).threshold(rate)


def test_scores_do_not_depend_on_the_scale_of_features_unless_they_are_not_normalized():
    x, labels = random_task([3] * 5, 16)
    queries = random_task([3] * 5, 16, seed=1)[0]
    unit, large = (fit_outlier_detector(scale * x[None], labels[None], 5) for scale in (1, 1e6))
    torch.testing.assert_close(unit.scores(queries[None]), large.scores(1e6 * queries[None]))
    plain = fit_outlier_detector(1e6 * x[None], labels[None], 5, normalize=False)
    torch.testing.assert_close(plain.scores(1e6 * queries[None]), 1e6 * unit.scores(queries[None]))


def test_float32_features_far_from_zero_lose_little_accuracy():
    x, labels = random_task([3] * 5, 16)
    queries = random_task([3] * 5, 16, seed=1)[0]
    exact, shifted = (
        fit_outlier_detector((x + shift)[None].to(dtype), labels[None], 5, normalize=False).scores(
            (queries + shift)[None].to(dtype)
        )
        for shift, dtype in ((0, torch.float64), (30, torch.float32))
    )
    torch.testing.assert_close(shifted.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_scored_in_float32(dtype):
    x, labels = random_task([3] * 5, 16)
    detector = fit_outlier_detector(x[None].to(dtype), labels[None], 5)
    assert detector.scores(x[None].to(dtype)).dtype == detector.threshold(0.05).dtype == torch.float32


def test_equal_examples_of_a_class_have_score_0():
    x = torch.eye(3).repeat_interleave(2, 0)[None]
    detector = fit_outlier_detector(x, labels_of([2, 2, 2])[None], 3)
    assert detector.scores(x).tolist() == [[0.0] * 6]
    assert detector.threshold(0.05).tolist() == [0.0]


def test_a_detector_is_restored_from_its_tensors():
    x, labels = random_task([3] * 5, 16)
    for normalize in (True, False):
        detector = fit_outlier_detector(x[None], labels[None], 5, normalize=normalize)
        tensors = detector.tensors()
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
        restored = OutlierDetector.from_tensors({**tensors, "other": torch.zeros(1)})
        assert torch.equal(restored.scores(3 * x[None]), detector.scores(3 * x[None]))
        assert torch.equal(restored.threshold(0.1), detector.threshold(0.1))
        assert restored.normalize is normalize


def test_missing_tensors_and_wrong_shapes_raise_an_error():
    x, labels = random_task([3] * 5, 16)
    tensors = fit_outlier_detector(x[None], labels[None], 5).tensors()
    with pytest.raises(InputError, match="tensors has no 'axes', but an outlier detector needs centroids, axes"):
        OutlierDetector.from_tensors({name: value for name, value in tensors.items() if name != "axes"})
    for name in set(tensors) - {"centroids"}:
        with pytest.raises(InputError, match=f"^{name} is .*, which does not fit centroids, float64 of shape"):
            OutlierDetector.from_tensors({**tensors, name: torch.zeros(7, 7, 7, 7)})


def test_features_of_other_tasks_raise_an_error():
    x, labels = random_task([3] * 5, 16)
    detector = fit_outlier_detector(x[None], labels[None], 5)
    for queries in (torch.zeros(2, 4, 16), torch.zeros(1, 4, 15), torch.zeros(4, 16)):
        with pytest.raises(InputError, match="Pass features of the same tasks"):
            detector.scores(queries)


def test_invalid_support_sets_raise_an_error():
    x, labels = random_task([3] * 5, 16)
    with pytest.raises(InputError, match="class 5 of task 0 has no support example"):
        fit_outlier_detector(x[None], labels[None], 6)
    with pytest.raises(InputError, match="For a single task use"):
        fit_outlier_detector(x, labels, 5)
    x[0, 0] = torch.nan
    with pytest.raises(InputError, match="features contains NaN"):
        fit_outlier_detector(x[None], labels[None], 5)


def test_squared_distances_equal_those_of_cdist():
    x, y = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    torch.testing.assert_close(squared_distances(x, y), torch.cdist(x, y).square())
