"""Regression tasks from families of functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.errors import check_count


@dataclass(frozen=True)
class Sinusoid:
    """Sinusoids y = A sin(x + φ), the regression tasks of MAML (Finn et al. 2017).

    Each task has an amplitude A ~ U(0.1, 5) and a phase φ ~ U(0, π). Inputs are x ~ U(−5, 5).

    Args:
        shots: Support examples per task.
        queries: Query examples per task.

    Raises:
        InputError: An argument is not a positive integer.

    >>> tasks = Sinusoid(shots=10, queries=15).sample(4, torch.Generator().manual_seed(0))
    >>> tasks.support_x.shape, tasks.query_y.shape
    (torch.Size([4, 10, 1]), torch.Size([4, 15, 1]))
    """

    shots: int = 10
    queries: int = 10

    def __post_init__(self) -> None:
        check_count("shots", self.shots)
        check_count("queries", self.queries)

    @property
    def outputs(self) -> int:
        """Number of network outputs: 1, the function value."""
        return 1

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks.
        """
        check_count("tasks", tasks)
        amplitude = _uniform(0.1, 5.0, (tasks, 1, 1), generator)
        phase = _uniform(0.0, math.pi, (tasks, 1, 1), generator)
        x = _uniform(-5.0, 5.0, (tasks, self.shots + self.queries, 1), generator)
        return Episodes.split(x, amplitude * torch.sin(x + phase), self.shots)


@dataclass(frozen=True)
class Quadratic:
    """Quadratic functions y = ν‖x − μ‖² (Wang et al. 2021, §5.1).

    Each task has a center μ ~ N(0, I) and a scale ν ~ U(1.3, 1.6), which is both the factor of the targets and the
    standard deviation of the inputs x ~ N(μ, ν²I). The inputs are normalized to norm √d after the targets are computed.

    Args:
        dimension: The dimension d of the inputs.
        shots: Support examples per task.
        queries: Query examples per task.

    Raises:
        InputError: An argument is not a positive integer.

    >>> tasks = Quadratic(dimension=10).sample(4, torch.Generator().manual_seed(0))
    >>> tasks.support_x.shape, tasks.query_x.shape
    (torch.Size([4, 5, 10]), torch.Size([4, 10, 10]))
    >>> bool(torch.allclose(tasks.support_x.norm(dim=-1), torch.tensor(10.0).sqrt()))
    True
    """

    dimension: int = 10
    shots: int = 5
    queries: int = 10

    def __post_init__(self) -> None:
        check_count("dimension", self.dimension)
        check_count("shots", self.shots)
        check_count("queries", self.queries)

    @property
    def outputs(self) -> int:
        """Number of network outputs: 1, the function value."""
        return 1

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks.
        """
        check_count("tasks", tasks)
        center = torch.randn(tasks, 1, self.dimension, generator=generator)
        scale = _uniform(1.3, 1.6, (tasks, 1, 1), generator)
        offset = scale * torch.randn(tasks, self.shots + self.queries, self.dimension, generator=generator)
        x, y = center + offset, scale * offset.square().sum(dim=-1, keepdim=True)
        return Episodes.split(math.sqrt(self.dimension) * torch.nn.functional.normalize(x, dim=-1), y, self.shots)


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(low, high, generator=generator)
