"""Run Python functions on several CPU cores, in worker threads that each use one PyTorch intra-op thread.

Operations on small tensors do not use more than one core. Therefore several tasks are computed at the same time, each
on one core.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Queue
from threading import Barrier, Event, Lock, local
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")
R = TypeVar("R")
_POOLS: dict[int, ThreadPoolExecutor] = {}  # by number of threads
_POOLS_LOCK = Lock()
_THREAD_STATE = local()

# With this variable PyTorch requests huge pages for large tensors. They cause fewer page faults, during which threads
# wait for each other in the operating system. PyTorch reads the variable at its first large allocation, so it is set on
# import.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def map_over_threads(function: Callable[..., R], *arguments: Sequence[Any]) -> Iterator[R]:
    """Yield `function(*items)` for the items of one or more sequences, in their order, like `map`.

    The calls run in worker threads that each use one intra-op thread, in the caller's gradient mode. Because the order
    is fixed, a sum of the results does not depend on the number of threads. If there is only one call, or PyTorch uses
    only one intra-op thread, the calls run in the calling thread.
    """
    threads = min(torch.get_num_threads(), *map(len, arguments))
    if threads < 2:  # always true inside a worker, which therefore never waits for its own pool
        yield from map(function, *arguments)
        return
    grad_enabled = torch.is_grad_enabled()

    def compute(*items: Any) -> R:
        with torch.set_grad_enabled(grad_enabled):
            try:
                return function(*items)
            except BaseException:
                release_failed_backward()
                raise

    yield from thread_pool(threads).map(compute, *arguments)


def stream_over_threads(
    function: Callable[[Sequence[T]], Iterator[R]], items: Sequence[T], threads: int | None = None
) -> Iterator[R]:
    """Split the items among threads, call `function` once per thread with its items, and yield the results.

    The default of `threads` is PyTorch's number of intra-op threads. Results are yielded as soon as they are computed,
    in any order. If the caller stops early or a call fails, the other threads stop after their current result.
    """
    threads = min(threads or torch.get_num_threads(), len(items))
    if threads < 2:  # always true inside a worker, which therefore never waits for its own pool
        yield from function(items)
        return
    results: Queue[tuple[R | None, BaseException | None] | None] = Queue()  # None: a thread has finished
    stopped = Event()

    def compute(thread_items: Sequence[T]) -> None:
        try:
            for result in function(thread_items):
                results.put((result, None))
                if stopped.is_set():
                    return
        except BaseException as error:
            results.put((None, error))
        finally:
            results.put(None)

    pool = thread_pool(threads)
    futures = [pool.submit(compute, items[start::threads]) for start in range(threads)]
    running_threads = threads
    try:
        while running_threads:
            message = results.get()
            if message is None:
                running_threads -= 1
                continue
            result, error = message
            if error is not None:
                raise error
            yield cast(R, result)
    finally:
        stopped.set()
        wait(futures)


def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of `threads` worker threads that each use one PyTorch intra-op thread.

    A process creates each pool once and then reuses it.

    `torch.set_num_threads` sets the number of intra-op threads of the calling thread, and also the default for threads
    that start later. Every worker thread calls it once when it starts, and the default is restored when all worker
    threads have started.
    """
    with _POOLS_LOCK:
        if threads not in _POOLS:
            keep_freed_memory()
            default, all_started = torch.get_num_threads(), Barrier(threads + 1)

            def initialize_worker() -> None:
                torch.get_num_threads()  # the first call copies the default to this thread; later defaults are ignored
                torch.set_num_threads(1)
                with torch.enable_grad():  # a graph older than any other of this thread, for `release_failed_backward`
                    _THREAD_STATE.leaf = torch.ones((), requires_grad=True)
                    _THREAD_STATE.oldest_output = _THREAD_STATE.leaf.clone()
                all_started.wait()

            _POOLS[threads] = pool = ThreadPoolExecutor(threads, "metabridge")
            for _ in range(threads):
                pool.submit(initialize_worker)
            all_started.wait()
            torch.set_num_threads(default)
        return _POOLS[threads]


def release_failed_backward() -> None:
    """Remove the nodes of a failed backward pass from the autograd queue of this worker thread.

    Otherwise the nodes stay in the queue until the thread ends, and the process aborts if the thread ends after the
    interpreter has shut down. Autograd runs the most recently created nodes first. A backward pass through an older
    graph therefore runs the leftover nodes before its own.
    """
    torch.autograd.grad(_THREAD_STATE.oldest_output, _THREAD_STATE.leaf, retain_graph=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOLS.clear)  # threads do not survive a fork


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB instead of returning them to the system.

    Otherwise the system maps and zeroes memory for every activation, while other threads wait.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
        mallopt(-1, 512 << 20)  # M_TRIM_THRESHOLD
