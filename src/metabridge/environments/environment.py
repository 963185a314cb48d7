"""The interface of task environments."""

from __future__ import annotations

from typing import Protocol

import torch

from metabridge.episodes import Episodes
from metabridge.errors import InputError, type_with_article


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


def check_environment(name: str, value: object) -> None:
    """Raise an `InputError` if an argument is not an environment.

    Args:
        name: The name of the argument, for the error message.
        value: The value of the argument.

    >>> check_environment("environment", [1, 2])
    Traceback (most recent call last):
    metabridge.errors.InputError: environment is a list, but must be an environment. Use an environment of \
metabridge.environments, such as Sinusoid().
    """
    if isinstance(value, type):
        raise InputError(
            f"{name} is the class {value.__name__}, but must be an environment. Use an instance of the class."
        )
    if callable(getattr(value, "sample", None)):
        return
    suggestion = "Use an environment of metabridge.environments, such as Sinusoid()."
    if callable(getattr(value, "tasks", None)):  # `LabeledImages`
        suggestion = "Call its method tasks, such as images.tasks('train')."
    raise InputError(f"{name} is {type_with_article(value)}, but must be an environment. {suggestion}")
