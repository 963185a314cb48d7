"""Readers, their valid inputs, and the cases that are generated from the inputs."""

from __future__ import annotations

import hashlib
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np


class Link(NamedTuple):
    """A symbolic link."""

    target: str


class Node(NamedTuple):
    """A named pipe or an empty folder."""

    kind: Literal["pipe", "folder"]


Files = Mapping[str, bytes | Link | Node]  # by path in the folder of the case; invalid UTF-8 as surrogates

# The allowed outcomes. "any": any data or an InputError; "same": only the data of a valid input, or an InputError;
# "refused": only an InputError. A crash, a hang, another exception and so on are always failures.
Expected = Literal["any", "same", "refused"]


class Case(NamedTuple):
    """One input: its files, the expected outcome, and the index of the reader's entry that reads them."""

    files: Files
    expected: Expected
    entry: int


class Hostile(NamedTuple):
    """A hand-written input."""

    files: Files
    expected: Expected = "any"


@dataclass(frozen=True)
class Reader:
    """One kind of file and the functions of the library that read it.

    Args:
        name: The name of the reader.
        entries: Functions that read the folder of a case and return its data, or raise `InputError`.
        valid_inputs: Returns the valid inputs. It may write to its argument, an empty folder.
        change: Returns a changed copy of a valid input. Its last argument is all valid inputs, for splicing.
        hostile: Returns the hand-written inputs, most of them malicious. Its argument is all valid inputs.
    """

    name: str
    entries: tuple[Callable[[Path], object], ...]
    valid_inputs: Callable[[Path], Sequence[Files]]
    change: Callable[[Files, random.Random, Sequence[Files]], tuple[Files, Expected]]
    hostile: Callable[[Sequence[Files]], Sequence[Hostile]] = lambda inputs: ()


@dataclass(frozen=True)
class Corpus:
    """The inputs of a reader, from which its cases are made."""

    reader: Reader
    valid_inputs: Sequence[Files]
    hand_written: Sequence[Hostile]

    @classmethod
    def of(cls, reader: Reader, folder: Path) -> Corpus:
        """Create the valid and the hand-written inputs of a reader."""
        valid_inputs = reader.valid_inputs(folder)
        return cls(reader, valid_inputs, reader.hostile(valid_inputs))

    @property
    def num_fixed_cases(self) -> int:
        """The number of cases that are not random: valid inputs once per entry, and hand-written inputs once."""
        return len(self.reader.entries) * len(self.valid_inputs) + len(self.hand_written)

    def case(self, seed: int, number: int) -> Case:
        """Return a case, which depends only on the seed, the reader and the number."""
        entries = len(self.reader.entries)
        entry, index = number % entries, number // entries
        if index < len(self.valid_inputs):
            return Case(self.valid_inputs[index], "same", entry)
        if number < self.num_fixed_cases:
            return Case(*self.hand_written[number - entries * len(self.valid_inputs)], entry)
        rng = random.Random(f"{seed}/{self.reader.name}/{number}")
        if self.hand_written and rng.random() < 0.02:  # again, possibly with another entry
            return Case(*rng.choice(self.hand_written), entry)
        files, expected = self.reader.change(rng.choice(self.valid_inputs or ({},)), rng, self.valid_inputs)
        return Case(files, expected, entry)


def lay_out(folder: Path, files: Files) -> None:
    """Create the folder of a case with these files. An existing folder is removed first."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if isinstance(content, Link):
            os.symlink(content.target, path)
        elif content == Node("pipe"):
            os.mkfifo(path)
        elif content == Node("folder"):
            os.makedirs(path, exist_ok=True)
        else:
            assert isinstance(content, bytes)
            with open(path, "wb") as stream:
                stream.write(content)


def digest(value: object) -> str:
    """Return a hash of plain data, arrays, tensors and dataclasses.

    >>> digest({"a": [1, 2.0]}) == digest({"a": [1, 2.0]}) != digest({"a": [1, 2]})
    True
    """
    key = hashlib.sha256()
    _add(key.update, value)
    return key.hexdigest()[:16]


def _add(update: Callable[[bytes], None], value: Any) -> None:
    torch = sys.modules.get("torch")  # if it is not imported, there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.view(torch.int16).numpy() if value.dtype is torch.bfloat16 else value.numpy()
    if isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode())
        update(repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        update(type(value).__name__.encode())
        for field in fields(value):
            update(field.name.encode())
            _add(update, getattr(value, field.name))
    elif isinstance(value, dict):
        update(f"dict{len(value)}".encode())
        for name, item in sorted(value.items(), key=lambda pair: repr(pair[0])):  # files store tensors in any order
            _add(update, name)
            _add(update, item)
    elif isinstance(value, list | tuple):
        update(f"list{len(value)}".encode())
        for item in value:
            _add(update, item)
    elif isinstance(value, float) and math.isnan(value):
        update(b"nan")
    else:
        update(f"{type(value).__name__}:{value!r};".encode("utf-8", "surrogatepass"))
