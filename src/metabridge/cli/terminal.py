"""Output to the terminal: results on standard output, notes on standard error.

Names of classes and files can contain anything. They are never interpreted as markup, and control characters in them
are printed as visible escapes.
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

MIN_TEXT_WIDTH = 12  # minimal width of a wrapped column, in characters
PIPE_CLOSED = 1  # exit status if the program that reads the output has closed the pipe, as in Rich


def printable(text: object) -> str:
    r"""Return text in which control characters and bytes that are not UTF-8 are replaced by visible escapes.

    >>> printable("\x1b[31mred\n"), printable("caf\udce9")
    ('\\x1b[31mred\\n', 'caf\\xe9')
    """
    return "".join(character if character.isprintable() else _escape(character) for character in str(text))


def say(text: object) -> None:
    """Print one line of results to standard output."""
    print(printable(text))


def note(text: object) -> None:
    """Print one line that is not a result to standard error."""
    print(printable(text), file=sys.stderr)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, text: Sequence[str] = (), title: str | None = None
) -> None:
    """Print a table. Cells of the columns in `text` are wrapped if necessary; cells are never truncated.

    If the columns do not fit side by side, each cell is printed as a line `heading: cell`.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    cells = [[printable(cell) for cell in row] for row in rows]
    min_widths, full_widths = [], []  # with and without wrapping
    for index, column in enumerate(columns):
        widest_cell = max((cell_len(row[index]) for row in cells), default=0)
        min_cell = min(widest_cell, MIN_TEXT_WIDTH) if column in text else widest_cell
        full_widths.append(max(cell_len(column), widest_cell))
        min_widths.append(max(*map(cell_len, column.split()), min_cell))
    available = console.width - 3 * len(columns) - 1  # without borders and padding
    if sum(min_widths) > available:
        _print_rows(columns, cells, title)
        return
    widths = full_widths if sum(full_widths) <= available else min_widths
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
    """Print each cell of a table as a line `heading: cell`, with an empty line before each row."""
    if title is not None:
        say(title)
    for row in rows:
        print()
        for column, cell in zip(columns, row):
            if cell:
                say(f"{column}: {cell}")


@contextlib.contextmanager
def terminal_output() -> Iterator[None]:
    """Escape characters that the terminal's encoding lacks, and print warnings and logged errors as notes.

    If another program reads standard output and has closed the pipe, exit without a message.

    Raises:
        InputError: If standard output cannot be written.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings(), _log_as_notes():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _show_warning
            yield
            if sys.stdout is not None:  # None if the program was started without a standard output
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


class _NoteHandler(logging.Handler):
    """A handler that prints log messages as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextlib.contextmanager
def _log_as_notes() -> Iterator[None]:
    """Print logged warnings and errors as notes. Python's default handler would not escape control characters."""
    logger, handler = logging.getLogger("metabridge"), _NoteHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as a note."""
    note(f"Note: {message}")


def _discard(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device; otherwise flushing it at exit would fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _escape(character: str) -> str:
    """Return a visible escape of a character. Python decodes bytes that are not UTF-8 as U+DC80 to U+DCFF."""
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else repr(character)[1:-1]
