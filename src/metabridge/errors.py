"""The error type for invalid input, and checks that raise it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, SupportsFloat

if TYPE_CHECKING:
    from torch import Tensor


# Exceptions that parsers of JSON, tensor headers and pickles can raise on corrupted or malicious data.
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


MAX_COUNT = 2**31 - 1  # maximum of count arguments, such that the product of two counts fits into 64 bits


class InputError(ValueError):
    """Raised for invalid input to metabridge: an argument, an option or a file.

    The message names the input and says how to correct it. The command-line interface prints it without a traceback and
    exits with status 2.

    >>> import metabridge as mb
    >>> raise mb.InputError("ways is 7, but there are only 5 classes. Use ways=5 or fewer.")
    Traceback (most recent call last):
    metabridge.errors.InputError: ways is 7, but there are only 5 classes. Use ways=5 or fewer.
    """


def check_count(name: str, value: int) -> None:
    """Raise `InputError` unless a value is an integer from 1 to `MAX_COUNT`.

    >>> check_count("shots", 0)
    Traceback (most recent call last):
    metabridge.errors.InputError: shots is 0, but must be an integer of at least 1. Use shots=1 or more.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}, but must be an integer of at least 1. Use {name}=1 or more.")
    if value > MAX_COUNT:
        raise InputError(f"{name} is {value}, which is too large. Use {name}={MAX_COUNT} or less.")


def check_positive(name: str, value: float) -> None:
    """Raise `InputError` unless a value is a positive, finite number.

    >>> check_positive("lr", 0.0)
    Traceback (most recent call last):
    metabridge.errors.InputError: lr is 0.0, but must be a positive number.
    """
    if not 0 < _as_float(value) < math.inf:
        raise InputError(f"{name} is {value!r}, but must be a positive number.")


def check_not_negative(name: str, value: float) -> None:
    """Raise `InputError` unless a value is a finite number of at least 0.

    >>> check_not_negative("noise", -1.0)
    Traceback (most recent call last):
    metabridge.errors.InputError: noise is -1.0, but must be a finite number, 0 or more.
    """
    if not 0 <= _as_float(value) < math.inf:
        raise InputError(f"{name} is {value!r}, but must be a finite number, 0 or more.")


def _as_float(value: object) -> float:
    """Convert a number to a float: infinity if it is too large for a float, NaN if it is not a number."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except OverflowError:
        return math.inf


def type_with_article(value: object) -> str:
    """Return the name of the type of a value with "a" or "an", for error messages.

    >>> type_with_article(1)
    'an int'
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def describe(tensor: Tensor) -> str:
    """Return the dtype and shape of a tensor as text for error messages.

    >>> import torch
    >>> describe(torch.zeros(2, 3))
    'float32 of shape (2, 3)'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
