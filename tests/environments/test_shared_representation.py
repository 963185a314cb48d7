from __future__ import annotations

import math

import pytest
import torch

from metabridge import fit, method
from metabridge.environments import SharedRepresentation
from metabridge.errors import InputError
from metabridge.learners import PRESETS, Engine, parameters
from metabridge.models import mlp


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fitted_regression_vectors(environment: SharedRepresentation, tasks: int) -> torch.Tensor:
    """Return the regression vectors of tasks without noise, computed from their support sets by least squares."""
    episodes = environment.sample(tasks, seeded())
    return torch.linalg.lstsq(episodes.support_x.double(), episodes.support_y.double()).solution[..., 0]


def test_task_parameters_lie_in_the_representation_with_the_given_mean_and_variances():
    environment = SharedRepresentation(8, (0.5, 2.0), mean=(1.0, -3.0), noise=0.0, shots=20, queries=1)
    fitted = fitted_regression_vectors(environment, 4000)
    basis = environment.representation
    assert torch.allclose(basis.mT @ basis, torch.eye(2, dtype=torch.float64))
    assert (fitted - fitted @ basis @ basis.mT).abs().max() < 1e-4
    weights = fitted @ basis
    # Means, variances and the correlation may differ by about four standard errors.
    for index, (mean, variance) in enumerate(zip(environment.mean, environment.variances)):
        assert weights[:, index].mean().item() == pytest.approx(mean, abs=4 * math.sqrt(variance / 4000))
        assert weights[:, index].var().item() == pytest.approx(variance, rel=4 * math.sqrt(2 / 4000))
    assert torch.corrcoef(weights.mT)[0, 1].abs() < 0.07


def test_target_noise_has_the_given_variance():
    environment = SharedRepresentation(4, (1.0,), noise=2.5, pool=2000)
    tasks = environment.tasks.without_split()
    noise = tasks.support_y[..., 0] - (tasks.support_x @ environment.task_parameters[..., None])[..., 0]
    assert noise.var().item() == pytest.approx(2.5, rel=4 * math.sqrt(2 / noise.numel()))
    assert tasks.support_x.var().item() == pytest.approx(1, rel=0.02)


def test_the_default_variances_are_those_of_the_paper():
    environment = SharedRepresentation()
    assert torch.tensor(environment.variances).norm().item() == pytest.approx(math.sqrt(5))
    assert [value / environment.variances[0] for value in environment.variances] == pytest.approx([1, 2, 3, 4, 5])


def test_tasks_of_a_pool_are_fixed_and_have_class_indices():
    environment = SharedRepresentation(6, (1.0, 1.0), pool=10, seed=3)
    episodes = environment.sample(4, seeded())
    assert len(set(episodes.classes.flatten().tolist())) == 4
    for index, pool_index in enumerate(episodes.classes.flatten()):
        assert torch.equal(episodes.support_x[index], environment.tasks.support_x[pool_index])
        assert torch.equal(episodes.query_y[index], environment.tasks.query_y[pool_index])
    same_seed = SharedRepresentation(6, (1.0, 1.0), pool=10, seed=3)
    assert torch.equal(same_seed.tasks.support_y, environment.tasks.support_y)


def test_the_same_seed_gives_the_same_tasks_and_another_seed_gives_different_tasks():
    environment = SharedRepresentation(dimension=6, variances=(1.0,))
    tasks, same_seed, other_seed = (environment.sample(3, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(tasks.support_y, same_seed.support_y)
    assert not torch.equal(tasks.support_y, other_seed.support_y)
    other_environment = SharedRepresentation(dimension=6, variances=(1.0,), seed=1)
    assert not torch.equal(environment.representation, other_environment.representation)


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"metaoptnet", "rfs", "frozen"}))  # two need labels
def test_every_regression_method_has_a_finite_loss_on_the_tasks(name):
    environment = SharedRepresentation(6, (1.0, 1.0), pool=8)
    net = mlp(6, 1, width=5, depth=1, activation="linear", bias=False)
    learner = method(name)
    gradient = Engine(learner, net, mode="loop")(
        parameters(learner, net, classes=environment.classes), environment.sample(environment.pool, seeded())
    )
    assert gradient.loss.isfinite()


def test_training_on_a_pool_lowers_the_loss():
    environment = SharedRepresentation(6, (4.0,), noise=0.01, pool=40)
    net = mlp(6, 1, width=6, depth=1, activation="linear", bias=False)
    learner = method("fo-anil", steps=1, lr=0.1)
    run = fit(net, learner, environment, iterations=80, batch_size=20, lr=0.05, mode="vectorized", progress=False)
    assert run.curve[-1].loss < 0.7 * run.curve[0].loss


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: SharedRepresentation(variances=(1.0, 0.0)),
            "variances is (1.0, 0.0), but all variances must be positive",
        ),
        (lambda: SharedRepresentation(3, (1.0,) * 4), "variances has 4 entries, but dimension is 3."),
        (lambda: SharedRepresentation(variances=()), "variances has 0 entries"),
        (lambda: SharedRepresentation(noise=-1.0), "noise is -1.0, but must be a finite number"),
        (lambda: SharedRepresentation(mean=(1.0,)), "mean has 1 entries, but variances has 5."),
        (
            lambda: SharedRepresentation(variances=(1.0,), mean=(math.nan,)),
            "mean is (nan,), but all entries must be finite",
        ),
        (lambda: SharedRepresentation(shots=0), "shots is 0, but must be"),
        (lambda: SharedRepresentation(pool=0), "pool is 0, but must be"),
        (lambda: SharedRepresentation(pool=3).sample(4, seeded()), "tasks is 4, but the pool has 3 tasks."),
        (lambda: SharedRepresentation().tasks, "pool is None, so there is no fixed set of tasks."),
        (lambda: SharedRepresentation().task_parameters, "pool is None, so there is no fixed set of tasks."),
    ],
)
def test_invalid_arguments_are_rejected(make, sentence):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(sentence)
