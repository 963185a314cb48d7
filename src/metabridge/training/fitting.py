"""`fit` trains a network from start to end, and `load` reads a saved run."""

from __future__ import annotations

import contextlib
import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, get_args

import torch
from rich.progress import Progress

from metabridge.choices import alternatives
from metabridge.device import as_device
from metabridge.environments.environment import Environment
from metabridge.errors import PARSING_ERRORS, InputError, check_not_negative
from metabridge.learners.engine import Mode
from metabridge.learners.method import Method
from metabridge.models.network import Network
from metabridge.progress import progress_bar
from metabridge.schedules import SCHEDULES, Schedule
from metabridge.schedules import schedule as create_schedule
from metabridge.training.checkpoint import (
    RunFolder,
    check_match,
    copy_into,
    damage_error,
    fingerprint,
    read_method,
    read_network,
    select_group,
)
from metabridge.training.config import (
    TrainingConfig,
    arguments_text,
    inherited_option,
    option,
    options_of,
    training_options,
)
from metabridge.training.evaluation import Model
from metabridge.training.learning_curve import point_from_json
from metabridge.training.trackers import Tracker, TrackerName, check_tracker, tracked_curve
from metabridge.training.trainer import Run, Trainer

Options = ParamSpec("Options")


@dataclass(frozen=True, kw_only=True)
class FitArguments(TrainingConfig):
    """The keyword arguments of `fit`: all training options, and options of a single call, such as the time limit."""

    schedule: Schedule | str = inherited_option(  # type: ignore[assignment]  # wider than in the base
        TrainingConfig,
        "schedule",
        help=f"Learning rate schedule, from `metabridge.schedules` or by name: {alternatives(SCHEDULES)}.",
    )
    validate: Environment | None = option(
        None,
        help="Source of validation tasks. The returned run contains the weights that had the best validation score. "
        "Default: none.",
    )
    teacher: Model | None = option(
        None, help="Trained model whose predictions are part of the targets; see `SoftTargets.distillation`."
    )
    init: Model | None = option(
        None,
        help="Trained model to start from. Its weights are copied into `net`, which must have the same features, and "
        "so are its head rows of training classes if the classes are the same, and its learned inner learning rates. "
        "Default: start from the weights of `net`.",
    )
    config: TrainingConfig | None = option(
        None, help="Training options; options that are passed by name take precedence."
    )
    device: torch.device | str = option("cpu", help="Device to compute on.")
    mode: Mode = option("auto", help=f"How meta-gradients are computed: {alternatives(get_args(Mode))}; see `Engine`.")
    out: str | Path | None = option(None, help="Folder to save the run in. None to save nothing.")
    minutes: float | None = option(
        None,
        help="Stop after this number of minutes. Call again with the same `out` to continue.",
        check=lambda name, value: None if value is None else check_not_negative(name, value),
    )
    progress: bool = option(True, help="Whether to show a progress bar on standard error.")
    name: str = option("training", help="Label of the progress bar.")
    log: TrackerName | Tracker | None = option(
        None,
        help='Experiment tracker to which the learning curve is also sent: "tensorboard", "wandb", "trackio" or a '
        "`metabridge.training.trackers.Tracker`.",
        check=check_tracker,
    )

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", create_schedule(self.schedule))
        super().__post_init__()


def _accepts(
    options_class: Callable[Options, object],
) -> Callable[[Callable[..., Run]], Callable[Concatenate[Network, Method, Environment, Options], Run]]:
    """Make the fields of a dataclass keyword arguments of the decorated function.

    The arguments are added to the function's signature, its docstring and, for type checkers, its static type.
    """

    def decorate(function: Callable[..., Run]) -> Callable[Concatenate[Network, Method, Environment, Options], Run]:
        signature = inspect.signature(function)
        keywords = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=field.type,
            )
            for field in options_of(options_class).values()  # type: ignore[arg-type]
        ]
        positional = [param for param in signature.parameters.values() if param.kind is param.POSITIONAL_OR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*positional, *keywords])  # type: ignore[attr-defined]
        if function.__doc__ is not None:
            text = arguments_text(options_class)  # type: ignore[arg-type]
            function.__doc__ = function.__doc__.replace("        {options}", text)
        return function

    return decorate


@_accepts(FitArguments)
def fit(net: Network, method: Method, environment: Environment, **arguments: Any) -> Run:
    """Train a network with a method on the tasks of an environment.

    With `validate`, the returned run contains the weights that had the best validation score; all validations use the
    same tasks. Without it, the run contains the weights after the last step. The weights of the run are also copied
    into `net` at the end.

    Training starts from the weights of `net`, so `fit(run.net, ...)` continues from a trained network, for example with
    another method. Learned inner learning rates and head rows of training classes are not in `net`; `init=run` copies
    them too. Parameters in `freeze` stay frozen in `net`: they have `requires_grad=False`.

    With `out`, the run is saved in that folder at each validation and at least every minute. If `fit` was interrupted,
    call it again with the same settings: it continues the run, and ends with the same weights as without interruption.
    With more `iterations`, training continues with the learning rate schedule stretched to the new length. A run that
    stopped early continues with a larger `patience`. During training, no other process can write to the folder, but the
    run can be loaded.

    Args:
        net: Network to train, in place.
        method: Method to train it with, such as `metabridge.method("maml")`.
        environment: Source of the training tasks.
        {options}

    Returns:
        The run: the trained model with its learning curve.

    Raises:
        InputError: If an option cannot be used, the method does not fit the network or the tasks, the loss becomes
            NaN or infinite, or `out` contains a run with other settings.

    >>> import metabridge as mb
    >>> sinusoids = mb.environments.Sinusoid()
    >>> run = mb.fit(mb.models.mlp(1, 1), mb.method("maml"), sinusoids, iterations=3, progress=False)
    >>> [point.iteration for point in run.curve]
    [1, 2, 3]
    """
    unknown = arguments.keys() - {field.name for field in fields(FitArguments)}
    if unknown:
        raise TypeError(f"fit() got an unexpected keyword argument {min(unknown)!r}")
    all_arguments = FitArguments(**arguments)  # with default values
    base_config = all_arguments if all_arguments.config is None else all_arguments.config
    options_by_name = {name: getattr(all_arguments, name) for name in options_of(TrainingConfig) if name in arguments}
    trainer = Trainer(
        net,
        method,
        environment,
        training_options(base_config, **options_by_name),
        validate=all_arguments.validate,
        device=all_arguments.device,
        mode=all_arguments.mode,
        out=all_arguments.out,
        teacher=all_arguments.teacher,
        init=all_arguments.init,
    )
    return run_to_end(
        trainer,
        all_arguments.name,
        minutes=all_arguments.minutes,
        progress=all_arguments.progress,
        log=all_arguments.log,
    )


def load(folder: str | Path, *, device: torch.device | str = "cpu", net: Network | None = None) -> Run:
    """Load the run that `fit` saved in a folder, with the best weights so far.

    Args:
        folder: Folder of the run.
        device: Device of the weights.
        net: The network that was trained. Required only if it was not built by a function of `metabridge.models`.

    Returns:
        The run.

    Raises:
        InputError: If there is no run in the folder, it has no weights yet, `net` is needed but missing or does not
            match the weights, or a file is damaged.

    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> import metabridge as mb
    >>> net, maml, sinusoids = mb.models.mlp(1, 1), mb.method("maml"), mb.environments.Sinusoid()
    >>> with TemporaryDirectory() as folder:
    ...     run = mb.fit(net, maml, sinusoids, iterations=3, out=folder, progress=False)
    ...     torch.equal(mb.load(folder).params["head.weight"], run.params["head.weight"])
    True
    """
    run_folder, device = RunFolder(Path(folder)), as_device(device)
    settings = run_folder.settings()
    weights, state = run_folder.read("weights"), run_folder.read("state")
    if weights is None:
        raise InputError(
            f"the run in {folder} has no weights yet: it was stopped before its first validation. "
            "Run the same training command again to continue it."
        )
    tensors, metadata = weights
    if net is None and settings["model"] is None:
        raise InputError(
            "this run's network was not built by metabridge.models. Build it and pass it: load(folder, net=net)."
        )
    try:
        net, method = read_network(settings, net, tensors), read_method(settings["method"])
        # on a CPU, a loaded run computes in float32
        low_precision = settings["training"]["precision"] == "bfloat16" and device.type != "cpu"
    except PARSING_ERRORS as error:
        raise damage_error(run_folder.path / "settings.json", f"its settings cannot be read ({error})") from error
    # the weights contain the fingerprint of their settings; early files of version 0.1.0 have none
    if metadata.get("settings", fingerprint(settings)) != fingerprint(settings):
        raise damage_error(
            run_folder.path / "settings.json", "its model or method is not what the weights were trained with"
        )
    params, buffers = select_group(tensors, "params"), select_group(tensors, "buffers")
    check_match({**dict(net.named_parameters()), **dict(net.named_buffers())}, params | buffers, run_folder.path)
    copy_into(net, params, buffers)
    try:
        # the state is written more often than the best weights, so its metadata has the points up to now
        latest_metadata = metadata if state is None else state[1]
        curve = tuple(point_from_json(point) for point in latest_metadata["curve"])
        seconds = float(latest_metadata["seconds"])
        finished = state is not None and bool(latest_metadata["finished"])
    except PARSING_ERRORS as error:
        name = "weights" if state is None else "state"
        raise damage_error(
            run_folder.path / f"{name}.safetensors", f"its metadata cannot be read ({error!r})"
        ) from error
    return Run(
        method,
        net.to(device).eval(),
        {key: value.to(device) for key, value in params.items()},
        torch.bfloat16 if low_precision else None,
        curve,
        seconds,
        settings,
        finished,
    )


def run_to_end(
    trainer: Trainer,
    name: str,
    *,
    minutes: float | None = None,
    progress: bool = True,
    log: TrackerName | Tracker | None = None,
) -> Run:
    """Run a trainer until training is finished or the time limit is reached, then save the run and close the trainer.

    Args:
        trainer: The trainer.
        name: Label of the progress bar.
        minutes: Stop after this number of minutes. None for no limit.
        progress: Whether to show a progress bar.
        log: Experiment tracker to which the learning curve is also sent, or its name; see `trackers.tracked_curve`.

    Returns:
        The run.
    """
    deadline = math.inf if minutes is None else time.perf_counter() + 60 * minutes
    with (
        saved_and_closed(trainer),
        tracked_curve(trainer, log, name) as send_points,
        progress_bar(progress) as bar,
    ):
        progress_line = ProgressLine(bar, name, trainer)
        while not trainer.finished and time.perf_counter() < deadline:
            with delay_interrupt():
                point_added = trainer.step()
            progress_line.update(point_added)
            if point_added:
                send_points()
    return trainer.run()


class ProgressLine:
    """The line of one training run in a progress bar."""

    def __init__(self, bar: Progress, name: str, trainer: Trainer) -> None:
        self._bar, self._name, self._trainer = bar, name, trainer
        self._task = bar.add_task(name, total=trainer.config.iterations, completed=trainer.iteration, status="")

    def update(self, point_added: bool) -> None:
        """Show the number of steps and the latest point of the learning curve.

        If standard error is not a terminal (for example, if it is redirected to a file), print each new point on a
        separate line.
        """
        trainer, bar = self._trainer, self._bar
        bar.update(self._task, completed=trainer.iteration)
        if point_added:
            text = f"{trainer.curve[-1]}, {trainer.speed()}"
            bar.update(self._task, status=text)
            if not bar.disable and not bar.console.is_terminal:
                bar.console.print(f"{self._name} {trainer.iteration}/{trainer.config.iterations}: {text}", markup=False)


@contextlib.contextmanager
def saved_and_closed(trainer: Trainer) -> Iterator[None]:
    """Save the run and unlock its folder at the end of the context, even after an error."""
    try:
        yield
    finally:
        try:
            trainer.save()
        finally:
            trainer.close()


@contextlib.contextmanager
def delay_interrupt() -> Iterator[None]:
    """Delay the first Ctrl-C until the end of the context; a second one interrupts immediately.

    This has no effect outside the main thread, or if Ctrl-C does not raise `KeyboardInterrupt`.
    """
    default_handler = signal.default_int_handler  # raises KeyboardInterrupt
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not default_handler:
        yield
        return
    delayed_signals: list[int] = []

    def delay(signal_number: int, frame: FrameType | None) -> None:
        if delayed_signals:
            raise KeyboardInterrupt
        delayed_signals.append(signal_number)

    signal.signal(signal.SIGINT, delay)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default_handler)
    if delayed_signals:
        raise KeyboardInterrupt
