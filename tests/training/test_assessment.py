from __future__ import annotations

import numpy as np
import pytest
import torch

from metabridge import InputError, evaluate, method, parameters
from metabridge.environments import LabeledImages, Sinusoid
from metabridge.models import mlp
from metabridge.training import Model
from metabridge.training.assessment import Assessment, assess
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
    assessment = Assessment(None, {"a": 0.5, "b": 0.25}, ((0.6, 0.5, 0.25), (0.95, 1.0, 0.75)))
    assert assessment.calibration_error == pytest.approx(0.25 * 0.1 + 0.75 * 0.05)
    assert assessment.worst_class == ("b", 0.25)


def test_regression_tasks_raise_an_error(model):
    with pytest.raises(InputError, match="environment is Sinusoid, but assess needs tasks of labeled images"):
        assess(model, Sinusoid())


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
