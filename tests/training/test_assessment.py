from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from metabridge import InputError, evaluate, method, parameters
from metabridge.environments import LabeledImages, Sinusoid
from metabridge.heads import fit_outlier_detector
from metabridge.models import mlp
from metabridge.training import Model, TestTimeAugmentation
from metabridge.training.assessment import (
    Assessment,
    accuracy_by_coverage,
    assess,
    assess_open_set,
    auroc,
    feature_table,
    open_set_tasks,
)
from metabridge.training.evaluation import predictions

CLASSES = ("ash", "birch", "cedar", "elm", "fir", "oak")
QUERIES = 12  # queries per task: 4 for each of 3 classes


@pytest.fixture(scope="module")
def model() -> Model:
    learner, net = method("anil", steps=8, lr=1.0), mlp(16, 3, width=24)
    return Model(learner, net, parameters(learner, net))


@pytest.fixture(scope="module")
def environment():
    """Tasks of all classes except fir. The images of oak are noise, so its accuracy must be the lowest."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(6).repeat(20)
    centers = torch.randint(60, 195, (6, 1, 4, 4), generator=generator)
    images = centers[labels] + torch.randint(-55, 56, (120, 1, 4, 4), generator=generator)
    noise = torch.randint(0, 256, (120, 1, 4, 4), generator=generator)
    images = torch.where((labels == 5)[:, None, None, None], noise, images)
    data = LabeledImages(
        images.to(torch.uint8),
        labels,
        CLASSES,
        torch.zeros(6, dtype=torch.int64),
        ("trees",),
        {"test": torch.tensor([5, 1, 2, 3, 0]), "train": torch.tensor([4])},
    )
    return data.tasks("test", ways=3, shots=2, queries=4)


def test_the_score_equals_the_score_of_evaluate_on_the_same_tasks(model, environment):
    assessment, score = (function(model, environment, tasks=50, seed=7) for function in (assess, evaluate))
    assert torch.equal(assessment.score.values, score.values)
    assert (assessment.score.mean, assessment.score.ci95) == (score.mean, score.ci95)


def test_class_accuracies_and_calibration_equal_those_computed_by_a_loop(model, environment):
    assessment = assess(model, environment, tasks=50, seed=7)
    correct_by_class: dict[str, list[bool]] = {}
    confidences, all_is_correct = [], []
    for outputs, episodes in predictions(model, environment, tasks=50, seed=7):
        logits = outputs.double().numpy()
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        for task in range(len(episodes)):
            for query, label in enumerate(episodes.query_y[task].tolist()):
                is_correct = int(logits[task, query].argmax()) == label
                class_name = environment.class_names[int(episodes.classes[task, label])]
                correct_by_class.setdefault(class_name, []).append(is_correct)
                confidences.append(probabilities[task, query].max())
                all_is_correct.append(is_correct)
    accuracies = {name: np.mean(correct) for name, correct in correct_by_class.items()}
    assert assessment.classes == pytest.approx(accuracies)
    assert set(assessment.classes) == set(CLASSES) - {"fir"}
    num_correct = sum(len(correct) * assessment.classes[name] for name, correct in correct_by_class.items())
    assert num_correct / len(all_is_correct) == pytest.approx(assessment.score.mean)
    assert assessment.worst_class == ("oak", assessment.classes["oak"])
    assert assessment.classes["oak"] == min(assessment.classes.values())
    bins = np.minimum((np.array(confidences) * 10).astype(int), 9)
    expected_error = 0.0
    for mask in (bins == bin_index for bin_index in range(10)):
        if mask.any():
            gap = np.mean(np.array(confidences)[mask]) - np.mean(np.array(all_is_correct)[mask])
            expected_error += mask.mean() * abs(gap)
    assert assessment.calibration_error == pytest.approx(expected_error, abs=1e-6)
    assert sum(fraction for _, _, fraction in assessment.calibration) == pytest.approx(1)


def test_the_calibration_error_of_a_small_example_is_correct():
    assessment = Assessment(None, {"a": 0.5, "b": 0.25}, ((0.6, 0.5, 0.25), (0.95, 1.0, 0.75)), {}, 0.0)
    assert assessment.calibration_error == pytest.approx(0.25 * 0.1 + 0.75 * 0.05)
    assert assessment.worst_class == ("b", 0.25)


class DivergingOnQueries:
    """A model whose outputs are not finite for the first `diverged_queries` queries of every task."""

    def __init__(self, model: Model, diverged_queries: int):
        self.model, self.device, self.diverged_queries = model, model.device, diverged_queries

    def predict(self, episodes):
        outputs = self.model.predict(episodes).clone()
        outputs[:, : self.diverged_queries // 2] = float("nan")
        outputs[:, self.diverged_queries // 2 : self.diverged_queries] = float("inf")
        return outputs


class DivergingOnFirstTask(DivergingOnQueries):
    """The same, but the outputs are finite for all tasks except the first of every batch of 16 tasks."""

    def predict(self, episodes):
        return torch.cat([super().predict(episodes)[:1], self.model.predict(episodes)[1:]])


def test_queries_of_a_diverged_task_count_as_wrong_and_are_not_part_of_the_calibration(model, environment):
    expected, assessment = (
        assess(model, environment, tasks=16),
        assess(DivergingOnFirstTask(model, QUERIES), environment, tasks=16),
    )
    assert assessment.score.diverged == 1
    assert assessment.score.values.tolist() == [0.0, *expected.score.values.tolist()[1:]]
    _, episodes = next(iter(predictions(model, environment, tasks=16)))
    first_task_classes = [environment.class_names[int(episodes.classes[0, label])] for label in episodes.query_y[0]]
    assert all(assessment.classes[name] <= expected.classes[name] for name in first_task_classes)
    assert {name: value for name, value in expected.classes.items() if name not in first_task_classes} == {
        name: value for name, value in assessment.classes.items() if name not in first_task_classes
    }
    assert sum(fraction for _, _, fraction in assessment.calibration) == pytest.approx(1)
    partly_diverged = assess(DivergingOnFirstTask(model, 4), environment, tasks=16)
    assert partly_diverged.score.diverged == 1
    assert partly_diverged.score.values[0] <= (QUERIES - 4) / QUERIES


def test_a_model_that_diverges_on_every_task_raises_an_error(model, environment):
    with pytest.raises(InputError, match="adaptation diverged on all 16 tasks"):
        assess(DivergingOnQueries(model, QUERIES), environment, tasks=16)


def test_the_accuracy_on_the_most_confident_queries_equals_that_computed_by_a_loop(model, environment):
    assessment = assess(model, environment, tasks=50, seed=7)
    accuracies = []  # for each task, the accuracies on its most confident 1, 2, … queries
    for outputs, episodes in predictions(model, environment, tasks=50, seed=7):
        for task in range(len(episodes)):
            confidences = outputs[task].softmax(-1).amax(-1).tolist()
            order = sorted(range(QUERIES), key=lambda query: -confidences[query])
            correct = [int(outputs[task, query].argmax()) == int(episodes.query_y[task, query]) for query in order]
            accuracies.append([np.mean(correct[:count]) for count in range(1, QUERIES + 1)])
    by_count = np.mean(accuracies, 0)
    # 50, 80 and 90 % of 12 queries, rounded up
    expected = {0.5: by_count[6 - 1], 0.8: by_count[10 - 1], 0.9: by_count[11 - 1]}
    assert assessment.accuracy_at_coverage == pytest.approx(expected)
    assert assessment.risk_coverage_area == pytest.approx(1 - by_count.mean())
    assert by_count[-1] == pytest.approx(assessment.score.mean)


def test_queries_of_a_diverged_task_are_the_least_confident():
    outputs = torch.tensor([[[0.0, torch.nan], [1.0, 0.0], [torch.inf, 0.0], [0.0, 2.0]]])
    accuracies = accuracy_by_coverage(outputs, torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
    assert accuracies[0].tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_the_auroc_equals_that_of_scikit_learn():
    from sklearn.metrics import roc_auc_score

    known = torch.randint(0, 8, (6, 30), generator=torch.Generator().manual_seed(0)).float()  # with many ties
    unknown = torch.randint(2, 10, (6, 20), generator=torch.Generator().manual_seed(1)).float()
    is_unknown = [0] * 30 + [1] * 20
    expected = [roc_auc_score(is_unknown, torch.cat(scores)) for scores in zip(known, unknown)]
    assert auroc(known, unknown).tolist() == pytest.approx(expected)


def test_known_queries_are_those_of_evaluate_and_unknown_images_have_other_classes(model, environment):
    table = feature_table(model, environment)
    pairs = zip(open_set_tasks(table, environment, tasks=50, seed=7), predictions(model, environment, tasks=50, seed=7))
    image_features = table.features_of(environment.image_indices)
    image_labels = environment.data.labels[environment.image_indices]
    for (episodes, unknown), (_, expected) in pairs:
        assert torch.equal(episodes.query_x, expected.query_x)
        assert torch.equal(episodes.support_x, expected.support_x)
        assert unknown.shape == episodes.query_x.shape
        for features, classes in zip(unknown, episodes.classes):
            is_image = (features[:, None] == image_features).all(-1)
            assert is_image.any(1).all()
            labels = image_labels[is_image.float().argmax(1)]
            assert not set(labels.tolist()) & set(environment.data.splits["test"][classes].tolist())


def test_open_set_results_equal_those_computed_by_a_loop(model, environment):
    from sklearn.metrics import roc_auc_score

    result = assess_open_set(model, environment, tasks=40, seed=7, rate=0.1)
    aurocs, rejected_known, rejected_unknown = [], [], []
    for episodes, unknown in open_set_tasks(feature_table(model, environment), environment, tasks=40, seed=7):
        for task in range(len(episodes)):
            task_slice = slice(task, task + 1)
            detector = fit_outlier_detector(episodes.support_x[task_slice], episodes.support_y[task_slice], 3)
            known_scores = detector.scores(episodes.query_x[task_slice])[0].tolist()
            unknown_scores = detector.scores(unknown[task_slice])[0].tolist()
            is_unknown = [0] * len(known_scores) + [1] * len(unknown_scores)
            aurocs.append(roc_auc_score(is_unknown, known_scores + unknown_scores))
            threshold = float(detector.threshold(0.1))
            rejected_known.append(np.mean([score > threshold for score in known_scores]))
            rejected_unknown.append(np.mean([score > threshold for score in unknown_scores]))
    assert result.rate == 0.1
    assert result.auroc.values.tolist() == pytest.approx(aurocs, abs=0.02)  # batches may round scores differently
    assert result.auroc.mean == pytest.approx(np.mean(aurocs), abs=1e-3)
    assert result.rejected_known.mean == pytest.approx(np.mean(rejected_known), abs=0.01)
    assert result.rejected_unknown.mean == pytest.approx(np.mean(rejected_unknown), abs=0.01)


def test_one_shot_tasks_have_an_auroc_but_no_rejections(model, environment):
    result = assess_open_set(model, replace(environment, shots=1), tasks=4)
    assert result.auroc.tasks == 4
    assert result.rejected_known is result.rejected_unknown is None


def test_the_detector_is_fitted_without_augmented_copies(model, environment):
    plain, copies = (
        assess_open_set(model, environment, tasks=10, augmentation=TestTimeAugmentation(copies=count))
        for count in (0, 2)
    )
    assert torch.equal(plain.auroc.values, copies.auroc.values)
    assert torch.equal(plain.rejected_known.values, copies.rejected_known.values)


def test_the_same_seed_gives_the_same_unknown_images_and_another_seed_others(model, environment):
    table = feature_table(model, environment)
    first, again, other = (next(open_set_tasks(table, environment, tasks=4, seed=seed))[1] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_table_of_features_saves_computing_them_again(model, environment):
    table = feature_table(model, environment)
    without_features = replace(model, params={**model.params, "features.1.weight": 0 * model.params["head.weight"]})
    for function in (assess, assess_open_set):
        assert function(without_features, environment, tasks=4, table=table)


def test_models_whose_features_depend_on_the_task_have_no_outlier_scores(environment):
    learner, net = method("maml"), mlp(16, 3)
    with pytest.raises(InputError, match="outlier scores need features that do not depend on the task"):
        assess_open_set(Model(learner, net, parameters(learner, net)), environment, tasks=4)


def test_tasks_with_all_classes_of_the_split_leave_no_unknown_class(model, environment):
    with pytest.raises(InputError, match="ways is 5, but split 'test' has 5 classes, so no class is unknown"):
        assess_open_set(model, replace(environment, ways=5), tasks=4)


@pytest.mark.parametrize("function", [assess, assess_open_set])
def test_a_single_task_and_regression_tasks_raise_an_error(function, model, environment):
    with pytest.raises(InputError, match="tasks is 1, but a confidence interval needs at least 2"):
        function(model, environment, tasks=1)
    with pytest.raises(InputError, match="environment is Sinusoid, but assess needs tasks of labeled images"):
        function(model, Sinusoid())
