"""Linear regression tasks that share a low-dimensional representation (D §2.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count, check_not_negative

# Proportional to 1, …, 5 and of Frobenius norm √5, like the identity's (D §5).
VARIANCES = tuple(index / math.sqrt(11) for index in range(1, 6))


@dataclass(frozen=True)
class SharedRepresentation:
    """y = ⟨B*w*, x⟩ + z with x ~ N(0, I_d), w* ~ N(μ*, Σ*) for each task and z ~ N(0, σ²) (D ass. 1).

    B* is d × k with orthonormal columns and is drawn from `seed`; Σ* is diagonal, which a choice of B* always makes
    it. `variances` are its k entries, `mean` is μ* (zero if it is not given), and `noise` is σ².

    With `pool`, there are only so many tasks, whose points are drawn from `seed` once and for all, the first `shots`
    of them for adaptation; each then has a head of its own in methods that keep one for every task.

    >>> world = SharedRepresentation(dimension=20, pool=100)
    >>> tasks = world.sample(4, torch.Generator().manual_seed(0))
    >>> tasks.support_x.shape, tasks.query_y.shape, tasks.classes.shape
    (torch.Size([4, 20, 20]), torch.Size([4, 10, 1]), torch.Size([4, 1]))
    >>> world.representation.shape
    torch.Size([20, 5])
    """

    dimension: int = 50
    variances: tuple[float, ...] = VARIANCES
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
                f"variances has {self.rank} entries, but dimension is {self.dimension}. Give at least one, and no more."
            )
        if not all(math.isfinite(value) and value > 0 for value in self.variances):
            raise InputError(
                f"variances is {self.variances}, but Σ* must not be singular: give positive numbers, "
                "and leave out directions in which tasks do not differ."
            )
        check_not_negative("noise", self.noise)
        if self.mean is not None and len(self.mean) != self.rank:
            raise InputError(
                f"mean has {len(self.mean)} entries, but variances has {self.rank}. Give one for each direction."
            )

    @property
    def outputs(self) -> int:
        """A linear function has one value at each point."""
        return 1

    @property
    def classes(self) -> int | None:
        """How many tasks have a head of their own."""
        return self.pool

    @property
    def rank(self) -> int:
        """The dimension k of the shared representation."""
        return len(self.variances)

    @cached_property
    def representation(self) -> Tensor:
        """B*, in float64."""
        drawn = torch.randn(self.dimension, self.rank, generator=self._generator(), dtype=torch.float64)
        basis: Tensor = torch.linalg.qr(drawn).Q
        return basis

    @cached_property
    def tasks(self) -> Episodes:
        """All the tasks of the pool, in order."""
        if self.pool is None:
            raise InputError("there is no end of tasks without a pool. Use pool=5000, or sample some.")
        return replace(self._draw(self.pool, self._generator(1)), classes=torch.arange(self.pool)[:, None])

    @cached_property
    def task_parameters(self) -> Tensor:
        """θ = B*w* of every task of the pool, (tasks, dimension)."""
        if self.pool is None:
            raise InputError("the slopes of tasks are known only in a pool. Use pool=5000.")
        return self._slopes(self.pool, self._generator(1))

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks with the (CPU) generator; those of a pool without repeating one."""
        check_count("tasks", tasks)
        if self.pool is None:
            return self._draw(tasks, generator)
        if tasks > self.pool:
            raise InputError(f"tasks is {tasks}, but the pool has {self.pool}. Use a larger pool or fewer tasks.")
        chosen = torch.randperm(self.pool, generator=generator)[:tasks]
        return Episodes(*(tensor[chosen] for tensor in self.tasks.tensors()))

    def _generator(self, stream: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(2 * self.seed + stream)

    def _slopes(self, tasks: int, generator: torch.Generator) -> Tensor:
        weights = torch.tensor(self.variances).sqrt() * torch.randn(tasks, self.rank, generator=generator)
        if self.mean is not None:
            weights = weights + torch.tensor(self.mean)
        return weights @ self.representation.mT.to(weights)

    def _draw(self, tasks: int, generator: torch.Generator) -> Episodes:
        slopes = self._slopes(tasks, generator)
        x = torch.randn(tasks, self.shots + self.queries, self.dimension, generator=generator)
        noise = math.sqrt(self.noise) * torch.randn(tasks, self.shots + self.queries, 1, generator=generator)
        y = x @ slopes[:, :, None] + noise
        return Episodes.split(x, y, self.shots)
