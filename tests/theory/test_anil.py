"""The closed forms of first-order ANIL against sampled tasks, the library's own learners and each other."""

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
from metabridge.theory.adaptation import error_bound, minimum_risk, one_step_estimate, one_step_risk, ridge, ridge_risks
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
RATES = AnilSettings(alpha=0.1, beta=0.1, m_in=6)
MEANS = {"zero mean": None, "some mean": (1.0, -0.5)}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def world(mean: tuple[float, ...] | None = None, **changes: int) -> SharedRepresentation:
    return SharedRepresentation(7, VARIANCES, mean, NOISE, shots=6, **changes)


def net(seed: int = 0, width: int = 4) -> tuple[Tensor, Tensor]:
    """A representation and a head that are nowhere near the limit."""
    generator = seeded(seed)
    drawn = torch.randn(7, width, generator=generator, dtype=torch.float64)
    return 0.7 * drawn, torch.randn(width, generator=generator, dtype=torch.float64)


def new_tasks(own: SharedRepresentation, tasks: int, points: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes, points and targets of tasks in float64."""
    generator = seeded(seed)
    basis = own.representation
    centre = torch.zeros(own.rank) if own.mean is None else torch.tensor(own.mean)
    weights = centre + torch.tensor(own.variances).sqrt() * torch.randn(tasks, own.rank, generator=generator)
    slopes = weights.double() @ basis.mT
    x = torch.randn(tasks, points, own.dimension, generator=generator, dtype=torch.float64)
    noise = math.sqrt(own.noise) * torch.randn(tasks, points, generator=generator, dtype=torch.float64)
    return slopes, x, (x @ slopes[..., None])[..., 0] + noise


def within_error(samples: Tensor, value: Tensor, errors: float = 5.0) -> bool:
    """Whether the mean over the first axis is the value, to so many standard errors in every entry."""
    error = samples.std(0) / math.sqrt(len(samples))
    return bool(((samples.mean(0) - value).abs() <= errors * error).all())


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_moments_of_adapted_heads_are_those_of_sampled_tasks(mean):
    B, w = net()
    own = world(mean)
    first, second = adapted_head_moments(B, w, TaskMoments.from_environment(own), RATES)
    _, x, y = new_tasks(own, 30_000, 6, 1)
    errors = x @ (B @ w) - y
    heads = w - RATES.alpha * ((errors[:, None] @ x)[:, 0] / 6) @ B
    assert within_error(heads, first)
    assert within_error(heads[:, :, None] * heads[:, None, :], second)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_the_recursion_is_the_mean_of_steps_on_sampled_tasks(mean):
    """FO-ANIL's step on N tasks is a mean over tasks, so that many runs of few tasks scatter around the recursion."""
    B, w = net()
    runs, tasks = 300, 100
    worlds = [world(mean, pool=runs * tasks)]
    points = TaskPoints(
        *(part.view(runs, tasks, *part.shape[2:]) for part in TaskPoints.from_episodes([worlds[0].tasks]))
    )
    points = points.to("cpu", torch.float64)
    stepped = first_order_step(B.expand(runs, -1, -1), w.expand(runs, -1), points, RATES)
    expected = population_step(B, w, TaskMoments.from_environment(worlds[0]), RATES)
    for found, wanted in zip(stepped, expected):
        assert within_error(found, wanted)


def test_equations_5_to_7_are_what_they_are_in_the_paper():
    B, w = net()
    own = world()
    basis, sigma = own.representation, torch.diag(torch.tensor(VARIANCES, dtype=torch.float64))
    a, m, eye = RATES.alpha, RATES.m_in, torch.eye(4, dtype=torch.float64)
    shrunk, shared = eye - a * B.mT @ B, basis @ sigma @ basis.mT
    total = (B @ w).square().sum() + sum(VARIANCES) + NOISE
    heads = shrunk @ torch.outer(w, w) @ shrunk + a**2 * B.mT @ shared @ B
    inner = torch.outer(B @ w, B @ w) + shared + total * torch.eye(7, dtype=torch.float64)
    heads = heads + a**2 / m * B.mT @ inner @ B
    next_B, next_w = population_step(B, w, TaskMoments.from_environment(own), RATES)
    torch.testing.assert_close(next_w, w - RATES.beta * shrunk @ B.mT @ B @ w)
    torch.testing.assert_close(next_B, B - RATES.beta * B @ heads + a * RATES.beta * shared @ B)


def test_infinite_samples_are_the_limit_of_many_points_on_the_same_tasks():
    B, w = net()
    tasks = TaskMoments.from_tasks(world(pool=30).task_parameters, NOISE)
    many, unlimited = (population_step(B, w, tasks, AnilSettings(0.1, 0.1, m)) for m in (1e9, math.inf))
    for near, exact in zip(many, unlimited):
        torch.testing.assert_close(near, exact)


@pytest.mark.parametrize(("name", "adapts"), [("fo-anil", "head"), ("fo-maml", "all")])
def test_a_step_on_finite_tasks_is_the_gradient_of_the_librarys_own_learner(name, adapts):
    runs = [world(pool=9, seed=seed) for seed in (0, 1)]
    nets = [net(seed) for seed in (0, 1)]
    points = TaskPoints.from_episodes([own.tasks for own in runs]).to("cpu", torch.float64)
    B, w = (torch.stack(part) for part in zip(*nets))
    stepped = first_order_step(B, w, points, RATES, adapts)
    learner = method(name, steps=1, lr=RATES.alpha)
    for run, own in enumerate(runs):
        module = mlp(7, 1, width=4, depth=1, activation="linear", bias=False).double()
        with torch.no_grad():
            module.features[1].weight.copy_(B[run].mT)
            module.head.weight.copy_(w[run][None])
        slopes = meta_gradient(
            learner, module, parameters(learner, module), own.tasks.to(dtype=torch.float64)
        ).gradients
        torch.testing.assert_close(stepped[0][run], B[run] - RATES.beta * slopes["features.1.weight"].mT)
        torch.testing.assert_close(stepped[1][run], w[run] - RATES.beta * slopes["head.weight"][0])


def test_single_precision_steps_stay_with_double_ones():
    points = TaskPoints.from_episodes([world(pool=200).tasks])
    B, w = initial_parameters(7, 7, RATES.alpha, seeded())
    ends = []
    for dtype in (torch.float32, torch.float64):
        own = points.to("cpu", dtype)
        start = (B[None].to(dtype), w[None].to(dtype))
        iteration = RepeatedStep(partial(first_order_step, points=own, rates=RATES), start)
        iteration.advance(1000)
        ends.append(iteration.state[0].double())
    assert (ends[0] - ends[1]).norm() < 1e-4 * ends[1].norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("adapts", ["head", "all"])
def test_recorded_steps_on_a_gpu_are_those_on_a_cpu(adapts):
    points = TaskPoints.from_episodes([world(pool=50, seed=seed).tasks for seed in (0, 1)])
    B, w = (torch.stack(part) for part in zip(net(0), net(1)))
    ends = []
    for device in ("cpu", "cuda"):
        own = points.to(device, torch.float64)
        iteration = RepeatedStep(
            partial(first_order_step, points=own, rates=RATES, adapts=adapts), (B.to(device), w.to(device))
        )
        iteration.advance(7)
        iteration.advance(13)
        ends.append(iteration.state)
    for plain, recorded in zip(*ends):
        torch.testing.assert_close(recorded.cpu(), plain)


@pytest.fixture(scope="module")
def converged() -> tuple[SharedRepresentation, AnilSettings, Tensor, Tensor]:
    """A net no wider than the representation, which converges fast; one that is wider unlearns like 1/t."""
    own, rates = world(), AnilSettings(0.4, 0.4, 6)
    B, w = initial_parameters(7, 2, rates.alpha, seeded())
    tasks = TaskMoments.from_environment(own)
    for _ in range(2500):
        B, w = population_step(B, w, tasks, rates)
    return own, rates, B, w


def test_the_recursion_reaches_the_limit_of_theorem_1(converged):
    own, rates, B, w = converged
    sigma = torch.diag(torch.tensor(VARIANCES, dtype=torch.float64))
    inside = own.representation.mT @ B
    wanted = limiting_gram(sigma, NOISE, rates)
    assert (inside @ inside.mT - wanted).abs().max() < 1e-6
    assert spectrum(B, own.representation).orthogonal_largest < 1e-6
    assert (B @ w).norm() < 1e-6
    # as D prints it
    eye, total = torch.eye(2, dtype=torch.float64), sum(VARIANCES) + NOISE
    printed = 6 / 7 / rates.alpha * (eye - torch.linalg.inv(7 / total * sigma + eye))
    torch.testing.assert_close(wanted, printed)


def test_a_mean_of_the_tasks_moves_the_initial_function_and_not_the_limit():
    own, rates = world((1.0, -0.5)), AnilSettings(0.4, 0.4, 6)
    B, w = initial_parameters(7, 2, rates.alpha, seeded())
    tasks = TaskMoments.from_environment(own)
    for _ in range(2500):
        B, w = population_step(B, w, tasks, rates)
    inside = own.representation.mT @ B
    sigma = torch.diag(torch.tensor(VARIANCES, dtype=torch.float64))
    torch.testing.assert_close(B @ w, tasks.mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(inside @ inside.mT, limiting_gram(sigma, NOISE, rates), atol=1e-5, rtol=0)


def test_wide_nets_unlearn_what_is_not_shared_no_slower_than_the_bound_and_like_1_over_t():
    own, rates = world(), AnilSettings(0.2, 0.2, 6)
    tasks, total = TaskMoments.from_environment(own), sum(VARIANCES) + NOISE
    B, w = initial_parameters(7, 7, rates.alpha, seeded())
    start, values = float(spectrum(B, own.representation).orthogonal_largest), []
    for step in range(1, 4001):
        B, w = population_step(B, w, tasks, rates)
        if step % 500 == 0:
            values.append((step, float(spectrum(B, own.representation).orthogonal_largest)))
    for step, value in values:
        assert value <= float(unlearning_bound(start, torch.tensor(step), total, rates))
    last, half = values[-1][1], values[3][1]
    assert last / half == pytest.approx(0.5, rel=0.05)


def test_the_limit_is_a_global_minimum_of_the_objective(converged):
    own, rates, B, w = converged
    tasks = TaskMoments.from_environment(own)
    least = minimum_risk(tasks, rates.m_in)
    assert float(one_step_risk(B, w, tasks, rates.alpha, rates.m_in) - least) == pytest.approx(0, abs=1e-9)
    for seed in range(200):
        generator = seeded(seed)
        scale = 3 * torch.rand(2, generator=generator, dtype=torch.float64)
        other = scale[0] * net(seed, 7)[0], scale[1] * net(seed, 7)[1]
        assert one_step_risk(*other, tasks, rates.alpha, rates.m_in) > least
        near = B + 1e-2 * torch.randn(B.shape, generator=generator, dtype=torch.float64), w
        assert one_step_risk(*near, tasks, rates.alpha, rates.m_in) >= least


def test_minimising_the_objective_finds_the_least_risk_and_no_less():
    tasks = TaskMoments.from_environment(world((0.4, 1.0)))
    B, w = (part.clone().requires_grad_() for part in net(3, 7))
    search = torch.optim.LBFGS([B, w], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def objective() -> Tensor:
        search.zero_grad()
        loss = one_step_risk(B, w, tasks, 0.1, 6)
        loss.backward()
        return loss

    search.step(objective)
    assert objective().item() == pytest.approx(float(minimum_risk(tasks, 6)), rel=1e-5)


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_risks_are_those_of_sampled_tasks(mean):
    B, w = net()
    own = world(mean)
    tasks = TaskMoments.from_environment(own)
    slopes, x, y = new_tasks(own, 20_000, 9, 2)
    errors = (one_step_estimate(B, w, x, y, 0.1) - slopes).square().sum(-1) / 2
    assert within_error(errors, one_step_risk(B, w, tasks, 0.1, 9))
    for penalty in (0.3, 5.0):
        exact = ridge_risks(B, tasks, x[:4000], torch.tensor([penalty, 1.0], dtype=torch.float64))[0]
        errors = (ridge(B, x[:4000], y[:4000], penalty) - slopes[:4000]).square().sum(-1) / 2
        assert within_error(errors, exact)


def test_ridge_is_scikit_learns():
    from sklearn.linear_model import Ridge

    B, _ = net()
    _, x, y = new_tasks(world(), 3, 9, 4)
    found = ridge(B, x, y, 0.7)
    for task in range(3):
        model = Ridge(alpha=0.7, fit_intercept=False).fit((x[task] @ B).numpy(), y[task].numpy())
        torch.testing.assert_close(found[task], B @ torch.from_numpy(model.coef_))


def test_proposition_1_falls_with_points_and_holds_at_the_limit_with_a_small_constant():
    own, rates = world(), AnilSettings(0.1, 0.1, 50)
    sigma = torch.diag(torch.tensor(VARIANCES, dtype=torch.float64))
    root = own.representation @ torch.linalg.cholesky(limiting_gram(sigma, NOISE, rates))
    for points in (10, 100, 1000):
        slopes, x, y = new_tasks(own, 2000, points, 5)
        errors = (one_step_estimate(root, torch.zeros(2, dtype=torch.float64), x, y, rates.alpha) - slopes).norm(dim=-1)
        bounds = error_bound(slopes.norm(dim=-1), sigma, NOISE, rates, points)
        assert (errors <= 2 * bounds).double().mean() > 1 - 4 * math.exp(-1)


def test_runs_side_by_side_are_the_same_as_one_by_one():
    worlds = [world(seed=seed) for seed in range(3)]
    nets = [net(seed) for seed in range(3)]
    together = population_step(
        *(torch.stack(part) for part in zip(*nets)),
        stack_moments([TaskMoments.from_environment(own) for own in worlds]),
        RATES,
    )
    for run, (own, start) in enumerate(zip(worlds, nets)):
        for many, one in zip(together, population_step(*start, TaskMoments.from_environment(own), RATES)):
            torch.testing.assert_close(many[run], one)


def test_the_spectrum_is_that_of_the_parts_of_the_representation():
    basis = torch.eye(5, 2, dtype=torch.float64)
    B = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64))
    found = spectrum(B, basis)
    assert [float(value) for value in found] == pytest.approx([4, 9, 1.25 / 3, 1])


def test_beyond_the_stable_step_the_limit_is_left():
    """α·β·s = 1 is where |1 − 2αβs| is 1; the refusal is not one of taste."""
    own = SharedRepresentation(3, (1.0,), noise=0.01)
    tasks = TaskMoments.from_environment(own)
    for alpha, stays in ((0.9, True), (1.1, False)):
        rates = AnilSettings(alpha, alpha, 1000)
        inside = math.sqrt(1 / alpha / (1 + 1 / 1000 + 1.01 / 1000))
        B, w = (inside + 1e-4) * own.representation, torch.zeros(1, dtype=torch.float64)
        for _ in range(200):
            B, w = population_step(B, w, tasks, rates)
        assert (abs(float((own.representation.mT @ B).abs()) - inside) < 1e-3) == stays


EYE = torch.eye(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "sentence"),
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
        (lambda: check_convergence(EYE, AnilSettings(0.1, 0.2)), "beta is 0.2, but theorem 1 needs it to be no larger"),
        (lambda: check_convergence(EYE, AnilSettings(1.5, 1.0)), "alpha · beta · the largest eigenvalue of Σ* is 1.5"),
        (lambda: initial_parameters(3, 4, 0.1, seeded()), "width is 4, but D's layers are no wider than the inputs."),
        (lambda: error_bound(torch.ones(1), EYE, 1.0, AnilSettings(), 1), "points is 1, but proposition 1 needs"),
        (lambda: ridge(EYE, EYE[None], EYE[:1], 0.0), "penalty is 0.0, but must be a positive number."),
        (
            lambda: ridge_risks(EYE, TaskMoments(EYE[0], EYE, 1.0), EYE[None], torch.tensor([1.0, 0.0])),
            "penalty is 0.0, but must be a positive number.",
        ),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(make, sentence):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(sentence)
