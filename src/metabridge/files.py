"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from metabridge.errors import InputError


def make_folder(folder: str | Path) -> Path:
    """Return the folder, made if it was not there: done before the work whose results go into it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be made ({error.strerror}). Name another.") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"the folder {folder} cannot be written to. Name another.")
    return folder


def make_way(file: Path) -> None:
    """Make the folder of a file, before the work whose result it is, and see that it is no folder itself.

    >>> make_way(Path("."))
    Traceback (most recent call last):
    metabridge.errors.InputError: . is a folder. Name a file.
    """
    if file.is_dir():
        raise InputError(f"{file} is a folder. Name a file.")
    make_folder(file.parent)


def write_whole(file: Path, content: bytes) -> Path:
    """Write under another name first, so that no reader ever sees half of the file, and return it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "note.txt"), b"whole").read_bytes()
    b'whole'
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, file)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}). Name another folder, or free space.") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return file
