"""Command line options derived from the fields of a configuration dataclass."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any

import typer

from metabridge.cli.options import MAX_SEED
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

# Types on the command line by the type of the field. Fields of all other types are read as text.
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


# Functions that convert what typer reads (text or a list of texts) to the type of the field, by this type. Their
# arguments are the value and the name of the option.
READERS: dict[str, Callable[[Any, str], Any]] = {
    "Mapping[str, object]": key_values,
    "Schedule": lambda name, flag: schedule(name),
}


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the `**config` parameter of a command by one option per field of `ImageTrainingConfig`.

    There is no option for soft targets. The command receives only the options that the user passed.
    """
    general_options = options_of(TrainingConfig)
    options = {name: field for name, field in options_of(ImageTrainingConfig).items() if _type(field) is not None}
    options = dict(sorted(options.items(), key=lambda item: item[0] in general_options))  # options for images first
    signature = inspect.signature(command, eval_str=True)
    command_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "config"
    ]

    def run(**values: Any) -> None:
        config_values = {name: values.pop(name) for name in options}
        config = {name: _read(options[name], value) for name, value in config_values.items() if value not in (None, [])}
        command(**values, **config)

    config_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(field))
        for name, field in options.items()
    ]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [command_parameters[0], *config_parameters, *command_parameters[1:]]
    )
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def flag_name(field: Field[Any]) -> str:
    """Return the name of a field's option on the command line."""
    return str(field.metadata["flags"][0]) if field.metadata["flags"] else f"--{field.name.replace('_', '-')}"


def _annotation(field: Field[Any]) -> Any:
    """Return the annotation of an option's parameter, from which typer makes the option."""
    check, option_type = field.metadata["check"], _type(field)
    bounds: dict[str, Any] = {}
    if option_type is int:
        whole = isinstance(check, WholeNumber)
        # the only integer without a `WholeNumber` check is the seed
        bounds = {"min": check.minimum if whole else 0, "max": check.maximum if whole else MAX_SEED}
    metavar = "KEY=VALUE" if option_type == list[str] else None
    flags = field.metadata["flags"] or ()
    return Annotated[option_type | None, typer.Option(*flags, help=_help(field), metavar=metavar, **bounds)]


def _type(field: Field[Any]) -> Any:
    """Return the type of a field's option; None for soft targets, which several options of `train` set."""
    if field.type == "SoftTargets | None":
        return None
    return TYPES.get(str(field.type).removesuffix(" | None"), str)


def _help(field: Field[Any]) -> str:
    """Return an option's help text, with the default if all methods have the same."""
    repeatable = " Can be repeated." if _type(field) == list[str] else ""
    defaults = [getattr(config, field.name) for config in (default_config("maml"), *METHOD_DEFAULTS.values())]
    if field.name == "method" or all(default == defaults[0] for default in defaults):
        return help_text(field) + repeatable
    return f"{field.metadata['help']} Default: depends on the method."


def _read(field: Field[Any], value: Any) -> Any:
    """Return the value of an option, converted to the type of the field."""
    reader = READERS.get(str(field.type))
    return value if reader is None else reader(value, flag_name(field))
