"""Teachers with one hidden layer: population losses, and the tasks that MAML prefers (Collins et al. 2022, theorem 1).

W are the neurons of the student and V the neurons of a teacher, in double precision. Both are matrices (M, d) of M
neurons with one weight for each of d inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

from metabridge.autodiff import grad
from metabridge.environments.teacher_networks import Activation, FixedNeurons, TeacherTasks, teacher_output
from metabridge.episodes import Episodes
from metabridge.errors import InputError

QUADRATURE_NODES = 48  # along each axis
GRADIENT_TOLERANCE = 1e-9  # a point is stationary if all elements of the gradient are smaller in absolute value
SAME_POINT_DISTANCE = 1e-5  # stationary points that are closer to each other count as one
MAX_NORM = 10.0  # farther from the origin, sigmoid and tanh are so flat that every point seems stationary


@dataclass(frozen=True, eq=False)
class TeacherTask:
    """The task of a teacher with neurons V: x ~ N(0, ρI), y = Σ_k σ(⟨v^k, x⟩) (Collins et al. 2022, §4).

    Args:
        neurons: The neurons V, (M, d), in float64.
        activation: "softplus", "sigmoid", "relu" or "tanh".
        covariance: Variance ρ of the inputs.

    Example:
        >>> task = TeacherTask(torch.tensor([[1.0, 0.0]], dtype=torch.float64), "relu", 2.0)
        >>> task.loss(torch.tensor([[-1.0, 0.0]], dtype=torch.float64)).item()
        1.0
    """

    neurons: Tensor
    activation: Activation = "softplus"
    covariance: float = 1.0

    def loss(self, W: Tensor) -> Tensor:
        """Return the population loss f(W) = ½E(h_W(x) − h_V(x))², where h is `teacher_output`.

        For ReLU it is computed in closed form, since a sum over finitely many inputs would have a wrong second
        derivative. For other activations it is computed by Gauss–Hermite quadrature, for inputs of at most 3
        dimensions. The gradients of the quadrature are accurate to half a percent for neurons w with √ρ‖w‖ up to 1.5
        (tanh) or 3 (sigmoid), and inaccurate for steeper neurons.

        Args:
            W: Neurons of the student, (M, d).

        Returns:
            The loss, a scalar.

        Raises:
            InputError: If quadrature is needed and the inputs have more than 3 dimensions.
        """
        if self.activation == "relu":
            cross = _relu_products(W, self.neurons).sum()
            return self.covariance * (_relu_square(W) - 2 * cross + _relu_square(self.neurons)) / 2
        if W.shape[-1] > 3:
            raise InputError(
                f"neurons have {W.shape[-1]} dimensions, but the quadrature for {self.activation} covers 3 at most. "
                "Use activation='relu', or sample from environments.TeacherTasks."
            )
        points, weights = map(torch.from_numpy, _normal_points(W.shape[-1]))
        x = math.sqrt(self.covariance) * points
        errors = teacher_output(self.activation, W, x) - teacher_output(self.activation, self.neurons, x)
        return (weights @ errors.square().squeeze(-1)) / 2

    def gradient(self, W: Tensor) -> Tensor:
        """Return the gradient ∇f(W) of the population loss.

        Args:
            W: Neurons of the student, (M, d).

        Returns:
            The gradient, (M, d).
        """
        return grad(self.loss, W)

    def curvatures(self, W: Tensor) -> Tensor:
        """Return the eigenvalues of ∇²f(W) in ascending order.

        The first is β and the last is L of Collins et al. 2022, theorem 1, at this point.

        Args:
            W: Neurons of the student, (M, d).

        Returns:
            The eigenvalues, (M · d).

        Raises:
            InputError: If a ReLU neuron is zero.
        """
        hessian = torch.func.hessian(self.loss)(W).reshape(W.numel(), W.numel())
        if self.activation == "relu" and (W == 0).all(-1).any():
            raise InputError(
                "W has a neuron with zero weights, where the loss of ReLU neurons has no second derivative. "
                "Give every neuron of W a nonzero weight."
            )
        values: Tensor = torch.linalg.eigvalsh(hessian)
        return values

    def adapt(self, W: Tensor, alpha: float) -> Tensor:
        """Take one step of gradient descent with infinitely many samples.

        Args:
            W: Neurons of the student, (M, d).
            alpha: Step size α.

        Returns:
            W − α∇f(W), (M, d).
        """
        return W - alpha * self.gradient(W)

    def environment(self, shots: int, queries: int) -> TeacherTasks:
        """Return the environment of episodes of this task.

        Args:
            shots: Number of support examples.
            queries: Number of query examples.

        Returns:
            The environment, whose episodes have the same teacher.
        """
        teacher = FixedNeurons(self.neurons[None])
        return TeacherTasks(teacher, self.activation, covariance=self.covariance, shots=shots, queries=queries)


def sample_episodes(
    tasks: Sequence[TeacherTask], episodes: int, shots: int, queries: int, generator: torch.Generator
) -> Episodes:
    """Sample the same number of episodes of each task.

    Args:
        tasks: The tasks.
        episodes: Number of episodes of each task.
        shots: Number of support examples.
        queries: Number of query examples.
        generator: A random generator on the CPU.

    Returns:
        The episodes, ordered by task.

    Example:
        >>> tasks = [TeacherTask(torch.ones(1, 2, dtype=torch.float64), "tanh", rho) for rho in (0.5, 1.0)]
        >>> sample_episodes(tasks, 3, shots=5, queries=4, generator=torch.Generator().manual_seed(0)).query_x.shape
        torch.Size([6, 4, 2])
    """
    return Episodes.concatenate([task.environment(shots, queries).sample(episodes, generator) for task in tasks])


def nal_loss(tasks: Sequence[TeacherTask]) -> Callable[[Tensor], Tensor]:
    """Return the loss of non-adaptive learning (NAL), W ↦ E_i f_i(W) (Collins et al. 2022, eq. 3).

    It is the mean over the tasks i of their population losses f_i.

    Args:
        tasks: The tasks.

    Returns:
        Function that maps the student's neurons to the loss.

    Example:
        >>> neurons = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        >>> float(nal_loss([TeacherTask(neurons, "relu")])(neurons))
        0.0
    """
    return lambda W: torch.stack([task.loss(W) for task in tasks]).mean()


def maml_loss(tasks: Sequence[TeacherTask], alpha: float) -> Callable[[Tensor], Tensor]:
    """Return the loss of MAML with infinitely many samples, W ↦ E_i f_i(W − α∇f_i(W)) (Collins et al. 2022, eq. 1, 30).

    Args:
        tasks: The tasks.
        alpha: Step size α.

    Returns:
        Function that maps the student's neurons to the loss.

    Example:
        >>> neurons = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        >>> float(maml_loss([TeacherTask(neurons, "relu")], alpha=0.1)(neurons))
        0.0
    """
    return lambda W: torch.stack([task.loss(task.adapt(W, alpha)) for task in tasks]).mean()


def stationary_points(loss: Callable[[Tensor], Tensor], starting_points: Iterable[Tensor]) -> list[Tensor]:
    """Return the distinct stationary points that a root finder for ∇loss reaches from some starting points.

    Points farther from the origin than `MAX_NORM` are left out.

    Args:
        loss: A function of the neurons.
        starting_points: Starting points of the search.

    Returns:
        The stationary points, at most one for each starting point.

    Example:
        >>> starting_points = torch.tensor([[0.8], [1.2]])
        >>> [point.tolist() for point in stationary_points(lambda W: (W**4 - 2 * W**2).sum(), starting_points)]
        [[1.0]]
    """
    result: list[Tensor] = []
    for start in starting_points:
        shape = start.shape

        def gradient(flat: NDArray[np.float64], shape: torch.Size = shape) -> NDArray[np.float64]:
            return grad(loss, torch.from_numpy(flat).reshape(shape)).numpy().ravel()

        root = optimize.root(gradient, start.double().numpy().ravel(), tol=1e-12, options={"maxfev": 100})
        point = torch.from_numpy(root.x).reshape(shape)
        is_stationary = abs(root.fun).max() < GRADIENT_TOLERANCE and point.norm() < MAX_NORM
        if is_stationary and all((point - other).norm() > SAME_POINT_DISTANCE for other in result):
            result.append(point)
    return result


def lowest_stationary_point(loss: Callable[[Tensor], Tensor], starting_points: Iterable[Tensor]) -> Tensor | None:
    """Return the stationary point with the lowest loss that is reached from some starting points.

    Args:
        loss: A function of the neurons.
        starting_points: Starting points of the search.

    Returns:
        The point; None if a starting point has a lower loss. With ReLU, a loss can have its minimum at a kink.

    Example:
        >>> lowest_stationary_point(lambda W: (W**4 - 2 * W**2).sum(), torch.tensor([[0.1], [0.8]])).tolist()
        [1.0]
    """
    starting_points = list(starting_points)
    candidates = [*stationary_points(loss, starting_points), *starting_points]
    lowest = min(candidates, key=lambda point: float(loss(point)))
    return None if any(lowest is start for start in starting_points) else lowest


@dataclass(frozen=True)
class HardTaskPreference:
    """How much a stationary point of MAML's loss favors the hard task 1 over the easy task 2 (Collins et al. 2022, §4).

    A gradient ratio below 1 means that the hard task is favored: the point is closer to stationary for it.

    Args:
        alpha: Step size α.
        ratio: ‖∇f₁(W)‖/‖∇f₂(W)‖, which is 1 at stationary points of NAL's loss.
        adapted_ratio: ‖∇f₁(W₁)‖/‖∇f₂(W₂)‖, where W₁ is W after a step on task 1, and W₂ is W after a step on task 2.
        hard_curvatures: Smallest and largest curvature of f₁ at W, β₁ and L₁.
        easy_curvatures: Smallest and largest curvature of f₂ at W, β₂ and L₂.

    Example:
        >>> HardTaskPreference(1.0, 0.5, 0.5, (0.1, 0.5), easy_curvatures=(0.25, 0.5)).adapted_bound
        1.5
    """

    alpha: float
    ratio: float
    adapted_ratio: float
    hard_curvatures: tuple[float, float]
    easy_curvatures: tuple[float, float]

    @classmethod
    def measure(cls, W: Tensor, hard: TeacherTask, easy: TeacherTask, alpha: float) -> HardTaskPreference:
        """Measure the preference at a point.

        Args:
            W: Neurons of the student, (M, d).
            hard: The hard task.
            easy: The easy task.
            alpha: Step size α.

        Returns:
            The gradient ratios and curvatures at the point.
        """

        def norm(task: TeacherTask, W: Tensor) -> float:
            return float(task.gradient(W).norm())

        curvatures = [(float(values[0]), float(values[-1])) for values in (hard.curvatures(W), easy.curvatures(W))]
        adapted_ratio = norm(hard, hard.adapt(W, alpha)) / norm(easy, easy.adapt(W, alpha))
        return cls(alpha, norm(hard, W) / norm(easy, W), adapted_ratio, *curvatures)

    @property
    def applies(self) -> bool:
        """Whether the assumptions of the proof hold at this point: both losses are convex and α < 1/L.

        L is the larger one of L₁ and L₂.
        """
        smallest, largest = zip(self.hard_curvatures, self.easy_curvatures)
        return min(smallest) > 0 and self.alpha * max(largest) < 1

    @property
    def adapted_bound(self) -> float:
        """(1 − αβ₂)/(1 − αL₁), the upper bound on `adapted_ratio` (Collins et al. 2022, eq. 33)."""
        return (1 - self.alpha * self.easy_curvatures[0]) / (1 - self.alpha * self.hard_curvatures[1])

    @property
    def bound(self) -> float:
        """((1 − αβ₂)/(1 − αL₁))², the upper bound on `ratio` up to O(α²) (Collins et al. 2022, eq. 36)."""
        return self.adapted_bound**2

    @property
    def printed_bound(self) -> float:
        """(1 − 2αβ₂)/(1 − αL₁)², which equals `bound` up to O(α²) and is printed in theorem 1 (eq. 13)."""
        return (1 - 2 * self.alpha * self.easy_curvatures[0]) / (1 - self.alpha * self.hard_curvatures[1]) ** 2


def hard_task_preferences(
    teachers: Tensor, activation: Activation, variances: tuple[float, float], relative_alpha: float
) -> list[HardTaskPreference]:
    """Measure the preference for the hard task at stationary points of MAML's population loss, for pairs of tasks.

    The searches for stationary points start at both teachers and at their midpoint.

    Args:
        teachers: Neurons of the hard and of the easy task of each pair, (pairs, 2, M, d).
        activation: Activation of students and teachers.
        variances: Input variances of hard and of easy tasks.
        relative_alpha: α·L₂, where L₂ is the largest curvature of the easy task at its teacher.

    Returns:
        The preference at each stationary point of each pair.

    Example:
        >>> teachers = torch.tensor([[[[1.0, 0.5]], [[0.2, -0.8]]]], dtype=torch.float64)
        >>> all(point.ratio <= point.bound for point in hard_task_preferences(teachers, "softplus", (0.5, 1.0), 0.1))
        True
    """
    hard_variance, easy_variance = variances
    preferences: list[HardTaskPreference] = []
    for hard_teacher, easy_teacher in teachers:
        hard = TeacherTask(hard_teacher, activation, hard_variance)
        easy = TeacherTask(easy_teacher, activation, easy_variance)
        alpha = relative_alpha / float(easy.curvatures(easy_teacher)[-1])
        starting_points = (hard_teacher, easy_teacher, (hard_teacher + easy_teacher) / 2)
        points = stationary_points(maml_loss([hard, easy], alpha), starting_points)
        preferences += [HardTaskPreference.measure(point, hard, easy, alpha) for point in points]
    return preferences


def _relu_products(W: Tensor, V: Tensor) -> Tensor:
    """Return E[max(⟨w, x⟩, 0)·max(⟨v, x⟩, 0)] for every pair of neurons and x ~ N(0, I).

    With the angle θ between w and v, it is (‖w‖‖v‖ sin θ + (π − θ)⟨w, v⟩)/2π.
    """
    inner = W @ V.mT
    squared_area = W.square().sum(-1)[:, None] * V.square().sum(-1) - inner.square()
    is_positive = squared_area > 0  # if not, the neurons are parallel, and the square root has no finite derivative
    area = torch.where(is_positive, torch.where(is_positive, squared_area, 1.0).sqrt(), 0.0)  # ‖w‖‖v‖ sin θ
    return (area + (math.pi - torch.atan2(area, inner)) * inner) / (2 * math.pi)


def _relu_square(W: Tensor) -> Tensor:
    """Return E[h_W(x)²] for x ~ N(0, I), where h_W is the sum of the ReLU neurons W."""
    off_diagonal = 1 - torch.eye(len(W), dtype=W.dtype)
    return W.square().sum() / 2 + (off_diagonal * _relu_products(W, W)).sum()


@lru_cache
def _normal_points(dimension: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points and weights with Σ weight·g(point) ≈ E g(x) for x ~ N(0, I)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)

    def cartesian_power(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack(np.meshgrid(*[values] * dimension, indexing="ij"), -1).reshape(-1, dimension)

    product_weights = cartesian_power(weights).prod(-1)
    return cartesian_power(nodes), product_weights / product_weights.sum()
