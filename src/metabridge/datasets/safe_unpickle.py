"""Pickles as data: arrays, numbers, text, lists and dictionaries, and nothing that runs code."""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from metabridge.errors import InputError

DEPTH = 64  # Containers within each other.
LONGEST_NUMBER = 1024  # Bytes of one integer, or characters of one written number.
LARGEST_KEY = 2**24  # Among smaller integers, too few can be found that collide in a dictionary.
MOST_MEMO = 2**26  # Of what a pickle remembers, where it is not larger itself.
FREE_BYTES = 2**24  # The result may have so many bytes, and four times the pickle's own size beyond it,
OBJECTS = 2**28  # and reading may take so much memory, and as much beyond it.
REFERENCE_BYTES = 8  # What an entry of a container takes: no more than its instructions, times four.
OBJECT_BYTES = 100  # Roughly what an empty container, or an entry of the memo, takes.


def unpickle(data: bytes, name: str) -> Any:
    """Return the plain data in a pickle; `name` is the name of its file, for error messages.

    This is an interpreter of its own for the few instructions that plain data needs, in protocols 0 to
    5. It builds Python's numbers, text, bytes, lists, tuples and dictionaries, and NumPy's arrays and
    scalars of numbers or text. It never calls or looks up anything that the pickle names. Arrays are
    read-only views of immutable bytes. Text of Python 2, which may be bytes, is read as Latin-1.

    Memory is limited by the size of the pickle, and so is the size of the result when every reference
    to a shared container is followed.

    >>> import pickle
    >>> unpickle(pickle.dumps({"labels": [1, 2], "data": np.zeros(2)}), "labels.pkl")["data"].tolist()
    [0.0, 0.0]
    >>> unpickle(pickle.dumps(print), "labels.pkl")
    Traceback (most recent call last):
    metabridge.errors.InputError: labels.pkl asks for builtins.print, which is code, not data. Do not trust this file.
    """
    try:
        reader = _Reader(data, name)
        result = reader.read()
        reader.check_tree(result)
        return result
    except InputError:
        raise
    except Exception as error:  # A damaged pickle can fail in every way.
        reason = str(error) if isinstance(error, ValueError | TypeError) else ""
        raise InputError(
            f"{name} is not a whole pickle of plain data ({reason or type(error).__name__}). Get the file again."
        ) from error


@dataclass(frozen=True)
class _Global:
    """A name that a pickle asks for, out of `_NAMES`. It stands for nothing that can be called."""

    name: str


@dataclass
class _Unbuilt:
    """An array or a dtype whose state is still to come, and the places in the memo that refer to it."""

    dtype: np.dtype[Any] | None = None  # None for an array.
    memo_keys: list[int] = field(default_factory=list)


_NAMES = {
    "numpy.ndarray",
    "numpy.dtype",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.numeric._frombuffer",
    "_codecs.encode",  # How Python 3 pickles bytes for Python 2,
    "builtins.bytes",  # and how it pickles empty ones.
}


class _Reader:
    """The state of one reading: the position in the pickle, the stack with its marks, and the memo."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._name = name
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._limit = FREE_BYTES + 4 * len(data)
        self._budget = OBJECTS + 4 * len(data)

    def read(self) -> Any:
        """Interpret the instructions up to STOP and return what is on top of the stack."""
        data, instructions = self._data, _INSTRUCTIONS
        while (code := data[self._position]) != _STOP:
            self._position += 1
            instruction = instructions.get(code)
            if instruction is None:
                raise ValueError(f"it has the instruction {bytes([code])!r}, which plain data does not need")
            instruction(self)
        return self._stack.pop()

    def check_tree(self, result: Any) -> None:
        """Refuse what is not plain data, is nested too deep, or is too large with shared parts counted each time."""
        size, limit = 0, self._limit
        levels = [iter((result,))]
        while levels:
            for value in levels[-1]:
                size += REFERENCE_BYTES
                if isinstance(value, list | tuple):
                    size += OBJECT_BYTES
                    levels.append(iter(value))
                elif isinstance(value, dict):
                    size += OBJECT_BYTES + sum(len(key) for key in value if isinstance(key, str | bytes))
                    levels.append(iter(value.values()))
                elif isinstance(value, str | bytes):
                    size += len(value)
                    continue
                elif isinstance(value, np.ndarray | np.generic):
                    size += value.nbytes
                    continue
                elif isinstance(value, int | float | None):
                    continue
                else:
                    raise ValueError("it has an array or a dtype without its contents")
                if len(levels) > DEPTH:
                    raise ValueError(f"its containers are nested more than {DEPTH} deep")
                break
            else:
                levels.pop()
            if size > limit:
                raise ValueError("it refers to the same data too often")

    # What instructions are made of.

    def _take(self, count: int) -> bytes:
        start, end = self._position, self._position + count
        if count < 0 or end > len(self._data):
            raise ValueError("it ends too early")
        self._position = end
        return self._data[start:end]

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._position)
        if end < 0:
            raise ValueError("it ends too early")
        line = self._data[self._position : end]
        self._position = end + 1
        return line

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _written_number(self) -> bytes:
        line = self._line()
        if len(line) > LONGEST_NUMBER:
            raise ValueError(f"it has a number of {len(line)} characters")
        return line

    def _spend(self, count: int) -> None:
        self._budget -= count
        if self._budget < 0:
            raise ValueError("it would take far more memory than its own size")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_container(self, value: Any) -> None:
        self._spend(OBJECT_BYTES)
        self._stack.append(value)

    def _mark(self) -> None:
        self._spend(OBJECT_BYTES)
        self._marks.append(self._stack)
        self._stack = []

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("it has no mark where one is needed")
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_to_mark()

    def _remember(self, key: int) -> None:
        if not 0 <= key < max(MOST_MEMO, len(self._data)):  # See `LARGEST_KEY`.
            raise ValueError(f"it numbers what it remembers with {str(key)[:20]}, but has {len(self._data)} bytes")
        self._spend(OBJECT_BYTES)
        value = self._memo[key] = self._stack[-1]
        if isinstance(value, _Unbuilt):
            value.memo_keys.append(key)

    # Containers.

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to what is not a list")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("it sets an item of what is not a dictionary")
        target.update(_dictionary(items))

    def _push_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise ValueError("it has too few values on its stack")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._push_container(items)

    # Globals, and what NumPy does with them.

    def _push_global(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}".replace("numpy.core.", "numpy._core.")  # Its name before NumPy 2.
        full = full.replace("__builtin__.", "builtins.")  # Its name in Python 2.
        if full not in _NAMES:
            raise InputError(
                f"{self._name} asks for {repr(f'{module}.{name}'[:200])[1:-1]}, which is code, not data. "
                "Do not trust this file."
            )
        self._push_container(_Global(full))

    def _refuse_instance(self) -> NoReturn:
        self._push_global(self._line().decode("latin1"), self._line().decode("latin1"))
        raise ValueError("it builds an object of a class")

    def _refuse_reference(self) -> NoReturn:
        raise InputError(f"{self._name} refers to an object outside itself. Get the file in a self-contained form.")

    def _reduce(self) -> None:
        arguments, target = self._stack.pop(), self._stack.pop()
        if not isinstance(target, _Global) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is not a function")
        self._spend(OBJECT_BYTES)
        match target.name, arguments:
            case "numpy._core.multiarray._reconstruct", (_Global("numpy.ndarray"), _, _):
                self._push(_Unbuilt())
            case "numpy.dtype", (str() | bytes() as code, *_):
                self._push(_Unbuilt(_dtype(_text(code))))
            case "numpy._core.multiarray.scalar", (np.dtype() as dtype, str() | bytes() as raw):
                self._push(_array(self._bytes(raw), dtype, ())[()])
            case "numpy._core.numeric._frombuffer", (
                bytes() as raw,
                np.dtype() as dtype,
                tuple() as shape,
                order,
                *axes,
            ):
                self._push(_turned(_array(raw, dtype, shape, order), order, axes))
            case "_codecs.encode", (str() as text, "latin1" | "latin-1"):
                self._push(self._bytes(text))
            case "builtins.bytes", ():
                self._push(b"")
            case _:
                raise ValueError(f"it uses {target.name} in an unusual way")

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, _Unbuilt):
            raise ValueError("it sets the state of what has none, or sets it twice")
        built: Any
        match target.dtype, state:
            case np.dtype() as dtype, (_, "<" | ">" | b"<" | b">" as order, *_):
                built = dtype.newbyteorder(_text(order))  # type: ignore[arg-type]
            case np.dtype() as built, (_, _, *_):
                pass
            case None, (_, tuple() as shape, np.dtype() as dtype, by_columns, str() | bytes() as raw):
                built = _array(self._bytes(raw), dtype, shape, "F" if by_columns else "C")
            case _:
                raise ValueError("it has an array or a dtype of an unusual form")
        self._stack[-1] = built
        for key in target.memo_keys:
            self._memo[key] = built

    def _bytes(self, raw: str | bytes) -> bytes:
        if isinstance(raw, bytes):
            return raw
        self._spend(len(raw))
        return raw.encode("latin1")


def _dictionary(items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    for key in keys:  # Hashing a tuple, or looking up integers that were chosen to collide, can take forever.
        if not isinstance(key, str | bytes) and not (isinstance(key, int) and -LARGEST_KEY <= key <= LARGEST_KEY):
            raise ValueError(f"it has a dictionary whose keys are neither text nor whole numbers up to {LARGEST_KEY}")
    if len(items) % 2:
        raise ValueError("it has a dictionary with a key that has no value")
    return dict(zip(keys, items[1::2]))


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _dtype(code: str) -> np.dtype[Any]:
    if not re.fullmatch(r"[biufcSU]\d{1,9}", code):
        raise ValueError(f"it has an array of {code[:20]!r}, which is neither numbers nor text")
    return np.dtype(code)


def _array(raw: bytes, dtype: np.dtype[Any], shape: tuple[Any, ...], order: Any = "C") -> NDArray[Any]:
    if len(shape) > DEPTH // 2 or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError("it has an array of an impossible shape")
    count = 1
    for side in shape:
        count *= side
    if count * dtype.itemsize != len(raw) or not dtype.itemsize:
        raise ValueError(f"it has an array of {len(raw)} bytes whose shape and dtype say {count * dtype.itemsize}")
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if order == "F" else "C")


def _turned(array: NDArray[Any], order: Any, axes: list[Any]) -> NDArray[Any]:
    """The array of protocol 5, whose axes may be in another order than those of its buffer."""
    return array.transpose(axes[0]) if order == "K" and axes and isinstance(axes[0], tuple) else array


def _line_integer(line: bytes) -> int | bool:
    return {b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line, 0)


def _string(line: bytes) -> str:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("it has text without quotes")
    unescaped: bytes = codecs.escape_decode(line[1:-1])[0]
    return unescaped.decode("latin1")


def _integer(raw: bytes) -> int:
    if len(raw) > LONGEST_NUMBER:
        raise ValueError(f"it has a number of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[_Reader], object]] = {
    code[0]: instruction
    for code, instruction in {
        b"\x80": lambda r: r._take(1),  # PROTO
        b"\x95": lambda r: r._take(8),  # FRAME, which says nothing that is needed
        b"N": lambda r: r._push(None),
        b"\x88": lambda r: r._push(True),
        b"\x89": lambda r: r._push(False),
        b"I": lambda r: r._push(_line_integer(r._written_number())),
        b"L": lambda r: r._push(int(r._written_number().rstrip(b"L"), 0)),
        b"F": lambda r: r._push(float(r._written_number())),
        b"J": lambda r: r._push(r._number("<i")),
        b"K": lambda r: r._push(r._number("<B")),
        b"M": lambda r: r._push(r._number("<H")),
        b"G": lambda r: r._push(r._number(">d")),
        b"\x8a": lambda r: r._push(_integer(r._take(r._number("<B")))),
        b"\x8b": lambda r: r._push(_integer(r._take(r._number("<i")))),
        b"S": lambda r: r._push(_string(r._line())),
        b"T": lambda r: r._push(r._take(r._number("<i")).decode("latin1")),
        b"U": lambda r: r._push(r._take(r._number("<B")).decode("latin1")),
        b"V": lambda r: r._push(r._line().decode("raw-unicode-escape")),
        b"X": lambda r: r._push(r._take(r._number("<I")).decode("utf-8", "surrogatepass")),
        b"\x8c": lambda r: r._push(r._take(r._number("<B")).decode("utf-8", "surrogatepass")),
        b"\x8d": lambda r: r._push(r._take(r._number("<Q")).decode("utf-8", "surrogatepass")),
        b"B": lambda r: r._push(r._take(r._number("<I"))),
        b"C": lambda r: r._push(r._take(r._number("<B"))),
        b"\x8e": lambda r: r._push(r._take(r._number("<Q"))),
        b"\x96": lambda r: r._push(r._take(r._number("<Q"))),  # BYTEARRAY8
        b"(": lambda r: r._mark(),
        b"0": lambda r: r._pop(),
        b"1": lambda r: r._pop_to_mark(),
        b"2": lambda r: r._push(r._stack[-1]),
        b"]": lambda r: r._push_container([]),
        b"l": lambda r: r._push_container(r._pop_to_mark()),
        b"a": lambda r: r._append([r._stack.pop()]),
        b"e": lambda r: r._append(r._pop_to_mark()),
        b")": lambda r: r._push(()),
        b"t": lambda r: r._push_container(tuple(r._pop_to_mark())),
        b"\x85": lambda r: r._push_tuple(1),
        b"\x86": lambda r: r._push_tuple(2),
        b"\x87": lambda r: r._push_tuple(3),
        b"}": lambda r: r._push_container({}),
        b"d": lambda r: r._push_container(_dictionary(r._pop_to_mark())),
        b"s": lambda r: r._set_items([r._stack.pop(-2), r._stack.pop()]),
        b"u": lambda r: r._set_items(r._pop_to_mark()),
        b"g": lambda r: r._push(r._memo[int(r._written_number())]),
        b"h": lambda r: r._push(r._memo[r._number("<B")]),
        b"j": lambda r: r._push(r._memo[r._number("<I")]),
        b"p": lambda r: r._remember(int(r._written_number())),
        b"q": lambda r: r._remember(r._number("<B")),
        b"r": lambda r: r._remember(r._number("<I")),
        b"\x94": lambda r: r._remember(len(r._memo)),
        b"c": lambda r: r._push_global(r._line().decode("latin1"), r._line().decode("latin1")),
        b"\x93": lambda r: r._push_global(r._stack.pop(-2), r._stack.pop()),
        b"R": lambda r: r._reduce(),
        b"b": lambda r: r._build(),
        b"i": lambda r: r._refuse_instance(),
        b"P": lambda r: r._refuse_reference(),
        b"Q": lambda r: r._refuse_reference(),
    }.items()
}
