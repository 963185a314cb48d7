"""Tasks over the cores of a CPU: a thread a core, each on one task at a time and with one compute thread.

Small nets on small sets leave a second core idle inside an operation; whole tasks side by side do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from metabridge.episodes import Episodes
from metabridge.threads import forget_failed_backward, pool

R = TypeVar("R")


def over_cores(function: Callable[[Episodes], R], tasks: Sequence[Episodes]) -> Iterator[R]:
    """Yield `function(task)` for every task, in the order of the tasks, whichever core computed it.

    What is summed as it comes is thus summed in one order, so that results do not depend on the number of cores. A
    single task runs on the calling thread, with all of its compute threads.
    """
    cores = min(torch.get_num_threads(), len(tasks))
    if cores < 2:
        yield from map(function, tasks)
        return
    gradients = torch.is_grad_enabled()

    def work(task: Episodes) -> R:
        with torch.set_grad_enabled(gradients):
            try:
                return function(task)
            except BaseException:
                forget_failed_backward()
                raise

    yield from pool(cores).map(work, tasks)
