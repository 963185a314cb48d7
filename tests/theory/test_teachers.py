from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate
from torch import Tensor
from torch.func import vmap

from metabridge.environments import FixedNeurons, TeacherTasks
from metabridge.environments.teacher_networks import ACTIVATIONS, neuron_sum
from metabridge.errors import InputError
from metabridge.theory.teachers import Preference, TeacherTask, maml_loss, nal_loss, stationary_points

STUDENT = torch.tensor([[-0.7, 1.1], [0.4, 0.2]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, 0.5], [-0.3, -1.2]], dtype=torch.float64)
STEP = 1e-5


def pair(activation: str) -> tuple[TeacherTask, TeacherTask]:
    """A hard and an easy task of one neuron each."""
    neurons = torch.tensor([[[0.9, 0.4]], [[0.2, 0.8]]], dtype=torch.float64)
    return TeacherTask(neurons[0], activation, 0.5), TeacherTask(neurons[1], activation, 1.0)


def differences(function, at: Tensor) -> Tensor:
    """Central differences of `function` in every element of `at`, stacked along the first axis."""
    moves = STEP * torch.eye(at.numel(), dtype=at.dtype).reshape(-1, *at.shape)
    return torch.stack([(function(at + move) - function(at - move)) / (2 * STEP) for move in moves])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_population_loss_and_its_gradient_are_the_means_of_samples(activation):
    task = TeacherTask(TEACHER, activation, 0.5)
    points = TeacherTasks(FixedNeurons(TEACHER[None]), activation, covariance=0.5, shots=1, queries=400_000)
    sample = points.sample(1, torch.Generator().manual_seed(0))
    x, y = sample.query_x[0], sample.query_y[0]
    student = STUDENT.clone().requires_grad_()
    residual = neuron_sum(activation, student, x) - y
    losses = residual.detach().square().squeeze(-1) / 2
    assert abs(task.loss(STUDENT) - losses.mean()) < 4 * losses.std() / len(x) ** 0.5
    (slope,) = torch.autograd.grad(residual.square().mean() / 2, student)
    assert (task.gradient(STUDENT) - slope).norm() < 0.02 * slope.norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_and_curvatures_match_finite_differences(activation):
    task = TeacherTask(TEACHER, activation, 0.5)
    torch.testing.assert_close(
        task.gradient(STUDENT), differences(task.loss, STUDENT).reshape(2, 2), atol=1e-8, rtol=1e-6
    )
    hessian = differences(task.gradient, STUDENT).reshape(4, 4)
    torch.testing.assert_close(task.curvatures(STUDENT), torch.linalg.eigvalsh(hessian), atol=1e-7, rtol=1e-5)
    through = maml_loss(pair(activation), 0.5)
    neuron = STUDENT[:1]
    torch.testing.assert_close(
        torch.func.grad(through)(neuron), differences(through, neuron).reshape(1, 2), atol=1e-8, rtol=1e-6
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_teacher_makes_no_error_on_itself_and_is_stationary(activation):
    task = TeacherTask(TEACHER, activation, 0.5)
    assert abs(task.loss(TEACHER)) < 1e-12
    assert task.gradient(TEACHER).norm() < 1e-7
    assert task.loss(TEACHER.flip(0)) == pytest.approx(0, abs=1e-12)  # neurons have no order


def test_the_same_inputs_with_less_variance_make_a_harder_task():
    hard, easy = (TeacherTask(TEACHER[:1], "softplus", variance) for variance in (0.5, 1.0))
    assert hard.curvatures(TEACHER[:1])[-1] < easy.curvatures(TEACHER[:1])[0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_stationary_point_of_maml_balances_the_gradients_and_keeps_to_the_bound(activation):
    hard, easy = pair(activation)
    rate = 0.4 / float(easy.curvatures(easy.neurons)[-1])
    loss = maml_loss([hard, easy], rate)
    (point,) = stationary_points(loss, [(hard.neurons + easy.neurons) / 2])
    pulled = []
    for task in (hard, easy):  # C eq. 31, with Hessians by finite differences
        hessian = differences(task.gradient, point).reshape(2, 2)
        gradient = task.gradient(task.adapted(point, rate)).flatten()
        pulled.append(gradient - rate * hessian @ gradient)
    assert pulled[0].norm() > 1e-3
    torch.testing.assert_close(pulled[0], -pulled[1], atol=1e-6, rtol=0)
    found = Preference.at(point, hard, easy, rate)
    assert found.applies
    assert found.adapted_ratio <= found.adapted_bound
    assert found.ratio < 1


def test_the_bound_belongs_to_stationary_points_alone():
    hard, easy = pair("softplus")
    elsewhere = Preference.at(easy.neurons + 0.05, hard, easy, 0.5)
    assert elsewhere.applies
    assert elsewhere.adapted_ratio > elsewhere.adapted_bound


def test_the_two_forms_of_the_bound_differ_by_the_square_of_the_rate():
    gaps = []
    for rate in (1e-3, 1e-4):
        found = Preference(rate, 1.0, 1.0, hard=(0.1, 0.2), easy=(0.3, 0.4))
        assert found.bound == pytest.approx(((1 - 0.3 * rate) / (1 - 0.2 * rate)) ** 2)
        gaps.append(found.bound - found.printed_bound)
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    ("rate", "hard", "easy", "applies"),
    [
        (1.0, (0.1, 0.2), (0.3, 0.4), True),
        (3.0, (0.1, 0.2), (0.3, 0.4), False),
        (1.0, (-0.1, 0.2), (0.3, 0.4), False),
        (1.0, (0.1, 0.2), (-0.3, 0.4), False),
    ],
)
def test_the_theorem_asks_for_convexity_and_a_small_rate(rate, hard, easy, applies):
    assert Preference(rate, 1.0, 1.0, hard, easy).applies is applies


def test_gradients_balance_where_nal_is_stationary():
    hard, easy = pair("sigmoid")
    (point,) = stationary_points(nal_loss([hard, easy]), [hard.neurons])
    assert Preference.at(point, hard, easy, 0.1).ratio == pytest.approx(1, abs=1e-6)


def test_a_full_step_is_the_limit_of_steps_on_many_samples():
    task = TeacherTask(TEACHER[:1], "softplus", 0.5)
    sample = TeacherTasks(FixedNeurons(TEACHER[None, :1]), covariance=0.5, shots=400_000, queries=1)
    x, y = (part[0] for part in sample.sample(1, torch.Generator().manual_seed(0)).tensors()[:2])
    student = STUDENT[:1].clone().requires_grad_()
    (slope,) = torch.autograd.grad((neuron_sum("softplus", student, x) - y).square().mean() / 2, student)
    moved = task.adapted(STUDENT[:1], 2.0)
    torch.testing.assert_close(moved, STUDENT[:1] - 2 * slope, atol=0.01, rtol=0)
    assert (moved - STUDENT[:1]).norm() > 0.2


def test_plateaus_far_out_are_not_taken_for_stationary_points():
    hard, easy = pair("sigmoid")
    loss = nal_loss([hard, easy])
    far = torch.tensor([[3e4, -2.2e4]], dtype=torch.float64)
    assert torch.func.grad(loss)(far).abs().max() < 1e-9
    assert stationary_points(loss, [far]) == []


def test_it_maps_over_students():
    task = TeacherTask(TEACHER[:1], "relu")
    students = torch.stack([STUDENT[:1], TEACHER[:1]])
    torch.testing.assert_close(vmap(task.loss)(students), torch.stack([task.loss(each) for each in students]))


def test_many_dimensions_are_refused_where_the_loss_needs_quadrature():
    wide = torch.ones(1, 4, dtype=torch.float64)
    assert TeacherTask(wide, "relu").loss(-wide) == pytest.approx(2)
    with pytest.raises(InputError, match="neurons have 4 dimensions, but the quadrature for tanh covers 3 at most"):
        TeacherTask(wide, "tanh").loss(-wide)


@pytest.mark.parametrize(("activation", "w"), [("tanh", 0.5), ("tanh", 1.5), ("sigmoid", 1.5), ("sigmoid", 3.0)])
def test_the_quadrature_resolves_neurons_as_steep_as_it_says(activation, w):
    σ = {"tanh": math.tanh, "sigmoid": lambda z: 1 / (1 + math.exp(-z))}[activation]
    slope = {"tanh": lambda z: 1 - σ(z) ** 2, "sigmoid": lambda z: σ(z) * (1 - σ(z))}[activation]

    def integrand(x: float) -> float:
        return (σ(w * x) - σ(x)) * slope(w * x) * x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    wanted, _ = integrate.quad(integrand, -12, 12, limit=400, epsabs=1e-13)
    student, teacher = (torch.tensor([[value]], dtype=torch.float64) for value in (w, 1.0))
    assert float(TeacherTask(teacher, activation).gradient(student)) == pytest.approx(wanted, rel=0.005)


def test_relu_neuron_of_zero_weights_has_no_curvatures():
    task, _ = pair("relu")
    with pytest.raises(InputError, match="W has a neuron with zero weights"):
        task.curvatures(torch.zeros(1, 2, dtype=torch.float64))
    assert task.curvatures(torch.tensor([[0.3, -0.2]], dtype=torch.float64)).isfinite().all()
