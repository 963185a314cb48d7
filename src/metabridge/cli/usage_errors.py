"""Messages for wrong command-line arguments, in one line and without Python's names of types."""

from __future__ import annotations

from typing import Any, cast

import typer

from metabridge.choices import alternatives

# Base class of typer's usage errors, which typer does not export.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])


def usage_message(error: typer.BadParameter) -> str:
    """Return the message of a usage error; for an invalid value, the option, the value and what is valid."""
    param: Any = error.param if isinstance(error, typer.BadParameter) else None
    validation_error: Any = error.__cause__
    if param is None or not hasattr(validation_error, "errors"):
        return error.format_message()
    value = validation_error.errors()[0]["input"]
    if choices := param.type_descriptor.choices:
        return f"{param.opts[0]} is {value}, but must be {alternatives(map(str, choices))}."
    number = "an integer" if param.type_descriptor.annotation is int else "a number"
    at_least = "" if param.min is None else f" of at least {param.min}"
    bounds = at_least if param.max is None else f" from {param.min} to {param.max}"
    return f"{param.opts[0]} is {value}, but must be {number}{bounds}."
