"""Pickles as data: arrays, numbers, text, lists and dictionaries, and nothing that runs code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metabridge.errors import InputError


def unpickle(data: bytes, name: str) -> Any:
    """Return what a pickle holds, if that is data alone; `name` is the file's, for messages.

    Arrays and scalars of NumPy, of numbers or text, are admitted beside Python's own numbers, text,
    bytes, lists, tuples and dictionaries. Anything else a pickle may ask for is refused before it is
    looked up, let alone called, and NumPy's own part is done by the stand-ins below, which do no more
    than these need. Text of Python 2, which may be bytes, is read as Latin-1.

    >>> unpickle(pickle.dumps({"labels": [1, 2], "data": np.zeros(2)}), "labels.pkl")["data"].tolist()
    [0.0, 0.0]
    >>> unpickle(pickle.dumps(print), "labels.pkl")
    Traceback (most recent call last):
    metabridge.errors.InputError: labels.pkl asks for builtins.print, which is code, not data. Do not trust this file.
    """
    try:
        return _Data(io.BytesIO(data), name).load()
    except InputError:
        raise
    except Exception as error:  # A damaged pickle can fail in every way.
        raise InputError(
            f"{name} is not a whole pickle of plain data ({str(error) or type(error).__name__}). Get the file again."
        ) from error


class _Data(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, name: str) -> None:
        super().__init__(stream, encoding="latin1")
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for what NumPy's own pickles need."""
        asked = f"{module.replace('numpy.core.', 'numpy._core.')}.{name}"  # Its name before NumPy 2.
        if asked == "numpy.ndarray":
            return None  # Only ever named as the kind of array to make, which is known.
        if asked not in _STAND_INS:
            raise InputError(f"{self._name} asks for {module}.{name}, which is code, not data. Do not trust this file.")
        stand_in = _STAND_INS[asked]
        return lambda *arguments: stand_in(*arguments)  # Anew each time: a pickle can set attributes of what it got.

    def persistent_load(self, pid: Any) -> Any:
        raise InputError(f"{self._name} refers to an object outside itself. Get the file in a self-contained form.")


class _Dtype:
    """A dtype of numbers or text. NumPy's own would take flags from the pickle that make it read stray memory."""

    def __init__(self, code: str, *_: object) -> None:
        self.real = np.dtype(str(code))
        if self.real.kind in "OV":
            raise TypeError(f"it has an array of {self.real}")

    def __setstate__(self, state: Sequence[Any]) -> None:
        if state[1] in ("<", ">"):
            self.real = self.real.newbyteorder(state[1])


class _Array(np.ndarray[Any, Any]):
    """An array that is filled with a stand-in for its dtype."""

    def __setstate__(self, state: Any, /) -> None:
        version, shape, dtype, by_columns, raw = state
        super().__setstate__((version, shape, dtype.real, by_columns, raw))


def _scalar(dtype: _Dtype, value: bytes | str) -> Any:
    raw = value.encode("latin1") if isinstance(value, str) else value
    return np.frombuffer(raw, dtype.real, count=1)[0]


def _from_buffer(
    buffer: bytes, dtype: _Dtype, shape: Sequence[int], order: str, axes: Sequence[int] | None = None
) -> NDArray[Any]:
    """The array of a newer pickle; `axes`, if given, says how those of the buffer are turned."""
    flat = np.frombuffer(buffer, dtype.real)
    if order == "K" and axes is not None:
        return flat.reshape(shape).transpose(axes)
    return flat.reshape(shape, order="F" if order == "F" else "C")


_STAND_INS: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _Dtype,
    "numpy._core.multiarray._reconstruct": lambda kind, shape, code: np.empty(0, np.int8).view(_Array),
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),  # How bytes are pickled for Python 2.
}
