"""Several trainings at the same time, a step of each in turn. Experiments use it for small networks on a GPU."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from rich.progress import Progress

from metabridge.errors import InputError, check_count
from metabridge.progress import progress_bar
from metabridge.training.fitting import ProgressLine, saved_and_closed, uninterrupted
from metabridge.training.trainer import Run, Trainer

CONCURRENT_TRAININGS = {"cuda": 8}  # by device type; 1 elsewhere


def concurrent_trainings(device: str) -> int:
    """Return how many small trainings should run at the same time on a device."""
    return CONCURRENT_TRAININGS.get(torch.device(device).type, 1)


def train_interleaved(
    trainers: Mapping[str, Callable[[], Trainer]],
    *,
    at_once: int = 1,
    minutes: float | None = None,
    progress: bool = True,
) -> Iterator[tuple[str, Run]]:
    """Train several networks, up to `at_once` at the same time, by taking a step of each in turn.

    On a GPU each training has its own stream, so small steps, which would leave most of the GPU idle, run concurrently.
    The result of a training does not depend on the others. The seconds of a run are its share of the total time.

    Args:
        trainers: For each name a function that creates the trainer; called when the training starts.
        at_once: Number of trainings at the same time. More than one needs networks without dropout, since all
            trainings share the global random generators.
        minutes: Stop all trainings after this number of minutes, and start no more. None for no limit.
        progress: Whether to show progress bars.

    Yields:
        The name and the run of each training, when it ends.

    Raises:
        InputError: If `at_once` is not positive, or a network draws random numbers and `at_once` is more than 1.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method
    >>> from metabridge.models import mlp
    >>> from metabridge.training import TrainingConfig
    >>> def trainer():
    ...     return Trainer(mlp(1, 1), method("maml"), Sinusoid(), TrainingConfig(iterations=2))
    >>> dict(train_interleaved({"a": trainer, "b": trainer}, at_once=2, progress=False))
    {'a': Run(mlp, 2 iterations, finished), 'b': Run(mlp, 2 iterations, finished)}
    """
    check_count("at_once", at_once)
    end = math.inf if minutes is None else time.perf_counter() + 60 * minutes
    waiting, active = deque(trainers.items()), list[_Training]()
    with progress_bar(progress) as bar:
        try:
            while waiting or active:
                while waiting and len(active) < at_once:
                    active.append(_Training(*waiting.popleft(), bar, at_once > 1))
                for training in list(active):
                    if training.trainer.finished or time.perf_counter() >= end:
                        run = training.end()
                        active.remove(training)
                        yield training.name, run
                    else:
                        training.step()
                if time.perf_counter() >= end:
                    waiting.clear()
        finally:
            with contextlib.ExitStack() as stack:  # saves and closes all, even if one fails
                for training in active:
                    stack.enter_context(training.saved_and_closed())


class _Training:
    """One of the trainings, with its progress line, and its stream if there are several on a GPU."""

    def __init__(self, name: str, make_trainer: Callable[[], Trainer], bar: Progress, concurrent: bool) -> None:
        self.name, self._stream = name, None
        self.trainer = make_trainer()
        if concurrent and self.trainer.draws_global_random_numbers:
            self.trainer.close()
            raise InputError(
                f"the network of {name} draws random numbers in training (dropout), so it cannot train at the same "
                "time as others. Use at_once=1."
            )
        if concurrent and self.trainer.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.trainer.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.trainer.device))
        self._line = ProgressLine(bar, name, self.trainer)

    def step(self) -> None:
        """Take one step."""
        with uninterrupted(), torch.cuda.stream(self._stream):
            point_added = self.trainer.step()
        self._line.update(point_added)

    @contextlib.contextmanager
    def saved_and_closed(self) -> Iterator[None]:
        """Save and close the training at the end, on its stream."""
        with torch.cuda.stream(self._stream), saved_and_closed(self.trainer):
            yield

    def end(self) -> Run:
        """Save and close the training, and return its run."""
        with self.saved_and_closed():
            pass
        with torch.cuda.stream(self._stream):
            run = self.trainer.run()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return run
