from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from metabridge import Engine, MetaGradient, method, parameters
from metabridge.environments.teacher_networks import ACTIVATIONS
from metabridge.episodes import Episodes
from metabridge.experiments import (
    ExperimentOptions,
    Result,
    landscape_fig4,
    landscape_fig6,
    landscape_nets,
    landscape_thm1,
    load_experiment,
)
from metabridge.experiments.landscape_nets import RATES, LossSurface, Minima, Scale, World, minima_rows, plane
from metabridge.experiments.landscape_thm1 import Check, check_theorem, theorem_rows
from metabridge.models import mlp
from metabridge.theory.teachers import Preference, maml_loss, nal_loss

WORLD = World("one hard", "softplus", support=30, easy=((-1.0, 0.5), (0.0, -1.0)), hard=((1.0, 1.0),), apart=True)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_engine(name: str, world: World, episodes: Episodes, neuron: Tensor) -> MetaGradient:
    """The loss of a one-neuron student, and its gradient, by the library's own learner; the head stays 1."""
    options = {"steps": 1, "lr": RATES[world.activation], "rates": "per-tensor"} if name == "maml" else {}
    chosen = method(name, split=True, **options)
    net = mlp(2, 1, width=1, depth=1, activation=world.activation, bias=False).double()
    with torch.no_grad():
        net.features[1].weight.copy_(neuron[None])
        net.head.weight.fill_(1)
    params = parameters(chosen, net)
    if name == "maml":
        params["rates.head.weight"].data.zero_()
    return Engine(chosen, net)(params, episodes)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_landscapes_are_the_losses_of_the_librarys_own_nal_and_maml(activation):
    world = replace(WORLD, activation=activation)
    episodes = world.sample(4, 5, seeded())
    neurons = torch.tensor([[0.3, -0.4], [-1.5, 0.2], [1.0, 2.0]], dtype=torch.float64)
    for name, rate in (("nal", None), ("maml", RATES[activation])):
        losses = LossSurface(activation, episodes, rate)(neurons)
        expected = torch.stack([by_engine(name, world, episodes, neuron).loss for neuron in neurons])
        torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize(("name", "rate"), [("nal", None), ("maml", RATES["softplus"])])
def test_the_meta_gradient_vanishes_at_the_minimum_that_is_found(name, rate):
    episodes = WORLD.sample(4, 5, seeded())
    surface = LossSurface("softplus", episodes, rate)
    place = surface.minimum()
    assert surface(place) <= surface(plane(25)).min()
    at, beside = (
        by_engine(name, WORLD, episodes, point).gradients["features.1.weight"].norm() for point in (place, place + 0.3)
    )
    assert at < 0.005 * beside


def test_many_samples_lead_to_the_population_losses():
    world = replace(WORLD, support=200_000)
    episodes, neuron = world.sample(1, 200_000, seeded()), torch.tensor([0.6, 0.1], dtype=torch.float64)
    rate = RATES["softplus"]
    for own, population in ((None, nal_loss(world.tasks)), (rate, maml_loss(world.tasks, rate))):
        sampled = float(LossSurface("softplus", episodes, own)(neuron))
        assert sampled == pytest.approx(float(population(neuron[None])), rel=0.03)


def test_episodes_have_the_inputs_and_answers_of_their_tasks():
    episodes = WORLD.sample(200, 20, seeded())
    assert episodes.support_x.shape == (600, 30, 2)
    hard, *easy = episodes.query_x.unflatten(0, (3, 200)).var((1, 2, 3)).tolist()
    assert hard == pytest.approx(0.5, rel=0.05)
    assert easy == pytest.approx([1.0, 1.0], rel=0.05)
    for index, task in enumerate(WORLD.tasks):
        own = episodes[200 * index : 200 * (index + 1)]
        assert float(LossSurface("softplus", own)(task.neurons[0])) == pytest.approx(0, abs=1e-20)


def measured(nal: float, maml: float, places: dict[str, list[list[float]]]) -> Minima:
    """Minima that were not computed, whose risks differ a little from draw to draw."""
    tensors = {name: torch.tensor(own, dtype=torch.float64) for name, own in places.items()}
    return Minima(WORLD, tensors, {"NAL": [nal, 1.01 * nal], "MAML": [maml, maml]}, {})


def test_claims_agree_where_maml_is_nearer_and_better_and_nowhere_else():
    far, near = [[-0.5, -0.5], [-0.51, -0.5]], [[0.5, 0.5], [0.51, 0.5]]
    good, bad = measured(0.2, 0.1, {"NAL": far, "MAML": near}), measured(0.1, 0.2, {"NAL": near, "MAML": far})
    for minima, agrees in ((good, True), (bad, False)):
        rows = {row.name.partition(": ")[2]: row for row in minima_rows(minima)}
        assert rows["MAML nearer to hard tasks than NAL by"].agrees is agrees
        assert rows["risk of NAL over that of MAML"].agrees is agrees
    assert rows["risk of NAL over that of MAML"].ours == pytest.approx(0.5025)
    assert rows["NAL to hard tasks"].ours == pytest.approx(0.7036, abs=1e-4)
    assert rows["minimum of MAML, first coordinate"].ours == pytest.approx(-0.505)
    world = replace(WORLD, apart=None)
    assert all(row.agrees is None for row in minima_rows(replace(good, world=world)))


def test_a_point_beyond_the_bound_is_told():
    kept = Preference(0.5, ratio=0.8, adapted_ratio=0.9, hard=(0.1, 0.2), easy=(0.3, 0.4))
    broken = replace(kept, ratio=1.2)
    after, before = theorem_rows([Check("tanh", 0.5, 3, (kept, broken))])
    assert after.agrees is True
    assert (before.agrees, before.ours) == (False, 1.2)
    assert before.published == pytest.approx(((1 - 0.15) / (1 - 0.1)) ** 2)
    assert "2 of 3 stationary points meet the conditions; 1 keep to the bound" in before.note
    assert theorem_rows([Check("tanh", 0.5, 3, ())]) == []


def test_theorem_1_holds_on_the_stationary_points_that_are_found():
    rows = theorem_rows(check_theorem("softplus", pairs=2, seed=1))
    assert len(rows) == 8
    assert all(row.agrees for row in rows)


@pytest.fixture(scope="module")
def done():
    """Both experiments at a scale of seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(landscape_nets.SCALES, "quick", Scale(draws=2, grid=7, tests=5, pairs=1, episodes=4, queries=5))
        patch.setattr(landscape_nets, "SEARCH", 9)
        patch.setattr(landscape_nets, "PRECISION", 1e-2)
        patch.setattr(landscape_thm1, "SHARES", (0.1, 0.5))
        patch.setattr(landscape_fig6, "WORLDS", landscape_fig6.WORLDS[:2])
        patch.setattr(landscape_fig6, "ACTIVATIONS", landscape_fig6.ACTIVATIONS[:1])
        return {
            module: module.run(ExperimentOptions("quick", progress=False))
            for module in (landscape_fig4, landscape_fig6)
        }


@pytest.mark.parametrize("module", [landscape_fig4, landscape_fig6])
def test_it_leaves_a_result_and_a_picture(module, done, tmp_path):
    outcome = done[module]
    assert Result.read(outcome.result.write(tmp_path)).rows == outcome.result.rows
    assert len({row.name for row in outcome.result.rows}) == len(outcome.result.rows)
    module.figure(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert load_experiment(module.ID) is module.EXPERIMENT


def test_equally_hard_tasks_share_the_population_minimum_in_a_square_and_not_otherwise(done):
    rows = {row.name: row for row in done[landscape_fig4].result.rows}
    assert rows["four easy tasks: population minima of NAL and MAML"].agrees is True
    assert rows["four easy tasks, lopsided: population minima of NAL and MAML"].ours > 0.1
    assert rows["one hard task: population minima of NAL and MAML"].ours > 1
    assert rows["hard task 1"].ours < rows["easy task 1"].ours
