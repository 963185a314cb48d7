"""Work over the cores of a CPU: a thread a core, each with one compute thread.

Small nets on small sets leave a second core idle inside an operation; whole pieces of work side by side do not.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from queue import Queue
from threading import Barrier, Event, Lock, local
from typing import NoReturn, TypeVar

import torch
from torch import nn

from metabridge.models.functional_call import bound

T = TypeVar("T")
R = TypeVar("R")
N = TypeVar("N", bound=nn.Module)
_POOLS: dict[int, ThreadPoolExecutor] = {}  # by the number of their threads
_MAKING = Lock()
_OWN = local()

# PyTorch then asks for huge pages for large tensors: fewer page faults, for which threads would queue up in the
# kernel. It looks once, at its first large allocation, so this stands here and not in a function.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def over_threads(
    function: Callable[[Sequence[T]], Iterator[R]], items: Sequence[T], cores: int | None = None
) -> Iterator[R]:
    """Yield what `function` yields for shares of the items, one share and one thread a core, as it comes."""
    cores = min(cores or torch.get_num_threads(), len(items))
    if cores < 2:  # a worker of a pool has one thread, and must not wait for its own pool
        yield from function(items)
        return
    found: Queue[Callable[[], R] | None] = Queue()
    stopped = Event()

    def work(share: Sequence[T]) -> None:
        try:
            for result in function(share):
                found.put(partial(_same, result))
                if stopped.is_set():
                    return
        except BaseException as error:
            found.put(partial(_raise, error))
        finally:
            found.put(None)

    workers = pool(cores)
    futures = [workers.submit(work, items[core::cores]) for core in range(cores)]
    try:
        while cores:
            result = found.get()
            if result is None:
                cores -= 1
            else:
                yield result()
    finally:
        stopped.set()  # where the reader has had enough, or something went wrong, the others end soon
        wait(futures)


def pool(cores: int) -> ThreadPoolExecutor:
    """Return `cores` threads, each with one compute thread, that stay for the life of the process.

    `torch.set_num_threads` sets the calling thread's number, but also the one that threads begun later start with. So
    it is called once for each worker, and the latter is put back at once, instead of at every use.
    """
    with _MAKING:
        if cores not in _POOLS:
            keep_freed_memory()
            threads, ready = torch.get_num_threads(), Barrier(cores + 1)

            def begin() -> None:
                torch.get_num_threads()  # a thread takes over the common number at its first use, and only then
                torch.set_num_threads(1)
                with torch.enable_grad():
                    _OWN.leaf = torch.ones((), requires_grad=True)
                    _OWN.oldest = _OWN.leaf.clone()
                ready.wait()

            _POOLS[cores] = made = ThreadPoolExecutor(cores, "metabridge")
            for _ in range(cores):
                made.submit(begin)
            ready.wait()
            torch.set_num_threads(threads)
        return _POOLS[cores]


def forget_failed_backward() -> None:
    """Let go of what a backward pass that failed in this worker of a pool has left to do.

    PyTorch keeps it until the thread ends. If that is after the end of the interpreter, the process aborts. Another
    backward pass drops it, provided that its own work is older: the latest comes first.
    """
    torch.autograd.grad(_OWN.oldest, _OWN.leaf, retain_graph=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOLS.clear)  # a child has none of its parent's threads


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
    """Copy the modules but share their tensors, so that a thread can call them and register hooks of its own."""
    copy = bound(net, {})
    for module in copy.modules():
        hooks = {name: value.copy() for name, value in vars(module).items() if "_hooks" in name}
        vars(module).update(hooks)
    return copy


def _same(value: R) -> R:
    return value


def _raise(error: BaseException) -> NoReturn:
    raise error
