"""The one error that is the user's to mend, and how it speaks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, SupportsFloat

if TYPE_CHECKING:
    from torch import Tensor


# What plain data that was damaged or made up can raise where it is read.
PARSING_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    AssertionError,
)


LARGEST = 2**31 - 1  # of counts, which leaves room for products of two in 64 bits


class InputError(ValueError):
    """Something given to metabridge cannot be used; the message names it and the way out.

    The command line prints the message alone and exits with status 2.

    >>> raise InputError("ways is 7, but only 5 classes are there. Use ways=5 or fewer.")
    Traceback (most recent call last):
    metabridge.errors.InputError: ways is 7, but only 5 classes are there. Use ways=5 or fewer.
    """


def check_count(name: str, value: int) -> None:
    """Refuse a count that is not a whole number of at least one.

    >>> check_count("shots", 0)
    Traceback (most recent call last):
    metabridge.errors.InputError: shots is 0, but must be a whole number of at least 1. Use shots=1 or more.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}, but must be a whole number of at least 1. Use {name}=1 or more.")
    if value > LARGEST:
        raise InputError(f"{name} is {value}, which is too large. Use {name}={LARGEST} or less.")


def check_positive(name: str, value: float) -> None:
    """Refuse a setting that is not a positive, finite number.

    >>> check_positive("lr", 0.0)
    Traceback (most recent call last):
    metabridge.errors.InputError: lr is 0.0, but must be a positive number.
    """
    if not 0 < _as_float(value) < math.inf:
        raise InputError(f"{name} is {value!r}, but must be a positive number.")


def check_not_negative(name: str, value: float) -> None:
    """Refuse a setting that is not a finite number, 0 or more.

    >>> check_not_negative("noise", -1.0)
    Traceback (most recent call last):
    metabridge.errors.InputError: noise is -1.0, but must be a finite number, 0 or more.
    """
    if not 0 <= _as_float(value) < math.inf:
        raise InputError(f"{name} is {value!r}, but must be a finite number, 0 or more.")


def _as_float(value: object) -> float:
    """Return a number as a float: infinite if it is too large for one, and NaN if it is no number."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except OverflowError:
        return math.inf


def describe(tensor: Tensor) -> str:
    """Say a tensor's dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
