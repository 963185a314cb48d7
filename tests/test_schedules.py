from __future__ import annotations

import random

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, ReduceLROnPlateau

from metabridge import InputError, method
from metabridge.environments import Sinusoid
from metabridge.models import mlp
from metabridge.schedules import SCHEDULES, Constant, Cosine, Plateau, Schedule, Step, schedule
from metabridge.training import Score, Trainer
from metabridge.training.config import TrainingConfig

ITERATIONS = 40  # the default Step drops the rate at 0.6 · 40 = 24 and 0.8 · 40 = 32 iterations


def optimizer() -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(scheduler: LRScheduler) -> list[float]:
    learning_rates = []
    for _ in range(ITERATIONS):
        learning_rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return learning_rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Constant(), lambda o: MultiStepLR(o, [])),
        (Step(), lambda o: MultiStepLR(o, [24, 32], gamma=0.1)),
        (Step(at=(0.25, 0.5, 0.75), drop=0.5), lambda o: MultiStepLR(o, [10, 20, 30], gamma=0.5)),
        (Cosine(), lambda o: CosineAnnealingLR(o, T_max=ITERATIONS)),
    ],
)
def test_factors_equal_those_of_pytorchs_schedulers(ours, theirs):
    factors = [ours.factor(iteration / ITERATIONS, []) for iteration in range(ITERATIONS)]
    assert factors == pytest.approx(rates(theirs(optimizer())), abs=1e-9)


def make_trainer(schedule: Schedule, **options) -> Trainer:
    """Return a trainer with a small learning rate of 1e-6. It validates only if there are options."""
    settings = TrainingConfig(iterations=ITERATIONS, schedule=schedule, lr=1e-6, validate_tasks=2, **options)
    validate = Sinusoid() if options else None
    return Trainer(
        mlp(1, 1, width=2), method("nal"), Sinusoid(shots=1, queries=1), settings, validate=validate, mode="loop"
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Step(), lambda o: MultiStepLR(o, [24, 32], gamma=0.1)),
        (Cosine(), lambda o: CosineAnnealingLR(o, T_max=ITERATIONS)),
    ],
)
def test_every_training_step_uses_the_learning_rate_of_pytorchs_scheduler(ours, theirs):
    trainer, learning_rates = make_trainer(ours), []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (learning_rates.append(trainer.optimizer.param_groups[0]["lr"]), step())
    for _ in range(ITERATIONS):
        trainer.step()
    assert [1e6 * rate for rate in learning_rates] == pytest.approx(rates(theirs(optimizer())), abs=1e-9)


def test_a_plateau_changes_the_rate_of_the_step_after_a_validation(monkeypatch):
    """The scores fall, so that each validation after the first drops the rate."""
    means = iter(range(100, 0, -1))
    monkeypatch.setattr(
        "metabridge.training.trainer.evaluate", lambda *_, **__: Score(next(means), 0.0, 2, torch.empty(0), "accuracy")
    )
    trainer, learning_rates = make_trainer(Plateau(drop=0.5, patience=0), validate_every=3), []
    for _ in range(10):
        trainer.step()
        learning_rates.append(1e6 * trainer.optimizer.param_groups[0]["lr"])
    assert learning_rates == pytest.approx([1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25])


def test_a_warm_up_rises_linearly_and_then_falls_like_the_cosine():
    cosine = Cosine(warmup=0.2)
    assert [cosine.factor(progress, []) for progress in (0.0, 0.05, 0.1, 0.2)] == pytest.approx([0, 0.25, 0.5, 1])
    assert cosine.factor(0.2 + 0.8 * 0.3, []) == pytest.approx(Cosine().factor(0.3, []))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("patience", "drop"), [(0, 0.5), (2, 0.1), (4, 0.3)])
def test_a_plateau_drops_the_rate_when_pytorchs_does(patience, drop, seed):
    rng = random.Random(seed)
    scores = [rng.random() * index**0.3 for index in range(60)]
    improved = [score > max(scores[:index], default=-1) for index, score in enumerate(scores)]
    sgd = optimizer()
    theirs = ReduceLROnPlateau(sgd, mode="max", factor=drop, patience=patience, threshold=0, eps=0)
    for count, score in enumerate(scores, start=1):
        theirs.step(score)
        rate = sgd.param_groups[0]["lr"]
        assert Plateau(drop, patience).factor(0.5, improved[:count]) == pytest.approx(rate, rel=1e-9)
    assert rate < 1  # there was at least one plateau


@pytest.mark.parametrize("warmup", [-0.1, 1.0])
def test_a_warm_up_that_leaves_no_training_is_refused(warmup):
    with pytest.raises(InputError, match=f"warmup is {warmup}"):
        Cosine(warmup)


def test_schedule_returns_a_schedule_by_name_and_rejects_unknown_names():
    assert {name: type(schedule(name)) for name in SCHEDULES} == SCHEDULES
    with pytest.raises(InputError, match="schedule is 'linear', but must be one of constant, step, cosine, plateau"):
        schedule("linear")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Step(at=(60, 80)), r"at is \(60, 80\), but must be a tuple of fractions"),
        (lambda: Step(at=0.5), "at is 0.5, but must be a tuple of fractions"),
        (lambda: Step(drop=0), "drop is 0, but must be a positive number"),
        (lambda: Plateau(patience=-1), "patience is -1"),
        (lambda: TrainingConfig(schedule="cosine"), "schedule is 'cosine', but must be a schedule such as"),
        (lambda: TrainingConfig(augment=True), "augment is True, but must be an Augment"),
    ],
)
def test_invalid_schedules_raise_an_input_error(make, message):
    with pytest.raises(InputError, match=message):
        make()
