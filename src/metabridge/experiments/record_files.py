"""What trainings leave behind: records that are small and stay valid where the weights are gone.

An experiment asked for again reads the records that are there, goes on with trainings that were stopped, and begins
those that are missing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.experiments.result import Environment, Trained, Work
from metabridge.files import make_folder, read_regular_file, write_atomically

R = TypeVar("R", bound=Trained)


def plain(plan: Mapping[str, object]) -> dict[str, Any]:
    """Return a plan as it is read back from JSON.

    >>> plain({"layers": (2, 3)})
    {'layers': [2, 3]}
    """
    return json.loads(json.dumps(plan))  # type: ignore[no-any-return]


def stored(work: Work, name: str, plan: Mapping[str, Any], make: Callable[[dict[str, Any]], R]) -> R | None:
    """Return the record that a training of this plan has left, made of what its file holds; None without one."""
    file = _file(work, name)
    if not file.exists():
        return None
    try:
        content = read_regular_file(file)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}). Check who may read it.") from error
    try:
        held = json.loads(content)
        record = make({**held, "environment": Environment(**held["environment"])})
    except PARSING_ERRORS as error:
        raise InputError(f"{file} is not a record of this version ({error}). Delete it to measure again.") from error
    return record if record.plan == plan else None


def keep(work: Work, name: str, record: Any) -> None:
    """Write a record, a dataclass, for `stored` to find."""
    file = _file(work, name)
    make_folder(file.parent)
    write_atomically(file, f"{json.dumps(asdict(record), indent=1)}\n".encode())


def run_folder(work: Work, name: str, plan: Mapping[str, Any]) -> Path:
    """Return where a training is kept. A run does not know all of its plan, so a changed one has another folder."""
    return work.out / "runs" / f"{name}-{zlib.crc32(json.dumps(plan).encode()):08x}"


def _file(work: Work, name: str) -> Path:
    return work.out / "records" / f"{name}.json"
