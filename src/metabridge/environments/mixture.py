"""Tasks of several environments, each drawn with its own probability."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import ImageTasks, TaskIndices
from metabridge.episodes import Episodes
from metabridge.errors import InputError, check_count


@dataclass(frozen=True, eq=False)
class Mixture:
    """Tasks of the first environment with the probability of the first weight, and so on.

    Weights count by their share of the sum. Where the tasks of all environments have one shape,
    each task of a batch is drawn by itself, and those of the first environment come first. Where
    shapes differ, as with 2 and 20 ways, they cannot lie in one tensor, and a whole batch is of one
    environment, drawn with the weights: the gradient of a batch has the same mean, but more noise.

    `Episodes.classes` is kept only where all environments count the same classes; methods with a
    head row for every class need it, others do not.

    >>> from metabridge.datasets import load
    >>> glyphs = load("glyphs")
    >>> easy, hard = (glyphs.tasks("train", superclass=kind) for kind in ("different", "same"))
    >>> Mixture((easy, hard), (0.5, 0.5)).sample(8, torch.Generator().manual_seed(0)).query_x.shape
    torch.Size([8, 75, 1, 28, 28])
    """

    environments: tuple[Environment, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.environments or len(self.environments) != len(self.weights):
            raise InputError(
                f"there are {len(self.environments)} environments and {len(self.weights)} weights, "
                "but there must be at least one environment, and a weight for each."
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or sum(self.weights) == 0:
            raise InputError(
                f"weights is {tuple(self.weights)}, but weights must be finite, none below 0 and not all 0."
            )
        if any(isinstance(environment, Mixture) for environment in self.environments):
            raise InputError("environments holds a Mixture. List the environments that it is of, each with its weight.")

    @property
    def outputs(self) -> int:
        """As many as the tasks with the most outputs need; the others use the first ones."""
        return max(environment.outputs for environment in self.environments)

    @cached_property
    def classes(self) -> int | None:
        """How many classes there are, if all environments count the same ones."""
        first, *others = (getattr(environment, "class_names", None) for environment in self.environments)
        return None if first is None or any(names != first for names in others) else len(first)

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks with the (CPU) generator."""
        check_count("tasks", tasks)
        weights = torch.tensor(self.weights, dtype=torch.float64)
        if not self._alike:
            kind = int(torch.multinomial(weights, 1, generator=generator))
            return self._kept(self.environments[kind].sample(tasks, generator))
        kinds = torch.multinomial(weights, tasks, replacement=True, generator=generator)
        counts = kinds.bincount(minlength=len(weights)).tolist()
        if alike := self._of_the_same_images:
            drawn = [environment.sample_indices(count, generator) for environment, count in zip(alike, counts) if count]
            joined = TaskIndices(*(torch.cat(parts) for parts in zip(*drawn)))
            return self._kept(
                joined.to_episodes(alike[0].data.float_images)
            )  # all at once: launches take longer than work
        return Episodes.concatenate(
            [
                self._kept(environment.sample(count, generator))
                for environment, count in zip(self.environments, counts)
                if count
            ]
        )

    @cached_property
    def _alike(self) -> bool:
        """Whether a task of any of the environments fits into one batch with those of the others."""
        generator = torch.Generator().manual_seed(0)
        examples = [self._kept(environment.sample(1, generator)) for environment in self.environments]
        return len({tuple((each.shape, each.dtype) for each in example.tensors()) for example in examples}) == 1

    @cached_property
    def _of_the_same_images(self) -> tuple[ImageTasks, ...]:
        """All of the environments, if they are tasks of one form out of the same images; otherwise none."""
        own = tuple(environment for environment in self.environments if isinstance(environment, ImageTasks))
        forms = {(id(each.data.images), each.ways, each.shots, each.queries) for each in own}
        return own if len(own) == len(self.environments) and len(forms) == 1 else ()

    def _kept(self, episodes: Episodes) -> Episodes:
        return episodes if self.classes is not None else replace(episodes, classes=None)
