from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from metabridge.environments import HardEasy, Landscape, LinearTasks, TaskGroup
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners import meta_gradient, method, parameters
from metabridge.models import Network
from metabridge.solvers import GradientDescent
from metabridge.theory import landscape as theory

ALPHA, M = 0.4, 7  # the step size α and the number m of samples of the test-time step


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_covariance(seed: int, dimension: int = 4) -> torch.Tensor:
    root = torch.randn(dimension, dimension, generator=seeded(seed), dtype=torch.float64)
    return root @ root.mT / dimension / 3 + 0.05 * torch.eye(dimension, dtype=torch.float64)


def random_landscape(spread: float = 0.3) -> Landscape:
    """Return a landscape of three groups whose covariances do not commute."""
    groups = [
        TaskGroup(
            random_covariance(seed),
            torch.randn(4, generator=seeded(seed)),
            spread * random_covariance(10 + seed),
            0.2 * seed,
            p,
        )
        for seed, p in ((1, 0.2), (2, 0.5), (3, 0.3))
    ]
    return Landscape(tuple(groups), 4)


def random_hard_easy(seed: int) -> tuple[HardEasy, float]:
    """Return a random `HardEasy`, and a stable α."""
    uniform = torch.rand(6, generator=seeded(seed), dtype=torch.float64).tolist()
    rho_hard, rho_easy = 0.05 + uniform[0], 0.05 + uniform[1]
    hard_easy = HardEasy(rho_hard, rho_easy, R=5 * uniform[2], r_hard=uniform[3], r_easy=uniform[4], dimension=6)
    return hard_easy, 1.9 * uniform[5] / max(rho_hard, rho_easy)


def linear_net(w: torch.Tensor) -> Network:
    net = Network(nn.Flatten(), nn.Linear(len(w), 1, bias=False)).double()
    with torch.no_grad():
        net.head.weight.copy_(w[None])
    return net


@pytest.mark.parametrize("seed", [1, 2])
def test_adapted_covariance_equals_a_mean_over_drawn_samples(seed):
    """It is E[(I − αS)Σ(I − αS)] over the sample covariance S = X̂ᵀX̂/m, which is drawn here."""
    Sigma, samples = random_covariance(seed), 40_000
    x = torch.randn(samples, M, 4, generator=seeded(), dtype=torch.float64) @ torch.linalg.cholesky(Sigma).mT
    error_map = torch.eye(4, dtype=torch.float64) - ALPHA * x.mT @ x / M
    sampled_forms = error_map @ Sigma @ error_map
    error = sampled_forms.std(0) / math.sqrt(samples)
    assert ((sampled_forms.mean(0) - theory.adapted_covariance(Sigma, ALPHA, M)).abs() <= 4.5 * error).all()


def test_adapted_covariance_of_heavy_tailed_inputs_uses_their_fourth_moments():
    """The inputs are s·x with x normal, E[s²] = 1 and E[s⁴] = 8: all fourth moments are 8 times those of x."""
    Sigma, alpha, samples = torch.diag(torch.tensor([1.0, 0.5, 0.1])).double(), 0.7, 5
    fourth = 8 * ((Sigma @ Sigma).trace() * Sigma + 2 * Sigma @ Sigma @ Sigma)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, samples, 3, generator=generator).double() * Sigma.diagonal().sqrt()
    x = x * 8**0.5 * (torch.rand(200_000, samples, 1, generator=generator) < 1 / 8)
    error_map = torch.eye(3).double() - alpha * x.mT @ x / samples
    sampled_forms = error_map @ Sigma @ error_map
    mean_form, error = sampled_forms.mean(0), sampled_forms.std(0) / math.sqrt(len(sampled_forms))
    assert ((mean_form - theory.adapted_covariance(Sigma, alpha, samples, fourth)).abs() <= 4.5 * error).all()
    assert mean_form[0, 0] > 2 * theory.adapted_covariance(Sigma, alpha, samples)[0, 0]


def test_fourth_moments_of_normal_inputs_are_the_default():
    Sigma = torch.diag(torch.tensor([1.0, 0.5, 0.1])).double()
    fourth = (Sigma @ Sigma).trace() * Sigma + 2 * Sigma @ Sigma @ Sigma
    explicit, default = (theory.adapted_covariance(Sigma, 0.7, 5, moments) for moments in (fourth, None))
    torch.testing.assert_close(explicit, default)


def test_risk_above_floor_and_floor_add_up_to_the_loss_after_a_step():
    """The loss F_m(w) is measured on tasks of groups with random covariances, for an arbitrary w."""
    landscape, w = random_landscape(), torch.tensor([1.0, -1.0, 0.5, 2.0])
    episodes = LinearTasks(landscape, M, 20).sample(60_000, seeded())
    residual = episodes.support_x @ w[:, None] - episodes.support_y
    adapted = w[:, None] - ALPHA / M * episodes.support_x.mT @ residual
    losses = (episodes.query_x @ adapted - episodes.query_y).square().mean((1, 2)).double() / 2
    expected = float(theory.risk_above_floor(landscape, w, ALPHA, M)) + theory.noise_floor(landscape, ALPHA, M)
    assert abs(float(losses.mean()) - expected) < 4.5 * float(losses.std()) / math.sqrt(len(losses))
    assert float(losses.std()) / math.sqrt(len(losses)) < 0.02 * expected


def test_risks_of_many_initializations_computed_together_equal_single_ones():
    landscape, ws = random_landscape(), torch.randn(2, 3, 4, generator=seeded())
    risks = theory.risk_above_floor(landscape, ws, ALPHA, M)
    single = [[float(theory.risk_above_floor(landscape, w, ALPHA, M)) for w in row] for row in ws]
    torch.testing.assert_close(risks, torch.tensor(single, dtype=torch.float64))


def test_maml_solution_minimizes_the_risk_after_a_step_and_nal_solution_before_it():
    landscape = random_landscape()
    for w, alpha in (
        (theory.maml_solution(landscape, ALPHA, M), ALPHA),
        (theory.nal_solution(landscape), 0.0),
    ):
        w = w.requires_grad_()
        (gradient,) = torch.autograd.grad(theory.risk_above_floor(landscape, w, alpha, M), w)
        assert float(gradient.abs().max()) < 1e-12


def test_maml_without_a_step_is_nal():
    landscape = random_landscape()
    torch.testing.assert_close(theory.maml_solution(landscape, 0.0, M), theory.nal_solution(landscape))


@pytest.mark.parametrize("name", ["nal", "maml"])
def test_risks_at_the_solutions_equal_proposition_1(name):
    """Eq. 6 and 7 as printed: ½ E_i‖E_i'[W_i']⁻¹E_i'[W_i'(w_i'* − w_i*)]‖² in the norm of Q_i, for 5 fixed tasks.

    W_i is Σ_i for NAL, and for MAML Q^{(n₂)} with n₂ = 3.
    """
    tasks = random_landscape().sample_finite(5, seeded())
    Sigma, w = tasks.distribution.covariance, tasks.distribution.center
    Q = theory.adapted_covariance(Sigma, ALPHA, M)
    W = Sigma if name == "nal" else theory.adapted_covariance(Sigma, ALPHA, 3)
    inverse = torch.linalg.inv(W.mean(0))
    risks = []
    for i in range(5):
        gap = inverse @ torch.stack([W[j] @ (w[j] - w[i]) for j in range(5)]).mean(0)
        risks.append(gap @ Q[i] @ gap / 2)
    risk = theory.risk_above_floor(tasks, theory.solution(name, tasks, ALPHA, 3), ALPHA, M)
    assert float(risk) == pytest.approx(float(torch.stack(risks).mean()), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_two_tasks_have_the_solutions_and_risks_of_equations_8_and_9(seed):
    """The printed eq. 9 lacks the factor ‖w₁* − w₂*‖²/4, which is d here."""
    hard_easy, alpha = random_hard_easy(seed)
    rho_H, rho_E, d = hard_easy.rho_hard, hard_easy.rho_easy, hard_easy.dimension
    groups = TaskGroup(rho_H, 1.0, probability=0.5), TaskGroup(rho_E, -1.0, probability=0.5)
    tasks = Landscape(groups, d)
    a_H, a_E = theory.task_weights(hard_easy, alpha, M)
    weights = {"nal": (rho_H, rho_E), "maml": (a_H, a_E)}
    risks = {
        "nal": (a_E * rho_H**2 + a_H * rho_E**2) / (rho_E + rho_H) ** 2,
        "maml": a_E * a_H / (a_E + a_H),
    }
    for name, (hard, easy) in weights.items():
        w = theory.solution(name, tasks, alpha, M)
        torch.testing.assert_close(w, torch.full_like(w, (hard - easy) / (hard + easy)), rtol=1e-12, atol=1e-12)
        assert float(theory.risk_above_floor(tasks, w, alpha, M)) == pytest.approx(d * risks[name], rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_hard_easy_risks_equal_equations_10_and_11_and_the_general_risk(seed):
    hard_easy, alpha = random_hard_easy(seed)
    (a_H, a_E), d = theory.task_weights(hard_easy, alpha, M), hard_easy.dimension
    rho_H, rho_E, R2 = hard_easy.rho_hard, hard_easy.rho_easy, hard_easy.R**2
    r_H, r_E = hard_easy.r_hard, hard_easy.r_easy
    nal = (
        (a_E * rho_E**2 + 2 * a_E * rho_E * rho_H) * r_E
        + a_E * rho_H**2 * (r_E + R2)
        + (a_H * rho_H**2 + 2 * a_H * rho_E * rho_H) * r_H
        + a_H * rho_E**2 * (r_H + R2)
    )
    maml = (
        (a_E**3 + 2 * a_E**2 * a_H) * r_E
        + (a_H**3 + 2 * a_E * a_H**2) * r_H
        + a_E * a_H**2 * (r_E + R2)
        + a_E**2 * a_H * (r_H + R2)
    )
    risks = theory.hard_easy_risks(hard_easy, alpha, M)
    assert risks.nal == pytest.approx(d / (4 * (rho_E + rho_H) ** 2) * nal, rel=1e-12)
    assert risks.maml == pytest.approx(d / (4 * (a_E + a_H) ** 2) * maml, rel=1e-12)
    for name in ("nal", "maml"):
        w = theory.solution(name, hard_easy.landscape, alpha, M)
        general = float(theory.risk_above_floor(hard_easy.landscape, w, alpha, M))
        assert getattr(risks, name) == pytest.approx(general, rel=1e-12)


def test_ratio_of_risks_approaches_its_asymptotic_value():
    gaps = []
    for rho_hard, m in ((1e-1, 1e4), (1e-2, 1e6), (1e-3, 1e8)):
        hard_easy = HardEasy(rho_hard, 1.0, R=2.0, r_hard=0.5, r_easy=1.0)
        gaps.append(abs(theory.hard_easy_risks(hard_easy, 1.0, m).ratio - theory.asymptotic_ratio(hard_easy)))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.05
    assert theory.asymptotic_ratio(hard_easy) == 9  # 1 + R²/r_H
    assert theory.asymptotic_ratio(HardEasy(0.1, 1.0)) == math.inf


@pytest.mark.parametrize("name", ["nal", "maml"])
def test_no_stable_step_size_is_better_than_best_alpha(name):
    landscape = random_landscape()

    def loss(alpha: float) -> float:
        w = theory.solution(name, landscape, alpha, M)
        return float(theory.risk_above_floor(landscape, w, alpha, M)) + theory.noise_floor(landscape, alpha, M)

    best = theory.best_alpha(name, landscape, M)
    largest = 2 / float(torch.linalg.eigvalsh(landscape.distribution.covariance).max())
    assert all(loss(best) <= loss(share * largest) + 1e-12 for share in torch.linspace(0, 0.999, 77).tolist())


def test_best_alpha_of_nal_is_the_vertex_of_a_parabola():
    """With g = w − w*, the loss is ½E[‖g‖²_Σ − 2α‖g‖²_Σ² + α²((1 + 1/m)‖g‖²_Σ³ + tr(Σ²)(‖g‖²_Σ + σ²)/m)] + ½E[σ²]."""
    landscape = random_landscape()
    tasks, w = landscape.distribution, theory.nal_solution(landscape)
    second_moment = torch.einsum("gi,gj->gij", w - tasks.center, w - tasks.center) + tasks.spread  # E[ggᵀ]

    def norm(power: int) -> torch.Tensor:
        return torch.einsum("gij,gji->g", torch.linalg.matrix_power(tasks.covariance, power), second_moment)

    trace = tasks.covariance.square().sum((1, 2))
    curvature = (1 + 1 / M) * norm(3) + trace * (norm(1) + tasks.noise) / M
    vertex = float((tasks.probability @ norm(2)) / (tasks.probability @ curvature))
    assert theory.best_alpha("nal", landscape, M) == pytest.approx(vertex, rel=1e-6)


@pytest.mark.parametrize(
    ("shots", "queries", "episodes_per_task", "tasks"), [(7, 5, 1, 6), (2, 9, 4, 3), (30, 1, 5, 2)]
)
def test_meta_gradients_vanish_at_the_empirical_solutions(shots, queries, episodes_per_task, tasks):
    episodes = (
        LinearTasks(random_landscape().sample_finite(tasks, seeded()), shots, queries)
        .sample_every_group(episodes_per_task, seeded())
        .to(dtype=torch.float64)
    )
    maml = method("maml", steps=1, lr=ALPHA)
    nal = method("nal", test_solver=GradientDescent(steps=1, lr=ALPHA))
    for learner, w in ((maml, theory.empirical_maml(episodes, ALPHA)), (nal, theory.empirical_nal(episodes))):
        net = linear_net(w)
        result = meta_gradient(learner, net, parameters(learner, net), episodes)
        assert float(result.gradients["head.weight"].abs().max()) < 1e-10
        shifted = linear_net(w + 0.1)
        elsewhere = meta_gradient(learner, shifted, parameters(learner, shifted), episodes)
        assert float(elsewhere.loss) > float(result.loss)


def test_empirical_solutions_equal_equations_41_and_43():
    generator = seeded()
    T, n, d = 4, 6, 3
    w = torch.randn(T, d, 1, generator=generator, dtype=torch.float64)
    x_in, x_out = torch.randn(2, T, n, d, generator=generator, dtype=torch.float64)
    z_in, z_out = torch.randn(2, T, n, 1, generator=generator, dtype=torch.float64)
    episodes = Episodes(x_in, x_in @ w + z_in, x_out, x_out @ w + z_out)
    P = torch.eye(d, dtype=torch.float64) - ALPHA / n * x_in.mT @ x_in
    Q = P @ x_out.mT @ x_out @ P
    right = Q @ w + P @ x_out.mT @ z_out - ALPHA / n * P @ x_out.mT @ x_out @ x_in.mT @ z_in
    expected = torch.linalg.solve(Q.sum(0), right.sum(0)).squeeze(-1)
    torch.testing.assert_close(theory.empirical_maml(episodes, ALPHA), expected, rtol=1e-10, atol=1e-10)
    x, z = torch.cat([x_in, x_out], 1), torch.cat([z_in, z_out], 1)
    expected = torch.linalg.solve((x.mT @ x).sum(0), (x.mT @ x @ w + x.mT @ z).sum(0)).squeeze(-1)
    torch.testing.assert_close(theory.empirical_nal(episodes), expected, rtol=1e-10, atol=1e-10)


def test_empirical_solutions_approach_the_population_solutions():
    landscape = random_landscape()
    tasks = LinearTasks(landscape, M, M)

    def gaps(count: int) -> tuple[float, float]:
        episodes = tasks.sample(count, seeded())
        nal = theory.empirical_nal(episodes) - theory.nal_solution(landscape)
        maml = theory.empirical_maml(episodes, ALPHA) - theory.maml_solution(landscape, ALPHA, M)
        return float(nal.norm()), float(maml.norm())

    for few, many in zip(gaps(200), gaps(51200)):
        assert many < few / 4  # 1/16 expected, with 256 times as many tasks
        assert many < 0.05


def test_risks_are_zero_if_a_step_solves_every_task():
    assert theory.hard_easy_risks(HardEasy(1.0, 1.0, R=2.0, r_hard=1.0), 1.0, math.inf) == (0.0, 0.0)


HARD_EASY = HardEasy(0.1, 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: theory.maml_solution(HARD_EASY.landscape, 2.0, M), "alpha is 2.0, but steps of 2 or more diverge"),
        (
            lambda: theory.maml_solution(HardEasy(1.0, 1.0).landscape, 1.0, math.inf),
            "with infinitely many samples and this alpha, one step from any initialization reaches the optimum",
        ),
        (lambda: theory.risk_above_floor(HARD_EASY.landscape, torch.ones(10), -0.1, M), "alpha is -0.1, but steps"),
        (lambda: theory.noise_floor(HARD_EASY.landscape, math.nan, M), "alpha is nan, but steps"),
        (lambda: theory.hard_easy_risks(HARD_EASY, 3.0, M), "alpha is 3.0, but steps"),
        (lambda: theory.adapted_covariance(torch.eye(2), 1.0, 0), "s is 0, but must be"),
        (lambda: theory.maml_solution(HARD_EASY.landscape, 1.0, 0), "n2 is 0, but must be an integer of at least 1"),
        (lambda: theory.task_weights(HARD_EASY, 1.0, 2.5), "m is 2.5, but must be an integer"),
        (lambda: theory.noise_floor(HARD_EASY.landscape, 1.0, -1), "m is -1, but must be an integer"),
        (lambda: theory.task_weights(HARD_EASY, 1.0, math.nan), "m is nan, but must be an integer"),
        (lambda: theory.risk_above_floor(HARD_EASY.landscape, torch.ones(10), 1.0, 0), "m is 0, but must be"),
        (
            lambda: theory.empirical_maml(LinearTasks(HARD_EASY.landscape).sample(9, seeded()), -1.0),
            "alpha is -1.0, but a step size must be",
        ),
        (
            lambda: theory.risk_above_floor(HARD_EASY.landscape, torch.ones(3), 1.0, M),
            "w is float32 of shape (3,), but",
        ),
        (
            lambda: theory.empirical_nal(LinearTasks(HARD_EASY.landscape, 2, 2).sample(2, seeded())),
            "the inputs of all tasks together do not span the 10 input dimensions",
        ),
        (
            lambda: theory.empirical_maml(LinearTasks(HARD_EASY.landscape, 20, 3).sample(3, seeded()), 1.0),
            "the inputs of all tasks together do not span the 10 input dimensions",
        ),
    ],
)
def test_invalid_settings_are_reported(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_best_alpha_of_maml_is_the_inverse_of_a_curvature_that_all_tasks_share():
    landscape = HardEasy(rho_hard=1.0, rho_easy=1.0, dimension=2).landscape
    assert abs(theory.best_alpha("maml", landscape, m=math.inf) - 1.0) < 1e-6
