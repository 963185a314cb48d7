"""What every source of tasks offers, and the checks they share."""

from __future__ import annotations

from typing import Protocol

import torch

from metabridge.episodes import Episodes
from metabridge.errors import InputError


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


def require_positive(name: str, value: int) -> None:
    """Refuse a count that is not a whole number of at least one.

    >>> require_positive("shots", 0)
    Traceback (most recent call last):
    metabridge.errors.InputError: shots is 0, but must be a whole number of at least 1. Use shots=1 or more.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}, but must be a whole number of at least 1. Use {name}=1 or more.")
