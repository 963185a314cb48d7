"""Capture a computation as a CUDA graph and replay it without Python overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class CapturedGraph(Generic[T]):
    """A GPU computation that is captured once and then replayed.

    A replay reads and writes the same memory as the captured call, and overwrites `result`. The memory stays allocated.
    Before the capture, the computation runs `warmup` times, with all its side effects.
    """

    def __init__(self, compute: Callable[[], T], *, warmup: int = 3) -> None:
        current = torch.cuda.current_stream()
        # The default stream cannot be captured, so a new one is used instead. Any other current stream is captured
        # itself. Each stream has its own workspace for matrix products, so graphs that were captured on different
        # streams can be replayed at the same time.
        stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
        # During the warmup, libraries create handles and select algorithms by benchmarks: neither is possible in a
        # capture, and other work on the GPU would distort the benchmarks.
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                compute()
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.result = compute()

    def replay(self) -> T:
        """Run the computation again and return its result."""
        self._graph.replay()
        return self.result
