"""Base classes of experiments. Each can be run at two scales, and its result is a table of numbers and a figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from metabridge.errors import InputError
from metabridge.report.results import Machine, Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from metabridge.environments.image_tasks import LabeledImages


class FinishedRun(Protocol):
    """The attributes that a `TrainingExperiment` uses of a finished training run or search. Every `Record` has them."""

    @property
    def plan(self) -> Mapping[str, Any]:
        """All settings on which the measurements depend."""

    @property
    def environment(self) -> Machine:
        """The machine on which it ran, named like its key in records and result files."""

    @property
    def minutes(self) -> float:
        """Duration of the training run or search, in minutes."""


D = TypeVar("D")  # the data that an experiment measures
R = TypeVar("R", bound=FinishedRun)


@dataclass(frozen=True)
class ExperimentOptions:
    """The options of `metabridge reproduce`.

    Args:
        scale: "quick" (minutes on a CPU) or "paper" (full size).
        device: Name of the PyTorch device.
        seed: Seed of all random numbers.
        out: Folder for training runs and their records.
        data: Folder with one subfolder per data set, which has the name of the data set.
        only: Names of the training runs or searches to run. Default: all.
        minutes: Time limit of a training run, or of all runs that are trained together. Unfinished runs are resumed by
            the next call.
        progress: Whether to show progress bars.

    Raises:
        InputError: If the scale is unknown.
    """

    scale: str
    device: str = "cpu"
    seed: int = 0
    out: Path = Path("runs")
    data: Path | None = None
    only: tuple[str, ...] = ()
    minutes: float | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        if self.scale not in ("quick", "paper"):
            raise InputError(f"scale is '{self.scale}', but must be 'quick' or 'paper'.")

    def includes(self, run_name: str) -> bool:
        """Return whether `only` selects the training run or search with this name."""
        return not self.only or run_name in self.only

    def check_selected_names(self, run_names: Collection[str]) -> None:
        """Raise an `InputError` if `only` contains a name that is not in `run_names`."""
        unknown = sorted(set(self.only) - set(run_names))
        if unknown:
            problem = f"its parts are {', '.join(run_names)}" if run_names else "it has only one part"
            raise InputError(f"only is {', '.join(unknown)}, which is not a part of this experiment: {problem}.")

    def has_data(self, name: str) -> bool:
        """Return whether the data set is built in or `data` contains it.

        >>> ExperimentOptions("quick").has_data("glyphs"), ExperimentOptions("quick").has_data("omniglot")
        (True, False)
        """
        return name == "glyphs" or self._data_path(name) is not None

    def data_name(self, *names: str) -> str:
        """Return the first of the data sets that is available.

        If none is, return "glyphs" at the quick scale, and the first name at the paper scale.

        >>> ExperimentOptions("quick").data_name("mini-imagenet")
        'glyphs'
        >>> ExperimentOptions("paper").data_name("mini-imagenet")
        'mini-imagenet'
        """
        fallback = "glyphs" if self.scale == "quick" else names[0]
        return next((name for name in names if self.has_data(name)), fallback)

    def load_images(self, *names: str, size: int | None = None) -> LabeledImages:
        """Load the first of the data sets that is available, or the glyphs; see `data_name`.

        Args:
            names: The data sets that the experiment can use, in order of preference.
            size: Height and width to which the images are resized, in pixels. The glyphs are not resized. Default: the
                usual size of the data set.

        Raises:
            InputError: If the scale is "paper" and none of the data sets is available.
        """
        from metabridge.datasets import load

        name = self.data_name(*names)
        if name == "glyphs":
            return load(name)
        path = self._data_path(name)
        if path is None:
            where = "no --data is passed" if self.data is None else f"--data {self.data} does not contain it"
            folders = " or ".join("cifar-100-python" if name == "fs-cifar100" else name for name in names)
            raise InputError(
                f"the paper scale needs {folders}, but {where}. Pass the folder that contains it with --data, or use "
                "--scale quick to run a smaller experiment without it."
            )
        return load(name, path, size=size)

    def _data_path(self, name: str) -> Path | None:
        """Return the path from which `load` reads a data set, or None if `data` does not contain it."""
        from metabridge.datasets import cifar

        if self.data is None:
            return None
        if name == "fs-cifar100":
            return self.data if cifar.matches(self.data) else None
        return self.data / name if (self.data / name).exists() else None


@dataclass(frozen=True)
class Outcome(Generic[D]):
    """The result of an experiment, and the data that its figure shows."""

    result: Result
    data: D


@dataclass(frozen=True)
class Experiment(Generic[D]):
    """An experiment that always runs as a whole.

    To add one, write a module of this package with a line `EXPERIMENT = Experiment("its-id", ...)`.

    Args:
        id: Name on the command line and of the result file.
        measure: Function that computes the data.
        rows: Function that computes the rows of the result from the data.
        figure: Function that draws the outcome. By default, the figure shows our numbers next to the published ones.
        settings: For each scale, a dataclass with its settings, which are stored in the result.
        constants: Further settings to store, which are the same for both scales.
        on_cpu: Whether the experiment runs on the CPU even if the options name another device.
    """

    id: str
    measure: Callable[[ExperimentOptions], D]
    rows: Callable[[D, ExperimentOptions], Iterable[Row]]
    figure: Callable[[Outcome[D]], Figure] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    on_cpu: bool = False

    resumable: ClassVar[bool] = False  # whether --only and --minutes can be used

    def run(self, options: ExperimentOptions) -> Outcome[D]:
        """Run the experiment."""
        started = time.perf_counter()
        data = self.measure(options)
        return Outcome(self.result(data, options, time.perf_counter() - started), data)

    def result(self, data: D, options: ExperimentOptions, seconds: float) -> Result:
        """Return the result of an experiment whose data took `seconds` to compute."""
        return Result(
            id=self.id,
            scale=options.scale,
            seed=options.seed,
            settings={**asdict(self.settings[options.scale]), **self.constants},
            environment=Machine.current("cpu" if self.on_cpu else options.device),
            seconds=seconds,
            rows=tuple(self.rows(data, options)),
        )

    def draw(self, outcome: Outcome[D], file: Path) -> None:
        """Write the figure as a PNG file."""
        from metabridge.report import figures, result_figures

        with figures.LIGHT.context():
            figure = self.figure(outcome) if self.figure else result_figures.published_and_ours(outcome.result)
        figures.save(figure, file)


@dataclass(frozen=True)
class TrainingExperiment(Experiment[Mapping[str, R]]):
    """An experiment made of training runs or searches that can be run one by one, stopped and resumed.

    `measure` returns the records of the finished runs by name. The result takes the machine, the settings and the time
    from the records, because the runs may have been trained earlier and on another machine.
    """

    resumable: ClassVar[bool] = True

    def result(self, data: Mapping[str, R], options: ExperimentOptions, seconds: float) -> Result:
        """Return the result that the records contain.

        Raises:
            InputError: If no training run or search is finished.
        """
        rows = tuple(self.rows(data, options))
        if not rows:
            raise InputError(f"no part of {self.id} is finished. Run the same command again, with more --minutes.")
        return Result(
            id=self.id,
            scale=options.scale,
            seed=options.seed,
            settings={"plans": {name: record.plan for name, record in data.items()}},
            environment=next(iter(data.values())).environment,
            seconds=60 * sum(record.minutes for record in data.values()),
            rows=rows,
        )
