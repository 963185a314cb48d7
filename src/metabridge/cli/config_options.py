"""Command line options derived from the fields of a configuration dataclass."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any

import typer

from metabridge.errors import InputError
from metabridge.schedules import schedule
from metabridge.training.config import (
    METHOD_DEFAULTS,
    ImageTrainingConfig,
    TrainingConfig,
    WholeNumber,
    default_config,
    help_text,
    options_of,
)

MOST_SEED = 2**63 - 1
# The type on the command line for a field's type; text for all others.
TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "Augment | bool": bool,
    "Mapping[str, object]": list[str],
}


def key_values(texts: list[str], flag: str) -> dict[str, Any]:
    """Return KEY=VALUE pairs as a dictionary. Values are read as JSON, or as text if they are not JSON."""
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"{flag} is {text!r}, but must be KEY=VALUE, such as steps=5.")
        try:
            pairs[key] = json.loads(value)
        except ValueError:
            pairs[key] = value
    return pairs


# How a value is read that is not a number, text or a switch, by the field's type.
READERS: dict[str, Callable[[Any, str], Any]] = {
    "Mapping[str, object]": key_values,
    "Schedule": lambda name, flag: schedule(name),
}


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the `**config` parameter of a command by an option for each field of `ImageTrainingConfig`.

    The command receives only the options that are given on the command line.
    """
    every_training = options_of(TrainingConfig)
    options = {name: field for name, field in options_of(ImageTrainingConfig).items() if _type(field) is not None}
    options = dict(sorted(options.items(), key=lambda item: item[0] in every_training))  # of image training first
    fixed = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "config"]

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in options}
        config = {name: _read(options[name], value) for name, value in given.items() if value not in (None, [])}
        command(**values, **config)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(field))
        for name, field in options.items()
    ]
    fixed = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fixed]
    run.__signature__ = inspect.Signature([fixed[0], *parameters, *fixed[1:]])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def flag_name(field: Field[Any]) -> str:
    """Return the option's name on the command line."""
    return str(field.metadata["flags"][0]) if field.metadata["flags"] else f"--{field.name.replace('_', '-')}"


def _annotation(field: Field[Any]) -> Any:
    """Return the type and the help text of an option for typer."""
    check, kind = field.metadata["check"], _type(field)
    bounds: dict[str, Any] = {}
    if kind is int:
        whole = isinstance(check, WholeNumber)
        bounds = {"min": check.least if whole else 0, "max": check.most if whole else MOST_SEED}
    metavar = "KEY=VALUE" if kind == list[str] else None
    flags = field.metadata["flags"] or ()
    return Annotated[kind | None, typer.Option(*flags, help=_help(field), metavar=metavar, **bounds)]


def _type(field: Field[Any]) -> Any:
    """Return an option's type on the command line; None if several options set it, as for soft targets."""
    if field.type == "SoftTargets | None":
        return None
    return TYPES.get(str(field.type).removesuffix(" | None"), str)


def _help(field: Field[Any]) -> str:
    """Return the help text, with the default if it is the same for all methods."""
    repeatable = " Can be repeated." if _type(field) == list[str] else ""
    defaults = [getattr(config, field.name) for config in (default_config("maml"), *METHOD_DEFAULTS.values())]
    if field.name == "method" or all(default == defaults[0] for default in defaults):
        return help_text(field) + repeatable
    return f"{field.metadata['help']} Default: depends on the method."


def _read(field: Field[Any], value: Any) -> Any:
    reader = READERS.get(str(field.type))
    return value if reader is None else reader(value, flag_name(field))
