"""Terminal output: results go to standard output, messages to standard error.

Names of classes and files can contain any characters. They are never interpreted as markup, and their control
characters are escaped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from metabridge.errors import InputError

MIN_WRAPPED_WIDTH = 12  # minimum width of a wrapped column, in characters
BROKEN_PIPE_STATUS = 1  # exit status if the reader of standard output has closed the pipe, as in Rich


def printable(text: object) -> str:
    r"""Escape the control characters and the invalid UTF-8 bytes in a text.

    >>> printable("\x1b[31mred\n"), printable("caf\udce9")
    ('\\x1b[31mred\\n', 'caf\\xe9')
    """
    return "".join(character if character.isprintable() else _escape(character) for character in str(text))


def print_stdout(text: object) -> None:
    """Print one line to standard output, with control characters escaped."""
    print(printable(text))


def print_stderr(text: object) -> None:
    """Print one line to standard error, with control characters escaped."""
    print(printable(text), file=sys.stderr)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    left_aligned: Sequence[str] = (),
    title: str | None = None,
) -> None:
    """Print a table without truncating any cell.

    The columns in `left_aligned` contain text, which is wrapped if necessary. All other columns contain numbers and are
    right-aligned. If the terminal is too narrow for the table, print each cell on its own line as `heading: cell`.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    cells = [[printable(cell) for cell in row] for row in rows]
    min_widths, full_widths = [], []  # of the columns, with and without wrapping
    for index, column in enumerate(columns):
        widest_cell = max((cell_len(row[index]) for row in cells), default=0)
        min_cell = min(widest_cell, MIN_WRAPPED_WIDTH) if column in left_aligned else widest_cell
        full_widths.append(max(cell_len(column), widest_cell))
        min_widths.append(max(*map(cell_len, column.split()), min_cell))
    available = console.width - 3 * len(columns) - 1  # width without borders and padding
    if sum(min_widths) > available:
        _print_rows(columns, cells, title)
        return
    widths = full_widths if sum(full_widths) <= available else min_widths
    table = Table(title=None if title is None else Text(printable(title)))
    for column, width in zip(columns, widths):
        if column in left_aligned:
            table.add_column(Text(column), overflow="fold")
        else:
            table.add_column(Text(column), justify="right", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    """Print each cell of a table on its own line as `heading: cell`, with an empty line before each row."""
    if title is not None:
        print_stdout(title)
    for row in rows:
        print()
        for column, cell in zip(columns, row):
            if cell:
                print_stdout(f"{column}: {cell}")


@contextlib.contextmanager
def terminal_output() -> Iterator[None]:
    """Escape characters that the terminal cannot encode, and print warnings and logged errors as single lines.

    If the reader of standard output has closed the pipe, exit without a message.

    Raises:
        InputError: If standard output cannot be written.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings(), _logging_to_stderr():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _show_warning
            yield
            if sys.stdout is not None:  # None if the program was started without a standard output
                sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            _discard(stream)
        sys.exit(BROKEN_PIPE_STATUS)
    except OSError as error:
        if error.filename is not None:
            raise
        _discard(sys.stdout)
        raise InputError(f"the output cannot be written ({error.strerror}).") from error


class _StderrHandler(logging.Handler):
    """Print log messages to standard error, with control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        print_stderr(record.getMessage())


@contextlib.contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Print logged warnings and errors with escaped control characters, unlike Python's default handler."""
    logger, handler = logging.getLogger("metabridge"), _StderrHandler(logging.WARNING)
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
    """Print a warning as one line; see `warnings.showwarning` for the arguments.

    Options of training are shown as on the command line.
    """
    text = re.sub(r"\btrain with (\w+)='(\w+)'", r"train with --\1 \2", str(message))
    print_stderr(f"Note: {text}")


def _discard(stream: TextIO) -> None:
    """Redirect an unwritable stream to the null device, so that Python can flush it at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def _escape(character: str) -> str:
    """Return the escape sequence of a character. Python decodes invalid UTF-8 bytes as U+DC80 to U+DCFF."""
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else repr(character)[1:-1]
