from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metabridge import Engine, method, parameters
from metabridge.environments.teacher_networks import ACTIVATIONS, Activation, FixedNeurons, TeacherTasks
from metabridge.episodes import Episodes
from metabridge.learners import MetaGradient
from metabridge.models import mlp
from metabridge.theory.loss_surface import LossSurface, neuron_grid
from metabridge.theory.teachers import TeacherTask, maml_loss, nal_loss

TEACHERS = [((1.0, 1.0), 0.5), ((-1.0, 0.5), 1.0), ((0.0, -1.0), 1.0)]  # neurons and variances of their inputs
ALPHA = 4.0


def tasks(activation: Activation) -> list[TeacherTask]:
    return [
        TeacherTask(torch.tensor([neuron], dtype=torch.float64), activation, variance) for neuron, variance in TEACHERS
    ]


def sample(activation: Activation, episodes: int, shots: int, queries: int) -> Episodes:
    """Sample the same number of episodes of each task."""
    generator = torch.Generator().manual_seed(0)
    environments = [
        TeacherTasks(
            FixedNeurons(task.neurons[None]), activation, covariance=task.covariance, shots=shots, queries=queries
        )
        for task in tasks(activation)
    ]
    return Episodes.concatenate([environment.sample(episodes, generator) for environment in environments])


def meta_gradient(name: str, activation: Activation, episodes: Episodes, neuron: Tensor) -> MetaGradient:
    """Return the meta-gradient of `Engine` for a student with one neuron, whose head stays 1."""
    options = {"steps": 1, "lr": ALPHA, "rates": "per-tensor"} if name == "maml" else {}
    algorithm = method(name, split=True, **options)
    net = mlp(2, 1, width=1, depth=1, activation=activation, bias=False).double()
    with torch.no_grad():
        net.features[1].weight.copy_(neuron[None])
        net.head.weight.fill_(1)
    params = parameters(algorithm, net)
    if name == "maml":
        params["rates.head.weight"].data.zero_()  # the inner step leaves the head at 1
    return Engine(algorithm, net)(params, episodes)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_surfaces_are_the_losses_of_nal_and_maml(activation):
    episodes = sample(activation, 4, 30, 5)
    neurons = torch.tensor([[0.3, -0.4], [-1.5, 0.2], [1.0, 2.0]], dtype=torch.float64)
    for name, lr in (("nal", None), ("maml", ALPHA)):
        losses = LossSurface(activation, episodes, lr)(neurons)
        expected = torch.stack([meta_gradient(name, activation, episodes, neuron).loss for neuron in neurons])
        torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize(("name", "lr"), [("nal", None), ("maml", ALPHA)])
def test_the_meta_gradient_vanishes_at_the_minimum(name, lr):
    episodes = sample("softplus", 4, 30, 5)
    surface = LossSurface("softplus", episodes, lr)
    minimum = surface.minimum()
    assert surface(minimum) <= surface(neuron_grid(25)).min()
    at_minimum, elsewhere = (
        meta_gradient(name, "softplus", episodes, point).gradients["features.1.weight"].norm()
        for point in (minimum, minimum + 0.3)
    )
    assert at_minimum < 0.005 * elsewhere


def test_surfaces_of_many_samples_approach_the_population_losses():
    episodes, neuron = sample("softplus", 1, 200_000, 200_000), torch.tensor([0.6, 0.1], dtype=torch.float64)
    population = tasks("softplus")
    for lr, population_loss in ((None, nal_loss(population)), (ALPHA, maml_loss(population, ALPHA))):
        sampled = float(LossSurface("softplus", episodes, lr)(neuron))
        assert sampled == pytest.approx(float(population_loss(neuron[None])), rel=0.03)
