from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from metabridge.environments import LabeledImages
from metabridge.errors import InputError
from metabridge.heads import SVM, Head, LogisticRegression, NearestCentroid, create_head
from metabridge.inference.calibration import choose_penalty, fit_temperature, head_penalty, with_penalty
from metabridge.inference.left_out import LeftOut, predict_left_out
from metabridge.learners import method


def simulate(temperature, n, seed=0, classes=4):
    """Return outputs whose softmax at this temperature gives the true probabilities of the labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator).double()
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return LeftOut(torch.arange(n), logits * temperature, labels)


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 7.0])
def test_the_temperature_of_simulated_outputs_is_recovered(temperature, calibrated):
    fitted = fit_temperature(simulate(temperature, 20_000), calibrated=calibrated)
    assert fitted == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize(("calibrated", "scale"), [(True, 1.0), (False, 2.0)])
def test_the_temperature_minimizes_the_log_loss_plus_its_prior(calibrated, scale):
    left_out = simulate(0.3, 12, seed=1)
    outputs, labels = left_out.outputs.numpy(), left_out.labels.numpy()

    def objective(temperature):
        losses = -log_softmax(outputs / temperature, axis=1)[np.arange(12), labels]
        return losses.sum() + math.log(temperature) ** 2 / (2 * scale**2)

    fitted = fit_temperature(left_out, calibrated=calibrated)
    assert objective(fitted) <= min(map(objective, np.geomspace(0.01, 100, 5001))) + 1e-9


def test_few_images_keep_the_temperature_near_one():
    outputs = torch.tensor([[0.1, 0.0], [0.0, 0.1]]).double()
    few = LeftOut(torch.arange(2), outputs, torch.tensor([0, 1]))
    many = LeftOut(torch.arange(200), outputs.repeat(100, 1), torch.tensor([0, 1]).repeat(100))
    assert 0.5 < fit_temperature(few, calibrated=True) < 1
    assert fit_temperature(many, calibrated=True) < 0.05
    nothing = LeftOut(torch.arange(0), outputs[:0], torch.arange(0))
    assert fit_temperature(nothing, calibrated=False) == 1
    diverged = LeftOut(torch.arange(2), outputs * math.nan, torch.tensor([0, 1]))
    assert fit_temperature(diverged, calibrated=True) == 1


@pytest.mark.parametrize("name", Head.registry)
def test_the_penalty_of_a_head_can_be_read_and_changed(name):
    head = create_head(name)
    assert head_penalty(head) == head.default_penalty
    if head.default_penalty is None:
        with pytest.raises(InputError, match=r"penalty is 0\.5, but the head 'centroid' has no penalty"):
            with_penalty(head, 0.5)
    else:
        assert with_penalty(head, 0.5) == create_head(name, 0.5)
    assert with_penalty(SVM(loss="hinge"), 4.0) == SVM(C=0.25, loss="hinge")
    with pytest.raises(InputError, match="penalty is -1"):
        with_penalty(LogisticRegression(), -1)


def chosen_penalty(head, features, labels):
    chosen = choose_penalty(replace(method("frozen"), test_solver=head), {}, features, labels)
    return head_penalty(chosen.test_solver)


def test_another_penalty_is_chosen_only_if_left_out_images_support_it():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5).repeat_interleave(30)
    noise = torch.randn(150, 20, generator=generator)
    separable = torch.eye(20)[labels] + 0.02 * noise
    assert chosen_penalty(LogisticRegression(0.33), noise, labels) == 0.33  # there is nothing to learn
    assert chosen_penalty(LogisticRegression(1e-4), 0.3 * separable + noise, labels) == pytest.approx(1e-3)
    one_per_class = torch.arange(5)
    assert chosen_penalty(LogisticRegression(0.33), separable[::30], one_per_class) == 0.33


@pytest.mark.parametrize("head", [SVM(), NearestCentroid(), create_head("ridge")])
def test_the_penalty_of_a_head_without_probabilities_is_not_changed(head):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5).repeat_interleave(30)
    features = torch.randn(150, 20, generator=generator) + 0.3 * torch.eye(20)[labels]
    assert chosen_penalty(head, features, labels) == head_penalty(head)


def calibration_error(probabilities, labels):
    """Return the expected calibration error with 10 bins of confidence."""
    confidence, predicted = probabilities.max(1)
    correct = (predicted == labels).double()
    bins = (10 * confidence).long().clamp_max(9)
    return sum(
        float((confidence[bins == index].mean() - correct[bins == index].mean()).abs() * (bins == index).sum())
        for index in bins.unique()
    ) / len(labels)


@pytest.mark.parametrize("name", Head.registry)
def test_temperatures_reduce_the_calibration_error_on_glyphs(name, glyphs: LabeledImages):
    tasks = glyphs.tasks("test", ways=5, shots=5).sample(10, torch.Generator().manual_seed(0))
    head = create_head(name)
    learner = replace(method("frozen"), test_solver=head)
    before, after, all_labels = [], [], []
    for task in range(10):
        support, query = tasks.support_x[task].flatten(1), tasks.query_x[task].flatten(1)
        left_out = predict_left_out(learner, {}, support, tasks.support_y[task])
        temperature = fit_temperature(left_out, calibrated=head.calibrated)
        outputs = head.fit(support[None], tasks.support_y[task][None], 5).scores(query[None])[0].double()
        before.append(outputs.softmax(1))
        after.append((outputs / temperature).softmax(1))
        all_labels.append(tasks.query_y[task])
    labels = torch.cat(all_labels)
    assert calibration_error(torch.cat(after), labels) < 0.5 * calibration_error(torch.cat(before), labels)
