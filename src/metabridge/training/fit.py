"""The training loop: draw tasks, take the meta-gradient, step an ordinary optimizer."""

from __future__ import annotations

from pathlib import Path

import torch

from metabridge.device import as_device
from metabridge.environments.environment import Environment
from metabridge.errors import PARSING_ERRORS, InputError, check_not_negative
from metabridge.learners.engine import Mode
from metabridge.learners.method import Method
from metabridge.models.network import Network
from metabridge.training.augment import Augment
from metabridge.training.checkpoint import (
    RunFolder,
    check_match,
    damaged,
    fill,
    fingerprint,
    part,
    read_method,
    read_network,
)
from metabridge.training.evaluate import Model
from metabridge.training.fitting import Fitting, Run, alone
from metabridge.training.loop import Precision, Settings, point_of
from metabridge.training.schedules import Schedule
from metabridge.training.soft_targets import SoftTargets


def fit(
    net: Network,
    method: Method,
    environment: Environment,
    *,
    validate: Environment | None = None,
    iterations: int = Settings.iterations,
    tasks: int = Settings.tasks,
    optimizer: str = Settings.optimizer,
    lr: float = Settings.lr,
    weight_decay: float = Settings.weight_decay,
    schedule: Schedule = Settings.schedule,
    augment: Augment | None = None,
    patience: int | None = None,
    validate_every: int | None = None,
    validate_tasks: int = Settings.validate_tasks,
    precision: Precision = Settings.precision,
    soft_targets: SoftTargets | None = None,
    teacher: Model | None = None,
    average: float | None = None,
    device: torch.device | str = "cpu",
    mode: Mode = "auto",
    seed: int = 0,
    out: str | Path | None = None,
    minutes: float | None = None,
    progress: bool = True,
    name: str = "training",
) -> Run:
    """Train `net` with `method` on tasks of `environment` and return the run.

    With `validate`, the parameters of the best validation score are kept, judged on the same tasks
    each time (every tenth of the iterations unless `validate_every` says otherwise), and training
    ends early after more than `patience` validations without a new best. The network given ends with
    the weights.

    Methods that train one classifier (MTL, RFS) take `soft_targets`: smoothed labels, mixed images, or the predictions
    of a `teacher` that was trained before. With `average`, a decay such as 0.999, the moving average of the parameters
    is validated and kept instead of the parameters themselves.

    With `out`, the run is kept in that folder. Called again with the same settings it goes on where
    it stopped, to the same weights as if it had not. With more `iterations` a run goes on for longer, with
    its schedule stretched to the new length. `minutes` stops it after so long, to go on later. While it is
    trained no other training writes to the folder, but it can be loaded.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method
    >>> from metabridge.models import mlp
    >>> run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=3, progress=False)
    >>> [point.iteration for point in run.curve]
    [1, 2, 3]
    """
    if minutes is not None:
        check_not_negative("minutes", minutes)
    settings = Settings(
        iterations=iterations,
        tasks=tasks,
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        schedule=schedule,
        augment=augment,
        patience=patience,
        validate_every=validate_every,
        validate_tasks=validate_tasks,
        precision=precision,
        soft_targets=soft_targets,
        average=average,
        seed=seed,
    )
    begun = Fitting(
        net, method, environment, settings, validate=validate, device=device, mode=mode, out=out, teacher=teacher
    )
    return alone(begun, name, minutes=minutes, progress=progress)


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
    kept, device = RunFolder(Path(folder)), as_device(device)
    settings = kept.settings()
    weights, state = kept.read("weights"), kept.read("state")
    if weights is None:
        raise InputError(
            f"the run in {folder} has no weights yet: it was stopped before its first validation. "
            "Give the train command again, and it goes on."
        )
    tensors, notes = weights
    if net is None and settings["model"] is None:
        raise InputError("this run's network was made by hand. Make it again and give it: load(folder, net=net).")
    try:
        net, method = read_network(settings, net, tensors), read_method(settings["method"])
        low = settings["training"]["precision"] == "bfloat16" and device.type != "cpu"
    except PARSING_ERRORS as error:
        raise damaged(kept.path / "settings.json", f"its settings cannot be read ({error})") from error
    if notes.get("settings", fingerprint(settings)) != fingerprint(settings):
        raise damaged(kept.path / "settings.json", "its model or method is not what the weights were trained with")
    params, buffers = part(tensors, "params"), part(tensors, "buffers")
    check_match({**dict(net.named_parameters()), **dict(net.named_buffers())}, params | buffers, kept.path)
    fill(net, params, buffers)
    try:
        latest = notes if state is None else state[1]
        curve, seconds = tuple(point_of(line) for line in latest["curve"]), float(latest["seconds"])
        finished = state is not None and bool(latest["finished"])
    except PARSING_ERRORS as error:
        name = "weights" if state is None else "state"
        raise damaged(kept.path / f"{name}.safetensors", f"its notes cannot be read ({error!r})") from error
    return Run(
        method,
        net.to(device).eval(),
        {key: value.to(device) for key, value in params.items()},
        torch.bfloat16 if low else None,
        curve,
        seconds,
        settings,
        finished,
    )
