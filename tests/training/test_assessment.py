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


@pytest.fixture(scope="module")
def model() -> Model:
    chosen, net = method("anil", steps=8, lr=1.0), mlp(16, 3, width=24)
    return Model(chosen, net, parameters(chosen, net))


@pytest.fixture(scope="module")
def tasks():
    """Tasks of five classes. The images of oak are noise, so its accuracy must be the lowest."""
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


def test_the_score_equals_the_score_of_evaluate_on_the_same_tasks(model, tasks):
    assessment, score = (function(model, tasks, tasks=50, seed=7) for function in (assess, evaluate))
    assert torch.equal(assessment.score.values, score.values)
    assert (assessment.score.mean, assessment.score.ci95) == (score.mean, score.ci95)


def test_class_accuracies_and_calibration_equal_counts_by_a_loop(model, tasks):
    assessment = assess(model, tasks, tasks=50, seed=7)
    hits: dict[str, list[bool]] = {}
    confidences, is_correct = [], []
    for outputs, episodes in predictions(model, tasks, tasks=50, seed=7):
        logits = outputs.double().numpy()
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        for task in range(len(episodes)):
            for query, label in enumerate(episodes.query_y[task].tolist()):
                correct = int(logits[task, query].argmax()) == label
                hits.setdefault(tasks.class_names[int(episodes.classes[task, label])], []).append(correct)
                confidences.append(probabilities[task, query].max())
                is_correct.append(correct)
    assert assessment.classes == pytest.approx({name: np.mean(correct) for name, correct in hits.items()})
    assert set(assessment.classes) == set(CLASSES) - {"fir"}
    weighted = sum(len(correct) * assessment.classes[name] for name, correct in hits.items()) / sum(
        map(len, hits.values())
    )
    assert weighted == pytest.approx(assessment.score.mean)
    assert assessment.worst == ("oak", assessment.classes["oak"])
    assert assessment.classes["oak"] == min(assessment.classes.values())
    bins = np.minimum((np.array(confidences) * 10).astype(int), 9)
    error = 0.0
    for mask in (bins == number for number in range(10)):
        if mask.any():
            gap = np.mean(np.array(confidences)[mask]) - np.mean(np.array(is_correct)[mask])
            error += mask.mean() * abs(gap)
    assert assessment.calibration_error == pytest.approx(error, abs=1e-6)
    assert sum(share for _, _, share in assessment.calibration) == pytest.approx(1)


def test_the_calibration_error_of_a_small_example_is_correct():
    assessment = Assessment(None, {"a": 0.5, "b": 0.25}, ((0.6, 0.5, 0.25), (0.95, 1.0, 0.75)))
    assert assessment.calibration_error == pytest.approx(0.25 * 0.1 + 0.75 * 0.05)
    assert assessment.worst == ("b", 0.25)


def test_tasks_without_classes_raise_an_error(model):
    with pytest.raises(InputError, match="environment is Sinusoid, but assess needs tasks of labeled images"):
        assess(model, Sinusoid())


class PartlyDiverging:
    """A model with outputs that are not finite for the first `bad` queries of every task."""

    def __init__(self, model: Model, bad: int):
        self.model, self.device, self.bad = model, model.device, bad

    def predict(self, episodes):
        outputs = self.model.predict(episodes).clone()
        outputs[:, : self.bad // 2], outputs[:, self.bad // 2 : self.bad] = float("nan"), float("inf")
        return outputs


class OneDiverging(PartlyDiverging):
    """The same, but only for the first task of every block."""

    def predict(self, episodes):
        return torch.cat([super().predict(episodes)[:1], self.model.predict(episodes)[1:]])


def test_queries_of_a_diverged_task_count_as_wrong_and_are_not_calibrated(model, tasks):
    expected, assessment = assess(model, tasks, tasks=16), assess(OneDiverging(model, 12), tasks, tasks=16)
    assert assessment.score.diverged == 1
    assert assessment.score.values.tolist() == [0.0, *expected.score.values.tolist()[1:]]
    _, episodes = next(iter(predictions(model, tasks, tasks=16)))
    names = [tasks.class_names[int(episodes.classes[0, label])] for label in episodes.query_y[0]]
    assert all(assessment.classes[name] <= expected.classes[name] for name in names)
    assert {name: value for name, value in expected.classes.items() if name not in names} == {
        name: value for name, value in assessment.classes.items() if name not in names
    }
    assert sum(share for _, _, share in assessment.calibration) == pytest.approx(1)
    alone = assess(OneDiverging(model, 4), tasks, tasks=16)
    assert alone.score.diverged == 1
    assert alone.score.values[0] <= 8 / 12


def test_a_model_that_diverges_on_every_task_raises_an_error(model, tasks):
    with pytest.raises(InputError, match="adaptation diverged on all 16 tasks"):
        assess(PartlyDiverging(model, 12), tasks, tasks=16)
