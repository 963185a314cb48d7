"""A typer application whose help shows what to type for an option, instead of its Python type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from metabridge.cli.config_file import config_option

Function = TypeVar("Function", bound=Callable[..., Any])

# How the help names the value of an option, by typer's name of its type.
VALUE_NAMES = {"int": "INT", "int range": "INT", "float": "NUMBER", "float range": "NUMBER", "str": "TEXT"}
MAX_LENGTH = 22  # longer lists of choices would be wrapped in a terminal with 80 columns


def value_name(param: Any, ctx: Any) -> str:
    """Return the name of an option's value in the help; an empty string for flags and arguments."""
    if isinstance(param, TyperArgument) or param.is_flag:
        return ""
    type_name = param.metavar or param.display_type(ctx).strip("<>").removeprefix("list[").removesuffix("]")
    if len(type_name) > MAX_LENGTH:
        return "NAME"  # the help text lists the choices
    return str(VALUE_NAMES.get(type_name, type_name))


class _HelpFormat:
    """Mixin for commands: show the names of option values, and append defaults to the help texts."""

    def get_params(self, context: Any) -> Any:
        params = super().get_params(context)  # type: ignore[misc]
        for param in params:
            param.display_type_rich = partial(value_name, param)
            if param.show_default and param.default not in (None, "") and param.default is not False:
                param.help = f"{param.help or ''} Default: {'on' if param.default is True else param.default}.".strip()
                param.show_default = False
        return params


class Command(_HelpFormat, TyperCommand):
    """A command whose help has this format, and whose options can be in a file (`--config`)."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **options: Any) -> None:
        super().__init__(*args, params=[*(params or ()), config_option()], **options)


class Group(_HelpFormat, TyperGroup):
    """A group of commands whose help has this format."""


class App(typer.Typer):
    """A typer application whose commands are `Command`s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Register a command, as in `typer.Typer`."""
        return super().command(name, cls=Command, **options)
