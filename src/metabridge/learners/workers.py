"""Tasks over the cores of a CPU: a thread a core, each on a share of the tasks and with one compute thread.

Small nets on small sets leave a second core idle inside an operation; whole tasks side by side do not.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

from metabridge.episodes import Episodes
from metabridge.models.network import Network

R = TypeVar("R")

# PyTorch then asks for huge pages for large tensors: fewer page faults, for which threads would queue up in the
# kernel. It looks once, at its first large allocation, so this stands here and not in a function.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


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
            return function(_shell(net), share)

    try:
        with ThreadPoolExecutor(cores) as pool:
            return list(pool.map(work, shares))
    finally:
        torch.set_num_threads(threads)


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB instead of handing each back to the system.

    Otherwise every activation is mapped and zeroed anew, and threads wait for each other while the
    system does it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
        mallopt(-1, 512 << 20)  # M_TRIM_THRESHOLD


def _shell(net: Network) -> Network:
    """Copy the modules but share their tensors: calling one module with two sets of weights is not thread-safe."""
    shared = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    return copy.deepcopy(net, shared)
