from __future__ import annotations

import pytest
import torch

from metabridge.theory.loss_surface import LossSurface
from metabridge.theory.sampled_minima import SampledMinima
from metabridge.theory.teachers import TeacherTask, sample_episodes

NEURONS = ((1.0, 1.0), (-1.0, 0.5), (0.0, -1.0))
HARD_FIRST = [
    TeacherTask(torch.tensor([neuron], dtype=torch.float64), "softplus", variance)
    for neuron, variance in zip(NEURONS, (0.5, 1.0, 1.0))
]


def test_sampled_episodes_have_the_inputs_and_targets_of_their_tasks():
    episodes = sample_episodes(HARD_FIRST, 200, 30, 20, torch.Generator().manual_seed(0))
    assert episodes.support_x.shape == (600, 30, 2)
    hard, *easy = episodes.query_x.unflatten(0, (3, 200)).var((1, 2, 3)).tolist()
    assert hard == pytest.approx(0.5, rel=0.05)
    assert easy == pytest.approx([1.0, 1.0], rel=0.05)
    for index, task in enumerate(HARD_FIRST):
        surface = LossSurface("softplus", episodes[200 * index : 200 * (index + 1)])
        assert float(surface(task.neurons[0])) == pytest.approx(0, abs=1e-20)


@pytest.fixture(scope="module")
def minima() -> SampledMinima:
    """The minima of one task, with settings that take only seconds. At the task's neuron, both losses are zero."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metabridge.theory.loss_surface.SEARCH_POINTS", 9)
        return SampledMinima.find(
            HARD_FIRST[1:2], 2.0, shots=20, queries=10, episodes=4, test_episodes=5, draws=2, grid_size=5, seed=0
        )


def test_both_losses_of_a_single_task_are_minimal_at_its_neuron(minima):
    for method in ("NAL", "MAML"):
        assert minima.positions[method].tolist() == [pytest.approx(NEURONS[1], abs=1e-3)] * 2
        assert minima.risks[method] == pytest.approx([0.0, 0.0], abs=1e-6)
        assert minima.distances(method, [NEURONS[1]]) == pytest.approx([0.0, 0.0], abs=2e-3)
        assert minima.surfaces[method].shape == (5, 5)
        assert float(minima.surfaces[method].min()) > 0  # the task's neuron is not on the grid


def test_the_population_minima_of_a_single_task_are_its_neuron(minima):
    for point in minima.population_minima().values():
        assert point.tolist() == pytest.approx(NEURONS[1], abs=1e-5)


def test_there_are_no_population_minima_if_a_sampled_minimum_is_below_all_stationary_points(minima, monkeypatch):
    monkeypatch.setattr("metabridge.theory.sampled_minima.lowest_stationary_point", lambda loss, starts: None)
    assert minima.population_minima() is None
