from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from metabridge.environments import HardEasy, Landscape, LinearTasks, LogisticTasks, TaskGroup
from metabridge.experiments import ExperimentOptions, Result, load_experiment
from metabridge.experiments import landscape_fig1 as fig1
from metabridge.experiments import landscape_fig2 as fig2
from metabridge.experiments import landscape_fig3 as fig3
from metabridge.experiments import landscape_fig7 as fig7
from metabridge.experiments import landscape_rates as rates
from metabridge.experiments import landscape_table3 as table3
from metabridge.experiments.landscape_linear import (
    CrossEntropy,
    Learner,
    Scale,
    Squared,
    compared,
    descend,
    judge,
    maml_gradient,
)
from metabridge.theory.landscape import (
    hard_easy_risks,
    maml_solution,
    nal_solution,
    noise_floor,
    risk_above_floor,
)

SGD = Scale(iterations=30, judged=40, runs=3)
TINY = {
    fig1: SGD,
    fig2: fig2.Settings(SGD, (50, 20), (0.2, 1.0)),
    fig3: fig3.Settings(SGD, (1.0, 2.0)),
    fig7: fig7.Settings(SGD, (0.2, 1.0)),
    table3: SGD,
    rates: rates.Scale((32, 128), (8, 32), (64, 256), runs=3),
}
WORLD = HardEasy(rho_hard=0.3, rho_easy=1.0, R=1.0, r_hard=0.2, r_easy=0.1, dimension=3, noise=0.1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def done():
    """Every experiment at a scale of a second."""
    with pytest.MonkeyPatch.context() as patch:
        for module, scale in TINY.items():
            patch.setitem(module.SCALES, "quick", scale)
        return {module: module.run(ExperimentOptions("quick", progress=False)) for module in TINY}


@pytest.mark.parametrize("module", TINY, ids=lambda module: module.ID)
def test_it_leaves_a_result_and_a_picture(module: ModuleType, done, tmp_path):
    outcome = done[module]
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    assert len({(row.name, row.metric) for row in outcome.result.rows}) == len(outcome.result.rows)
    module.figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert load_experiment(module.ID) is module.EXPERIMENT


def test_the_paper_scale_is_that_of_the_paper():
    for module, iterations, runs in ((fig2, 5000, 10), (fig3, 5000, 10), (fig7, 5000, 10)):
        sgd = module.SCALES["paper"].sgd
        assert (sgd.iterations, sgd.runs, sgd.judged, sgd.outer) == (iterations, runs, 3000, 25)
    assert (table3.SCALES["paper"].iterations, table3.SCALES["paper"].runs, table3.BATCH) == (4000, 5, 10)
    assert {2000, 500, 50} <= set(fig2.SCALES["paper"].samples)


@pytest.mark.parametrize("logistic", [False, True])
def test_gradients_are_those_of_automatic_differentiation(logistic):
    generator = seeded()
    x_in, x_out = torch.randn(2, 4, 6, 3, generator=generator, dtype=torch.float64)
    y_in, y_out = (torch.rand(2, 4, 6, generator=generator, dtype=torch.float64) > 0.5).double()
    w = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = CrossEntropy if logistic else Squared.of
    value = CrossEntropy.value if logistic else Squared.value

    def mean_loss(w, x, y):
        return value((x @ w[..., None]).squeeze(-1), y).mean(-1).sum()

    (inner,) = torch.autograd.grad(mean_loss(w, x_in, y_in), w, create_graph=True)
    torch.testing.assert_close(loss(x_in, y_in).gradient(w), inner)
    (expected,) = torch.autograd.grad(mean_loss(w - 0.7 * inner, x_out, y_out), w)
    torch.testing.assert_close(maml_gradient(loss(x_in, y_in), loss(x_out, y_out), w, 0.7), expected)
    if logistic:
        direct = torch.nn.functional.binary_cross_entropy_with_logits((x_in @ w[..., None]).squeeze(-1), y_in)
        assert float(mean_loss(w, x_in, y_in).detach()) / 4 == pytest.approx(float(direct.detach()))


@pytest.mark.parametrize("name", ["nal", "maml"])
def test_sgd_ends_at_the_population_solution(name):
    """Steps so short that the noise of the end is small against the distance of the two solutions."""
    alpha, n2, scale = 0.8, 20, Scale(iterations=3000, runs=20, outer=10)
    tasks = LinearTasks(WORLD.landscape, n2, scale.outer)
    learner = Learner(0.02) if name == "nal" else Learner(0.05, alpha)
    w = descend(tasks, {name: learner}, scale, seeded())[name].double()
    ends = {"nal": nal_solution(WORLD.landscape), "maml": maml_solution(WORLD.landscape, alpha, n2)}
    error = w.std(0) / math.sqrt(scale.runs)
    assert ((w.mean(0) - ends[name]).abs() < 4.5 * error).all()
    assert float(error.max()) < 0.2 * float((ends["nal"] - ends["maml"]).norm())


def test_hard_tasks_of_a_batch_have_their_weight():
    """One step from 0 is the step times the weighted sum of the gradients −Xᵀy/n of the batch."""
    tasks, scale = LinearTasks(WORLD.landscape, 4, 3), Scale(iterations=1, runs=2)
    w = descend(tasks, {"weighted": Learner(0.1, hard=5.0)}, scale, seeded(), batch=3)["weighted"]
    episodes = tasks.sample(6, seeded()).without_split()
    pulls = (episodes.support_x.mT @ episodes.support_y).squeeze(-1) / 7
    weights = torch.where(episodes.classes[:, 0] == 0, 5.0, 1.0).unflatten(0, (2, 3))
    assert len(weights.unique()) == 2
    weights = weights / weights.sum(1, keepdim=True)
    torch.testing.assert_close(w, 0.1 * (weights[..., None] * pulls.unflatten(0, (2, 3))).sum(1))


@pytest.mark.parametrize("at_once", [1, 1000])
def test_iterations_follow_each_other_whatever_the_size_of_a_portion(at_once, monkeypatch):
    monkeypatch.setattr("metabridge.experiments.landscape_linear.AT_ONCE", at_once)
    tasks, scale = LinearTasks(WORLD.landscape, 4, 3), Scale(iterations=3, runs=2)
    found = descend(tasks, {"nal": Learner(0.1)}, scale, seeded())["nal"]
    generator, w = seeded(), torch.zeros(2, 3)
    portions = [tasks.sample(2, generator) for _ in range(3)] if at_once == 1 else [tasks.sample(6, generator)]
    for episodes in (portion[first : first + 2] for portion in portions for first in range(0, len(portion), 2)):
        x, y = episodes.without_split().support_x, episodes.without_split().support_y
        w = w - 0.1 * (x.mT @ (x @ w[..., None] - y)).squeeze(-1) / 7
    torch.testing.assert_close(found, w)


def test_judges_measure_the_risk_above_the_floor():
    alpha, m, scale = 0.8, 6, Scale(judged=2000, runs=10, outer=10)
    w = torch.tensor([1.0, -1.0, 0.5])
    found = judge(LinearTasks(WORLD.landscape, m, scale.outer), w, alpha, scale, seeded()).double()
    expected = float(risk_above_floor(WORLD.landscape, w, alpha, m)) + noise_floor(WORLD.landscape, alpha, m)
    assert found.shape == (10,)
    assert abs(float(found.mean()) - expected) < 4.5 * float(found.std()) / math.sqrt(10)
    assert float(found.std()) < 0.1 * expected


def test_the_loss_of_every_tasks_own_solution_is_the_floor_of_labels():
    groups = TaskGroup(0.5, torch.tensor([1.0, 2.0]), probability=0.3), TaskGroup(1.0, -1.0, probability=0.7)
    landscape = Landscape(groups, 2)
    episodes = LogisticTasks(landscape, 50, 50).sample(4000, seeded()).without_split()
    w = landscape.distribution.centre.float()[episodes.classes[:, 0] // 2]
    scores = (episodes.support_x @ w[..., None]).squeeze(-1)
    losses = CrossEntropy.value(scores, episodes.support_y.float()).mean(1).double()
    assert abs(float(losses.mean()) - fig7.label_floor(landscape)) < 4.5 * float(losses.std()) / math.sqrt(4000)


@pytest.mark.parametrize(("shift", "agrees"), [(0.0, True), (1.9, True), (2.1, False)])
def test_means_agree_with_closed_forms_within_twice_their_interval(shift, agrees):
    values = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    margin = compared("", "", values, 0.0).ci95
    assert compared("", "", values, 1.5 + shift * margin).agrees is agrees


def test_closed_forms_stand_beside_what_sgd_found(done):
    rows = {(row.name, row.metric): row for row in done[fig2].result.rows}
    row = rows["MAML, m = 50, ρ_H = 0.2", "first coordinate"]
    a_H, a_E = 0.2 * 0.8**2 + 11 / 50 * 0.2**3, 11 / 50
    assert row.published == pytest.approx((a_H - a_E) / (a_H + a_E))
    assert row.ours == pytest.approx(float(done[fig2].ends[50, 0.2]["maml"].coordinate.mean()))
    rows = {(row.name, row.metric): row for row in done[fig3].result.rows}
    assert rows["limit of NAL over MAML, hard tasks close together", "ratio"].published == pytest.approx(11)
    assert all(row.agrees for (name, _), row in rows.items() if name.startswith("limit"))


def test_the_landscape_with_close_hard_tasks_has_the_published_ratio_and_the_largest():
    ratios = [hard_easy_risks(world, 1 / world.rho_easy, fig1.M).ratio for world in fig1.WORLDS.values()]
    assert ratios[0] == pytest.approx(1)
    assert max(ratios) == ratios[-1] == pytest.approx(3, abs=0.1)


def test_expected_coordinates_and_errors_of_up_weighting_are_near_the_published_ones():
    """Errors are the published ones with a third of the printed variance, and are above them as printed."""
    for name, ((coordinate, spread), (error, error_spread)) in table3.PUBLISHED.items():
        learner = table3.LEARNERS[name]
        found, smaller = table3.expected(learner, table3.world(1 / 3))
        assert abs(found - coordinate) < 2 * max(spread, 0.02)
        assert abs(smaller - error) < max(error_spread, 0.025)
        assert table3.expected(learner, table3.world(1.0))[1] > error + 0.13


def test_the_exponents_of_the_rates_agree_if_they_are_minus_a_half():
    for exponent, agrees in ((-0.5, True), (-0.3, False), (-0.9, False)):
        points = {size: [size**exponent, 1.01 * size**exponent] for size in (8, 32, 128)}
        (row, *others) = rates.rows({"NAL, points n": points})
        assert row.ours == pytest.approx(exponent)
        assert row.agrees is agrees
        assert [other.ours for other in others] == [pytest.approx(sum(values) / 2) for values in points.values()]


def test_the_covariances_of_the_rates_do_not_commute():
    first, second, third = rates.world().distribution.covariance
    for one, other in ((first, second), (second, third)):
        assert float((one @ other - other @ one).norm()) > 0.01
