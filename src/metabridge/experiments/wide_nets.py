"""Tasks, kernel and seeds that the experiments on theorems 1 and 2 of Wang et al. 2022 share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from metabridge.environments.regression_functions import Quadratic
from metabridge.episodes import Episodes
from metabridge.kernels import fully_connected_kernel

DEPTH = 3
KERNEL = fully_connected_kernel(depth=DEPTH)
TASKS = Quadratic(shots=4, queries=4)
# Stored in the settings of results. There, "environment" is the source of tasks.
CONSTANTS = {"depth": DEPTH, "environment": asdict(TASKS)}


def sample_tasks(num_tasks: int, seed: int) -> Episodes:
    """Sample tasks, and standardize their labels: the labels of all tasks together have mean 0 and variance 1."""
    episodes = TASKS.sample(num_tasks, torch.Generator().manual_seed(seed))
    labels = torch.cat([episodes.support_y, episodes.query_y], 1)
    return episodes.map_targets(lambda y: (y - labels.mean()) / labels.std())


def initialization_seeds(widths: Sequence[int], nets_per_width: int, seed: int) -> dict[int, list[int]]:
    """Return the seeds of the networks by width.

    All seeds are distinct, also across calls with different `seed` and the same `widths` and `nets_per_width`.

    >>> initialization_seeds((8, 16), 2, seed=0)
    {8: [0, 1], 16: [2, 3]}
    """
    first = seed * len(widths) * nets_per_width
    starts = range(first, first + len(widths) * nets_per_width, nets_per_width)
    return {width: list(range(start, start + nets_per_width)) for width, start in zip(widths, starts)}
