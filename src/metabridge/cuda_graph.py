"""Capture a computation as a CUDA graph and replay it without Python overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class CapturedGraph(Generic[T]):
    """A GPU computation that is captured once and then replayed.

    A replay reads and writes the same tensors as the captured call, and overwrites `result`. The memory stays
    allocated. The computation also runs `warmup` times before the capture, with all its side effects.
    """

    def __init__(self, compute: Callable[[], T], *, warmup: int = 3) -> None:
        current = torch.cuda.current_stream()
        # The default stream cannot be captured. Any other stream is captured itself, because the workspace of a matrix
        # product belongs to its stream: trainings with one stream each can then replay at the same time.
        stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
        torch.cuda.synchronize()  # other work on the GPU would mislead libraries that benchmark their algorithms
        with torch.cuda.stream(stream):
            for _ in range(warmup):  # libraries select algorithms and create handles, which a capture does not allow
                compute()
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.result = compute()

    def replay(self) -> T:
        """Run the computation again and return its result."""
        self._graph.replay()
        return self.result
