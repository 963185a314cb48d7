"""Linear and logistic regression tasks from groups, such as hard and easy tasks (Collins et al. 2022, §3)."""

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
    """A group of similar tasks: inputs are x ~ N(0, Σ), and the solution of each task is w* ~ N(center, spread).

    Args:
        covariance: The covariance Σ of the inputs, or a number ρ for Σ = ρI. Smaller covariances make gradient descent
            converge more slowly.
        center: The mean of w*, or a number if all coordinates have the same mean.
        spread: The covariance of w*, or a number r for rI. If 0, all tasks of the group have the same solution.
        noise: The variance σ² of the noise on regression targets.
        probability: The probability that a task is from this group.

    >>> TaskGroup(covariance=0.1, center=2.0, probability=0.25).noise
    0.0
    """

    covariance: Tensor | float
    center: Tensor | float = 0.0
    spread: Tensor | float = 0.0
    noise: float = 0.0
    probability: float = 1.0

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in ("covariance", "center", "spread", "noise", "probability")}
        texts = {name: describe(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        return f"TaskGroup({', '.join(f'{name}={text}' for name, text in texts.items())})"


class TaskDistribution(NamedTuple):
    """The fields of all groups of a landscape as float64 tensors; the first dimension indexes the groups."""

    probability: Tensor  # (groups,)
    covariance: Tensor  # (groups, dimension, dimension)
    center: Tensor  # (groups, dimension)
    spread: Tensor  # (groups, dimension, dimension)
    noise: Tensor  # (groups,)


@dataclass(frozen=True, eq=False)
class Landscape:
    """A task landscape: groups of tasks and their probabilities. `HardEasy` builds the most common one.

    Args:
        groups: The groups. Their probabilities must add up to 1.
        dimension: The dimension of the inputs and of w*.

    Raises:
        InputError: A field of a group is invalid, or the probabilities do not add up to 1.

    >>> groups = TaskGroup(1.0, probability=0.75), TaskGroup(torch.eye(3), 2.0, probability=0.25)
    >>> Landscape(groups, dimension=3).distribution.probability
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    groups: tuple[TaskGroup, ...]
    dimension: int

    def __post_init__(self) -> None:
        check_count("dimension", self.dimension)
        if not self.groups:
            raise InputError("groups is empty, but must contain at least one group of tasks.")
        for index, group in enumerate(self.groups):
            _check_group(index, group, self.dimension)
        probability_sum = math.fsum(group.probability for group in self.groups)
        if abs(probability_sum - 1) > 1e-9:
            raise InputError(f"the probabilities of the groups add up to {probability_sum:g}, but must add up to 1.")

    def __repr__(self) -> str:
        return f"Landscape({len(self.groups)} groups, dimension={self.dimension})"

    @cached_property
    def distribution(self) -> TaskDistribution:
        """The fields of all groups as tensors."""
        identity = torch.eye(self.dimension, dtype=torch.float64)
        return TaskDistribution(
            torch.tensor([group.probability for group in self.groups], dtype=torch.float64),
            torch.stack([_as_matrix(group.covariance, identity) for group in self.groups]),
            torch.stack([_as_double(group.center).expand(self.dimension) for group in self.groups]),
            torch.stack([_as_matrix(group.spread, identity) for group in self.groups]),
            torch.tensor([group.noise for group in self.groups], dtype=torch.float64),
        )

    def sample_finite(self, tasks: int, generator: torch.Generator) -> Landscape:
        """Sample a finite set of tasks, and return it as a landscape with one group per task.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The landscape. Each group has a fixed w*, and all groups have the same probability.

        >>> finite = HardEasy(rho_hard=0.1, rho_easy=1.0).landscape.sample_finite(4, torch.Generator().manual_seed(0))
        >>> len(finite.groups), float(finite.distribution.spread.abs().max())
        (4, 0.0)
        """
        check_count("tasks", tasks)
        group_indices, solutions = self._sample_solutions(tasks, generator)
        distribution = self.distribution
        groups = (
            TaskGroup(distribution.covariance[group], solution, 0.0, float(distribution.noise[group]), 1 / tasks)
            for group, solution in zip(group_indices, solutions)
        )
        return Landscape(tuple(groups), self.dimension)

    def _sample_solutions(self, tasks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample tasks. Return the group index and the solution w* of each."""
        group_indices = torch.multinomial(self.distribution.probability, tasks, replacement=True, generator=generator)
        return group_indices, self._sample_solutions_given_groups(group_indices, generator)

    def _sample_solutions_given_groups(self, group_indices: Tensor, generator: torch.Generator) -> Tensor:
        """Sample the solution w* of each task, given its group."""
        normal = torch.randn(len(group_indices), self.dimension, generator=generator)
        deviations = (self._spread_sqrt[group_indices] @ normal.double()[..., None]).squeeze(-1)
        return self.distribution.center[group_indices] + deviations

    def _sample_inputs(
        self, group_indices: Tensor, solutions: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Sample `count` inputs x of each task, given its group and solution w*. Return them and the values ⟨w*, x⟩."""
        normal = torch.randn(len(group_indices), count, self.dimension, generator=generator)
        x = normal @ self._covariance_sqrt.to(normal.dtype)[group_indices]
        return x, x @ solutions.to(x.dtype)[..., None]

    @cached_property
    def _covariance_sqrt(self) -> Tensor:
        return _symmetric_sqrt(self.distribution.covariance)

    @cached_property
    def _spread_sqrt(self) -> Tensor:
        return _symmetric_sqrt(self.distribution.spread)


@dataclass(frozen=True)
class HardEasy:
    """Hard and easy tasks with probability ½ each (Collins et al. 2022, §3.2).

    Hard tasks have Σ = ρ_H·I and w* ~ N(R·1, r_H·I); easy tasks have Σ = ρ_E·I and w* ~ N(0, r_E·I). Σ is the
    covariance of the inputs, w* the solution of a task, and 1 the vector of ones.

    Args:
        rho_hard: The input variance ρ_H of hard tasks.
        rho_easy: The input variance ρ_E of easy tasks.
        R: The mean of the coordinates of w* for hard tasks.
        r_hard: The variance r_H of the coordinates of w* for hard tasks.
        r_easy: The variance r_E of the coordinates of w* for easy tasks.
        dimension: The dimension of the inputs.
        noise: The noise variance σ² of the targets.

    Raises:
        InputError: A number is out of range.

    >>> HardEasy(rho_hard=0.1, rho_easy=1.0, dimension=2).landscape.distribution.center
    tensor([[1., 1.],
            [0., 0.]], dtype=torch.float64)
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
        """The landscape of the two groups, hard tasks first."""
        hard = TaskGroup(self.rho_hard, self.R, self.r_hard, self.noise, 0.5)
        easy = TaskGroup(self.rho_easy, 0.0, self.r_easy, self.noise, 0.5)
        return Landscape((hard, easy), self.dimension)


@dataclass(frozen=True, eq=False)
class LinearTasks:
    """Linear regression tasks y = ⟨w*, x⟩ + z on a landscape (Collins et al. 2022, §3).

    Inputs are x ~ N(0, Σ) and noise is z ~ N(0, σ²); Σ, σ² and the distribution of w* depend on the task's group.
    In multi-task methods, the head has one output unit for each group.

    Args:
        landscape: The groups of tasks.
        shots: Support examples per task.
        queries: Query examples per task.

    Raises:
        InputError: `shots` or `queries` is not a positive integer.

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
        """Number of network outputs: 1, the function value."""
        return 1

    @property
    def classes(self) -> int:
        """Number of output units of the head in multi-task methods: one for each group."""
        return len(self.landscape.groups)

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks. `Episodes.classes` contains the group of each task.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks.
        """
        check_count("tasks", tasks)
        return self._sample_episodes(*self.landscape._sample_solutions(tasks, generator), generator)

    def sample_every_group(self, episodes: int, generator: torch.Generator) -> Episodes:
        """Sample one task from every group, regardless of its probability, and several episodes of each task.

        If the landscape is from `Landscape.sample_finite`, the result has τ episodes of each of the T fixed tasks
        (Collins et al. 2022, eq. 4).

        Args:
            episodes: Number of episodes τ per task. They have the same w*, but different inputs.
            generator: A random generator on the CPU.

        Returns:
            The episodes, ordered by group.
        """
        check_count("episodes", episodes)
        group_indices = torch.arange(self.classes)
        solutions = self.landscape._sample_solutions_given_groups(group_indices, generator)
        return self._sample_episodes(
            group_indices.repeat_interleave(episodes), solutions.repeat_interleave(episodes, 0), generator
        )

    def _sample_episodes(self, group_indices: Tensor, solutions: Tensor, generator: torch.Generator) -> Episodes:
        x, y = self.landscape._sample_inputs(group_indices, solutions, self.shots + self.queries, generator)
        noise_std = self.landscape.distribution.noise.sqrt().to(y.dtype)[group_indices, None, None]
        y = y + noise_std * torch.randn(y.shape, generator=generator)
        return Episodes.split(x, y, self.shots, group_indices[:, None])


@dataclass(frozen=True, eq=False)
class LogisticTasks:
    """Logistic regression tasks on a landscape (Collins et al. 2022, fig. 7).

    The label of an input x ~ N(0, Σ) is 1 with probability 1/(1 + e^{−⟨w*, x⟩}), and 0 otherwise; Σ and the
    distribution of w* depend on the task's group. In multi-task methods, the head has two output units for each group.

    Args:
        landscape: The groups of tasks. Their `noise` must be 0.
        shots: Support examples per task.
        queries: Query examples per task.

    Raises:
        InputError: `shots` or `queries` is not a positive integer, or a group has noise.

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
        nonzero_noise = [group.noise for group in self.landscape.groups if group.noise]
        if nonzero_noise:
            raise InputError(
                f"noise is {nonzero_noise[0]}, but must be 0, because the labels of LogisticTasks are already random. "
                "Use groups with noise=0."
            )

    @property
    def outputs(self) -> int:
        """Number of network outputs: 2. The second minus the first is the logit."""
        return 2

    @property
    def classes(self) -> int:
        """Number of output units of the head in multi-task methods: two for each group."""
        return 2 * len(self.landscape.groups)

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks. `Episodes.classes` contains the two output units of each task's group.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks.
        """
        check_count("tasks", tasks)
        group_indices, solutions = self.landscape._sample_solutions(tasks, generator)
        x, logit = self.landscape._sample_inputs(group_indices, solutions, self.shots + self.queries, generator)
        labels = torch.rand(logit.shape, generator=generator) < logit.sigmoid()
        return Episodes.split(x, labels.squeeze(-1).long(), self.shots, 2 * group_indices[:, None] + torch.arange(2))


def random_covariance(dimension: int, log_std: float, generator: torch.Generator) -> Tensor:
    """Return a random covariance with uniformly distributed eigenvectors and log-normal eigenvalues scaled to mean 1.

    Args:
        dimension: The dimension d.
        log_std: The standard deviation of the logarithms of the eigenvalues.
        generator: A random generator on the CPU.

    Returns:
        The covariance (d, d), in float64.

    >>> round(float(random_covariance(5, 0.3, torch.Generator().manual_seed(0)).trace()), 6)
    5.0
    """
    eigenvectors = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator).double()).Q
    eigenvalues = (log_std * torch.randn(dimension, generator=generator).double()).exp()
    return (eigenvectors * (eigenvalues / eigenvalues.mean())) @ eigenvectors.T  # type: ignore[no-any-return]


def _as_double(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _as_matrix(value: Tensor | float, identity: Tensor) -> Tensor:
    matrix = _as_double(value)
    return matrix if matrix.ndim else matrix * identity


def _symmetric_sqrt(matrices: Tensor) -> Tensor:
    """Return the symmetric square roots of positive semi-definite matrices."""
    eigenvalues, eigenvectors = torch.linalg.eigh(matrices)
    square_roots: Tensor = (eigenvectors * eigenvalues.clamp_min(0).sqrt()[..., None, :]) @ eigenvectors.mT
    return square_roots


def _check_group(index: int, group: TaskGroup, dimension: int) -> None:
    _check_shape(f"covariance of group {index}", group.covariance, (dimension, dimension))
    _check_shape(f"center of group {index}", group.center, (dimension,))
    _check_shape(f"spread of group {index}", group.spread, (dimension, dimension))
    check_not_negative(f"noise of group {index}", group.noise)
    if not 0 <= group.probability <= 1:
        raise InputError(f"probability of group {index} is {group.probability}, but must be between 0 and 1.")
    min_eigenvalue, max_eigenvalue = _extreme_eigenvalues(f"covariance of group {index}", group.covariance)
    if min_eigenvalue <= 1e-12 * max_eigenvalue or max_eigenvalue <= 0:
        raise InputError(
            f"covariance of group {index} has the eigenvalue {min_eigenvalue:.3g}, "
            "but all eigenvalues must be positive."
        )
    min_eigenvalue, max_eigenvalue = _extreme_eigenvalues(f"spread of group {index}", group.spread)
    if min_eigenvalue < -1e-12 * abs(max_eigenvalue):
        raise InputError(
            f"spread of group {index} has the eigenvalue {min_eigenvalue:.3g}, but eigenvalues must not be negative."
        )


def _check_shape(name: str, value: Tensor | float, shape: tuple[int, ...]) -> None:
    tensor = torch.as_tensor(value)
    if tensor.ndim and tensor.shape != shape:
        raise InputError(f"{name} is {describe(tensor)}, but must be a number or a tensor of shape {shape}.")
    if not tensor.isfinite().all():
        raise InputError(f"{name} has infinite or NaN values, but must be finite.")


def _extreme_eigenvalues(name: str, value: Tensor | float) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue; raise `InputError` if a matrix is not symmetric."""
    matrix = _as_double(value)
    if not matrix.ndim:
        return float(matrix), float(matrix)
    if not torch.allclose(matrix, matrix.mT, rtol=1e-6, atol=1e-9 * float(matrix.abs().max())):
        raise InputError(
            f"{name} is not symmetric: it differs from its transpose by up to "
            f"{float((matrix - matrix.mT).abs().max()):.3g}. Use (M + Mᵀ)/2 to make it symmetric."
        )
    eigenvalues = torch.linalg.eigvalsh(matrix)
    return float(eigenvalues[0]), float(eigenvalues[-1])
