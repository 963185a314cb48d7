import math

import pytest
import torch

from metabridge.environments import Environment, Quadratic, Sinusoid
from metabridge.errors import InputError

ENVIRONMENTS = [Sinusoid(), Quadratic()]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fit_sinusoid(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the amplitude, phase and largest error of the least-squares fit a sin x + b cos x."""
    basis = torch.cat([x.sin(), x.cos()], dim=-1).double()
    coefficients = torch.linalg.lstsq(basis, y.double()).solution
    error = (basis @ coefficients - y.double()).abs().amax()
    return coefficients.norm(dim=1)[:, 0], torch.atan2(coefficients[:, 1], coefficients[:, 0])[:, 0], error


def test_support_and_query_examples_of_a_task_are_on_the_same_sinusoid():
    tasks = Sinusoid().sample(50, seeded()).without_split()
    *_, error = fit_sinusoid(tasks.support_x, tasks.support_y)
    assert error < 1e-4


def test_amplitude_phase_and_inputs_of_sinusoids_are_uniform_on_their_ranges():
    tasks = Sinusoid(shots=20, queries=1).sample(4000, seeded())
    amplitude, phase, _ = fit_sinusoid(tasks.support_x, tasks.support_y)
    for values, low, high in [(amplitude, 0.1, 5), (phase, 0, math.pi), (tasks.support_x.flatten(), -5, 5)]:
        normalized = ((values - low) / (high - low)).double().sort().values
        assert normalized[0] > -1e-3
        assert normalized[-1] < 1 + 1e-3
        # Kolmogorov-Smirnov distance to the uniform distribution, which exceeds 1.95/√n with probability 0.001.
        distance = (normalized - torch.linspace(0, 1, len(normalized), dtype=torch.float64)).abs().max()
        assert distance < 1.95 / math.sqrt(len(normalized))


def test_quadratic_inputs_have_norm_root_d():
    tasks = Quadratic(dimension=7).sample(20, seeded())
    torch.testing.assert_close(tasks.query_x.norm(dim=-1), torch.full((20, 10), math.sqrt(7)))


def test_quadratic_targets_have_the_scaled_chi_squared_distribution():
    """y = ν‖x − μ‖² with x − μ ~ N(0, ν²I) is ν³ times a χ² variable with d degrees of freedom."""
    y = Quadratic(shots=50, queries=50).sample(4000, seeded()).without_split().support_y.double().squeeze(-1)
    cubed_scales = y.mean(dim=1) / 10
    low, high = 1.3, 1.6
    expected = (high**4 - low**4) / (4 * (high - low))  # E[ν³]
    assert cubed_scales.mean().item() == pytest.approx(expected, rel=0.01)
    # Within a task, Var[y] = 2dν⁶ and E[y] = dν³, so the ratio of the variance to the squared mean is 2/d.
    assert (y.var(dim=1) / y.mean(dim=1) ** 2).mean().item() == pytest.approx(0.2, rel=0.03)
    scales = cubed_scales.pow(1 / 3)
    assert low < scales.quantile(0.05) < low + 0.06
    assert high - 0.06 < scales.quantile(0.95) < high


def test_quadratic_targets_are_computed_before_inputs_are_normalized():
    """Compute the same tasks from the definition, and compare targets and inputs."""
    generator = seeded(3)
    center = torch.randn(6, 1, 10, generator=generator)
    scale = torch.empty(6, 1, 1).uniform_(1.3, 1.6, generator=generator)
    x = center + scale * torch.randn(6, 15, 10, generator=generator)
    tasks = Quadratic().sample(6, seeded(3)).without_split()
    torch.testing.assert_close(tasks.support_y, scale * (x - center).square().sum(-1, keepdim=True))
    torch.testing.assert_close(tasks.support_x, math.sqrt(10) * x / x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
def test_the_same_seed_gives_the_same_tasks_and_another_seed_gives_different_tasks(environment: Environment):
    tasks, same_seed, other_seed = (environment.sample(3, seeded(seed)) for seed in (1, 1, 2))
    for tensor, same, different in zip(tasks.tensors(), same_seed.tensors(), other_seed.tensors()):
        assert torch.equal(tensor, same)
        assert not torch.equal(tensor, different)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
def test_tasks_are_regression_tasks_with_one_output_and_without_classes(environment: Environment):
    tasks = environment.sample(4, seeded())
    assert not tasks.is_classification
    assert tasks.query_y.shape == (4, 10, 1)
    assert environment.outputs == 1
    assert tasks.classes is None


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Sinusoid(shots=0), "shots is 0, but must be an integer of at least 1. Use shots=1 or more."),
        (lambda: Quadratic(queries=-2), "queries is -2, but must be"),
        (lambda: Quadratic(dimension=2.5), "dimension is 2.5, but must be"),  # type: ignore[arg-type]
        (lambda: Sinusoid().sample(0, seeded()), "tasks is 0, but must be"),
    ],
)
def test_a_count_below_one_is_rejected(make, sentence):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(sentence)
