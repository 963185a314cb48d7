"""Send the learning curve of a training run to an experiment tracker: TensorBoard, Weights & Biases or Trackio.

Trackers only receive numbers, so they do not change the results. A tracker that fails does not stop the training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from metabridge.choices import alternatives
from metabridge.errors import PARSING_ERRORS, InputError, check_count
from metabridge.files import json_bytes, read_regular_file, write_atomically
from metabridge.training.checkpoint import damage_error
from metabridge.training.learning_curve import Point, best_score

if TYPE_CHECKING:
    from metabridge.training.trainer import Trainer

log = logging.getLogger("metabridge")

TrackerName = Literal["tensorboard", "wandb", "trackio"]
MODULES: dict[str, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
INSTALL: dict[str, str] = {"tensorboard": "'metabridge[tensorboard]'", "wandb": "wandb", "trackio": "trackio"}
STATE_FILE = "tracker.json"  # in the folder of a run


@runtime_checkable
class Tracker(Protocol):
    """An experiment tracker: an object that records numbers during training.

    Pass one to `metabridge.fit(log=...)`, for example to send the learning curve to a service of your own.

    >>> class PrintingTracker:
    ...     def log(self, values, step):
    ...         print(step, sorted(values))
    ...     def finish(self):
    ...         print("finished")
    >>> import metabridge as mb
    >>> net, sinusoids = mb.models.mlp(1, 1), mb.environments.Sinusoid()
    >>> run = mb.fit(net, mb.method("maml"), sinusoids, iterations=1, progress=False, log=PrintingTracker())
    1 ['learning_rate', 'loss', 'seconds']
    finished
    """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values at a training step."""

    def finish(self) -> None:
        """End the recording, when training ends or is stopped."""


def check_tracker(name: str, value: object) -> None:
    """Raise an `InputError` if a value is neither None, the name of an installed tracker nor a `Tracker`.

    >>> check_tracker("log", "mlflow")
    Traceback (most recent call last):
    metabridge.errors.InputError: log is 'mlflow', but must be tensorboard, wandb or trackio.
    """
    if value is None or isinstance(value, Tracker):
        return
    if value not in get_args(TrackerName):
        choices = alternatives(get_args(TrackerName))
        alternative = "" if isinstance(value, str) else ", or a Tracker"
        raise InputError(f"{name} is {value!r}, but must be {choices}{alternative}.")
    _import_tracker(str(value))


def _import_tracker(name: str) -> Any:
    """Return the module of a tracker. Importing it takes seconds, so it is imported only when it is used."""
    try:
        return import_module(MODULES[name])
    except ImportError as error:
        raise InputError(
            f"log is {name!r}, but {name} cannot be imported ({error}). Install it with pip install {INSTALL[name]}, "
            "or use another tracker."
        ) from error


@dataclass(frozen=True)
class TrackedRun:
    """The state of a training run in a tracker, which is stored in its folder.

    Args:
        run_id: Name of the run in the tracker, which is unique.
        iteration: Iteration of the last point of the learning curve that the tracker has recorded; 0 for none.
    """

    run_id: str
    iteration: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,100}", self.run_id):
            raise InputError(f"run_id is {self.run_id!r}, but must consist of letters, digits and the characters .-_")
        if self.iteration != 0:
            check_count("iteration", self.iteration)


def read_tracked_runs(folder: Path) -> dict[str, TrackedRun]:
    """Return the state of a run in each tracker that has recorded it, from tracker.json in its folder.

    Raises:
        InputError: If the file cannot be read.
    """
    file = folder / STATE_FILE
    try:
        stored = json.loads(read_regular_file(file))
        return {str(name): TrackedRun(**state) for name, state in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, *PARSING_ERRORS) as error:
        raise damage_error(file, f"it cannot be read ({error})") from error


class TensorBoardTracker:
    """Writes event files for TensorBoard.

    Args:
        folder: Folder of the event files.
        settings: Settings of the run, shown as text. None if the run is continued.
        purge_step: If the run is continued, its first step: TensorBoard ignores earlier records from this step on.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object] | None, purge_step: int | None) -> None:
        self._writer = _import_tracker("tensorboard").SummaryWriter(str(folder), purge_step=purge_step)
        if settings is not None:
            lines = json.dumps(settings, indent=2).splitlines()
            self._writer.add_text("settings", "\n".join(f"    {line}" for line in lines))  # as code in Markdown

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values at a training step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()


class ServiceTracker:
    """Records a run with a package that has the interface of Weights & Biases: wandb or trackio.

    The project is "metabridge", or the value of the environment variable WANDB_PROJECT or TRACKIO_PROJECT.

    Args:
        name: Name of the package.
        run_id: Name of the run, which is unique. If the project has such a run, it is continued.
        settings: Settings of the run.
    """

    def __init__(self, name: TrackerName, run_id: str, settings: Mapping[str, object]) -> None:
        project = os.environ.get(f"{name.upper()}_PROJECT", "metabridge")
        identity = {"id": run_id} if name == "wandb" else {}  # trackio identifies runs by their names
        self._run = _import_tracker(name).init(
            project=project, name=run_id, config=dict(settings), resume="allow", **identity
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values at a training step."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """Upload what is left and end the run."""
        self._run.finish()


@contextlib.contextmanager
def tracked_curve(trainer: Trainer, tracker: TrackerName | Tracker | None, name: str) -> Iterator[Callable[[], None]]:
    """Send the points of a trainer's learning curve to a tracker, if there is one.

    If the trainer continues a saved run, its run in the tracker is continued too: only points that the tracker has not
    recorded yet are sent. If the tracker raises an error, a warning is logged, and training continues without it.

    Args:
        trainer: The trainer.
        tracker: The tracker or its name. None for none.
        name: Start of the name of the run in the tracker.

    Yields:
        A function that sends the new points. It must be called when the curve has new points.

    Raises:
        InputError: If the tracker is not installed, or tracker.json cannot be read.
    """
    check_tracker("log", tracker)
    recorder = None if tracker is None else _Recorder(trainer, tracker, name)
    if recorder is None or (trainer.finished and not recorder.new_points()):
        yield lambda: None
        return
    recorder.start()
    try:
        recorder.send_points()
        yield recorder.send_points
    finally:
        recorder.finish()


class _Recorder:
    """Sends the points of a learning curve to a tracker until the tracker fails, and stores which ones were sent."""

    def __init__(self, trainer: Trainer, tracker: TrackerName | Tracker, name: str) -> None:
        self._trainer, self._source = trainer, tracker
        self._key = tracker if isinstance(tracker, str) else type(tracker).__name__
        folder = trainer.folder
        # if training starts from the beginning, the file belongs to a run whose other files were removed
        self._stored = {} if folder is None or trainer.iteration == 0 else read_tracked_runs(folder)
        label = re.sub(r"[^\w.-]", "-", name if folder is None else folder.resolve().name)[:60]
        self._is_new = self._key not in self._stored
        self._state = self._stored.get(self._key, TrackedRun(f"{label}-{secrets.token_hex(4)}"))
        self._tracker: Tracker | None = None

    def new_points(self) -> Sequence[Point]:
        """Return the points of the learning curve that were not sent yet."""
        return [point for point in self._trainer.curve if point.iteration > self._state.iteration]

    def start(self) -> None:
        """Start the run in the tracker, or continue it."""
        with self._errors_as_warning():
            self._tracker = self._open()

    def send_points(self) -> None:
        """Send all new points."""
        for point in self.new_points():
            if self._tracker is None:
                return
            with self._errors_as_warning():
                self._tracker.log(_values(self._trainer, point), step=point.iteration)
                self._state = TrackedRun(self._state.run_id, point.iteration)
                self._save()

    def finish(self) -> None:
        """End the run in the tracker."""
        if self._tracker is not None:
            with self._errors_as_warning():
                self._tracker.finish()

    def _open(self) -> Tracker:
        if not isinstance(self._source, str):
            return self._source
        self._save()
        settings, run_id = self._trainer.settings, self._state.run_id
        if self._source != "tensorboard":
            return ServiceTracker(self._source, run_id, settings)
        if self._trainer.folder is not None:
            folder = self._trainer.folder / "tensorboard"
        else:
            folder = Path("runs", "tensorboard", f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{run_id}")
        if self._is_new:
            return TensorBoardTracker(folder, settings, purge_step=None)
        return TensorBoardTracker(folder, None, purge_step=self._state.iteration + 1)

    def _save(self) -> None:
        if self._trainer.folder is not None:
            states = self._stored | {self._key: self._state}
            content = json_bytes({key: asdict(state) for key, state in states.items()})
            write_atomically(self._trainer.folder / STATE_FILE, content, follow=False)

    @contextlib.contextmanager
    def _errors_as_warning(self) -> Iterator[None]:
        """Log an error of the tracker as a warning, and use the tracker no more."""
        try:
            yield
        except Exception as error:
            self._tracker = None
            log.warning("%s failed (%s: %s). Training continues without it.", self._key, type(error).__name__, error)


def _values(trainer: Trainer, point: Point) -> dict[str, float]:
    """Return the values that trackers record at a point of the learning curve."""
    # the learning rate of the last step before the point
    rate = trainer.learning_rate(point.iteration - 1)
    values = {"loss": point.loss, "learning_rate": rate, "seconds": point.seconds}
    if point.score is not None:
        values |= {"validation_score": point.score.mean, "validation_ci95": point.score.ci95}
    best = best_score([other for other in trainer.curve if other.iteration <= point.iteration])
    return values if best is None else values | {"best_score": best.mean}
