"""What a GPU is told to do, recorded once as a CUDA graph and replayed without Python between the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Recording(Generic[T]):
    """A computation on a GPU that reads and writes its tensors where they lie, also when it is replayed.

    Its memory stays taken, and `result` is overwritten by every replay. What it changes, it changes `warm` times before
    it is recorded.
    """

    def __init__(self, compute: Callable[[], T], *, warm: int = 3) -> None:
        here = torch.cuda.current_stream()
        # A matrix product's workspace belongs to the stream it is recorded on. Where trainings have a stream each they
        # record there, and their replays can run at the same time; on the default stream nothing can be recorded.
        side = torch.cuda.Stream() if here == torch.cuda.default_stream() else here
        torch.cuda.synchronize()  # what else is under way would mislead libraries that time their algorithms
        with torch.cuda.stream(side):
            for _ in range(warm):  # libraries choose their algorithms and make their handles before recording
                compute()
        here.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            self.result = compute()

    def replay(self) -> T:
        """Compute again."""
        self._graph.replay()
        return self.result
