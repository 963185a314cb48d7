"""Mixtures of task environments."""

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
    """Tasks from several environments. Each environment is sampled with a given probability.

    If the tasks of all environments have the same shapes, the environment of each task is sampled independently, and
    the tasks of a batch are ordered by environment. Tasks of different shapes, such as 2-way and 20-way tasks, do
    not fit into one tensor, so all tasks of a batch are from one random environment. The mean of the batch gradient is
    then the same as for independent environments, but its variance is higher.

    `Episodes.classes` is set only if all environments have the same `class_names`, such as image tasks of one split.
    It is needed only by methods whose head has one output unit per training class.

    Args:
        environments: The environments, which must not be mixtures.
        weights: Unnormalized probabilities of the environments.

    Raises:
        InputError: The numbers of environments and weights differ, an environment is a mixture, or the weights are
            negative, not finite, or all zero.

    >>> from metabridge.datasets import load
    >>> glyphs = load("glyphs")
    >>> easy, hard = (glyphs.tasks("train", superclass=superclass) for superclass in ("different", "same"))
    >>> Mixture((easy, hard), (0.5, 0.5)).sample(8, torch.Generator().manual_seed(0)).query_x.shape
    torch.Size([8, 75, 1, 28, 28])
    """

    environments: tuple[Environment, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.environments or len(self.environments) != len(self.weights):
            raise InputError(
                f"there are {len(self.environments)} environments and {len(self.weights)} weights, "
                "but there must be at least one environment and one weight per environment."
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or sum(self.weights) == 0:
            raise InputError(
                f"weights is {tuple(self.weights)}, but weights must be finite, at least 0, and not all 0."
            )
        if any(isinstance(environment, Mixture) for environment in self.environments):
            raise InputError("environments contains a Mixture. List its environments instead, each with its weight.")

    @property
    def outputs(self) -> int:
        """Number of network outputs: the maximum over the environments. Tasks that need fewer use the first outputs."""
        return max(environment.outputs for environment in self.environments)

    @cached_property
    def classes(self) -> int | None:
        """Number of classes that the environments share, or None if they have different class names or none."""
        names, *other_names = (getattr(environment, "class_names", None) for environment in self.environments)
        return None if names is None or any(other != names for other in other_names) else len(names)

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks.
        """
        check_count("tasks", tasks)
        weights = torch.tensor(self.weights, dtype=torch.float64)
        if not self._same_shapes:
            index = int(torch.multinomial(weights, 1, generator=generator))
            return self._drop_classes(self.environments[index].sample(tasks, generator))
        indices = torch.multinomial(weights, tasks, replacement=True, generator=generator)
        counts = indices.bincount(minlength=len(weights)).tolist()
        if image_environments := self._environments_with_same_images:
            task_indices = [
                environment.sample_indices(count, generator)
                for environment, count in zip(image_environments, counts)
                if count
            ]
            all_indices = TaskIndices(*(torch.cat(tensors) for tensors in zip(*task_indices)))
            # Load all images at once: on a GPU, the launch overhead of several small operations would dominate.
            return self._drop_classes(all_indices.to_episodes(image_environments[0].data.float_images))
        return Episodes.concatenate(
            [
                self._drop_classes(environment.sample(count, generator))
                for environment, count in zip(self.environments, counts)
                if count
            ]
        )

    @cached_property
    def _same_shapes(self) -> bool:
        """Whether the tasks of all environments fit into one batch."""
        generator = torch.Generator().manual_seed(0)
        samples = [self._drop_classes(environment.sample(1, generator)) for environment in self.environments]
        return len({tuple((tensor.shape, tensor.dtype) for tensor in sample.tensors()) for sample in samples}) == 1

    @cached_property
    def _environments_with_same_images(self) -> tuple[ImageTasks, ...]:
        """The environments, if all are `ImageTasks` of the same images, ways, shots and queries; otherwise empty."""
        environments = tuple(environment for environment in self.environments if isinstance(environment, ImageTasks))
        settings = {
            (id(environment.data.images), environment.ways, environment.shots, environment.queries)
            for environment in environments
        }
        return environments if len(environments) == len(self.environments) and len(settings) == 1 else ()

    def _drop_classes(self, episodes: Episodes) -> Episodes:
        """Set `Episodes.classes` to None unless all environments have the same class names."""
        return episodes if self.classes is not None else replace(episodes, classes=None)
