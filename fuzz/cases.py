"""What is fuzzed, as data: a reader, its valid inputs, and the cases made of them."""

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
    """Something that is not a regular file: a named pipe or an empty folder."""

    kind: Literal["pipe", "folder"]


Files = Mapping[str, bytes | Link | Node]  # by path below the case's folder; bytes that are no UTF-8 as surrogates

# What may happen to a case: anything but a failure; the valid data or a refusal; a refusal alone.
Expected = Literal["any", "same", "refused"]


class Case(NamedTuple):
    """One input: the files, what is expected of them, and by which of the reader's entries they are read."""

    files: Files
    expected: Expected
    entry: int


class Hostile(NamedTuple):
    """An input made by hand."""

    files: Files
    expected: Expected = "any"


@dataclass(frozen=True)
class Reader:
    """One kind of file and the functions of the library that read it.

    - `entries`: each reads the case's folder and returns what it found, or raises `InputError`.
    - `seeds`: makes the valid inputs, with the library's help in an empty folder where that is needed.
    - `change`: makes a changed input of a valid one; the last argument is all of them, to splice.
    - `hostile`: makes the inputs that were written by hand, of the valid ones where that is needed.
    """

    name: str
    entries: tuple[Callable[[Path], object], ...]
    seeds: Callable[[Path], Sequence[Files]]
    change: Callable[[Files, random.Random, Sequence[Files]], tuple[Files, Expected]]
    hostile: Callable[[Sequence[Files]], Sequence[Hostile]] = lambda inputs: ()


@dataclass(frozen=True)
class Corpus:
    """The inputs of a reader."""

    reader: Reader
    inputs: Sequence[Files]
    by_hand: Sequence[Hostile]

    @classmethod
    def of(cls, reader: Reader, folder: Path) -> Corpus:
        """Make the valid and the hand-made inputs of a reader."""
        inputs = reader.seeds(folder)
        return cls(reader, inputs, reader.hostile(inputs))

    @property
    def fixed(self) -> int:
        """How many cases come before the random ones: the valid inputs by every entry, each hand-made one by one."""
        return len(self.reader.entries) * len(self.inputs) + len(self.by_hand)

    def case(self, seed: int, number: int) -> Case:
        """Return case `number`, which depends on nothing else but the seed and the reader."""
        entries = len(self.reader.entries)
        entry, place = number % entries, number // entries
        if place < len(self.inputs):
            return Case(self.inputs[place], "same", entry)
        if number < self.fixed:
            return Case(*self.by_hand[number - entries * len(self.inputs)], entry)
        rng = random.Random(f"{seed}/{self.reader.name}/{number}")
        if self.by_hand and rng.random() < 0.02:  # by another entry, perhaps
            return Case(*rng.choice(self.by_hand), entry)
        files, expected = self.reader.change(rng.choice(self.inputs or ({},)), rng, self.inputs)
        return Case(files, expected, entry)


def lay_out(folder: Path, files: Files) -> None:
    """Make the case's folder anew, with these files alone."""
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
    """Return a key of plain data, arrays, tensors and dataclasses: equal for equal values alone.

    >>> digest({"a": [1, 2.0]}) == digest({"a": [1, 2.0]}) != digest({"a": [1, 2]})
    True
    """
    key = hashlib.sha256()
    _add(key.update, value)
    return key.hexdigest()[:16]


def _add(update: Callable[[bytes], None], value: Any) -> None:
    torch = sys.modules.get("torch")  # without which there are no tensors
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
        for name, each in sorted(value.items(), key=lambda item: repr(item[0])):  # files keep tensors in any order
            _add(update, name)
            _add(update, each)
    elif isinstance(value, list | tuple):
        update(f"list{len(value)}".encode())
        for each in value:
            _add(update, each)
    elif isinstance(value, float) and math.isnan(value):
        update(b"nan")
    else:
        update(f"{type(value).__name__}:{value!r};".encode("utf-8", "surrogatepass"))
