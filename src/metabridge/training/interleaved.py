"""Train several networks concurrently, by taking one step of each in turn. Meant for small networks on a GPU."""

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
from metabridge.training.fitting import ProgressLine, delay_interrupt, saved_and_closed
from metabridge.training.trainer import Run, Trainer

CONCURRENT_RUNS = {"cuda": 8}  # number of networks to train at the same time by device type; 1 for other types


def concurrent_runs(device: str) -> int:
    """Return the number of small networks to train at the same time on a device."""
    return CONCURRENT_RUNS.get(torch.device(device).type, 1)


def train_interleaved(
    trainers: Mapping[str, Callable[[], Trainer]],
    *,
    at_once: int = 1,
    minutes: float | None = None,
    progress: bool = True,
) -> Iterator[tuple[str, Run]]:
    """Train several networks, up to `at_once` at the same time, by taking one step of each in turn.

    On a GPU, each network is trained on its own stream, so small steps, which would leave most of the GPU idle, run
    concurrently. The results are the same as if the networks were trained one after another; `seconds` of a run counts
    only the steps of that network.

    Args:
        trainers: For each name, a function that creates the trainer. It is called when training of this network starts.
        at_once: Number of networks to train at the same time. More than 1 requires networks without dropout, since
            networks with dropout would share the global random generators.
        minutes: Stop all training runs after this number of minutes, and start no more. None for no limit.
        progress: Whether to show progress bars.

    Yields:
        The name and the run of each network, when its training ends.

    Raises:
        InputError: If `at_once` is not a positive integer, or is more than 1 and a network draws random numbers.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method
    >>> from metabridge.models import mlp
    >>> from metabridge.training import TrainingConfig
    >>> def trainer():
    ...     return Trainer(mlp(1, 1), method("maml"), Sinusoid(), TrainingConfig(iterations=2))
    >>> dict(train_interleaved({"a": trainer, "b": trainer}, at_once=2, progress=False))
    {'a': Run(maml, mlp, 2 iterations, finished), 'b': Run(maml, mlp, 2 iterations, finished)}
    """
    check_count("at_once", at_once)
    deadline = math.inf if minutes is None else time.perf_counter() + 60 * minutes
    waiting, active = deque(trainers.items()), list[_ActiveTrainer]()
    with progress_bar(progress) as bar:
        try:
            while waiting or active:
                while waiting and len(active) < at_once:
                    active.append(_ActiveTrainer(*waiting.popleft(), bar, at_once > 1))
                for active_trainer in list(active):
                    if active_trainer.trainer.finished or time.perf_counter() >= deadline:
                        run = active_trainer.end()
                        active.remove(active_trainer)
                        yield active_trainer.name, run
                    else:
                        active_trainer.step()
                if time.perf_counter() >= deadline:
                    waiting.clear()
        finally:
            with contextlib.ExitStack() as stack:  # saves and closes all trainers, even if one raises an error
                for active_trainer in active:
                    stack.enter_context(active_trainer.saved_and_closed())


class _ActiveTrainer:
    """A trainer with its progress line and, if several networks are trained on a GPU, its stream."""

    def __init__(self, name: str, create_trainer: Callable[[], Trainer], bar: Progress, concurrent: bool) -> None:
        self.name, self._stream = name, None
        self.trainer = create_trainer()
        if concurrent and self.trainer.draws_global_random_numbers:
            self.trainer.close()
            raise InputError(
                f"the network of {name} draws random numbers in training (dropout), so it cannot be trained at the "
                "same time as others. Use at_once=1."
            )
        if concurrent and self.trainer.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.trainer.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.trainer.device))
        self._line = ProgressLine(bar, name, self.trainer)

    def step(self) -> None:
        """Take one step."""
        with delay_interrupt(), torch.cuda.stream(self._stream):
            point_added = self.trainer.step()
        self._line.update(point_added)

    @contextlib.contextmanager
    def saved_and_closed(self) -> Iterator[None]:
        """Save the run and close the trainer at the end of the context, on the trainer's stream."""
        with torch.cuda.stream(self._stream), saved_and_closed(self.trainer):
            yield

    def end(self) -> Run:
        """Save the run, close the trainer, and return the run."""
        with self.saved_and_closed():
            pass
        with torch.cuda.stream(self._stream):
            run = self.trainer.run()
        if self._stream is not None:
            torch.cuda.current_stream(self.trainer.device).wait_stream(self._stream)
        return run
