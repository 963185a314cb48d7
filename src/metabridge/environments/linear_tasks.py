"""Linear regression and logistic regression on groups of tasks, such as hard ones and easy ones (C §3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count, check_not_negative, check_positive, describe


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Tasks of one kind: inputs x ~ N(0, Σ), of which each task's own w* ~ N(centre, spread) makes the targets.

    - `covariance`: Σ, or a number ρ for ρI. The smaller it is, the slower gradient descent is on the task.
    - `centre`: the mean of w*, or a number for the same in every coordinate.
    - `spread`: the covariance of w*, or a number r for rI; 0 makes all tasks of the group the same.
    - `noise`: the variance σ² of what is added to the targets of a regression.
    - `probability`: the share of this group among the tasks.
    """

    covariance: Tensor | float
    centre: Tensor | float = 0.0
    spread: Tensor | float = 0.0
    noise: float = 0.0
    probability: float = 1.0


class TaskDistribution(NamedTuple):
    """What tasks are drawn from, in float64, a row for each group."""

    probability: Tensor
    covariance: Tensor
    centre: Tensor
    spread: Tensor
    noise: Tensor


@dataclass(frozen=True, eq=False)
class Landscape:
    """Groups of tasks in one space, each drawn with its probability. `HardEasy` is the shortest way to make one.

    >>> groups = TaskGroup(1.0, probability=0.75), TaskGroup(torch.eye(3), 2.0, probability=0.25)
    >>> Landscape(groups, dimension=3).distribution.probability
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    groups: tuple[TaskGroup, ...]
    dimension: int

    def __post_init__(self) -> None:
        check_count("dimension", self.dimension)
        if not self.groups:
            raise InputError("groups is empty, but there must be at least one group of tasks.")
        for place, group in enumerate(self.groups):
            _check_group(place, group, self.dimension)
        total = math.fsum(group.probability for group in self.groups)
        if abs(total - 1) > 1e-9:
            raise InputError(f"the probabilities of the groups add up to {total:g}, but must add up to 1.")

    @cached_property
    def distribution(self) -> TaskDistribution:
        """The groups as tensors."""
        identity = torch.eye(self.dimension, dtype=torch.float64)
        return TaskDistribution(
            torch.tensor([group.probability for group in self.groups], dtype=torch.float64),
            torch.stack([_matrix(group.covariance, identity) for group in self.groups]),
            torch.stack([_as_double(group.centre).expand(self.dimension) for group in self.groups]),
            torch.stack([_matrix(group.spread, identity) for group in self.groups]),
            torch.tensor([group.noise for group in self.groups], dtype=torch.float64),
        )

    def sample_finite(self, tasks: int, generator: torch.Generator) -> Landscape:
        """Return so many tasks of this landscape as one of their own, each a group with a fixed w*.

        >>> few = HardEasy(rho_hard=0.1, rho_easy=1.0).landscape.sample_finite(4, torch.Generator().manual_seed(0))
        >>> len(few.groups), float(few.distribution.spread.abs().max())
        (4, 0.0)
        """
        check_count("tasks", tasks)
        kinds, w = self._tasks(tasks, generator)
        law = self.distribution
        groups = (
            TaskGroup(law.covariance[kind], centre, 0.0, float(law.noise[kind]), 1 / tasks)
            for kind, centre in zip(kinds, w)
        )
        return Landscape(tuple(groups), self.dimension)

    def _tasks(self, tasks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the groups of tasks and their w*."""
        kinds = torch.multinomial(self.distribution.probability, tasks, replacement=True, generator=generator)
        return kinds, self._solutions(kinds, generator)

    def _solutions(self, kinds: Tensor, generator: torch.Generator) -> Tensor:
        normal = torch.randn(len(kinds), self.dimension, generator=generator)
        return self.distribution.centre[kinds] + (self._spreads[kinds] @ normal.double()[..., None]).squeeze(-1)

    def _points(self, kinds: Tensor, w: Tensor, points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the inputs of tasks of these groups, with ⟨w*, x⟩."""
        normal = torch.randn(len(kinds), points, self.dimension, generator=generator)
        x = normal @ self._roots.to(normal.dtype)[kinds]
        return x, x @ w.to(x.dtype)[..., None]

    @cached_property
    def _roots(self) -> Tensor:
        return _root(self.distribution.covariance)

    @cached_property
    def _spreads(self) -> Tensor:
        return _root(self.distribution.spread)


@dataclass(frozen=True)
class HardEasy:
    """Hard and easy tasks in equal parts (C §3.2).

    Σ = ρ_H·I and w* ~ N(R·1, r_H·I) for a hard task, Σ = ρ_E·I and w* ~ N(0, r_E·I) for an easy one.
    """

    rho_hard: float
    rho_easy: float
    R: float = 1.0
    r_hard: float = 0.0
    r_easy: float = 0.0
    dimension: int = 10
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rho_hard", "rho_easy"):
            check_positive(name, getattr(self, name))
        if not math.isfinite(self.R):
            raise InputError(f"R is {self.R}, but must be a finite number.")
        for name in ("r_hard", "r_easy", "noise"):
            check_not_negative(name, getattr(self, name))

    @cached_property
    def landscape(self) -> Landscape:
        """The two groups, the hard tasks first."""
        hard = TaskGroup(self.rho_hard, self.R, self.r_hard, self.noise, 0.5)
        easy = TaskGroup(self.rho_easy, 0.0, self.r_easy, self.noise, 0.5)
        return Landscape((hard, easy), self.dimension)


@dataclass(frozen=True, eq=False)
class LinearTasks:
    """y = ⟨w*, x⟩ + z with x ~ N(0, Σ) and z ~ N(0, σ²) (C §3); Σ, σ² and the law of w* are those of the task's group.

    A method with persistent heads has one for every group.

    >>> tasks = LinearTasks(HardEasy(rho_hard=0.1, rho_easy=1.0).landscape, shots=25, queries=10)
    >>> tasks.sample(4, torch.Generator().manual_seed(0)).query_x.shape
    torch.Size([4, 10, 10])
    """

    landscape: Landscape
    shots: int = 10
    queries: int = 10

    def __post_init__(self) -> None:
        check_count("shots", self.shots)
        check_count("queries", self.queries)

    @property
    def outputs(self) -> int:
        """One value at each point."""
        return 1

    @property
    def classes(self) -> int:
        """A persistent head for each group."""
        return len(self.landscape.groups)

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks with the (CPU) generator; `classes` says of which group each one is."""
        check_count("tasks", tasks)
        return self._episodes(*self.landscape._tasks(tasks, generator), generator)

    def sample_every_group(self, episodes: int, generator: torch.Generator) -> Episodes:
        """Draw one task of every group, whatever its probability, and so many episodes of it, side by side.

        Of a landscape that `Landscape.sample_finite` made, these are τ episodes of each of T given tasks (C eq. 4).
        """
        check_count("episodes", episodes)
        kinds = torch.arange(self.classes)
        w = self.landscape._solutions(kinds, generator)
        return self._episodes(kinds.repeat_interleave(episodes), w.repeat_interleave(episodes, 0), generator)

    def _episodes(self, kinds: Tensor, w: Tensor, generator: torch.Generator) -> Episodes:
        x, y = self.landscape._points(kinds, w, self.shots + self.queries, generator)
        deviation = self.landscape.distribution.noise.sqrt().to(y.dtype)[kinds, None, None]
        y = y + deviation * torch.randn(y.shape, generator=generator)
        return Episodes.split(x, y, self.shots, kinds[:, None])


@dataclass(frozen=True, eq=False)
class LogisticTasks:
    """Labels 1 with probability 1/(1 + e^{−⟨w*, x⟩}) and 0 otherwise (C fig. 7); x and w* as in `LinearTasks`.

    >>> tasks = LogisticTasks(HardEasy(rho_hard=0.1, rho_easy=1.0).landscape)
    >>> tasks.sample(4, torch.Generator().manual_seed(0)).query_y.shape, tasks.outputs
    (torch.Size([4, 10]), 2)
    """

    landscape: Landscape
    shots: int = 10
    queries: int = 10

    def __post_init__(self) -> None:
        check_count("shots", self.shots)
        check_count("queries", self.queries)
        noisy = [group.noise for group in self.landscape.groups if group.noise]
        if noisy:
            raise InputError(f"noise is {noisy[0]}, but labels are random by themselves. Use groups with noise=0.")

    @property
    def outputs(self) -> int:
        """Two classes; the second's output less the first's is the logit."""
        return 2

    @property
    def classes(self) -> int:
        """Two persistent rows for each group."""
        return 2 * len(self.landscape.groups)

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks with the (CPU) generator; `classes` says of which group each one is."""
        check_count("tasks", tasks)
        kinds, w = self.landscape._tasks(tasks, generator)
        x, logit = self.landscape._points(kinds, w, self.shots + self.queries, generator)
        labels = torch.rand(logit.shape, generator=generator) < logit.sigmoid()
        return Episodes.split(x, labels.squeeze(-1).long(), self.shots, 2 * kinds[:, None] + torch.arange(2))


def _as_double(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _matrix(value: Tensor | float, identity: Tensor) -> Tensor:
    matrix = _as_double(value)
    return matrix if matrix.ndim else matrix * identity


def _root(matrices: Tensor) -> Tensor:
    """The symmetric square roots of positive semi-definite matrices."""
    values, vectors = torch.linalg.eigh(matrices)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
    return root


def _check_group(place: int, group: TaskGroup, dimension: int) -> None:
    _check_shape(f"covariance of group {place}", group.covariance, (dimension, dimension))
    _check_shape(f"centre of group {place}", group.centre, (dimension,))
    _check_shape(f"spread of group {place}", group.spread, (dimension, dimension))
    check_not_negative(f"noise of group {place}", group.noise)
    if not 0 <= group.probability <= 1:
        raise InputError(f"probability of group {place} is {group.probability}, but must be between 0 and 1.")
    least, most = _modes(f"covariance of group {place}", group.covariance)
    if least <= 1e-12 * most or most <= 0:
        raise InputError(
            f"covariance of group {place} has the eigenvalue {least:.3g}, but inputs must vary in every direction: "
            "all eigenvalues must be positive."
        )
    least, most = _modes(f"spread of group {place}", group.spread)
    if least < -1e-12 * abs(most):
        raise InputError(f"spread of group {place} has the eigenvalue {least:.3g}, but a variance is not negative.")


def _check_shape(name: str, value: Tensor | float, shape: tuple[int, ...]) -> None:
    given = torch.as_tensor(value)
    if given.ndim and given.shape != shape:
        raise InputError(f"{name} is {describe(given)}, but must be a number or of shape {shape}.")
    if not given.isfinite().all():
        raise InputError(f"{name} holds infinite or undefined numbers, but must be finite.")


def _modes(name: str, value: Tensor | float) -> tuple[float, float]:
    """The least and the largest eigenvalue of what must be symmetric."""
    matrix = _as_double(value)
    if not matrix.ndim:
        return float(matrix), float(matrix)
    if not torch.allclose(matrix, matrix.mT, rtol=1e-6, atol=1e-9 * float(matrix.abs().max())):
        raise InputError(
            f"{name} is not symmetric: entries differ from their mirror images by up to "
            f"{float((matrix - matrix.mT).abs().max()):.3g}. Use (M + Mᵀ)/2 if that is what is meant."
        )
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0]), float(values[-1])
