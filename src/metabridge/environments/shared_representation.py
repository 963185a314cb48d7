"""Linear regression tasks that share a low-dimensional representation (Yüksel et al. 2023, §2.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count, check_not_negative

# The diagonal of Σ*, proportional to 1, …, 5 and scaled such that ‖Σ*‖_F = √5 (Yüksel et al. 2023, §5).
DEFAULT_VARIANCES = tuple(index / math.sqrt(11) for index in range(1, 6))


@dataclass(frozen=True)
class SharedRepresentation:
    """Linear tasks y = ⟨B*w*, x⟩ + z that share the representation B* (Yüksel et al. 2023, assumption 1).

    Inputs are x ~ N(0, I_d), each task has its own w* ~ N(μ*, Σ*), and noise is z ~ N(0, σ²). B* is a random d × k
    matrix with orthonormal columns. Σ* is diagonal without loss of generality.

    Args:
        dimension: The dimension d of the inputs.
        variances: The k diagonal entries of Σ*.
        mean: The k entries of μ* (default: zeros).
        noise: The variance σ² of the noise z, not its standard deviation.
        shots: Support examples per task.
        queries: Query examples per task.
        pool: Number of tasks in a fixed pool, from which `sample` selects tasks. The inputs and targets of the pool are
            generated once, from `seed`. In multi-task methods, the head has one output unit for each task of the pool.
            By default there is no pool, and every call of `sample` generates new tasks.
        seed: Seed of B* and of the pool.

    Raises:
        InputError: If an argument is out of range, or `variances` has more than d entries or not as many as `mean`.

    >>> environment = SharedRepresentation(dimension=20, pool=100)
    >>> tasks = environment.sample(4, torch.Generator().manual_seed(0))
    >>> tasks.support_x.shape, tasks.query_y.shape, tasks.classes.shape
    (torch.Size([4, 20, 20]), torch.Size([4, 10, 1]), torch.Size([4, 1]))
    >>> environment.representation.shape
    torch.Size([20, 5])
    """

    dimension: int = 50
    variances: tuple[float, ...] = DEFAULT_VARIANCES
    mean: tuple[float, ...] | None = None
    noise: float = 4.0
    shots: int = 20
    queries: int = 10
    pool: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dimension", "shots", "queries"):
            check_count(name, getattr(self, name))
        if self.pool is not None:
            check_count("pool", self.pool)
        if not 0 < self.rank <= self.dimension:
            raise InputError(
                f"variances has {self.rank} entries, but dimension is {self.dimension}. "
                f"Use 1 to {self.dimension} entries."
            )
        if not all(math.isfinite(value) and value > 0 for value in self.variances):
            raise InputError(
                f"variances is {self.variances}, but all variances must be positive and finite. "
                "Remove the entries that are 0, which also reduces the rank."
            )
        check_not_negative("noise", self.noise)
        if self.mean is not None and len(self.mean) != self.rank:
            raise InputError(f"mean has {len(self.mean)} entries, but variances has {self.rank}. Use the same number.")
        if self.mean is not None and not all(map(math.isfinite, self.mean)):
            raise InputError(f"mean is {self.mean}, but all entries must be finite.")

    @property
    def outputs(self) -> int:
        """Number of network outputs: 1, the function value."""
        return 1

    @property
    def classes(self) -> int | None:
        """Number of output units of the head in multi-task methods. Each task of the pool takes the role of a class.

        None if there is no pool.
        """
        return self.pool

    @property
    def rank(self) -> int:
        """Dimension k of the shared representation."""
        return len(self.variances)

    @cached_property
    def representation(self) -> Tensor:
        """The matrix B*, (dimension, rank), in float64."""
        normal = torch.randn(self.dimension, self.rank, generator=self._generator(), dtype=torch.float64)
        basis: Tensor = torch.linalg.qr(normal).Q
        return basis

    @cached_property
    def tasks(self) -> Episodes:
        """All tasks of the pool, in order.

        Raises:
            InputError: If there is no pool.
        """
        if self.pool is None:
            raise InputError(
                "pool is None, so there is no fixed set of tasks. Set a pool, such as pool=5000, or call sample."
            )
        return replace(self._sample_tasks(self.pool, self._generator(1)), classes=torch.arange(self.pool)[:, None])

    @cached_property
    def task_parameters(self) -> Tensor:
        """The regression vectors θ = B*w* of all tasks of the pool, (tasks, dimension).

        Raises:
            InputError: If there is no pool.
        """
        if self.pool is None:
            raise InputError("pool is None, so there is no fixed set of tasks. Set a pool, such as pool=5000.")
        # `_sample_tasks` samples the parameters before anything else, so these are the parameters of `tasks`
        return self._sample_parameters(self.pool, self._generator(1))

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks. If there is a pool, sample from it without replacement.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks.

        Raises:
            InputError: If `tasks` is not a positive integer, or is larger than the pool.
        """
        check_count("tasks", tasks)
        if self.pool is None:
            return self._sample_tasks(tasks, generator)
        if tasks > self.pool:
            raise InputError(f"tasks is {tasks}, but the pool has {self.pool} tasks. Use a larger pool or fewer tasks.")
        indices = torch.randperm(self.pool, generator=generator)[:tasks]
        return Episodes(*(tensor[indices] for tensor in self.tasks.tensors()))

    def _generator(self, stream: int = 0) -> torch.Generator:
        """Return the random generator of the representation (stream 0) or of the pool (stream 1)."""
        return torch.Generator().manual_seed(2 * self.seed + stream)

    def _sample_parameters(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Return the regression vectors θ = B*w* of new tasks, (tasks, dimension)."""
        weights = torch.tensor(self.variances).sqrt() * torch.randn(tasks, self.rank, generator=generator)
        if self.mean is not None:
            weights = weights + torch.tensor(self.mean)
        return weights @ self.representation.mT.to(weights)

    def _sample_tasks(self, tasks: int, generator: torch.Generator) -> Episodes:
        # The parameters are sampled before all else, so that `task_parameters` can sample the same ones by themselves.
        parameters = self._sample_parameters(tasks, generator)
        x = torch.randn(tasks, self.shots + self.queries, self.dimension, generator=generator)
        noise = math.sqrt(self.noise) * torch.randn(tasks, self.shots + self.queries, 1, generator=generator)
        y = x @ parameters[:, :, None] + noise
        return Episodes.split(x, y, self.shots)
