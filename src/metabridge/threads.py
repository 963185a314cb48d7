"""Work over the cores of a CPU: a thread a core, each with one compute thread.

Small nets on small sets leave a second core idle inside an operation; whole pieces of work side by side do not.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from threading import Event
from typing import NoReturn, TypeVar

import torch
from torch import nn

T = TypeVar("T")
R = TypeVar("R")
N = TypeVar("N", bound=nn.Module)

# PyTorch then asks for huge pages for large tensors: fewer page faults, for which threads would queue up in the
# kernel. It looks once, at its first large allocation, so this stands here and not in a function.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def over_threads(
    function: Callable[[Sequence[T]], Iterator[R]], items: Sequence[T], cores: int | None = None
) -> Iterator[R]:
    """Yield what `function` yields for shares of the items, one share and one thread a core, as it comes."""
    keep_freed_memory()
    cores = min(cores or torch.get_num_threads(), len(items))
    found: Queue[Callable[[], R] | None] = Queue()
    stopped = Event()

    def work(share: Sequence[T]) -> None:
        torch.set_num_threads(1)
        try:
            for result in function(share):
                found.put(partial(_same, result))
                if stopped.is_set():
                    return
        except BaseException as error:
            found.put(partial(_raise, error))
        finally:
            found.put(None)

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(cores) as pool:
        try:
            for core in range(cores):
                pool.submit(work, items[core::cores])
            while cores:
                result = found.get()
                if result is None:
                    cores -= 1
                else:
                    yield result()
        finally:
            stopped.set()  # where the reader has had enough, or something went wrong, the others end soon
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


def shell(net: N) -> N:
    """Copy the modules but share their tensors: calling one module with two sets of weights is not thread-safe."""
    shared = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    return copy.deepcopy(net, shared)


def _same(value: R) -> R:
    return value


def _raise(error: BaseException) -> NoReturn:
    raise error
