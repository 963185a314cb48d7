"""What an experiment leaves behind: its numbers beside the published ones, and how they were made."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import make_folder, read_regular_file, write_atomically

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Work:
    """What an experiment is asked to do, and where."""

    scale: str  # "quick" or "paper"
    device: str = "cpu"
    seed: int = 0
    out: Path = Path("runs")  # where trainings are kept, for experiments that train for long
    data: Path | None = None  # the folder with the data sets, for experiments that need one
    only: tuple[str, ...] = ()  # the parts to compute, if not all
    minutes: float | None = None  # of a training, or of several in turns together; then it goes on later
    progress: bool = True

    def __post_init__(self) -> None:
        if self.scale not in ("quick", "paper"):
            raise InputError(f"scale is '{self.scale}', but must be 'quick' or 'paper'.")

    def check_only(self, names: Collection[str]) -> None:
        """Refuse parts to compute that the experiment has not."""
        unknown = sorted(set(self.only) - set(names))
        if unknown:
            known = f"the trainings are {', '.join(names)}" if names else "this experiment has no parts"
            raise InputError(f"only names {', '.join(unknown)}, but {known}.")


@dataclass(frozen=True)
class Row:
    """One number of ours, beside the published one where there is one.

    >>> Row("MAML, 1-shot", "accuracy %", ours=48.9, ci95=0.4, published=48.7, agrees=True).note
    ''
    """

    name: str
    metric: str
    _: KW_ONLY
    published: float | None = None
    ours: float
    ci95: float | None = None
    agrees: bool | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for key in ("ours", "ci95", "published"):
            value = getattr(self, key)
            if value is not None and not math.isfinite(value):
                raise InputError(f"row '{self.name}' has {key}={value}, but a result is a finite number.")


@dataclass(frozen=True)
class Environment:
    """The machine and the code that computed a result."""

    device: str
    torch: str
    python: str
    commit: str | None


def environment(device: torch.device | str) -> Environment:
    """Describe this machine, of which `device` did the work."""
    import torch

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor()
    return Environment(name, torch.__version__, platform.python_version(), _commit())


class Trained(Protocol):
    """What a result takes from the record of a training."""

    @property
    def plan(self) -> dict[str, Any]:
        """How it was trained."""
        ...

    @property
    def environment(self) -> Environment:
        """Where it was trained."""
        ...

    @property
    def minutes(self) -> float:
        """How long it was trained."""
        ...


@dataclass(frozen=True)
class Result:
    """The rows of one experiment, with everything needed to compute them again."""

    id: str
    scale: str
    seed: int
    settings: dict[str, object]
    environment: Environment
    seconds: float
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, work: Work, name: str, rows: tuple[Row, ...], records: Mapping[str, Trained]) -> Result:
        """Return the result that the records of trainings add up to; they name the machine and the plans."""
        if not rows:
            raise InputError(
                f"{name} has no training that is finished. Give it more --minutes, or call it again to go on."
            )
        first = next(iter(records.values()))
        plans = {label: record.plan for label, record in records.items()}
        minutes = sum(record.minutes for record in records.values())
        return cls(name, work.scale, work.seed, {"plans": plans}, first.environment, 60 * minutes, rows)

    def write(self, folder: str | Path) -> Path:
        """Write `ID.json` into the folder and return its path."""
        text = json.dumps(asdict(self), indent=2, allow_nan=False, ensure_ascii=False)
        return write_atomically(make_folder(folder) / f"{self.id}.json", f"{text}\n".encode())

    @classmethod
    def read(cls, path: str | Path) -> Result:
        """Return the result that `write` left at `path`."""
        try:
            stored = json.loads(read_regular_file(Path(path)))
        except OSError as error:
            raise InputError(f"the result {path} cannot be read ({error.strerror}).") from error
        except PARSING_ERRORS as error:
            raise InputError(f"{path} is not a result: it is not JSON ({error}).") from error
        wanted = {field.name for field in fields(cls)}
        if not isinstance(stored, dict) or set(stored) != wanted:
            raise InputError(f"{path} is not a result: it must hold exactly {', '.join(sorted(wanted))}.")
        try:
            rows = tuple(Row(**row) for row in stored["rows"])
            return cls(**stored | {"environment": Environment(**stored["environment"]), "rows": rows})
        except PARSING_ERRORS as error:
            raise InputError(
                f"{path} is not a result: its rows or environment are of another form ({error})."
            ) from error


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model()}, {cores} cores"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The short hash of the checkout that this file belongs to, if it is in one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside another project's checkout, whose commit says nothing of it.
    ours = git("ls-files", str(folder.parent / "__init__.py"))
    return git("rev-parse", "--short", "HEAD") if ours else None


class Outcome(Protocol):
    """What a run returns: its result, and whatever else its figure needs."""

    @property
    def result(self) -> Result:
        """The numbers."""
        ...
