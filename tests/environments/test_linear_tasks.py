from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from metabridge.environments import Environment, HardEasy, Landscape, LinearTasks, LogisticTasks, TaskGroup
from metabridge.environments.linear_tasks import random_covariance
from metabridge.errors import InputError
from metabridge.learners import PRESETS, meta_gradient, method, parameters, predict
from metabridge.models import mlp

HARD_EASY = HardEasy(rho_hard=0.2, rho_easy=1.0, R=2.0, r_hard=0.5, r_easy=0.1, dimension=3)
ENVIRONMENTS = [kind(HARD_EASY.landscape, shots=6, queries=4) for kind in (LinearTasks, LogisticTasks)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def full_covariance(dimension: int, seed: int) -> torch.Tensor:
    root = torch.randn(dimension, dimension, generator=seeded(seed), dtype=torch.float64)
    return root @ root.mT / dimension + 0.1 * torch.eye(dimension, dtype=torch.float64)


def random_landscape(dimension: int = 3, noise: float = 0.0) -> Landscape:
    groups = (
        TaskGroup(full_covariance(dimension, 1), 1.0, full_covariance(dimension, 2), noise, 0.3),
        TaskGroup(full_covariance(dimension, 3), -2.0, full_covariance(dimension, 4), noise / 2, 0.7),
    )
    return Landscape(groups, dimension)


def solutions_of(episodes):
    """Return w* of every task, computed from noise-free targets."""
    points = episodes.without_split()
    return torch.linalg.lstsq(points.support_x.double(), points.support_y.double()).solution.squeeze(-1)


def within_error(measured: torch.Tensor, expected: torch.Tensor, standard_error: torch.Tensor) -> bool:
    """Return whether all entries differ by at most 4.5 standard errors."""
    return bool(((measured - expected).abs() <= 4.5 * standard_error).all())


def check_covariance(points: torch.Tensor, expected: torch.Tensor) -> None:
    """Check the covariance of normal points (n, d); entry (i, j) has standard error √((Σ_ii Σ_jj + Σ_ij²)/n)."""
    standard_error = ((torch.outer(expected.diagonal(), expected.diagonal()) + expected**2) / len(points)).sqrt()
    assert within_error(points.T @ points / len(points), expected, standard_error)


def test_inputs_and_solutions_have_the_distribution_of_their_group():
    landscape = random_landscape()
    episodes = LinearTasks(landscape, 6, 4).sample(6000, seeded())
    w = solutions_of(episodes)
    for group in range(2):
        in_group = episodes.classes[:, 0] == group
        _, covariance, center, spread, _ = (field[group] for field in landscape.distribution)
        check_covariance(episodes.query_x[in_group].double().flatten(0, 1), covariance)
        assert within_error(w[in_group].mean(0), center, (spread.diagonal() / in_group.sum()).sqrt())
        check_covariance(w[in_group] - center, spread)


def test_groups_are_sampled_with_their_probabilities():
    frequency = (LinearTasks(random_landscape(), 1, 1).sample(10000, seeded()).classes == 0).double().mean()
    assert abs(float(frequency) - 0.3) < 4.5 * math.sqrt(0.3 * 0.7 / 10000)


def test_target_noise_has_the_variance_of_the_group():
    episodes = LinearTasks(random_landscape(noise=0.5), 20, 20).sample(2000, seeded()).without_split()
    x, y = episodes.support_x.double(), episodes.support_y.double()
    residuals = y - x @ torch.linalg.lstsq(x, y).solution
    for group, variance in enumerate((0.5, 0.25)):
        # 40 examples less the 3 parameters of the least-squares fit
        variances = residuals[episodes.classes[:, 0] == group].square().sum((1, 2)) / (40 - 3)
        assert abs(float(variances.mean()) - variance) < 4.5 * float(variances.std()) / math.sqrt(len(variances))


def test_support_and_query_set_of_a_task_have_the_same_solution():
    episodes = LinearTasks(random_landscape(), 6, 4).sample(50, seeded())
    torch.testing.assert_close(
        episodes.query_x.double() @ solutions_of(episodes)[..., None], episodes.query_y.double(), atol=1e-5, rtol=1e-4
    )


def test_hard_and_easy_tasks_are_groups_of_scaled_identities():
    distribution, identity = HARD_EASY.landscape.distribution, torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(distribution.covariance, torch.stack([0.2 * identity, identity]))
    torch.testing.assert_close(distribution.center, torch.tensor([[2.0] * 3, [0.0] * 3], dtype=torch.float64))
    torch.testing.assert_close(distribution.spread, torch.stack([0.5 * identity, 0.1 * identity]))


def test_finite_landscapes_have_fixed_tasks_with_several_episodes():
    finite = random_landscape().sample_finite(5, seeded())
    torch.testing.assert_close(finite.distribution.probability, torch.full((5,), 0.2, dtype=torch.float64))
    for seed in (1, 2):
        episodes = LinearTasks(finite, 6, 4).sample_every_group(3, seeded(seed))
        assert episodes.classes[:, 0].tolist() == [task for task in range(5) for _ in range(3)]
        torch.testing.assert_close(
            solutions_of(episodes), finite.distribution.center.repeat_interleave(3, 0), atol=1e-4, rtol=1e-4
        )


def test_episodes_of_a_task_share_its_solution():
    w = solutions_of(LinearTasks(random_landscape(), 6, 4).sample_every_group(2, seeded()))
    torch.testing.assert_close(w[0::2], w[1::2], atol=1e-4, rtol=1e-4)


def test_labels_are_one_with_the_logistic_probability():
    landscape = Landscape((TaskGroup(full_covariance(3, 1), torch.tensor([1.0, -2.0, 0.5])),), 3)
    episodes = LogisticTasks(landscape, 50, 50).sample(1000, seeded()).without_split()
    probability = (episodes.support_x @ torch.tensor([1.0, -2.0, 0.5])).sigmoid()
    for low in torch.arange(0, 1, 0.2):
        in_bin = (probability >= low) & (probability < low + 0.2)
        differences = (episodes.support_y[in_bin] - probability[in_bin]).double()
        standard_error = float((probability * (1 - probability))[in_bin].sum().sqrt()) / int(in_bin.sum())
        assert abs(float(differences.mean())) < 4.5 * standard_error


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: type(environment).__name__)
def test_the_same_seed_gives_the_same_tasks_and_another_seed_gives_different_tasks(environment: Environment):
    tasks, same_seed, other_seed = (environment.sample(8, seeded(seed)) for seed in (1, 1, 2))
    for tensor, same, different in zip(tasks.tensors(), same_seed.tensors(), other_seed.tensors()):
        assert torch.equal(tensor, same)
        assert not torch.equal(tensor, different)


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.trains])
def test_every_method_has_finite_gradients_and_predictions_of_the_right_shape_on_logistic_tasks(name):
    environment = ENVIRONMENTS[1]
    learner = method(name)
    options = {"activation": "linear", "bias": False} if name == "burer-monteiro" else {}
    net = mlp(3, environment.outputs, width=4, depth=1, **options)
    params = parameters(learner, net, classes=environment.classes)
    episodes = environment.sample(4, seeded())
    result = meta_gradient(learner, net, params, episodes)
    assert all(grad.isfinite().all() for grad in result.gradients.values())
    assert predict(learner, net, params, episodes).shape == (4, 4, 2)  # tasks, queries, outputs


@pytest.mark.parametrize("name", ["maml", "fo-maml", "anil", "reptile", "imaml", "r2d2", "nal", "burer-monteiro"])
def test_every_regression_method_has_finite_gradients_and_predictions_of_the_right_shape_on_linear_tasks(name):
    environment = ENVIRONMENTS[0]
    learner, net = method(name), mlp(3, environment.outputs, width=4, depth=1, activation="linear", bias=False)
    params = parameters(learner, net, classes=environment.classes)
    episodes = environment.sample(4, seeded())
    assert all(grad.isfinite().all() for grad in meta_gradient(learner, net, params, episodes).gradients.values())
    assert predict(learner, net, params, episodes).shape == (4, 4, 1)  # tasks, queries, outputs


SINGULAR = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
ASYMMETRIC = torch.tensor([[1.0, 0.5], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Landscape((), 2), "groups is empty"),
        (lambda: Landscape((TaskGroup(1.0),), 0), "dimension is 0, but must be"),
        (lambda: Landscape((TaskGroup(1.0, probability=0.4),) * 2, 2), "the probabilities of the groups add up to 0.8"),
        (lambda: Landscape((TaskGroup(1.0, probability=1.5),), 2), "probability of group 0 is 1.5, but must be"),
        (lambda: Landscape((TaskGroup(SINGULAR),), 2), "covariance of group 0 has the eigenvalue"),
        (lambda: Landscape((TaskGroup(0.0),), 2), "covariance of group 0 has the eigenvalue 0"),
        (lambda: Landscape((TaskGroup(ASYMMETRIC),), 2), "covariance of group 0 is not symmetric: it differs"),
        (lambda: Landscape((TaskGroup(torch.eye(3)),), 2), "covariance of group 0 is float32 of shape (3, 3), but"),
        (lambda: Landscape((TaskGroup(math.nan),), 2), "covariance of group 0 has infinite or NaN values"),
        (lambda: Landscape((TaskGroup(1.0, torch.ones(3)),), 2), "center of group 0 is float32 of shape (3,), but"),
        (lambda: Landscape((TaskGroup(1.0, 0.0, ASYMMETRIC),), 2), "spread of group 0 is not symmetric"),
        (lambda: Landscape((TaskGroup(1.0, 0.0, -1.0),), 2), "spread of group 0 has the eigenvalue -1, but"),
        (lambda: Landscape((TaskGroup(1.0, noise=-0.1),), 2), "noise of group 0 is -0.1, but must be a finite number"),
        (lambda: HardEasy(0.0, 1.0), "rho_hard is 0.0, but must be a positive number"),
        (lambda: HardEasy(0.1, 1.0, R=math.inf), "R is inf, but must be a finite number"),
        (lambda: HardEasy(0.1, 1.0, r_easy=-1.0), "r_easy is -1.0, but must be a finite number"),
        (lambda: LinearTasks(HARD_EASY.landscape, 0), "shots is 0, but must be"),
        (lambda: LogisticTasks(HARD_EASY.landscape, 1, 0), "queries is 0, but must be"),
        (
            lambda: LogisticTasks(replace(HARD_EASY, noise=0.1).landscape),
            "noise is 0.1, but must be 0, because the labels of LogisticTasks",
        ),
        (lambda: ENVIRONMENTS[0].sample(0, seeded()), "tasks is 0, but must be"),
        (lambda: ENVIRONMENTS[0].sample_every_group(0, seeded()), "episodes is 0, but must be"),
        (lambda: HARD_EASY.landscape.sample_finite(0, seeded()), "tasks is 0, but must be"),
    ],
)
def test_invalid_arguments_are_rejected(make, sentence):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(sentence)


def test_repr_shows_the_shape_of_tensors_and_not_their_values():
    group = TaskGroup(torch.eye(50), torch.ones(50))
    assert "covariance=float32 of shape (50, 50), center=float32 of shape (50,), spread=0.0" in repr(group)
    landscape = Landscape((group,), 50)
    assert repr(landscape) == "Landscape(1 groups, dimension=50)"
    assert repr(LinearTasks(landscape)) == f"LinearTasks(landscape={landscape!r}, shots=10, queries=10)"


def test_eigenvalues_of_random_covariances_have_mean_1_and_the_given_standard_deviation_of_their_logarithms():
    eigenvalues = torch.linalg.eigvalsh(random_covariance(400, 0.3, seeded()))
    assert float(eigenvalues.mean()) == pytest.approx(1)
    assert float(eigenvalues.log().std()) == pytest.approx(0.3, rel=0.1)
