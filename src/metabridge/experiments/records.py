"""Records of trainings and searches: small JSON files that stay when the weights are deleted.

Experiments share them. An experiment that is run again reads the records that exist, resumes the trainings that were
stopped, and starts those that are missing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.files import make_folder, read_regular_file, write_atomically
from metabridge.report.results import Machine


@dataclass(frozen=True)
class Record:
    """What one training or search measured. Subclasses add the measurements as fields.

    The field names are the keys of `records/*.json`, unless `to_json` says otherwise.

    Args:
        name: Name of the file, without `.json`.
        plan: Everything that the training depends on, as JSON gives it back.
        environment: The machine that trained.
        minutes: Duration of the training.
    """

    name: str
    plan: dict[str, Any]
    environment: Machine
    minutes: float

    @classmethod
    def load(cls, options: ExperimentOptions, name: str, plan: Mapping[str, Any]) -> Self | None:
        """Return the stored record of a training with this plan, or None if there is none.

        Raises:
            InputError: If the file cannot be read or is not a record.
        """
        file = _file(options, name)
        if not file.exists():
            return None
        try:
            content = read_regular_file(file)
        except OSError as error:
            raise InputError(f"{file} cannot be read ({error.strerror}). Check its permissions.") from error
        try:
            stored = json.loads(content)
            record = cls.from_json({**stored, "environment": Machine(**stored["environment"])})
        except PARSING_ERRORS as error:
            raise InputError(
                f"{file} is not a record of this version ({error}). Delete it to run the training again."
            ) from error
        return record if record.plan == plan else None

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Return the record with these fields, as JSON holds them. Subclasses convert their own fields."""
        return cls(**stored)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as `from_json` reads them."""
        return asdict(self)

    def save(self, options: ExperimentOptions) -> None:
        """Write the record for `load`."""
        file = _file(options, self.name)
        make_folder(file.parent)
        write_atomically(file, f"{json.dumps(self.to_json(), indent=1)}\n".encode())


def as_json(plan: Mapping[str, object]) -> dict[str, Any]:
    """Return a plan as JSON gives it back, with lists instead of tuples.

    >>> as_json({"layers": (2, 3)})
    {'layers': [2, 3]}
    """
    return json.loads(json.dumps(plan))  # type: ignore[no-any-return]


def run_folder(options: ExperimentOptions, name: str, plan: Mapping[str, Any]) -> Path:
    """Return the folder of a training. Its name depends on the plan, so that a changed plan starts a new training."""
    return options.out / "runs" / f"{name}-{zlib.crc32(json.dumps(plan).encode()):08x}"


def _file(options: ExperimentOptions, name: str) -> Path:
    return options.out / "records" / f"{name}.json"
