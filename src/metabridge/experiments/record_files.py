"""Old names, for modules that do not use `records` yet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.records import _file, run_folder
from metabridge.experiments.records import as_json as plain
from metabridge.files import make_folder, read_regular_file, write_atomically
from metabridge.report.results import Machine

__all__ = ["keep", "plain", "run_folder", "stored"]
R = TypeVar("R")


def stored(
    work: ExperimentOptions, name: str, plan: Mapping[str, Any], make: Callable[[dict[str, Any]], R]
) -> R | None:
    """Return the stored record."""
    file = _file(work, name)
    if not file.exists():
        return None
    try:
        held = json.loads(read_regular_file(file))
        record: Any = make({**held, "environment": Machine(**held["environment"])})
    except PARSING_ERRORS as error:
        raise InputError(f"{file} is not a record of this version ({error}). Delete it to measure again.") from error
    return record if record.plan == plan else None


def keep(work: ExperimentOptions, name: str, record: Any) -> None:
    """Write a record."""
    file = _file(work, name)
    make_folder(file.parent)
    write_atomically(file, f"{json.dumps(asdict(record), indent=1)}\n".encode())
