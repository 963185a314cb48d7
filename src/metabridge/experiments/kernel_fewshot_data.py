"""The images, tasks and precomputed kernels of the experiment kernel-fewshot."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate, layer_norm

from metabridge.environments.image_tasks import ImageTasks, LabelledImages, TaskIndices
from metabridge.episodes import Episodes
from metabridge.kernels import AnalyticKernel

SIZE = 16  # pixels a side, the smallest size for conv4's kernel, whose cost grows with the fourth power of the size


@dataclass(frozen=True)
class PoolSize:
    """The number of classes to use from a split, and the number of images per class."""

    classes: int
    images: int


def downscaled(images: LabelledImages) -> LabelledImages:
    """Return the images with `SIZE` × `SIZE` pixels, each the mean of the pixels that it replaces."""
    size = (SIZE, SIZE)
    batches = [interpolate(batch.float(), size=size, mode="area").round().byte() for batch in images.images.split(4096)]
    return replace(images, images=torch.cat(batches))


def sample_pool(images: LabelledImages, sizes: dict[str, PoolSize], seed: int) -> LabelledImages:
    """Return random classes of every split, with random images of each class."""
    indices, splits = [], {}
    for split, size in sizes.items():
        tasks = images.tasks(split, ways=size.classes, shots=1, queries=size.images - 1)
        sampled = tasks.sample_indices(1, torch.Generator().manual_seed(seed))
        splits[split] = images.splits[split][sampled.classes[0]]
        indices.append(torch.cat([sampled.support[0], sampled.query[0]], 1).flatten())
    pool = torch.cat(indices)
    return replace(images, images=images.images[pool], labels=images.labels[pool], splits=splits)


def standardized(images: LabelledImages) -> Tensor:
    """Return the images in double precision, each with mean 0 and variance 1 over its pixels."""
    return layer_norm(images.images.double(), images.images.shape[1:])


def ink_in_upper_half(images: LabelledImages) -> Tensor:
    """Return the mean over the upper half of each standardized image."""
    return standardized(images)[:, 0, : SIZE // 2].mean((1, 2))


@dataclass(frozen=True, eq=False)
class KernelTable:
    """A kernel with precomputed values. Its inputs are the indices of images, of shape (n, 1).

    Args:
        matrices: The kernel matrices Θ (NTK) and K (NNGP) of all images.
        seconds: Time to compute the matrices.
    """

    matrices: tuple[Tensor, Tensor]
    seconds: float

    @classmethod
    def compute(cls, kernel: AnalyticKernel, pool: LabelledImages, device: str = "cpu") -> KernelTable:
        """Compute Θ and K of the images of a pool, scaled so that the diagonal of Θ has a mean of 1.

        Values between validation and test images are not needed. They are NaN.
        """
        started = time.perf_counter()
        x = standardized(pool).to(device)
        if not kernel.pixel_dims:
            x = x.flatten(1)
        matrices = [torch.full((len(x), len(x)), math.nan, dtype=torch.float64) for _ in range(2)]
        train, validation, test = (
            pool.tasks(split, shots=1, queries=1).image_indices for split in ("train", "validation", "test")
        )
        for indices in (train, validation, test):
            for matrix, values in zip(matrices, kernel.both(x[indices])):
                matrix[indices[:, None], indices] = values.cpu()
        for indices in (validation, test):
            for matrix, values in zip(matrices, kernel.both(x[indices], x[train])):
                matrix[indices[:, None], train] = values.cpu()
                matrix[train[:, None], indices] = values.cpu().mT
        scale = matrices[0].diagonal().mean()
        return cls((matrices[0] / scale, matrices[1] / scale), time.perf_counter() - started)

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return Θ(x, z)."""
        return self.both(x, z)[0]

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return K(x, z)."""
        return self.both(x, z)[1]

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Θ(x, z) and K(x, z)."""
        rows, columns = (indices[:, 0].long() for indices in (x, x if z is None else z))
        ntk, nngp = (matrix[rows[:, None], columns] for matrix in self.matrices)
        return ntk, nngp


@dataclass(frozen=True, eq=False)
class IndexedTasks:
    """Tasks whose inputs are the indices of images.

    Args:
        tasks: The tasks.
        order: One value per image (images,). The label of a class is then its rank by the mean value of its support
            images. None: labels are in random order.
    """

    tasks: ImageTasks
    order: Tensor | None = None

    @property
    def outputs(self) -> int:
        """The number of classes of a task."""
        return self.tasks.outputs

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample tasks."""
        indices = self.tasks.sample_indices(tasks, generator)
        if self.order is not None:
            ranks = self.order[indices.support].mean(-1).argsort(-1)
            indices = TaskIndices(*(field.gather(1, _expanded_like(ranks, field)) for field in indices))
        return indices.to_episodes(lambda image_indices: image_indices[..., None].double())


def _expanded_like(ranks: Tensor, field: Tensor) -> Tensor:
    """Return the ranks of classes (tasks, ways), repeated for each image if `field` has an axis for images."""
    return ranks if field.ndim == 2 else ranks[..., None].expand(field.shape)
