"""Read arrays, numbers, text, lists and dictionaries from pickles without running code."""

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

MAX_DEPTH = 64  # of nested containers
MAX_NUMBER_LENGTH = 1024  # bytes of an integer, or characters of a number in text
MAX_KEY = 2**24  # larger integer keys can be chosen with colliding hashes, which makes dictionaries slow
MAX_MEMO_INDEX = 2**26  # limit of the keys of the memo (see `_Reader`), or the size of the pickle if that is larger
BASE_RESULT_BYTES = 2**24  # the size of the result is limited to this plus four times the size of the pickle
BASE_MEMORY = 2**28  # the memory for reading is limited to this many bytes plus four times the size of the pickle
REFERENCE_BYTES = 8  # the memory of a reference in a container
OBJECT_BYTES = 100  # the approximate memory of an empty container or a memo entry


def unpickle(data: bytes, name: str) -> Any:
    """Return the plain data in a pickle; `name` is the name of its file, for error messages.

    This interpreter executes only the instructions of protocols 0 to 5 that plain data need. It builds Python
    numbers, text, bytes, lists, tuples and dictionaries, and NumPy arrays and scalars of numbers or text. It never
    looks up or calls anything that the pickle names. Arrays are read-only. Text of Python 2, which may be bytes, is
    decoded as Latin-1.

    The memory for reading and the size of the result are limited, depending on the size of the pickle. In the size of
    the result, a container counts once for each reference to it.

    >>> import pickle
    >>> unpickle(pickle.dumps({"labels": [1, 2], "data": np.zeros(2)}), "labels.pkl")["data"].tolist()
    [0.0, 0.0]
    >>> unpickle(pickle.dumps(print), "labels.pkl")
    Traceback (most recent call last):
    metabridge.errors.InputError: labels.pkl refers to builtins.print, which is code, not data. Do not trust this file.
    """
    try:
        reader = _Reader(data, name)
        result = reader.read()
        reader.check_result(result)
        return result
    except InputError:
        raise
    except Exception as error:  # damaged pickles raise exceptions of many types
        reason = str(error) if isinstance(error, ValueError | TypeError) else ""
        raise InputError(
            f"{name} is not a valid pickle of plain data ({reason or type(error).__name__}). Download the file again."
        ) from error


@dataclass(frozen=True)
class _Global:
    """A name in `_ALLOWED_GLOBALS` that a pickle refers to. It is only a marker and cannot be called."""

    name: str


@dataclass
class _Unbuilt:
    """An array or dtype whose state has not been set yet, and the keys of the memo entries that refer to it."""

    dtype: np.dtype[Any] | None = None  # None for an array
    memo_keys: list[int] = field(default_factory=list)


_ALLOWED_GLOBALS = {
    "numpy.ndarray",
    "numpy.dtype",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.numeric._frombuffer",
    "_codecs.encode",  # in protocols 0 to 2, Python 3 pickles bytes with this function,
    "builtins.bytes",  # and empty bytes with this one
}


class _Reader:
    """An interpreter of one pickle, which is a program for a stack machine.

    MARK starts a new stack and saves the current one in `_marks`; a later instruction makes a container of the items of
    the new stack. The memo stores values under integer keys, so that the pickle can refer to them again.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._name = name
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._max_result_bytes = BASE_RESULT_BYTES + 4 * len(data)
        self._memory_left = BASE_MEMORY + 4 * len(data)

    def read(self) -> Any:
        """Execute the instructions up to STOP and return the top of the stack."""
        data, instructions = self._data, _INSTRUCTIONS
        while (code := data[self._position]) != _STOP:
            self._position += 1
            instruction = instructions.get(code)
            if instruction is None:
                raise ValueError(f"it has the instruction {bytes([code])!r}, which plain data do not need")
            instruction(self)
        return self._stack.pop()

    def check_result(self, result: Any) -> None:
        """Raise `ValueError` if a result is not plain data, is nested too deeply, or is too large."""
        size = 0
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
                    raise ValueError("it has an array or a dtype without content")
                if len(levels) > MAX_DEPTH:
                    raise ValueError(f"its containers are nested more than {MAX_DEPTH} deep")
                break
            else:
                levels.pop()
            if size > self._max_result_bytes:
                raise ValueError("it refers to the same data too many times")

    # Helpers of several instructions.

    def _read_bytes(self, count: int) -> bytes:
        start, end = self._position, self._position + count
        if count < 0 or end > len(self._data):
            raise ValueError("it ends too early")
        self._position = end
        return self._data[start:end]

    def _read_line(self) -> bytes:
        end = self._data.find(b"\n", self._position)
        if end < 0:
            raise ValueError("it ends too early")
        line = self._data[self._position : end]
        self._position = end + 1
        return line

    def _read_number(self, layout: str) -> Any:
        return struct.unpack(layout, self._read_bytes(struct.calcsize(layout)))[0]

    def _read_number_line(self) -> bytes:
        line = self._read_line()
        if len(line) > MAX_NUMBER_LENGTH:
            raise ValueError(f"it has a number of {len(line)} characters")
        return line

    def _use_memory(self, count: int) -> None:
        self._memory_left -= count
        if self._memory_left < 0:
            raise ValueError("reading it would take far more memory than the size of the pickle")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_container(self, value: Any) -> None:
        self._use_memory(OBJECT_BYTES)
        self._stack.append(value)

    def _push_mark(self) -> None:
        self._use_memory(OBJECT_BYTES)
        self._marks.append(self._stack)
        self._stack = []

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("it lacks a mark")
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_to_mark()

    def _memoize(self, key: int) -> None:
        if not 0 <= key < max(MAX_MEMO_INDEX, len(self._data)):  # large keys make dictionaries slow, see `MAX_KEY`
            raise ValueError(f"it has the memo index {str(key)[:20]}, but only {len(self._data)} bytes")
        self._use_memory(OBJECT_BYTES)
        value = self._memo[key] = self._stack[-1]
        if isinstance(value, _Unbuilt):
            value.memo_keys.append(key)

    # Containers.

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to an object that is not a list")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("it sets an item of an object that is not a dictionary")
        target.update(_make_dictionary(items))

    def _push_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise ValueError("it has too few values on its stack")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._push_container(items)

    # Globals and NumPy arrays.

    def _push_global(self, module: Any, name: Any) -> None:
        full_name = f"{module}.{name}".replace("numpy.core.", "numpy._core.")  # the module was renamed in NumPy 2
        full_name = full_name.replace("__builtin__.", "builtins.")  # the module was renamed in Python 3
        if full_name not in _ALLOWED_GLOBALS:
            raise InputError(
                f"{self._name} refers to {repr(f'{module}.{name}'[:200])[1:-1]}, which is code, not data. "
                "Do not trust this file."
            )
        self._push_container(_Global(full_name))

    def _reject_instance(self) -> NoReturn:
        self._push_global(self._read_line().decode("latin1"), self._read_line().decode("latin1"))
        raise ValueError("it creates an object of a class")

    def _reject_reference(self) -> NoReturn:
        raise InputError(f"{self._name} refers to an object outside the file. Use a self-contained pickle.")

    def _reduce(self) -> None:
        arguments, target = self._stack.pop(), self._stack.pop()
        if not isinstance(target, _Global) or not isinstance(arguments, tuple):
            raise ValueError("it calls an object that is not a function")
        self._use_memory(OBJECT_BYTES)
        match target.name, arguments:
            case "numpy._core.multiarray._reconstruct", (_Global("numpy.ndarray"), _, _):
                self._push(_Unbuilt())
            case "numpy.dtype", (str() | bytes() as code, *_):
                self._push(_Unbuilt(_parse_dtype(_to_text(code))))
            case "numpy._core.multiarray.scalar", (np.dtype() as dtype, str() | bytes() as raw):
                self._push(_make_array(self._to_bytes(raw), dtype, ())[()])
            case "numpy._core.numeric._frombuffer", (
                bytes() as raw,
                np.dtype() as dtype,
                tuple() as shape,
                order,
                *axes,
            ):
                self._push(_transpose(_make_array(raw, dtype, shape, order), order, axes))
            case "_codecs.encode", (str() as text, "latin1" | "latin-1"):
                self._push(self._to_bytes(text))
            case "builtins.bytes", ():
                self._push(b"")
            case _:
                raise ValueError(f"it uses {target.name} in an unusual way")

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, _Unbuilt):
            raise ValueError("it sets the state of an object that has none, or sets it twice")
        built: Any
        match target.dtype, state:
            case np.dtype() as dtype, (_, "<" | ">" | b"<" | b">" as order, *_):
                built = dtype.newbyteorder(_to_text(order))  # type: ignore[arg-type]
            case np.dtype() as built, (_, _, *_):
                pass
            case None, (_, tuple() as shape, np.dtype() as dtype, is_fortran, str() | bytes() as raw):
                built = _make_array(self._to_bytes(raw), dtype, shape, "F" if is_fortran else "C")
            case _:
                raise ValueError("it has an array or a dtype with an unusual state")
        self._stack[-1] = built
        for key in target.memo_keys:
            self._memo[key] = built

    def _to_bytes(self, raw: str | bytes) -> bytes:
        if isinstance(raw, bytes):
            return raw
        self._use_memory(len(raw))
        return raw.encode("latin1")


def _make_dictionary(items: list[Any]) -> dict[Any, Any]:
    """Return a dictionary; `items` contains each key followed by its value."""
    keys = items[::2]
    for key in keys:  # hashing a nested tuple, or looking up integers with colliding hashes, can take very long
        if not isinstance(key, str | bytes) and not (isinstance(key, int) and -MAX_KEY <= key <= MAX_KEY):
            raise ValueError(f"it has a dictionary whose keys are neither text nor integers up to {MAX_KEY}")
    if len(items) % 2:
        raise ValueError("it has a dictionary with a key that has no value")
    return dict(zip(keys, items[1::2]))


def _to_text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _parse_dtype(code: str) -> np.dtype[Any]:
    if not re.fullmatch(r"[biufcSU]\d{1,9}", code):
        raise ValueError(f"it has an array of {code[:20]!r}, which is neither numbers nor text")
    return np.dtype(code)


def _make_array(raw: bytes, dtype: np.dtype[Any], shape: tuple[Any, ...], order: Any = "C") -> NDArray[Any]:
    if len(shape) > MAX_DEPTH // 2 or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("it has an array of an invalid shape")
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != len(raw) or not dtype.itemsize:
        raise ValueError(f"it has an array of {len(raw)} bytes, but its shape and dtype need {count * dtype.itemsize}")
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if order == "F" else "C")


def _transpose(array: NDArray[Any], order: Any, axes: list[Any]) -> NDArray[Any]:
    """Transpose an array of protocol 5 whose buffer stores the axes in another order; return others unchanged."""
    return array.transpose(axes[0]) if order == "K" and axes and isinstance(axes[0], tuple) else array


def _parse_integer(line: bytes) -> int | bool:
    return {b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line, 0)


def _unquote(line: bytes) -> str:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("it has text without quotes")
    unescaped: bytes = codecs.escape_decode(line[1:-1])[0]
    return unescaped.decode("latin1")


def _decode_integer(raw: bytes) -> int:
    if len(raw) > MAX_NUMBER_LENGTH:
        raise ValueError(f"it has a number of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[_Reader], object]] = {
    code[0]: instruction
    for code, instruction in {
        b"\x80": lambda r: r._read_bytes(1),  # PROTO
        b"\x95": lambda r: r._read_bytes(8),  # FRAME, whose length is not needed
        b"N": lambda r: r._push(None),  # NONE
        b"\x88": lambda r: r._push(True),  # NEWTRUE
        b"\x89": lambda r: r._push(False),  # NEWFALSE
        b"I": lambda r: r._push(_parse_integer(r._read_number_line())),  # INT
        b"L": lambda r: r._push(int(r._read_number_line().rstrip(b"L"), 0)),  # LONG
        b"F": lambda r: r._push(float(r._read_number_line())),  # FLOAT
        b"J": lambda r: r._push(r._read_number("<i")),  # BININT
        b"K": lambda r: r._push(r._read_number("<B")),  # BININT1
        b"M": lambda r: r._push(r._read_number("<H")),  # BININT2
        b"G": lambda r: r._push(r._read_number(">d")),  # BINFLOAT
        b"\x8a": lambda r: r._push(_decode_integer(r._read_bytes(r._read_number("<B")))),  # LONG1
        b"\x8b": lambda r: r._push(_decode_integer(r._read_bytes(r._read_number("<i")))),  # LONG4
        b"S": lambda r: r._push(_unquote(r._read_line())),  # STRING
        b"T": lambda r: r._push(r._read_bytes(r._read_number("<i")).decode("latin1")),  # BINSTRING
        b"U": lambda r: r._push(r._read_bytes(r._read_number("<B")).decode("latin1")),  # SHORT_BINSTRING
        b"V": lambda r: r._push(r._read_line().decode("raw-unicode-escape")),  # UNICODE
        b"X": lambda r: r._push(r._read_bytes(r._read_number("<I")).decode("utf-8", "surrogatepass")),  # BINUNICODE
        b"\x8c": lambda r: r._push(
            r._read_bytes(r._read_number("<B")).decode("utf-8", "surrogatepass")
        ),  # SHORT_BINUNICODE
        b"\x8d": lambda r: r._push(r._read_bytes(r._read_number("<Q")).decode("utf-8", "surrogatepass")),  # BINUNICODE8
        b"B": lambda r: r._push(r._read_bytes(r._read_number("<I"))),  # BINBYTES
        b"C": lambda r: r._push(r._read_bytes(r._read_number("<B"))),  # SHORT_BINBYTES
        b"\x8e": lambda r: r._push(r._read_bytes(r._read_number("<Q"))),  # BINBYTES8
        b"\x96": lambda r: r._push(r._read_bytes(r._read_number("<Q"))),  # BYTEARRAY8
        b"(": lambda r: r._push_mark(),  # MARK
        b"0": lambda r: r._pop(),  # POP
        b"1": lambda r: r._pop_to_mark(),  # POP_MARK
        b"2": lambda r: r._push(r._stack[-1]),  # DUP
        b"]": lambda r: r._push_container([]),  # EMPTY_LIST
        b"l": lambda r: r._push_container(r._pop_to_mark()),  # LIST
        b"a": lambda r: r._append([r._stack.pop()]),  # APPEND
        b"e": lambda r: r._append(r._pop_to_mark()),  # APPENDS
        b")": lambda r: r._push(()),  # EMPTY_TUPLE
        b"t": lambda r: r._push_container(tuple(r._pop_to_mark())),  # TUPLE
        b"\x85": lambda r: r._push_tuple(1),  # TUPLE1
        b"\x86": lambda r: r._push_tuple(2),  # TUPLE2
        b"\x87": lambda r: r._push_tuple(3),  # TUPLE3
        b"}": lambda r: r._push_container({}),  # EMPTY_DICT
        b"d": lambda r: r._push_container(_make_dictionary(r._pop_to_mark())),  # DICT
        b"s": lambda r: r._set_items([r._stack.pop(-2), r._stack.pop()]),  # SETITEM
        b"u": lambda r: r._set_items(r._pop_to_mark()),  # SETITEMS
        b"g": lambda r: r._push(r._memo[int(r._read_number_line())]),  # GET
        b"h": lambda r: r._push(r._memo[r._read_number("<B")]),  # BINGET
        b"j": lambda r: r._push(r._memo[r._read_number("<I")]),  # LONG_BINGET
        b"p": lambda r: r._memoize(int(r._read_number_line())),  # PUT
        b"q": lambda r: r._memoize(r._read_number("<B")),  # BINPUT
        b"r": lambda r: r._memoize(r._read_number("<I")),  # LONG_BINPUT
        b"\x94": lambda r: r._memoize(len(r._memo)),  # MEMOIZE
        b"c": lambda r: r._push_global(r._read_line().decode("latin1"), r._read_line().decode("latin1")),  # GLOBAL
        b"\x93": lambda r: r._push_global(r._stack.pop(-2), r._stack.pop()),  # STACK_GLOBAL
        b"R": lambda r: r._reduce(),  # REDUCE
        b"b": lambda r: r._build(),  # BUILD
        b"i": lambda r: r._reject_instance(),  # INST
        b"P": lambda r: r._reject_reference(),  # PERSID
        b"Q": lambda r: r._reject_reference(),  # BINPERSID
    }.items()
}
