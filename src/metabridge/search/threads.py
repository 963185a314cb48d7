"""Networks over the cores of a CPU: several at a time, each with one compute thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from threading import Event
from typing import NoReturn, TypeVar

import torch

from metabridge.learners.workers import keep_freed_memory

T = TypeVar("T")
R = TypeVar("R")


def over_threads(function: Callable[[Sequence[T]], Iterator[R]], items: Sequence[T]) -> Iterator[R]:
    """Yield what `function` yields for shares of the items, one share and one thread a core, as it comes."""
    keep_freed_memory()
    cores = min(torch.get_num_threads(), len(items))
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


def _same(value: R) -> R:
    return value


def _raise(error: BaseException) -> NoReturn:
    raise error
