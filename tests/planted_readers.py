"""Readers that each have a known fault, for testing the fuzzing harness."""

from __future__ import annotations

import logging
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fuzz.cases import Expected, Files, Hostile, Reader
from fuzz.mutate import damage

from metabridge.errors import InputError

GOOD = {"file": b"good"}


def sound(folder: Path) -> object:
    """Read a file without any fault."""
    content = (folder / "file").read_bytes()
    if content != b"good":
        raise InputError("file is not good.")
    return content


def traceback(folder: Path) -> object:
    return {b"good": 1}[(folder / "file").read_bytes()]


def hang(folder: Path) -> object:
    while (folder / "file").read_bytes() != b"good":
        pass
    return 1


def wait(folder: Path) -> object:
    if (folder / "file").read_bytes() != b"good":
        os.read(os.pipe()[0], 1)
    return 1


def memory(folder: Path) -> object:
    if (folder / "file").read_bytes() != b"good":
        return len(bytearray(2 * 2**30))
    return 1


def touched_memory(folder: Path) -> object:
    """Allocate more than the limit of a case, but not so much that the allocation fails."""
    return 1 if (folder / "file").read_bytes() == b"good" else len(b"x" * (2**30 + 2**26))


def hidden_memory(folder: Path) -> object:
    try:
        return memory(folder)
    except MemoryError as error:
        raise InputError("file is too large.") from error


def logged_memory(folder: Path) -> object:
    try:
        return memory(folder)
    except MemoryError as error:
        logging.getLogger("metabridge").warning("1 unreadable image is left out: %s (%r).", "a.png", error)
        return 1


def left_out_memory(folder: Path) -> object:
    """Log the same message as the library, which does not contain the exception."""
    try:
        return memory(folder)
    except MemoryError:
        logging.getLogger("metabridge").warning("1 unreadable image is left out: %s.", "a.png (not enough memory)")
        return 1


def writes_outside(folder: Path) -> object:
    if (folder / "file").read_bytes() != b"good":
        (folder.parent / "outside" / "new").write_bytes(b"")
    return 1


def reads_outside(folder: Path) -> object:
    return (
        sound(folder) if (folder / "file").read_bytes() == b"good" else (folder / "../outside/secret.png").read_bytes()
    )


def starts_a_process(folder: Path) -> object:
    if (folder / "file").read_bytes() != b"good":
        subprocess.run([sys.executable, "-c", ""], check=True)
    return 1


def unpickles(folder: Path) -> object:
    return 1 if (folder / "file").read_bytes() == b"good" else pickle.loads(b"cos\ngetcwd\n.")


def gives_other_data(folder: Path) -> object:
    return (folder / "file").read_bytes()


def crashes(folder: Path) -> object:
    return 1 if (folder / "file").read_bytes() == b"good" else os.abort()


def change(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
    """Return a damaged file. "same" means that a reader must return the data of the good file or refuse to read."""
    return {"file": damage(b"good", rng)}, "same"


def planted(read: Callable[[Path], object]) -> Reader:
    """Return the harness's description of a reader: its good file, random changes of it, and one hostile file."""
    bad = Hostile({"file": b"bad"}, "same")
    return Reader(read.__name__, (read,), lambda folder: [GOOD], change, lambda inputs: [bad])


# the kind of failure that the harness must report for each reader
FAULTS = {
    traceback: "traceback",
    hang: "hang",
    wait: "hang",
    memory: "memory",
    touched_memory: "memory",
    hidden_memory: "memory",
    logged_memory: "memory",
    left_out_memory: "memory",
    writes_outside: "outside",
    reads_outside: "outside",
    starts_a_process: "code",
    unpickles: "code",
    gives_other_data: "silent",
    crashes: "crash",
}
READERS = {read.__name__: planted(read) for read in (sound, *FAULTS)}
