"""What every source of tasks offers, and the checks they share."""

from __future__ import annotations

from typing import Protocol

import torch

from metabridge.episodes import Episodes


class Environment(Protocol):
    """A source of tasks: all that a trainer needs to know of it.

    >>> from metabridge.environments import Sinusoid
    >>> environment: Environment = Sinusoid()
    >>> len(environment.sample(3, torch.Generator().manual_seed(0))), environment.outputs
    (3, 1)
    """

    @property
    def outputs(self) -> int:
        """How many outputs a network needs for one task."""
        ...

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks; the same state of the (CPU) generator gives the same tasks."""
        ...
