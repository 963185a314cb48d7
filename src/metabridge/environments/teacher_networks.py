"""Regression tasks whose targets are the outputs of two-layer teacher networks, whose output weights are all 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count, check_not_negative, check_positive, describe

Activation = Literal["softplus", "sigmoid", "relu", "tanh"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "tanh": torch.tanh,
}


def teacher_output(activation: Activation, neurons: Tensor, x: Tensor) -> Tensor:
    """Return the output h(x) = Σ_k σ(⟨w^k, x⟩) of a teacher, (..., n, 1) (Collins et al. 2022, §4).

    Args:
        activation: The activation σ, a key of `ACTIVATIONS`.
        neurons: The weights w^k of the M neurons, (..., M, d).
        x: The n inputs, (..., n, d).

    >>> teacher_output("relu", torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, -3.0], [1.0, 4.0]]))
    tensor([[2.],
            [5.]])
    """
    return ACTIVATIONS[activation](x @ neurons.mT).sum(-1, keepdim=True)


@dataclass(frozen=True)
class GaussianNeurons:
    """A distribution of teachers with neurons w ~ N(mean·1, variance·I), where 1 is the vector of ones.

    Args:
        dimension: The dimension of the inputs.
        width: The number of neurons of each teacher.
        mean: The mean of each weight.
        variance: The variance of each weight.

    Raises:
        InputError: `dimension` or `width` is not a positive integer, or the variance is negative.

    >>> GaussianNeurons(dimension=2, width=3).sample(4, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 2])
    """

    stored_name: ClassVar[str] = "NormalNeurons"  # class name of version 0.1.0, which saved runs contain

    dimension: int
    width: int = 1
    mean: float = 0.0
    variance: float = 1.0

    def __post_init__(self) -> None:
        check_count("dimension", self.dimension)
        check_count("width", self.width)
        check_not_negative("variance", self.variance)

    def sample(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Sample the teacher of each task.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The neurons, (tasks, width, dimension).
        """
        normal = torch.randn(tasks, self.width, self.dimension, generator=generator)
        return self.mean + math.sqrt(self.variance) * normal


@dataclass(frozen=True, eq=False)
class FixedNeurons:
    """The uniform distribution over a fixed set of teachers.

    Args:
        neurons: The weights of the neurons, floating point of shape (teachers, width, dimension).

    Raises:
        InputError: The shape or dtype is wrong.

    >>> FixedNeurons(torch.ones(1, 3, 2)).sample(4, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 2])
    """

    stored_name: ClassVar[str] = "GivenNeurons"  # class name of version 0.1.0, which saved runs contain

    neurons: Tensor

    def __post_init__(self) -> None:
        if not self.neurons.is_floating_point() or self.neurons.ndim != 3 or not self.neurons.numel():
            raise InputError(
                f"neurons is {describe(self.neurons)}, but must be floating point of shape "
                "(teachers, width, dimension). For a single teacher of one neuron use neurons[None, None]."
            )

    def __repr__(self) -> str:
        teachers, width, dimension = self.neurons.shape
        return f"FixedNeurons({teachers} teachers, width={width}, dimension={dimension})"

    def sample(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Sample the teacher of each task.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The neurons, (tasks, width, dimension).
        """
        return self.neurons[torch.randint(len(self.neurons), (tasks,), generator=generator)]


@dataclass(frozen=True, eq=False)
class TeacherTasks:
    """Regression tasks y = Σ_k σ(⟨w^k, x⟩) + z with a teacher network for each task (Collins et al. 2022, §4).

    Inputs are x ~ N(0, ρI) and noise is z ~ N(0, ν²). Gradient descent converges more slowly for smaller ρ, so hard
    tasks have a small ρ. Combine easy and hard tasks with a `Mixture`.

    Args:
        neurons: The distribution of the teachers.
        activation: The activation σ.
        covariance: The variance ρ of each input coordinate; the covariance of the inputs is ρI.
        noise: The variance ν² of the noise on the targets.
        shots: Support examples per task.
        queries: Query examples per task.

    Raises:
        InputError: The activation is unknown, or another argument is out of range.

    >>> from metabridge.environments import Mixture
    >>> easy = TeacherTasks(GaussianNeurons(dimension=2))
    >>> hard = TeacherTasks(FixedNeurons(torch.tensor([[[1.0, 1.0]]])), covariance=0.5)
    >>> tasks = Mixture((easy, hard), (0.5, 0.5)).sample(6, torch.Generator().manual_seed(0))
    >>> tasks.support_x.shape, tasks.query_y.shape
    (torch.Size([6, 10, 2]), torch.Size([6, 10, 1]))
    """

    stored_name: ClassVar[str] = "Teachers"  # class name of version 0.1.0, which saved runs contain

    neurons: GaussianNeurons | FixedNeurons
    activation: Activation = "softplus"
    covariance: float = 1.0
    noise: float = 0.0
    shots: int = 10
    queries: int = 10

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation is {self.activation!r}, but must be one of {', '.join(ACTIVATIONS)}.")
        check_positive("covariance", self.covariance)
        check_not_negative("noise", self.noise)
        check_count("shots", self.shots)
        check_count("queries", self.queries)

    @property
    def outputs(self) -> int:
        """Number of network outputs: 1, the function value."""
        return 1

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks. The tensors have the dtype of the neurons.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks.
        """
        check_count("tasks", tasks)
        neurons = self.neurons.sample(tasks, generator)
        shape = (tasks, self.shots + self.queries, neurons.shape[-1])
        x = math.sqrt(self.covariance) * torch.randn(shape, generator=generator, dtype=neurons.dtype)
        y = teacher_output(self.activation, neurons, x)
        if self.noise:
            y = y + math.sqrt(self.noise) * torch.randn(y.shape, generator=generator, dtype=y.dtype)
        return Episodes.split(x, y, self.shots)
