"""The interface of task environments."""

from __future__ import annotations

from typing import Protocol

import torch

from metabridge.episodes import Episodes


class Environment(Protocol):
    """A distribution of tasks. Methods can be trained on any object with these two members.

    >>> from metabridge.environments import Sinusoid
    >>> environment: Environment = Sinusoid()
    >>> len(environment.sample(3, torch.Generator().manual_seed(0))), environment.outputs
    (3, 1)
    """

    @property
    def outputs(self) -> int:
        """Number of network outputs needed for one task."""
        ...

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks. The same state of the generator gives the same tasks.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The support and query sets of the tasks.
        """
        ...
