"""Trainings under way, to be taken on a step at a time: one by itself, or several in turns."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.progress import Progress

from metabridge.device import as_device
from metabridge.environments.environment import Environment
from metabridge.errors import InputError, check_count
from metabridge.files import FolderLock
from metabridge.learners.engine import Mode
from metabridge.learners.method import Method
from metabridge.models.network import Network
from metabridge.progress import progress_bar
from metabridge.training.checkpoint import RunFolder, fill
from metabridge.training.evaluate import Model, Score
from metabridge.training.loop import Loop, Point, Settings, best_score

SAVED = 60.0  # seconds after which a run is saved, if no validation came before
AT_ONCE = {"cuda": 8}  # small trainings in turns, by the kind of device; elsewhere one after the other


@dataclass(frozen=True)
class Run(Model):
    """A trained model and how it got there."""

    curve: tuple[Point, ...] = ()
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    finished: bool = True

    @property
    def best(self) -> Score | None:
        """The validation score of the parameters that were kept, if there was validation."""
        return best_score(self.curve)


class Fitting:
    """A training under way, and the folder that it is kept in, if any; see `fit`.

    The folder is locked until `close`, so that no other training writes to it.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method
    >>> from metabridge.models import mlp
    >>> fitting = Fitting(mlp(1, 1), method("maml"), Sinusoid(), Settings(iterations=2))
    >>> fitting.step(), fitting.step(), fitting.run().finished
    (True, True, True)
    """

    def __init__(
        self,
        net: Network,
        method: Method,
        environment: Environment,
        settings: Settings,
        *,
        validate: Environment | None = None,
        device: torch.device | str = "cpu",
        mode: Mode = "auto",
        out: str | Path | None = None,
        teacher: Model | None = None,
    ) -> None:
        if not isinstance(method, Method):
            raise InputError(f"method is {method!r}, but must be a Method. Use metabridge.method({method!r}).")
        device = as_device(device)
        self._folder = None if out is None else RunFolder(Path(out))
        if self._folder is not None and settings.validate_every is None and (held := self._folder.held()):
            settings = replace(settings, validate_every=held["training"].get("validate_every"))
        self.loop = Loop(net, method, environment, validate, settings, device, mode, teacher)
        self._described = {} if self._folder is None else self.loop.described()
        self._lock = None if self._folder is None else FolderLock(self._folder.path)
        self._saved = time.perf_counter()
        if self._folder is not None:
            try:
                self._begin(self._folder)
            except BaseException:
                self.close()
                raise

    def _begin(self, folder: RunFolder) -> None:
        """Take up what the folder holds, if it has the same settings but for the number of iterations."""
        resized = folder.check(self._described)
        self.loop.restore(folder)
        if resized:
            self.loop.end_curve()
            self.save()  # a run that was finished no longer is, or the other way round
        if resized or folder.held() is None:
            folder.write_settings(self._described)

    def step(self) -> bool:
        """Take one step, and return whether it brought a point of the learning curve."""
        judged = self.loop.step()
        if judged or time.perf_counter() > self._saved + SAVED:
            self.save()
        return judged

    def save(self) -> None:
        """Write the folder, unless a step was broken off."""
        if self._folder is not None and self.loop.intact:
            if self._lock is None:
                raise InputError(f"the training in {self._folder.path} was closed. Begin it again to go on.")
            self._lock.check()
            self.loop.save(self._folder)
        self._saved = time.perf_counter()

    def close(self) -> None:
        """Let others write to the folder. Training goes on only by beginning it again."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def run(self) -> Run:
        """Write the best weights so far into the network, and return what there is."""
        loop = self.loop
        params, buffers = loop.best()
        fill(loop.net, params, buffers)
        dtype, curve = loop.settings.dtype, tuple(loop.curve)
        return Run(loop.method, loop.net.eval(), params, dtype, curve, loop.seconds, self._described, loop.finished)


def alone(fitting: Fitting, name: str, *, minutes: float | None = None, progress: bool = True) -> Run:
    """Take one training on to its end, or for so many minutes, and return the run."""
    ((_, run),) = in_turns({name: lambda: fitting}, minutes=minutes, progress=progress)
    return run


def several(device: str) -> int:
    """How many small trainings should take turns on a device."""
    return AT_ONCE.get(torch.device(device).type, 1)


def in_turns(
    begin: Mapping[str, Callable[[], Fitting]],
    *,
    at_once: int = 1,
    minutes: float | None = None,
    progress: bool = True,
) -> Iterator[tuple[str, Run]]:
    """Take trainings on by a step each in turn, `at_once` of them, and yield the name and the run of each at its end.

    On a GPU each has a stream of its own, so that small steps, which would leave most of it idle, run at the same
    time. A training's seconds are its share of the time of all. After so many `minutes` all end, to go on later; those
    that have not begun by then do not. Networks that drop at random are refused `at_once`: they share a generator.
    """
    check_count("at_once", at_once)
    until = math.inf if minutes is None else time.perf_counter() + 60 * minutes
    waiting, under_way = deque(begin.items()), list[_Turn]()
    with progress_bar(progress) as bar:
        try:
            while waiting or under_way:
                while waiting and len(under_way) < at_once:
                    under_way.append(_Turn(*waiting.popleft(), bar, at_once > 1))
                for turn in list(under_way):
                    if turn.fitting.loop.finished or time.perf_counter() >= until:
                        run = turn.end()
                        under_way.remove(turn)
                        yield turn.name, run
                    else:
                        turn.step()
                if time.perf_counter() >= until:
                    waiting.clear()
        finally:
            with contextlib.ExitStack() as left:  # all are saved and closed, whatever happens to one
                for turn in under_way:
                    left.callback(turn.fitting.close)
                    left.callback(turn.save)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Let a first Ctrl-C wait for the end of what is inside; a second one does not wait."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if asked:
        raise KeyboardInterrupt


class _Turn:
    """One of the trainings, its bar, and its stream where there are several."""

    def __init__(self, name: str, begin: Callable[[], Fitting], bar: Progress, beside: bool) -> None:
        self.name, self._bar, self._stream = name, bar, None
        self.fitting = begin()
        loop = self.fitting.loop
        if beside and loop.draws:
            self.fitting.close()
            raise InputError(
                f"{name} drops at random, and would draw from the same generator as the others. Use at_once=1."
            )
        if beside and loop.device.type == "cuda":
            self._stream = torch.cuda.Stream(loop.device)
            self._stream.wait_stream(torch.cuda.current_stream(loop.device))
        self._shown = bar.add_task(name, total=loop.settings.iterations, completed=loop.iteration, status="")

    def step(self) -> None:
        with unbroken(), torch.cuda.stream(self._stream):
            judged = self.fitting.step()
        loop, bar = self.fitting.loop, self._bar
        bar.update(self._shown, completed=loop.iteration)
        if judged:
            told = f"{loop.curve[-1].told()}, {loop.speed()}"
            bar.update(self._shown, status=told)
            if not bar.disable and not bar.console.is_terminal:
                bar.console.print(f"{self.name} {loop.iteration}/{loop.settings.iterations}: {told}", markup=False)

    def save(self) -> None:
        with torch.cuda.stream(self._stream):
            self.fitting.save()

    def end(self) -> Run:
        self.save()
        self.fitting.close()
        with torch.cuda.stream(self._stream):
            run = self.fitting.run()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return run
