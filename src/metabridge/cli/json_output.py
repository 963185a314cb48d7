"""The option `--json`, which every command that reports something has.

`--json FILE` writes a report as JSON and prints the usual text. `--json -` prints only JSON to standard output, and
messages to standard error. Numbers are not rounded, and numbers that JSON does not have (NaN and infinity) are null.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from metabridge.cli.terminal import print_stderr, print_stdout

JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="JSON file to which all results are also written. With `-`, JSON is printed to standard output instead of "
        "text.",
    ),
]


class JsonOutput:
    """Where a command writes its report as JSON.

    Args:
        file: The value of `--json`: a file, `-` for standard output, or None to write nothing.

    Raises:
        InputError: If the file cannot be written.
    """

    def __init__(self, file: Path | None) -> None:
        from metabridge.files import STDOUT, make_parent_folder

        self._file = file
        self.is_stdout = str(file) == STDOUT
        if file is not None:
            make_parent_folder(file)

    def print_message(self, text: object) -> None:
        """Print a line to standard output, or to standard error if JSON is printed to standard output."""
        (print_stderr if self.is_stdout else print_stdout)(text)

    def messages_to_stderr(self) -> AbstractContextManager[object]:
        """Return a context in which everything that is printed goes to standard error if JSON goes to standard output.

        Use it around code of other packages, which print messages.
        """
        return redirect_stdout(sys.stderr) if self.is_stdout else nullcontext()

    def write(self, report: object) -> None:
        """Write the report, and print where it is."""
        from metabridge.files import json_bytes, write_output

        if self._file is None:
            return
        write_output(self._file, json_bytes(to_json(report), indent=2))
        if not self.is_stdout:
            print_stdout(f"All results are in {self._file}")


def to_json(value: object) -> object:
    """Return a value with JSON types: NaN and infinity are null, paths are strings, and tuples are lists.

    >>> to_json({"loss": float("nan"), "out": Path("runs"), "scores": (0.5, 1)})
    {'loss': None, 'out': 'runs', 'scores': [0.5, 1]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def versions() -> dict[str, str]:
    """Return the versions of metabridge and PyTorch, which are part of reports of results."""
    import torch

    from metabridge import __version__

    return {"metabridge": __version__, "torch": torch.__version__}
