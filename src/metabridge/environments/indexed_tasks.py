"""Image tasks whose inputs are the indices of images, for kernels with precomputed values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.environments.image_tasks import ImageTasks
from metabridge.episodes import Episodes


@dataclass(frozen=True, eq=False)
class IndexedTasks:
    """Tasks whose inputs are the indices of images, of shape (tasks, images, 1), instead of the images.

    Args:
        tasks: The tasks.
        order: One value per image (images,). The label of a class is then its rank by the mean value of its support
            images, so that labels have the same meaning in all tasks. None: labels are in random order.

    Example:
        >>> from metabridge.datasets import load
        >>> environment = IndexedTasks(load("glyphs").tasks("test", queries=2))
        >>> environment.sample(8, torch.Generator().manual_seed(0)).query_x.shape
        torch.Size([8, 10, 1])
    """

    tasks: ImageTasks
    order: Tensor | None = None

    @property
    def outputs(self) -> int:
        """The number of classes of a task."""
        return self.tasks.outputs

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks, with inputs in float64.
        """
        indices = self.tasks.sample_indices(tasks, generator)
        if self.order is not None:
            indices = indices.sorted_by(self.order)
        return indices.to_episodes(lambda image_indices: image_indices[..., None].double())
