import math

import pytest
import torch

from metabridge import method, parameters
from metabridge.environments import FixedNeurons, GaussianNeurons, Mixture, TeacherTasks
from metabridge.environments.teacher_networks import ACTIVATIONS, teacher_output
from metabridge.errors import InputError
from metabridge.learners import meta_gradient
from metabridge.models import mlp
from metabridge.training import evaluate, fit
from metabridge.training.checkpoint import describe_environment

NEURONS = torch.tensor([[[1.0, -0.5], [0.5, 2.0]], [[-1.0, 0.0], [0.3, 0.3]]], dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_network_with_the_neurons_of_the_teacher_has_zero_error(activation):
    """The network is built by `mlp`, so this also checks that networks and teachers have the same activations."""
    tasks = TeacherTasks(FixedNeurons(NEURONS[:1]), activation, covariance=0.5).sample(3, seeded()).without_split()
    net = mlp(2, 1, width=2, depth=1, activation=activation, bias=False).double()
    with torch.no_grad():
        net.features[1].weight.copy_(NEURONS[0])
        net.head.weight.fill_(1)
    torch.testing.assert_close(net(tasks.support_x.flatten(0, 1)), tasks.support_y.flatten(0, 1))


def test_fixed_teachers_are_sampled_with_equal_probability():
    tasks = TeacherTasks(FixedNeurons(NEURONS), "tanh").sample(2000, seeded()).without_split()
    outputs = torch.stack([teacher_output("tanh", teacher, tasks.support_x) for teacher in NEURONS])
    matches = (outputs - tasks.support_y).abs().amax((-2, -1)) < 1e-12
    assert matches.sum(0).eq(1).all()
    assert abs(int(matches[0].sum()) - 1000) < 4 * math.sqrt(500)  # four standard deviations


def test_inputs_and_noise_have_the_given_variances():
    noise_free, noisy = (TeacherTasks(FixedNeurons(NEURONS[:1]), covariance=0.5, noise=noise) for noise in (0.0, 0.09))
    tasks = noisy.sample(4000, seeded())
    inputs = tasks.support_x.flatten(0, 1)
    torch.testing.assert_close(inputs.T.cov(), 0.5 * torch.eye(2, dtype=torch.float64), atol=0.02, rtol=0)
    noise = tasks.support_y - teacher_output("softplus", NEURONS[0], tasks.support_x)
    assert noise.var().item() == pytest.approx(0.09, rel=0.03)
    assert abs(noise.mean()) < 0.01
    assert torch.equal(noise_free.sample(5, seeded()).support_x, noisy.sample(5, seeded()).support_x)


def test_gaussian_neurons_have_the_given_mean_and_variance():
    neurons = GaussianNeurons(dimension=3, width=2, mean=2.0, variance=0.25).sample(20_000, seeded())
    assert neurons.shape == (20_000, 2, 3)
    torch.testing.assert_close(neurons.mean(0), torch.full((2, 3), 2.0), atol=0.02, rtol=0)
    torch.testing.assert_close(neurons.flatten(1).T.cov(), 0.25 * torch.eye(6), atol=0.02, rtol=0)


@pytest.mark.parametrize("neurons", [FixedNeurons(NEURONS), GaussianNeurons(2)], ids=["fixed", "gaussian"])
def test_the_same_seed_gives_the_same_tasks_and_another_seed_gives_different_tasks(neurons):
    tasks, same_seed, other_seed = (TeacherTasks(neurons, noise=0.1).sample(3, seeded(seed)) for seed in (1, 1, 2))
    for tensor, same, different in zip(tasks.tensors(), same_seed.tensors(), other_seed.tensors()):
        assert torch.equal(tensor, same)
        assert not torch.equal(tensor, different)


@pytest.mark.parametrize("name", ["maml", "fo-maml", "anil", "reptile", "imaml", "minibatch-prox", "r2d2", "nal"])
def test_every_regression_method_has_gradients_on_hard_and_easy_teachers(name):
    easy, hard = TeacherTasks(GaussianNeurons(2)), TeacherTasks(GaussianNeurons(2, mean=2.0), covariance=0.5)
    environment = Mixture((easy, hard), (0.5, 0.5))
    learner, net = method(name), mlp(2, environment.outputs, width=8)
    params = parameters(learner, net)
    _, gradients = meta_gradient(learner, net, params, environment.sample(4, seeded()))
    assert any(grad.abs().max() > 0 for grad in gradients.values())
    assert all(grad.isfinite().all() for grad in gradients.values())


def test_training_on_teachers_lowers_the_error_on_new_tasks():
    environment = TeacherTasks(GaussianNeurons(2, mean=1.0, variance=0.2), "tanh")
    maml, net = method("maml", steps=1, lr=0.1), mlp(2, 1, width=16, depth=1, activation="tanh")
    before, after = (
        evaluate(
            fit(net, maml, environment, iterations=count, batch_size=4, lr=3e-2, progress=False), environment, tasks=30
        )
        for count in (1, 40)
    )
    assert after.mean < before.mean / 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: TeacherTasks(GaussianNeurons(2), "gelu"),
            "activation is 'gelu', but must be one of softplus, sigmoid",
        ),
        (lambda: TeacherTasks(GaussianNeurons(2), covariance=0.0), "covariance is 0.0, but must be a positive number"),
        (lambda: TeacherTasks(GaussianNeurons(2), noise=-1.0), "noise is -1.0, but must be a finite number, 0 or more"),
        (lambda: TeacherTasks(GaussianNeurons(2), shots=0), "shots is 0, but must be"),
        (lambda: TeacherTasks(GaussianNeurons(2)).sample(0, seeded()), "tasks is 0, but must be"),
        (lambda: GaussianNeurons(0), "dimension is 0, but must be"),
        (lambda: GaussianNeurons(2, variance=math.nan), "variance is nan, but must be a finite number"),
        (lambda: FixedNeurons(torch.ones(2)), "neurons is float32 of shape (2,), but must be floating point of shape"),
        (lambda: FixedNeurons(torch.ones(0, 1, 2)), "neurons is float32 of shape (0, 1, 2), but must be"),
    ],
)
def test_invalid_arguments_are_rejected(make, sentence):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(sentence)


def test_repr_shows_the_shape_of_fixed_neurons_and_not_their_values():
    assert repr(FixedNeurons(torch.ones(4, 3, 2))) == "FixedNeurons(4 teachers, width=3, dimension=2)"
    assert len(repr(TeacherTasks(FixedNeurons(torch.ones(4, 3, 2))))) < 200


@pytest.mark.parametrize(
    ("neurons", "stored_name"), [(FixedNeurons(NEURONS), "GivenNeurons"), (GaussianNeurons(2), "NormalNeurons")]
)
def test_settings_of_runs_contain_the_class_names_of_version_0_1_0(neurons, stored_name):
    settings = describe_environment(TeacherTasks(neurons))
    assert settings["environment"] == "Teachers"
    assert settings["neurons"]["environment"] == stored_name
