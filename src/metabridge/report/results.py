"""Results of experiments: our numbers, the published ones, and how ours were computed."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import make_folder, read_regular_file, write_atomically

if TYPE_CHECKING:
    from torch import device as TorchDevice


@dataclass(frozen=True)
class Row:
    """One of our numbers and, if there is one, the published number.

    Args:
        name: The measured setting, unique among the rows with the same metric.
        metric: The quantity and its unit.
        published: The published number.
        ours: Our number.
        ci95: Half-width of the 95 % confidence interval of `ours`.
        agrees: Whether `ours` agrees with `published` or with a published claim; None if it was not compared.
        note: How `ours` was measured, and the condition for `agrees`.

    Raises:
        InputError: If a number is not finite.

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
                raise InputError(f"row '{self.name}' has {key}={value}, but a result must be a finite number.")

    @classmethod
    def mean(
        cls,
        name: str,
        metric: str,
        runs: Sequence[float],
        *,
        published: float | None = None,
        agrees: bool | None = None,
        note: str = "",
    ) -> Row:
        """Return the row of the mean of `runs`, the numbers of all runs, with its 95 % interval if there are several.

        >>> Row.mean("MAML, 1-shot", "accuracy %", [48.0, 49.0]).ours
        48.5
        """
        from metabridge.intervals import mean_interval  # imported here, because it imports PyTorch

        mean, margin = mean_interval(runs)
        ci95 = None if len(runs) == 1 else margin
        return cls(name, metric, published=published, ours=mean, ci95=ci95, agrees=agrees, note=note)

    @classmethod
    def share(
        cls, name: str, metric: str, is_true: Sequence[bool], *, agrees: bool | None = None, note: str = ""
    ) -> Row:
        """Return the row of the percentage of entries of `is_true` that are true.

        >>> Row.share("large intervals", "problems %", [True, False, True, True]).ours
        75.0
        """
        return cls(name, metric, ours=100 * sum(is_true) / len(is_true), agrees=agrees, note=note)

    def with_published(self, published: float, tolerance: float, note: str) -> Row:
        """Return the row compared with a published number. They agree if they differ by at most a relative tolerance.

        >>> row = Row("MAML, 1-shot", "accuracy %", ours=48.9)
        >>> row.with_published(48.7, tolerance=0.01, note="agrees within 1 %").agrees
        True
        """
        agrees = abs(self.ours - published) <= tolerance * abs(published)
        return replace(self, published=published, agrees=agrees, note=note)


@dataclass(frozen=True)
class Machine:
    """The device and the software that computed a result."""

    device: str  # name of the GPU, or the model of the CPU and its number of cores
    torch: str  # version of PyTorch
    python: str  # version of Python
    commit: str | None  # short hash of the checked-out commit of metabridge; None if it is not in a checkout

    @classmethod
    def current(cls, device: TorchDevice | str) -> Machine:
        """Return the description of this machine for computations on `device`, and of its software."""
        import torch

        name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor()
        return cls(name, torch.__version__, platform.python_version(), _commit())


@dataclass(frozen=True)
class Result:
    """The rows of one experiment, and the settings and the machine with which they were computed.

    The field names are the keys of `results/*.json`. `id` is the name of the experiment, `scale` is "quick" or "paper",
    and `environment` is the machine.
    """

    id: str
    scale: str
    seed: int
    settings: dict[str, object]
    environment: Machine
    seconds: float
    rows: tuple[Row, ...]

    def write(self, folder: str | Path) -> Path:
        """Write `ID.json` into the folder and return its path."""
        text = json.dumps(asdict(self), indent=2, allow_nan=False, ensure_ascii=False)
        return write_atomically(make_folder(folder) / f"{self.id}.json", f"{text}\n".encode())

    @classmethod
    def read(cls, path: str | Path) -> Result:
        """Return the result in a file that was written by `write`.

        Raises:
            InputError: If the file cannot be read or is not a result.
        """
        try:
            stored = json.loads(read_regular_file(Path(path)))
        except OSError as error:
            raise InputError(f"the result {path} cannot be read ({error.strerror}).") from error
        except PARSING_ERRORS as error:
            raise InputError(f"{path} is not a result: it is not JSON ({error}).") from error
        keys = {field.name for field in fields(cls)}
        if not isinstance(stored, dict) or set(stored) != keys:
            raise InputError(f"{path} is not a result: its keys must be exactly {', '.join(sorted(keys))}.")
        try:
            rows = tuple(Row(**row) for row in stored["rows"])
            return cls(**stored | {"environment": Machine(**stored["environment"]), "rows": rows})
        except PARSING_ERRORS as error:
            raise InputError(f"{path} is not a result: its rows or its environment are malformed ({error}).") from error


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model()}, {cores} core{'' if cores == 1 else 's'}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the short hash of the checked-out commit if git tracks this package, or None."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            process = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    # An installed copy may be inside the checkout of another project, whose commit does not describe this package.
    tracked = git("ls-files", str(folder.parent / "__init__.py"))
    return git("rev-parse", "--short", "HEAD") if tracked else None
