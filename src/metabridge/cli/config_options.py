"""Command-line options generated from the fields of a configuration dataclass."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any

import typer

from metabridge.cli.options import MAX_SEED, at_most
from metabridge.errors import InputError
from metabridge.schedules import SCHEDULES, schedule
from metabridge.training.config import (
    METHOD_DEFAULTS,
    Choice,
    ImageTrainingConfig,
    IntegerRange,
    SoftTargets,
    TrainingConfig,
    default_config,
    help_text,
    options_of,
)

# Type of the command-line option for each field annotation.
OPTION_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "OptimizerName": str,
    "Precision": str,
    "Statistics": str,
    "Schedule": str,
    "Augment | bool": bool,
    "Mapping[str, object]": list[str],
    "tuple[str, ...]": list[str],
}
# Name of the option's value in the help, for each field annotation.
METAVARS = {
    "Mapping[str, object]": "KEY=VALUE",
    "tuple[str, ...]": "NAME",
    "Schedule": "|".join(SCHEDULES),
    "str": "NAME",
}
# Class of the nested configuration, whose fields also become options, for each field annotation.
NESTED: dict[str, Any] = {"SoftTargets": SoftTargets}


def parse_key_values(texts: list[str], flag: str) -> dict[str, Any]:
    """Parse KEY=VALUE pairs into a dictionary. Values that are not valid JSON are kept as text."""
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


# Function that converts the value of an option, for each field annotation. Its arguments are the value and the flag.
PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "Mapping[str, object]": parse_key_values,
    "Schedule": lambda name, flag: schedule(name),
    "tuple[str, ...]": lambda names, flag: tuple(names),
}


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the `**config` parameter of a command with one option per field of `ImageTrainingConfig`.

    The fields of a nested configuration (`SoftTargets`) also become options. The command receives only the options that
    the user passed; those of a nested configuration are passed as one dictionary.
    """
    general_options = options_of(TrainingConfig)
    fields = options_of(ImageTrainingConfig)
    fields = dict(sorted(fields.items(), key=lambda item: item[0] in general_options))  # image options first
    nested = {name: options_of(NESTED[_annotation(field)]) for name, field in fields.items() if _is_nested(field)}
    options: dict[str, Field[Any]] = {}
    for name, field in fields.items():
        options |= nested.get(name, {name: field})
    signature = inspect.signature(command, eval_str=True)
    command_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "config"
    ]

    def run(**values: Any) -> None:
        passed = {name: value for name in options if (value := values.pop(name)) not in (None, [])}
        config = {name: _parse(options[name], value) for name, value in passed.items()}
        for name, nested_options in nested.items():
            if nested_config := {option: config.pop(option) for option in nested_options if option in config}:
                config[name] = nested_config
        command(**values, **config)

    config_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_parameter_type(field))
        for name, field in options.items()
    ]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [command_parameters[0], *config_parameters, *command_parameters[1:]]
    )
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def flag_name(field: Field[Any]) -> str:
    """Return the command-line option of a field, such as `--batch-size`."""
    return str(field.metadata["flags"][0]) if field.metadata["flags"] else f"--{field.name.replace('_', '-')}"


def _annotation(field: Field[Any]) -> str:
    """Return the annotation of a field without `| None`."""
    return str(field.type).removesuffix(" | None")


def _is_nested(field: Field[Any]) -> bool:
    """Return whether a field holds a nested configuration."""
    return _annotation(field) in NESTED


def _parameter_type(field: Field[Any]) -> Any:
    """Return the parameter annotation from which typer creates the option of a field."""
    if _annotation(field) not in OPTION_TYPES:
        raise TypeError(f"{field.name} has the type {field.type}, which is not in OPTION_TYPES of {__name__}.")
    check, option_type = field.metadata["check"], OPTION_TYPES[_annotation(field)]
    bounds: dict[str, Any] = {}
    if option_type is int:  # the seed is the only integer field without an `IntegerRange`
        has_range = isinstance(check, IntegerRange)
        maximum = check.maximum if has_range else MAX_SEED
        bounds = {"min": check.minimum if has_range else 0, "callback": at_most(maximum)}
    metavar = METAVARS.get(_annotation(field)) or ("|".join(check.names) if isinstance(check, Choice) else None)
    flags = field.metadata["flags"] or ()
    if option_type is bool and field.default is False:
        flags = (flag_name(field),)  # without a second option that turns it off
    return Annotated[option_type | None, typer.Option(*flags, help=_help(field), metavar=metavar, **bounds)]


def _help(field: Field[Any]) -> str:
    """Return the help text of an option, with its default unless the default depends on the method.

    Names of other options, in backticks, are replaced by those options.
    """
    repeatable = " Can be repeated." if OPTION_TYPES[_annotation(field)] == list[str] else ""
    configs = (default_config("maml"), *METHOD_DEFAULTS.values())
    defaults = [getattr(config, field.name, field.default) for config in configs]
    if field.name == "method" or all(default == defaults[0] for default in defaults):
        text = help_text(field) + repeatable
    else:
        text = f"{field.metadata['help']} Default: depends on the method."
    flags = {name: flag_name(other) for name, other in options_of(ImageTrainingConfig).items()}
    return re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[0]), text)


def _parse(field: Field[Any], value: Any) -> Any:
    """Convert the value of an option to the type of its field."""
    parser = PARSERS.get(_annotation(field))
    return value if parser is None else parser(value, flag_name(field))
