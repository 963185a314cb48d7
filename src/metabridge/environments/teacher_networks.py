"""Regression tasks whose targets come from teachers: nets of one hidden layer with a fixed sum above it."""

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


def neuron_sum(activation: Activation, neurons: Tensor, x: Tensor) -> Tensor:
    """h(x) = Σ_k σ(⟨w^k, x⟩) for points x (..., points, d) and neurons w (..., M, d), as (..., points, 1) (C §4).

    >>> neuron_sum("relu", torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, -3.0], [1.0, 4.0]]))
    tensor([[2.],
            [5.]])
    """
    return ACTIVATIONS[activation](x @ neurons.mT).sum(-1, keepdim=True)


@dataclass(frozen=True)
class GaussianNeurons:
    """Teachers of `width` neurons, each drawn from N(mean·1, variance·I) for every task."""

    stored_name: ClassVar[str] = "GaussianNeurons"  # in the settings of runs since version 0.1.0

    dimension: int
    width: int = 1
    mean: float = 0.0
    variance: float = 1.0

    def __post_init__(self) -> None:
        check_count("dimension", self.dimension)
        check_count("width", self.width)
        check_not_negative("variance", self.variance)

    def sample(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Return the neurons of every task, (tasks, width, dimension)."""
        normal = torch.randn(tasks, self.width, self.dimension, generator=generator)
        return self.mean + math.sqrt(self.variance) * normal


@dataclass(frozen=True, eq=False)
class FixedNeurons:
    """Given teachers (teachers, width, dimension); every task has one of them, each with the same probability."""

    stored_name: ClassVar[str] = "FixedNeurons"  # in the settings of runs since version 0.1.0

    neurons: Tensor

    def __post_init__(self) -> None:
        if not self.neurons.is_floating_point() or self.neurons.ndim != 3 or not self.neurons.numel():
            raise InputError(
                f"neurons is {describe(self.neurons)}, but must be floating point of shape "
                "(teachers, width, dimension). For a single teacher of one neuron use neurons[None, None]."
            )

    def sample(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Return the neurons of every task, (tasks, width, dimension)."""
        return self.neurons[torch.randint(len(self.neurons), (tasks,), generator=generator)]


@dataclass(frozen=True, eq=False)
class TeacherTasks:
    """y = Σ_k σ(⟨w^k, x⟩) + z with x ~ N(0, ρI), z ~ N(0, σ²) and neurons w of a teacher for each task (C §4).

    `covariance` is ρ and `noise` is σ². The smaller ρ is, the slower gradient descent is on the task: easy and
    hard tasks differ in it, and a `Mixture` has both.

    >>> from metabridge.environments import Mixture
    >>> easy = TeacherTasks(GaussianNeurons(dimension=2))
    >>> hard = TeacherTasks(FixedNeurons(torch.tensor([[[1.0, 1.0]]])), covariance=0.5)
    >>> tasks = Mixture((easy, hard), (0.5, 0.5)).sample(6, torch.Generator().manual_seed(0))
    >>> tasks.support_x.shape, tasks.query_y.shape
    (torch.Size([6, 10, 2]), torch.Size([6, 10, 1]))
    """

    stored_name: ClassVar[str] = "TeacherTasks"  # in the settings of runs since version 0.1.0

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
        """A teacher has one value at each point."""
        return 1

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks with the (CPU) generator, in the precision of the neurons."""
        check_count("tasks", tasks)
        neurons = self.neurons.sample(tasks, generator)
        shape = (tasks, self.shots + self.queries, neurons.shape[-1])
        x = math.sqrt(self.covariance) * torch.randn(shape, generator=generator, dtype=neurons.dtype)
        y = neuron_sum(self.activation, neurons, x)
        if self.noise:
            y = y + math.sqrt(self.noise) * torch.randn(y.shape, generator=generator, dtype=y.dtype)
        return Episodes.split(x, y, self.shots)
