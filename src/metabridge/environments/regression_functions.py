"""Regression tasks drawn from families of functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.errors import check_count


@dataclass(frozen=True)
class Sinusoid:
    """y = A sin(x + φ) with A ~ U(0.1, 5) and φ ~ U(0, π) for each task, x ~ U(−5, 5).

    The family on which MAML was first shown.

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
        """A sinusoid has one value at each point."""
        return 1

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks with the (CPU) generator."""
        check_count("tasks", tasks)
        amplitude = _uniform(0.1, 5.0, (tasks, 1, 1), generator)
        phase = _uniform(0.0, math.pi, (tasks, 1, 1), generator)
        x = _uniform(-5.0, 5.0, (tasks, self.shots + self.queries, 1), generator)
        return Episodes.split(x, amplitude * torch.sin(x + phase), self.shots)


@dataclass(frozen=True)
class Quadratic:
    """y = ν‖x − μ‖² with μ ~ N(0, I) and ν ~ U(1.3, 1.6) for each task, x ~ N(μ, ν²I) (A §5.1).

    The targets belong to x as drawn; the inputs a learner sees are then normalised to norm √d.

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
        """A quadratic has one value at each point."""
        return 1

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks with the (CPU) generator."""
        check_count("tasks", tasks)
        centre = torch.randn(tasks, 1, self.dimension, generator=generator)
        width = _uniform(1.3, 1.6, (tasks, 1, 1), generator)
        offset = width * torch.randn(tasks, self.shots + self.queries, self.dimension, generator=generator)
        x, y = centre + offset, width * offset.square().sum(dim=-1, keepdim=True)
        return Episodes.split(math.sqrt(self.dimension) * torch.nn.functional.normalize(x, dim=-1), y, self.shots)


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(low, high, generator=generator)
