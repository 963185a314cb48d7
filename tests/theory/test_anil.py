"""Closed forms of first-order ANIL, compared with sampled tasks, the library's learners and each other."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from metabridge import meta_gradient, method, parameters
from metabridge.environments import SharedRepresentation
from metabridge.errors import InputError
from metabridge.models import mlp
from metabridge.theory.adaptation import (
    error_bound,
    minimum_risk,
    one_step_estimate,
    one_step_risk,
    ridge_estimate,
    ridge_risks,
    sample_error_bound_ratios,
)
from metabridge.theory.anil import (
    AnilSettings,
    TaskMoments,
    adapted_head_moments,
    check_convergence,
    initial_parameters,
    limiting_gram,
    population_step,
    spectrum,
    stack_moments,
    unlearning_bound,
)
from metabridge.theory.finite_tasks import RepeatedStep, TaskPoints, first_order_step

VARIANCES, NOISE = (1.0, 2.0), 0.5
SETTINGS = AnilSettings(alpha=0.1, beta=0.1, m_in=6)
MEANS = {"zero mean": None, "nonzero mean": (1.0, -0.5)}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_environment(mean: tuple[float, ...] | None = None, **changes: int) -> SharedRepresentation:
    return SharedRepresentation(7, VARIANCES, mean, NOISE, shots=6, **changes)


def random_parameters(seed: int = 0, width: int = 4) -> tuple[Tensor, Tensor]:
    """Return a representation B and a head w, far from the limit of training."""
    generator = seeded(seed)
    representation = torch.randn(7, width, generator=generator, dtype=torch.float64)
    return 0.7 * representation, torch.randn(width, generator=generator, dtype=torch.float64)


def sample_tasks(
    environment: SharedRepresentation, tasks: int, points: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameters θ, the points and the targets of tasks, in float64."""
    generator = seeded(seed)
    basis = environment.representation
    center = torch.zeros(environment.rank) if environment.mean is None else torch.tensor(environment.mean)
    normal = torch.randn(tasks, environment.rank, generator=generator)
    weights = center + torch.tensor(environment.variances).sqrt() * normal
    theta = weights.double() @ basis.mT
    x = torch.randn(tasks, points, environment.dimension, generator=generator, dtype=torch.float64)
    noise = math.sqrt(environment.noise) * torch.randn(tasks, points, generator=generator, dtype=torch.float64)
    return theta, x, (x @ theta[..., None])[..., 0] + noise


def mean_equals(samples: Tensor, value: Tensor) -> bool:
    """Return whether the mean over the first axis equals the value within 5 standard errors in every entry."""
    standard_error = samples.std(0) / math.sqrt(len(samples))
    return bool(((samples.mean(0) - value).abs() <= 5.0 * standard_error).all())


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_moments_of_adapted_heads_equal_those_of_sampled_tasks(mean):
    B, w = random_parameters()
    environment = make_environment(mean)
    head_mean, head_second = adapted_head_moments(B, w, TaskMoments.from_environment(environment), SETTINGS)
    _, x, y = sample_tasks(environment, 30_000, 6, 1)
    errors = x @ (B @ w) - y
    heads = w - SETTINGS.alpha * ((errors[:, None] @ x)[:, 0] / 6) @ B  # 6 points per task
    assert mean_equals(heads, head_mean)
    assert mean_equals(heads[:, :, None] * heads[:, None, :], head_second)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_population_step_is_the_mean_of_steps_on_sampled_tasks(mean):
    """A step on finitely many tasks is a mean over tasks, so those of many runs scatter around the population step."""
    B, w = random_parameters()
    runs, tasks = 300, 100
    environment = make_environment(mean, pool=runs * tasks)
    points = TaskPoints(
        *(part.view(runs, tasks, *part.shape[2:]) for part in TaskPoints.from_episodes([environment.tasks]))
    )
    points = points.to("cpu", torch.float64)
    stepped = first_order_step(B.expand(runs, -1, -1), w.expand(runs, -1), points, SETTINGS)
    expected = population_step(B, w, TaskMoments.from_environment(environment), SETTINGS)
    for samples, value in zip(stepped, expected):
        assert mean_equals(samples, value)


def test_population_step_equals_the_published_equations_5_to_7():
    B, w = random_parameters()
    environment = make_environment()
    basis, sigma = environment.representation, torch.diag(torch.tensor(VARIANCES, dtype=torch.float64))
    a, m, eye = SETTINGS.alpha, SETTINGS.m_in, torch.eye(4, dtype=torch.float64)
    shrunk, theta_second = eye - a * B.mT @ B, basis @ sigma @ basis.mT
    target_variance = (B @ w).square().sum() + sum(VARIANCES) + NOISE
    head_second = shrunk @ torch.outer(w, w) @ shrunk + a**2 * B.mT @ theta_second @ B
    sampling_term = torch.outer(B @ w, B @ w) + theta_second + target_variance * torch.eye(7, dtype=torch.float64)
    head_second = head_second + a**2 / m * B.mT @ sampling_term @ B
    next_B, next_w = population_step(B, w, TaskMoments.from_environment(environment), SETTINGS)
    torch.testing.assert_close(next_w, w - SETTINGS.beta * shrunk @ B.mT @ B @ w)
    torch.testing.assert_close(next_B, B - SETTINGS.beta * B @ head_second + a * SETTINGS.beta * theta_second @ B)


def test_a_step_with_infinitely_many_points_per_task_is_the_limit_of_many_points():
    B, w = random_parameters()
    tasks = TaskMoments.from_tasks(make_environment(pool=30).task_parameters, NOISE)
    many, infinite = (population_step(B, w, tasks, AnilSettings(0.1, 0.1, m)) for m in (1e9, math.inf))
    for near, exact in zip(many, infinite):
        torch.testing.assert_close(near, exact)


@pytest.mark.parametrize(("name", "adapts"), [("fo-anil", "head"), ("fo-maml", "all")])
def test_a_step_on_finitely_many_tasks_equals_that_of_the_librarys_learner(name, adapts):
    runs = [make_environment(pool=9, seed=seed) for seed in (0, 1)]
    starts = [random_parameters(seed) for seed in (0, 1)]
    points = TaskPoints.from_episodes([environment.tasks for environment in runs]).to("cpu", torch.float64)
    B, w = (torch.stack(part) for part in zip(*starts))
    stepped = first_order_step(B, w, points, SETTINGS, adapts)
    learner = method(name, steps=1, lr=SETTINGS.alpha)
    for run, environment in enumerate(runs):
        module = mlp(7, 1, width=4, depth=1, activation="linear", bias=False).double()
        with torch.no_grad():
            module.features[1].weight.copy_(B[run].mT)
            module.head.weight.copy_(w[run][None])
        gradients = meta_gradient(
            learner, module, parameters(learner, module), environment.tasks.to(dtype=torch.float64)
        ).gradients
        torch.testing.assert_close(stepped[0][run], B[run] - SETTINGS.beta * gradients["features.1.weight"].mT)
        torch.testing.assert_close(stepped[1][run], w[run] - SETTINGS.beta * gradients["head.weight"][0])


def test_single_precision_steps_agree_with_double_precision():
    points = TaskPoints.from_episodes([make_environment(pool=200).tasks])
    B, w = initial_parameters(7, 7, SETTINGS.alpha, seeded())
    final_params = []
    for dtype in (torch.float32, torch.float64):
        task_points = points.to("cpu", dtype)
        start = (B[None].to(dtype), w[None].to(dtype))
        repeated = RepeatedStep(partial(first_order_step, points=task_points, settings=SETTINGS), start)
        repeated.advance(1000)
        final_params.append(repeated.params[0].double())
    assert (final_params[0] - final_params[1]).norm() < 1e-4 * final_params[1].norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("adapts", ["head", "all"])
def test_captured_steps_on_a_gpu_equal_those_on_a_cpu(adapts):
    points = TaskPoints.from_episodes([make_environment(pool=50, seed=seed).tasks for seed in (0, 1)])
    B, w = (torch.stack(part) for part in zip(random_parameters(0), random_parameters(1)))
    final_params = []
    for device in ("cpu", "cuda"):
        task_points = points.to(device, torch.float64)
        step = partial(first_order_step, points=task_points, settings=SETTINGS, adapts=adapts)
        repeated = RepeatedStep(step, (B.to(device), w.to(device)))
        repeated.advance(7)
        repeated.advance(13)
        final_params.append(repeated.params)
    for cpu, gpu in zip(*final_params):
        torch.testing.assert_close(gpu.cpu(), cpu)


@pytest.fixture(scope="module")
def converged_run() -> tuple[SharedRepresentation, AnilSettings, Tensor, Tensor]:
    """Return the environment, the settings, and B and w after convergence.

    The network is as wide as the true representation. Wider networks also have to unlearn orthogonal directions, and
    converge only like 1/t.
    """
    environment, settings = make_environment(), AnilSettings(0.4, 0.4, 6)
    B, w = initial_parameters(7, 2, settings.alpha, seeded())
    tasks = TaskMoments.from_environment(environment)
    for _ in range(2500):
        B, w = population_step(B, w, tasks, settings)
    return environment, settings, B, w


def test_population_steps_converge_to_the_limit_of_theorem_1(converged_run):
    environment, settings, B, w = converged_run
    sigma = torch.diag(torch.tensor(VARIANCES, dtype=torch.float64))
    coordinates = environment.representation.mT @ B
    expected = limiting_gram(sigma, NOISE, settings)
    assert (coordinates @ coordinates.mT - expected).abs().max() < 1e-6
    assert spectrum(B, environment.representation).orthogonal_largest < 1e-6
    assert (B @ w).norm() < 1e-6
    # The equation as printed by Yüksel et al. 2023, with m = 6:
    eye, total = torch.eye(2, dtype=torch.float64), sum(VARIANCES) + NOISE
    printed = 6 / 7 / settings.alpha * (eye - torch.linalg.inv(7 / total * sigma + eye))
    torch.testing.assert_close(expected, printed)


def test_parameters_converge_to_a_nonzero_mean_of_the_tasks_and_to_the_same_gram_matrix():
    environment, settings = make_environment((1.0, -0.5)), AnilSettings(0.4, 0.4, 6)
    B, w = initial_parameters(7, 2, settings.alpha, seeded())
    tasks = TaskMoments.from_environment(environment)
    for _ in range(2500):
        B, w = population_step(B, w, tasks, settings)
    coordinates = environment.representation.mT @ B
    sigma = torch.diag(torch.tensor(VARIANCES, dtype=torch.float64))
    torch.testing.assert_close(B @ w, tasks.mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(coordinates @ coordinates.mT, limiting_gram(sigma, NOISE, settings), atol=1e-5, rtol=0)


def test_wide_networks_unlearn_orthogonal_directions_within_the_bound_and_like_1_over_t():
    environment, settings = make_environment(), AnilSettings(0.2, 0.2, 6)
    tasks, total = TaskMoments.from_environment(environment), sum(VARIANCES) + NOISE
    B, w = initial_parameters(7, 7, settings.alpha, seeded())
    initial_value, values = float(spectrum(B, environment.representation).orthogonal_largest), []
    for step in range(1, 4001):
        B, w = population_step(B, w, tasks, settings)
        if step % 500 == 0:
            values.append((step, float(spectrum(B, environment.representation).orthogonal_largest)))
    for step, value in values:
        assert value <= float(unlearning_bound(initial_value, torch.tensor(step), total, settings))
    last, halfway = values[-1][1], values[3][1]  # after 4000 and 2000 steps
    assert last / halfway == pytest.approx(0.5, rel=0.05)


def test_the_limit_is_a_global_minimum_of_the_objective(converged_run):
    environment, settings, B, w = converged_run
    tasks = TaskMoments.from_environment(environment)
    minimum = minimum_risk(tasks, settings.m_in)
    assert float(one_step_risk(B, w, tasks, settings.alpha, settings.m_in) - minimum) == pytest.approx(0, abs=1e-9)
    for seed in range(200):
        generator = seeded(seed)
        scale = 3 * torch.rand(2, generator=generator, dtype=torch.float64)
        other = scale[0] * random_parameters(seed, 7)[0], scale[1] * random_parameters(seed, 7)[1]
        assert one_step_risk(*other, tasks, settings.alpha, settings.m_in) > minimum
        near = B + 1e-2 * torch.randn(B.shape, generator=generator, dtype=torch.float64), w
        assert one_step_risk(*near, tasks, settings.alpha, settings.m_in) >= minimum


def test_minimizing_the_objective_reaches_the_minimum_risk():
    tasks = TaskMoments.from_environment(make_environment((0.4, 1.0)))
    B, w = (part.clone().requires_grad_() for part in random_parameters(3, 7))
    optimizer = torch.optim.LBFGS([B, w], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = one_step_risk(B, w, tasks, 0.1, 6)
        loss.backward()
        return loss

    optimizer.step(objective)
    assert objective().item() == pytest.approx(float(minimum_risk(tasks, 6)), rel=1e-5)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_risks_equal_those_of_sampled_tasks(mean):
    B, w = random_parameters()
    environment = make_environment(mean)
    tasks = TaskMoments.from_environment(environment)
    theta, x, y = sample_tasks(environment, 20_000, 9, 2)
    errors = (one_step_estimate(B, w, x, y, 0.1) - theta).square().sum(-1) / 2
    assert mean_equals(errors, one_step_risk(B, w, tasks, 0.1, 9))
    for penalty in (0.3, 5.0):
        exact = ridge_risks(B, tasks, x[:4000], torch.tensor([penalty, 1.0], dtype=torch.float64))[0]
        errors = (ridge_estimate(B, x[:4000], y[:4000], penalty) - theta[:4000]).square().sum(-1) / 2
        assert mean_equals(errors, exact)


def test_ridge_estimate_equals_scikit_learn():
    from sklearn.linear_model import Ridge

    B, _ = random_parameters()
    _, x, y = sample_tasks(make_environment(), 3, 9, 4)
    estimates = ridge_estimate(B, x, y, 0.7)
    for task in range(3):
        model = Ridge(alpha=0.7, fit_intercept=False).fit((x[task] @ B).numpy(), y[task].numpy())
        torch.testing.assert_close(estimates[task], B @ torch.from_numpy(model.coef_))


def test_the_bound_of_proposition_1_with_a_constant_of_2_holds_at_the_limit_for_nearly_all_tasks():
    environment, settings = make_environment(), AnilSettings(0.1, 0.1, 50)
    sigma = torch.diag(torch.tensor(VARIANCES, dtype=torch.float64))
    root = environment.representation @ torch.linalg.cholesky(limiting_gram(sigma, NOISE, settings))
    for points in (10, 100, 1000):
        theta, x, y = sample_tasks(environment, 2000, points, 5)
        errors = (one_step_estimate(root, torch.zeros(2, dtype=torch.float64), x, y, settings.alpha) - theta).norm(
            dim=-1
        )
        ratios = errors / error_bound(theta.norm(dim=-1), sigma, NOISE, settings, points)
        assert (ratios <= 2).double().mean() > 0.98
        projected = sample_error_bound_ratios(sigma, NOISE, settings, points, 2000, seeded(6))  # x in the basis B*
        assert float(projected.median()) == pytest.approx(float(ratios.median()), rel=0.1)


def test_runs_computed_together_equal_single_runs():
    environments = [make_environment(seed=seed) for seed in range(3)]
    starts = [random_parameters(seed) for seed in range(3)]
    all_runs = population_step(
        *(torch.stack(part) for part in zip(*starts)),
        stack_moments([TaskMoments.from_environment(environment) for environment in environments]),
        SETTINGS,
    )
    for run, (environment, start) in enumerate(zip(environments, starts)):
        single_run = population_step(*start, TaskMoments.from_environment(environment), SETTINGS)
        for batched, expected in zip(all_runs, single_run):
            torch.testing.assert_close(batched[run], expected)


def test_spectrum_separates_directions_along_and_orthogonal_to_the_basis():
    basis = torch.eye(5, 2, dtype=torch.float64)
    B = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64))
    result = spectrum(B, basis)
    # 2² and 3² in the subspace; the mean of 1², 0.5² and 0², and their maximum, orthogonal to it
    assert [float(value) for value in result] == pytest.approx([4, 9, 1.25 / 3, 1])


def test_the_limit_is_stable_only_if_alpha_times_beta_times_the_variance_of_the_tasks_is_below_1():
    """A step multiplies the distance to the limit by 1 − 2αβs with the variance s = 1 of the tasks; α = β here."""
    environment = SharedRepresentation(3, (1.0,), noise=0.01)
    tasks = TaskMoments.from_environment(environment)
    for alpha, is_stable in ((0.9, True), (1.1, False)):
        settings = AnilSettings(alpha, alpha, 1000)
        limit = math.sqrt(1 / alpha / (1 + 1 / 1000 + 1.01 / 1000))  # the root of Λ* with Σ* = 1, σ² = 0.01, m = 1000
        B, w = (limit + 1e-4) * environment.representation, torch.zeros(1, dtype=torch.float64)
        for _ in range(200):
            B, w = population_step(B, w, tasks, settings)
        assert (abs(float((environment.representation.mT @ B).abs()) - limit) < 1e-3) == is_stable


EYE = torch.eye(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AnilSettings(m_in=0), "m_in is 0, but adaptation needs at least one point."),
        (lambda: AnilSettings(alpha=0.0), "alpha is 0.0, but must be"),
        (
            lambda: limiting_gram(torch.diag(torch.tensor([1.0, 0.0])), 1.0, AnilSettings()),
            "covariance has the eigenvalue 0",
        ),
        (
            lambda: check_convergence(EYE, AnilSettings(), width=1),
            "width is 1, but the representation has 2 dimensions",
        ),
        (
            lambda: check_convergence(EYE, AnilSettings(0.1, 0.2)),
            "beta is 0.2, but theorem 1 needs a beta of at most alpha",
        ),
        (
            lambda: check_convergence(EYE, AnilSettings(1.5, 1.0)),
            "alpha · beta · (largest eigenvalue of Σ*) is 1.5",
        ),
        (lambda: initial_parameters(3, 4, 0.1, seeded()), "width is 4, but the inputs have 3 dimensions"),
        (lambda: error_bound(torch.ones(1), EYE, 1.0, AnilSettings(), 1), "points is 1, but proposition 1 needs"),
        (lambda: ridge_estimate(EYE, EYE[None], EYE[:1], 0.0), "penalty is 0.0, but must be a positive number."),
        (
            lambda: ridge_risks(EYE, TaskMoments(EYE[0], EYE, 1.0), EYE[None], torch.tensor([1.0, 0.0])),
            "penalty is 0.0, but must be a positive number.",
        ),
    ],
)
def test_invalid_settings_are_reported(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(message)
