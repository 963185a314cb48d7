"""What commands write to the terminal: results on standard output, notes on standard error, names as data.

Names of classes and files come from anywhere. They are never read as markup, and what a terminal would obey or could
not show is written as a visible escape.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from metabridge.errors import InputError

NARROWEST = 12  # columns below which a column of text is not folded further
PIPE_CLOSED = 1  # the status where nobody reads the output any more, as Rich has it


def printable(text: object) -> str:
    r"""Return text without control characters: each becomes a visible escape, and so does a byte that is no UTF-8.

    >>> printable("\x1b[31mred\n"), printable("caf\udce9")
    ('\\x1b[31mred\\n', 'caf\\xe9')
    """
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in str(text))


def say(text: object) -> None:
    """Print a line of results."""
    print(printable(text))


def note(text: object) -> None:
    """Print a line that is not a result to standard error."""
    print(printable(text), file=sys.stderr)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, text: Sequence[str] = (), title: str | None = None
) -> None:
    """Print a table whose cells are never cut; only columns named in `text` are folded, the others hold numbers.

    Where not all columns fit beside each other, every row is printed as lines of `heading: cell`.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    cells = [[printable(cell) for cell in row] for row in rows]
    least, most = [], []
    for place, column in enumerate(columns):
        widest = max((cell_len(row[place]) for row in cells), default=0)
        most.append(max(cell_len(column), widest))
        least.append(max(*map(cell_len, column.split()), min(widest, NARROWEST) if column in text else widest))
    room = console.width - 3 * len(columns) - 1  # without borders and padding
    if sum(least) > room:
        _print_rows(columns, cells, title)
        return
    widths = most if sum(most) <= room else least
    table = Table(title=None if title is None else Text(printable(title)))
    for column, width in zip(columns, widths):
        if column in text:
            table.add_column(Text(column), overflow="fold")
        else:
            table.add_column(Text(column), justify="right", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    if title is not None:
        say(title)
    for row in rows:
        print()
        for column, cell in zip(columns, row):
            if cell:
                say(f"{column}: {cell}")


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """Let output go to any terminal: what its encoding lacks is escaped, and warnings and log messages are notes.

    If standard output cannot be written, raise an `InputError`; if nobody reads it any more, end quietly.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings(), _logged():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _noted
            yield
            if sys.stdout is not None:  # as it is where the program was started without
                sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            _discard(stream)
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        if error.filename is not None:
            raise
        _discard(sys.stdout)
        raise InputError(f"the output cannot be written ({error.strerror}).") from error


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Print what the library logs as notes; what Python prints without a handler has names as they are."""
    log, notes = logging.getLogger("metabridge"), _Notes(logging.WARNING)
    log.addHandler(notes)
    try:
        yield
    finally:
        log.removeHandler(notes)


def _noted(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    note(f"Note: {message}")


def _discard(stream: TextIO) -> None:
    """Point a stream that cannot be written to nowhere, so that the interpreter does not fail on it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else repr(letter)[1:-1]
