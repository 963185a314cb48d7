from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from metabridge import Engine, method, parameters
from metabridge.experiments import ExperimentOptions, Result, load_experiment, metantk_thm1, metantk_thm2
from metabridge.experiments.meta_ntk_descent import descend, initialisations, meta_ntk, sample, squared
from metabridge.experiments.metantk_thm1 import Training, law_rows, loss_rows
from metabridge.experiments.power_law import PowerLaw, mean
from metabridge.learners.adapt import predict
from metabridge.models import wide

TINY = {
    metantk_thm1: metantk_thm1.Scale(widths=(16, 128), nets=2, steps=12),
    metantk_thm2: metantk_thm2.Scale(widths=(16, 256), nets=2, tests=4, inner_steps=3, outer_steps=6, left=0.3),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Both experiments at a scale of seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for module, scale in TINY.items():
            patch.setitem(module.SCALES, "quick", scale)
        return {module: module.run(ExperimentOptions("quick", progress=False)) for module in TINY}


@pytest.mark.parametrize("module", list(TINY))
def test_it_leaves_a_result_and_a_picture(module, done, tmp_path):
    outcome = done[module]
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    assert len({row.name for row in outcome.result.rows}) == len(outcome.result.rows)
    module.figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert load_experiment(module.ID) is module.EXPERIMENT


def test_the_losses_stay_within_the_theorems_bound(done):
    outcome = done[metantk_thm1]
    for training in outcome.trainings[128]:
        assert len(training.losses) == 12
        assert all(loss <= outcome.bound**step * training.losses[0] for step, loss in enumerate(training.losses))
    assert all(row.agrees for row in outcome.result.rows if row.name == "loss, width 128")


def test_wider_nets_move_less_and_start_nearer_to_their_limit(done):
    narrow, wider = ([vars(training) for training in own] for own in done[metantk_thm1].trainings.values())
    for measure in ("path", "moved", "apart"):
        assert sum(own[measure] for own in wider) < sum(own[measure] for own in narrow)


def test_trained_nets_agree_with_their_twins_the_better_the_wider(done):
    found = [points for methods in done[metantk_thm2].errors.values() for points in methods.values()]
    assert len(found) == 2 * len(metantk_thm2.METHODS)
    for points in found:
        assert sum(points[256]) < sum(points[16]) / 2  # √16 = 4, within a factor of two
        assert max(points[256]) < 0.5


def test_a_loss_above_the_bound_and_a_movement_that_does_not_fall_are_told():
    falling = Training(tuple(0.5**step for step in range(10)), path=1.0, moved=1.0, apart=1.0)
    stuck = Training((1.0,) * 10, path=1.0, moved=1.0, apart=1.0)
    first, second = loss_rows({8: [falling, falling], 16: [falling, stuck]}, bound=0.9, predicted=0.6)
    assert (first.ours, first.agrees) == (pytest.approx(0.5), True)
    assert (second.ours, second.agrees) == (pytest.approx(0.75), False)
    assert "11 of 20 losses of 2 trainings" in second.note
    other = replace(stuck, path=1.1, moved=1.1, apart=1.1)
    exponents = [row for row in law_rows({8: [stuck, other], 16: [stuck, other]}) if row.metric.startswith("exponent")]
    assert [row.agrees for row in exponents] == [False, False, None]
    assert all(row.ours == pytest.approx(0) for row in exponents)
    flat, falls = ({8: [1.0, 1.1], 16: [last, 1.1 * last], 32: [last**2, 1.1 * last**2]} for last in (1.0, 0.7))
    rows = metantk_thm2.rows({"stopped early": {"maml": flat, "mtl": falls}})
    assert [row.agrees for row in rows if row.agrees is not None] == [False, True]


def test_a_power_law_is_found_and_its_interval_covers_it():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        noise = torch.randn(3, 4, generator=generator).mul(0.2).exp().tolist()
        points = {width: [3 * width**-0.5 * each for each in own] for width, own in zip((64, 128, 256), noise)}
        law = PowerLaw.fit(points)
        covered += abs(law.exponent + 0.5) <= law.ci95
    assert 180 <= covered <= 198  # 190 expected, with a spread of 3
    exact = PowerLaw.fit({width: [3 * width**-0.5] for width in (64, 128, 256)})
    assert exact(100) == pytest.approx(0.3)


def test_the_interval_of_a_mean_is_students():
    assert mean([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / math.sqrt(3), rel=1e-3))


def test_no_two_nets_start_alike():
    seeds = [seed for run in (0, 1) for own in initialisations((8, 16), 3, run).values() for seed in own]
    assert len(set(seeds)) == 12


@pytest.fixture
def small():
    """A smooth net in double precision, its method, parameters and tasks."""
    maml = method("maml", steps=3, lr=0.01, loss=squared)
    net = wide(10, width=16, activation="tanh").double()
    return maml, net, parameters(maml, net), sample(2, seed=0).to(dtype=torch.float64)


def test_a_step_of_descent_moves_the_outputs_as_the_metantk_says(small):
    """To first order F(θ − ηJᵀ(F − Y)) = F − ηΦ̂(F − Y)."""
    maml, net, params, episodes = small
    kernel, before, rate = meta_ntk(maml, net, params, episodes), predict(maml, net, params, episodes), 1e-5
    start = {name: value.detach().clone() for name, value in params.items()}
    (step,) = descend(Engine(maml, net), params, episodes, rate, 1)
    residual = (before - episodes.query_y).flatten()
    moved = (predict(maml, net, params, episodes) - before).flatten()
    assert torch.allclose(moved, -rate * kernel @ residual, rtol=1e-3, atol=1e-8)
    assert step.loss == pytest.approx(float(residual.square().sum() / 2))
    length = math.sqrt(sum(float((params[name].detach() - old).square().sum()) for name, old in start.items()))
    assert step.length == pytest.approx(length)
