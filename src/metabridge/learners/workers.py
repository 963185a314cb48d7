"""Tasks over the cores of a CPU: a thread a core, each on a share of the tasks and with one compute thread.

Small nets on small sets leave a second core idle inside an operation; whole tasks side by side do not.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

from metabridge.episodes import Episodes
from metabridge.models.network import Network
from metabridge.threads import keep_freed_memory, shell

R = TypeVar("R")


def over_cores(function: Callable[[Network, Episodes], R], net: Network, episodes: Episodes) -> list[R]:
    """Return `function(net, share)` for the shares of `episodes` that the cores take, in order."""
    cores = min(torch.get_num_threads(), len(episodes))
    if cores < 2:
        return [function(net, episodes)]
    keep_freed_memory()
    bounds = [len(episodes) * core // cores for core in range(cores + 1)]
    shares = [episodes[low:high] for low, high in pairwise(bounds)]
    threads = torch.get_num_threads()
    gradients = torch.is_grad_enabled()

    def work(share: Episodes) -> R:
        torch.set_num_threads(1)
        with torch.set_grad_enabled(gradients):
            return function(shell(net), share)

    try:
        with ThreadPoolExecutor(cores) as pool:
            return list(pool.map(work, shares))
    finally:
        torch.set_num_threads(threads)
