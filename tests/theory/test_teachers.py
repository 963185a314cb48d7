from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate
from torch import Tensor
from torch.func import vmap

from metabridge.environments import FixedNeurons, TeacherTasks
from metabridge.environments.teacher_networks import ACTIVATIONS, teacher_output
from metabridge.errors import InputError
from metabridge.theory.teachers import (
    HardTaskPreference,
    TeacherTask,
    lowest_stationary_point,
    maml_loss,
    nal_loss,
    stationary_points,
)

STUDENT = torch.tensor([[-0.7, 1.1], [0.4, 0.2]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, 0.5], [-0.3, -1.2]], dtype=torch.float64)
DIFFERENCE_STEP = 1e-5


def hard_and_easy(activation: str) -> tuple[TeacherTask, TeacherTask]:
    """Return a hard and an easy task with one neuron each."""
    neurons = torch.tensor([[[0.9, 0.4]], [[0.2, 0.8]]], dtype=torch.float64)
    return TeacherTask(neurons[0], activation, 0.5), TeacherTask(neurons[1], activation, 1.0)


def finite_differences(function, point: Tensor) -> Tensor:
    """Return central differences of a function in every element of `point`, stacked along the first axis."""
    offsets = DIFFERENCE_STEP * torch.eye(point.numel(), dtype=point.dtype).reshape(-1, *point.shape)
    differences = [function(point + offset) - function(point - offset) for offset in offsets]
    return torch.stack(differences) / (2 * DIFFERENCE_STEP)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_population_loss_and_its_gradient_are_close_to_sample_means(activation):
    task = TeacherTask(TEACHER, activation, 0.5)
    environment = TeacherTasks(FixedNeurons(TEACHER[None]), activation, covariance=0.5, shots=1, queries=400_000)
    sample = environment.sample(1, torch.Generator().manual_seed(0))
    x, y = sample.query_x[0], sample.query_y[0]
    student = STUDENT.clone().requires_grad_()
    residual = teacher_output(activation, student, x) - y
    losses = residual.detach().square().squeeze(-1) / 2
    assert abs(task.loss(STUDENT) - losses.mean()) < 4 * losses.std() / len(x) ** 0.5
    (gradient,) = torch.autograd.grad(residual.square().mean() / 2, student)
    assert (task.gradient(STUDENT) - gradient).norm() < 0.02 * gradient.norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_and_curvatures_match_finite_differences(activation):
    task = TeacherTask(TEACHER, activation, 0.5)
    torch.testing.assert_close(
        task.gradient(STUDENT), finite_differences(task.loss, STUDENT).reshape(2, 2), atol=1e-8, rtol=1e-6
    )
    hessian = finite_differences(task.gradient, STUDENT).reshape(4, 4)
    torch.testing.assert_close(task.curvatures(STUDENT), torch.linalg.eigvalsh(hessian), atol=1e-7, rtol=1e-5)
    loss = maml_loss(hard_and_easy(activation), 0.5)
    neuron = STUDENT[:1]
    torch.testing.assert_close(
        torch.func.grad(loss)(neuron), finite_differences(loss, neuron).reshape(1, 2), atol=1e-8, rtol=1e-6
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_teacher_has_zero_loss_on_itself_and_is_stationary(activation):
    task = TeacherTask(TEACHER, activation, 0.5)
    assert abs(task.loss(TEACHER)) < 1e-12
    assert task.gradient(TEACHER).norm() < 1e-7
    assert task.loss(TEACHER.flip(0)) == pytest.approx(0, abs=1e-12)  # the order of neurons does not matter


def test_less_variance_of_the_inputs_makes_the_curvature_of_a_task_smaller():
    hard, easy = (TeacherTask(TEACHER[:1], "softplus", variance) for variance in (0.5, 1.0))
    assert hard.curvatures(TEACHER[:1])[-1] < easy.curvatures(TEACHER[:1])[0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_stationary_point_of_maml_balances_the_gradients_and_satisfies_the_bound(activation):
    hard, easy = hard_and_easy(activation)
    alpha = 0.4 / float(easy.curvatures(easy.neurons)[-1])
    loss = maml_loss([hard, easy], alpha)
    (point,) = stationary_points(loss, [(hard.neurons + easy.neurons) / 2])
    outer_gradients = []
    for task in (hard, easy):  # Collins et al. 2022, eq. 31, with Hessians by finite differences
        hessian = finite_differences(task.gradient, point).reshape(2, 2)
        gradient = task.gradient(task.adapt(point, alpha)).flatten()
        outer_gradients.append(gradient - alpha * hessian @ gradient)
    assert outer_gradients[0].norm() > 1e-3
    torch.testing.assert_close(outer_gradients[0], -outer_gradients[1], atol=1e-6, rtol=0)
    preference = HardTaskPreference.measure(point, hard, easy, alpha)
    assert preference.applies
    assert preference.adapted_ratio <= preference.adapted_bound
    assert preference.ratio < 1


def test_the_bound_can_fail_away_from_stationary_points():
    hard, easy = hard_and_easy("softplus")
    elsewhere = HardTaskPreference.measure(easy.neurons + 0.05, hard, easy, 0.5)
    assert elsewhere.applies
    assert elsewhere.adapted_ratio > elsewhere.adapted_bound


def test_the_two_forms_of_the_bound_differ_by_the_square_of_alpha():
    gaps = []
    for alpha in (1e-3, 1e-4):
        preference = HardTaskPreference(alpha, 1.0, 1.0, hard_curvatures=(0.1, 0.2), easy_curvatures=(0.3, 0.4))
        assert preference.bound == pytest.approx(((1 - 0.3 * alpha) / (1 - 0.2 * alpha)) ** 2)
        gaps.append(preference.bound - preference.printed_bound)
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    ("alpha", "hard", "easy", "applies"),
    [
        (1.0, (0.1, 0.2), (0.3, 0.4), True),
        (3.0, (0.1, 0.2), (0.3, 0.4), False),
        (1.0, (-0.1, 0.2), (0.3, 0.4), False),
        (1.0, (0.1, 0.2), (-0.3, 0.4), False),
    ],
)
def test_the_theorem_needs_convexity_and_a_small_step(alpha, hard, easy, applies):
    assert HardTaskPreference(alpha, 1.0, 1.0, hard, easy).applies is applies


def test_gradients_balance_at_stationary_points_of_nal():
    hard, easy = hard_and_easy("sigmoid")
    (point,) = stationary_points(nal_loss([hard, easy]), [hard.neurons])
    assert HardTaskPreference.measure(point, hard, easy, 0.1).ratio == pytest.approx(1, abs=1e-6)


def test_a_step_on_the_population_loss_is_the_limit_of_steps_on_many_samples():
    task = TeacherTask(TEACHER[:1], "softplus", 0.5)
    sample = TeacherTasks(FixedNeurons(TEACHER[None, :1]), covariance=0.5, shots=400_000, queries=1)
    x, y = (part[0] for part in sample.sample(1, torch.Generator().manual_seed(0)).tensors()[:2])
    student = STUDENT[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((teacher_output("softplus", student, x) - y).square().mean() / 2, student)
    adapted = task.adapt(STUDENT[:1], 2.0)
    torch.testing.assert_close(adapted, STUDENT[:1] - 2 * gradient, atol=0.01, rtol=0)
    assert (adapted - STUDENT[:1]).norm() > 0.2


def test_distant_plateaus_do_not_count_as_stationary_points():
    hard, easy = hard_and_easy("sigmoid")
    loss = nal_loss([hard, easy])
    far = torch.tensor([[3e4, -2.2e4]], dtype=torch.float64)
    assert torch.func.grad(loss)(far).abs().max() < 1e-9
    assert stationary_points(loss, [far]) == []


def test_the_lowest_stationary_point_is_compared_with_the_starting_points():
    def loss(W: Tensor) -> Tensor:
        return ((W**2 - 1) ** 2 + W / 2).sum()  # minima near −1 and 1; the one near −1 is lower

    start = torch.tensor([[0.9]], dtype=torch.float64)
    assert lowest_stationary_point(loss, [start]) == pytest.approx(0.93, abs=0.01)
    assert lowest_stationary_point(loss, [start, -start]) == pytest.approx(-1.06, abs=0.01)
    assert lowest_stationary_point(lambda W: W.abs().sum(), [start]) is None  # the minimum is a kink


def test_episodes_of_a_task_have_its_inputs_and_targets():
    task = TeacherTask(TEACHER, "tanh", 0.5)
    episodes = task.environment(shots=3, queries=2000).sample(2, torch.Generator().manual_seed(0))
    assert episodes.support_x.shape == (2, 3, 2)
    assert float(episodes.query_x.var()) == pytest.approx(0.5, rel=0.05)
    torch.testing.assert_close(episodes.query_y, teacher_output("tanh", TEACHER, episodes.query_x))


def test_loss_supports_vmap_over_students():
    task = TeacherTask(TEACHER[:1], "relu")
    students = torch.stack([STUDENT[:1], TEACHER[:1]])
    torch.testing.assert_close(vmap(task.loss)(students), torch.stack([task.loss(student) for student in students]))


def test_quadrature_rejects_more_than_three_dimensions():
    neurons = torch.ones(1, 4, dtype=torch.float64)
    assert TeacherTask(neurons, "relu").loss(-neurons) == pytest.approx(2)
    with pytest.raises(InputError, match="neurons have 4 dimensions, but the quadrature for tanh covers 3 at most"):
        TeacherTask(neurons, "tanh").loss(-neurons)


@pytest.mark.parametrize(("activation", "w"), [("tanh", 0.5), ("tanh", 1.5), ("sigmoid", 1.5), ("sigmoid", 3.0)])
def test_quadrature_resolves_neurons_as_steep_as_documented(activation, w):
    σ = {"tanh": math.tanh, "sigmoid": lambda z: 1 / (1 + math.exp(-z))}[activation]
    derivative = {"tanh": lambda z: 1 - σ(z) ** 2, "sigmoid": lambda z: σ(z) * (1 - σ(z))}[activation]

    def integrand(x: float) -> float:
        return (σ(w * x) - σ(x)) * derivative(w * x) * x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    expected, _ = integrate.quad(integrand, -12, 12, limit=400, epsabs=1e-13)
    student, teacher = (torch.tensor([[value]], dtype=torch.float64) for value in (w, 1.0))
    assert float(TeacherTask(teacher, activation).gradient(student)) == pytest.approx(expected, rel=0.005)


def test_curvatures_reject_a_relu_neuron_of_zero_weights():
    task, _ = hard_and_easy("relu")
    with pytest.raises(InputError, match="W has a neuron with zero weights"):
        task.curvatures(torch.zeros(1, 2, dtype=torch.float64))
    assert task.curvatures(torch.tensor([[0.3, -0.2]], dtype=torch.float64)).isfinite().all()
