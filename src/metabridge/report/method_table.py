"""A method of the taxonomy in words."""

from __future__ import annotations

import re
from dataclasses import fields

from metabridge.learners.method import Method


def described(method: Method) -> dict[str, str]:
    """Return the columns of the taxonomy for one method.

    >>> from metabridge.learners.method import PRESETS
    >>> described(PRESETS["anil"])["inner solve"]
    'gradient descent: steps 5, lr 0.1'
    >>> described(PRESETS["mtl"])["inner solve"]
    'none; at test, logistic regression: penalty 0.33'
    """
    inner = "none" if method.inner is None else solver(method.inner)
    return {
        "adapts": method.adapts,
        "inner solve": inner if method.test is None else f"{inner}; at test, {solver(method.test)}",
        "outer gradient": method.outer,
        "head": method.head,
        "split": "yes" if method.split else "no",
    }


def solver(solver: object) -> str:
    """Say a solver with its settings: every number, and what is not a number where it is not as usual."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(solver).__name__)
    words = name if name.isupper() else name.lower()
    values = {field.name: (getattr(solver, field.name), field.default) for field in fields(solver)}  # type: ignore[arg-type]
    settings = [
        f"{name.replace('_', ' ')} {_word(value)}"
        for name, (value, usual) in values.items()
        if value != usual or not isinstance(value, str | bool)
    ]
    return f"{words}: {', '.join(settings)}" if settings else words


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
