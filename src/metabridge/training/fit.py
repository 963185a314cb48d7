"""The training loop: draw tasks, take the meta-gradient, step an ordinary optimizer."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metabridge.environments.environment import Environment
from metabridge.errors import InputError
from metabridge.learners.engine import Mode
from metabridge.learners.method import Method
from metabridge.models.network import Network
from metabridge.training.augment import Augment
from metabridge.training.checkpoint import RunFolder, check_match, fill, part, read_method, read_network
from metabridge.training.evaluate import Model, Score
from metabridge.training.loop import Loop, Point, Precision, Settings, point_of
from metabridge.training.schedule import Constant, Schedule

SAVED = 60.0  # seconds after which a run is saved, if no validation came before


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
        return next((point.score for point in reversed(self.curve) if point.best), None)


def fit(
    net: Network,
    method: Method,
    environment: Environment,
    *,
    validate: Environment | None = None,
    iterations: int = 1000,
    tasks: int = 4,
    optimizer: str = "adam",
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    schedule: Schedule = Constant(),  # noqa: B008  (frozen data)
    augment: Augment | None = None,
    patience: int | None = None,
    validate_every: int | None = None,
    validate_tasks: int = 100,
    precision: Precision = "float32",
    device: torch.device | str = "cpu",
    mode: Mode = "auto",
    seed: int = 0,
    out: str | Path | None = None,
    minutes: float | None = None,
    stop: Event | None = None,
    progress: bool = True,
    name: str = "training",
) -> Run:
    """Train `net` with `method` on tasks of `environment` and return the run.

    With `validate`, the parameters of the best validation score are kept, judged on the same tasks
    each time (every tenth of the iterations unless `validate_every` says otherwise), and training
    ends early after more than `patience` validations without a new best. The network given ends with
    the weights.

    With `out`, the run is kept in that folder. Called again with the same settings it goes on where
    it stopped, to the same weights as if it had not. `minutes` stops it after so long, to go on later,
    and so does `stop` once another thread sets it.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method
    >>> from metabridge.models import mlp
    >>> run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=3, progress=False)
    >>> [point.iteration for point in run.curve]
    [1, 2, 3]
    """
    settings = Settings(
        iterations=iterations,
        tasks=tasks,
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        schedule=schedule,
        augment=augment,
        patience=patience,
        validate_every=max(1, iterations // 10) if validate_every is None else validate_every,
        validate_tasks=validate_tasks,
        precision=precision,
        seed=seed,
    )
    if not isinstance(method, Method):
        raise InputError(f"method is {method!r}, but must be a Method. Use metabridge.method({method!r}).")
    loop = Loop(net, method, environment, validate, settings, torch.device(device), mode)
    folder = None if out is None else RunFolder(Path(out))
    described = {} if folder is None else loop.described()
    if folder is not None:
        folder.begin(described)
        loop.restore(folder)
    saved = time.perf_counter()
    until = math.inf if minutes is None else saved + 60 * minutes
    with _bar(progress) as bar:
        shown = bar.add_task(name, total=iterations, completed=loop.iteration, told="")
        try:
            while not loop.finished and time.perf_counter() < until and not (stop and stop.is_set()):
                judged = loop.step()
                bar.update(shown, completed=loop.iteration)
                if judged:
                    told = f"{loop.curve[-1].told()}, {loop.speed()}"
                    bar.update(shown, told=told)
                    if progress and not bar.console.is_terminal:
                        bar.console.print(f"{name} {loop.iteration}/{iterations}: {told}")
                if folder is not None and (judged or time.perf_counter() > saved + SAVED):
                    loop.save(folder)
                    saved = time.perf_counter()
        finally:
            if folder is not None and loop.intact:
                loop.save(folder)
    params, buffers = loop.best()
    fill(net, params, buffers)
    return Run(method, net.eval(), params, settings.dtype, tuple(loop.curve), loop.seconds, described, loop.finished)


def load(folder: str | Path, *, device: torch.device | str = "cpu", net: Network | None = None) -> Run:
    """Return the run that `fit` keeps in a folder, with the best parameters so far.

    `net` is needed only for a network that was made by hand.

    >>> from tempfile import TemporaryDirectory
    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method
    >>> from metabridge.models import mlp
    >>> with TemporaryDirectory() as out:
    ...     run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=3, out=out, progress=False)
    ...     torch.equal(load(out).params["head.weight"], run.params["head.weight"])
    True
    """
    kept = RunFolder(Path(folder))
    settings = kept.settings()
    try:
        net, method = read_network(settings, net), read_method(settings["method"])
        low = settings["training"]["precision"] == "bfloat16" and torch.device(device).type != "cpu"
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{kept.path / 'settings.json'} is damaged: its settings cannot be read ({error!r}). "
            "Restore it from a copy."
        ) from error
    weights = kept.read("weights")
    if weights is None:
        raise InputError(
            f"the run in {folder} has no weights yet: it was stopped before its first validation. "
            "Give the train command again, and it goes on."
        )
    tensors, notes = weights
    params, buffers = part(tensors, "params"), part(tensors, "buffers")
    check_match({**dict(net.named_parameters()), **dict(net.named_buffers())}, params | buffers, kept.path)
    fill(net, params, buffers)
    state = kept.read("state")
    return Run(
        method,
        net.to(device).eval(),
        {key: value.to(device) for key, value in params.items()},
        torch.bfloat16 if low else None,
        tuple(point_of(line) for line in (notes if state is None else state[1])["curve"]),
        notes["seconds"] if state is None else state[1]["seconds"],
        settings,
        state is not None and state[1]["finished"],
    )


def _bar(progress: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[told]}"),
        disable=not progress,
    )
