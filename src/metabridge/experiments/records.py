"""Records: small JSON files with the measurements of a training run or search, without the weights.

Experiments can share records. An experiment that is run again reads the existing records, resumes stopped training
runs, and starts the missing ones.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from metabridge.environments.image_tasks import LabeledImages
from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.files import make_folder, read_regular_file, write_atomically
from metabridge.report.results import Machine


@dataclass(frozen=True)
class Record:
    """The measurements of one training run or search. Subclasses add the measurements as fields.

    The field names are the keys of `records/*.json`, except for those in `file_keys`.

    Args:
        name: Name of the file, without `.json`.
        plan: All settings on which the measurements depend, as `as_json` returns them.
        environment: The machine on which it ran, named like its key in the files.
        minutes: Duration of the training run or search, in minutes.
    """

    name: str
    plan: dict[str, Any]
    environment: Machine
    minutes: float

    file_keys: ClassVar[Mapping[str, str]] = {}  # the key in the file, for each field that has a different key there

    @classmethod
    def load_or_measure(
        cls,
        options: ExperimentOptions,
        run_name: str,
        name: str,
        plan: Mapping[str, Any],
        measure: Callable[[], dict[str, Any] | None],
    ) -> Self | None:
        """Return the stored record of a training run or search. If there is none, measure and store the record.

        Args:
            options: Options of the experiment.
            run_name: Name of the training run or search in `options.only`.
            name: Name of the record, and of its file without `.json`.
            plan: All settings on which the measurements depend.
            measure: Function that trains or searches. It returns a dict with `minutes` and the fields that the subclass
                adds, or None if it was stopped by the time limit.

        Returns:
            The record; None if there is none yet, because `options.only` excludes the run or `measure` was stopped.
        """
        record = cls.load(options, name, as_json(plan))
        if record is not None or not options.includes(run_name):
            return record
        measurements = measure()
        return None if measurements is None else cls.store(options, name, plan, **measurements)

    @classmethod
    def store(cls, options: ExperimentOptions, name: str, plan: Mapping[str, Any], **measurements: Any) -> Self:
        """Create the record of measurements on this machine, write it to its file, and return it."""
        record = cls(name=name, plan=as_json(plan), environment=Machine.current(options.device), **measurements)
        record.save(options)
        return record

    @classmethod
    def load(cls, options: ExperimentOptions, name: str, plan: Mapping[str, Any]) -> Self | None:
        """Return the stored record with this name, or None if there is none or its plan differs.

        Raises:
            InputError: If the file cannot be read or is not a record.
        """
        file = _record_file(options, name)
        if not file.exists():
            return None
        try:
            content = read_regular_file(file)
        except OSError as error:
            raise InputError(f"{file} cannot be read ({error.strerror}). Check its permissions.") from error
        try:
            field_names = {key: name for name, key in cls.file_keys.items()}
            stored = rename_keys(json.loads(content), field_names)
            record = cls.from_json({**stored, "environment": Machine(**stored["environment"])})
        except PARSING_ERRORS as error:
            raise InputError(
                f"{file} is not a record of this version ({error}). Delete it to measure again."
            ) from error
        return record if record.plan == plan else None

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Return the record with these fields, as read from JSON. Subclasses convert the fields that they add."""
        return cls(**stored)

    def to_json(self) -> dict[str, Any]:
        """Return the fields in the form that `from_json` reads."""
        return asdict(self)

    def save(self, options: ExperimentOptions) -> None:
        """Write the record to the file that `load` reads."""
        file = _record_file(options, self.name)
        make_folder(file.parent)
        stored = rename_keys(self.to_json(), self.file_keys)
        write_atomically(file, f"{json.dumps(stored, indent=1)}\n".encode())


def as_json(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return settings as they would be read back from a JSON file, with lists instead of tuples.

    >>> as_json({"layers": (2, 3)})
    {'layers': [2, 3]}
    """
    return json.loads(json.dumps(settings))  # type: ignore[no-any-return]


def rename_keys(values: Mapping[str, Any], new_keys: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of a dict in which the keys in `new_keys` are replaced, such as by those of version 0.1.0.

    >>> rename_keys({"lr": 0.1, "test_tasks": 60}, {"test_tasks": "judged"})
    {'lr': 0.1, 'judged': 60}
    """
    return {new_keys.get(key, key): value for key, value in values.items()}


def image_description(images: LabeledImages) -> str:
    """Return the name and the size of images, such as "omniglot at 28 px"."""
    name = images.load_arguments["name"] if images.load_arguments else "images"
    return f"{name} at {images.images.shape[-1]} px"


def run_folder(options: ExperimentOptions, name: str, plan: Mapping[str, Any]) -> Path:
    """Return the folder of a training run. Its name contains a hash of the plan, so a changed plan starts a new run."""
    return options.out / "runs" / f"{name}-{zlib.crc32(json.dumps(plan).encode()):08x}"


def _record_file(options: ExperimentOptions, name: str) -> Path:
    return options.out / "records" / f"{name}.json"
