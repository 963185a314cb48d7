"""Image tasks whose inputs are image indices, for kernels that are precomputed for all pairs of images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.environments.image_tasks import ImageTasks
from metabridge.episodes import Episodes


@dataclass(frozen=True, eq=False)
class IndexedTasks:
    """Image tasks whose inputs are image indices of shape (tasks, images, 1), instead of images.

    Args:
        tasks: The environment of image tasks.
        sort_keys: One number per image, (images,). The classes of a task are labeled in ascending order of the mean
            sort key of their support images, so that labels have the same meaning in all tasks. Default: classes are
            labeled in random order.

    Example:
        >>> from metabridge.datasets import load
        >>> environment = IndexedTasks(load("glyphs").tasks("test", queries=2))
        >>> environment.sample(8, torch.Generator().manual_seed(0)).query_x.shape
        torch.Size([8, 10, 1])
    """

    tasks: ImageTasks
    sort_keys: Tensor | None = None

    @property
    def outputs(self) -> int:
        """Number of network outputs: one per class of a task."""
        return self.tasks.outputs

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks.

        Args:
            tasks: Number of tasks.
            generator: A random generator on the CPU.

        Returns:
            The tasks, whose inputs are image indices in float64.
        """
        indices = self.tasks.sample_indices(tasks, generator)
        if self.sort_keys is not None:
            indices = indices.sort_classes(self.sort_keys)
        return indices.to_episodes(lambda image_indices: image_indices[..., None].double())
