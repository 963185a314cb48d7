"""The option `--config`, which reads the options of a command from a YAML or JSON file.

A key of the file is the name of an option, with hyphens or underscores. Values are parsed like those on the command
line, whose options take precedence. Repeatable options have lists, and KEY=VALUE options have mappings:

    method: maml
    batch-size: 8
    option: {steps: 5, lr: 0.1}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from metabridge.cli.usage_errors import UsageError, usage_message
from metabridge.errors import PARSING_ERRORS, InputError

MAX_BYTES = 2**16  # size of the largest file that is read; PyYAML may need seconds for it
MAX_DEPTH = 16  # levels of nested lists and mappings in YAML


def config_option() -> Any:
    """Return the option `--config`, for the list of parameters of a command."""
    application = typer.Typer(add_completion=False)

    @application.command()
    def command(
        config_file: Annotated[
            Path | None,
            typer.Option(
                "--config",
                metavar="FILE",
                help="YAML or JSON file with options of this command, such as `batch-size: 8`. Options on the command "
                "line take precedence. Default: none.",
                is_eager=True,  # before all other options, whose default values it sets
                expose_value=False,
                callback=_set_defaults,
            ),
        ] = None,
    ) -> None:
        pass

    return next(param for param in typer.main.get_command(application).params if param.name == "config_file")


def _set_defaults(context: typer.Context, file: Path | None) -> None:
    """Use the values in a file as default values of the command's options."""
    if file is None:
        return
    options = {
        param.opts[0].removeprefix("--"): param
        for param in context.command.params
        if param.opts[0].startswith("--") and param.name not in ("config_file", "help")
    }
    defaults: dict[str, Any] = {}
    for name, value in read_config_file(file).items():
        key = name.replace("_", "-")
        if key not in options:
            similar = get_close_matches(key, options, n=1)
            hint = f"Use {similar[0]}." if similar else f"See {context.command_path} --help for the options."
            raise InputError(f"{file}: {_shortened(name)} is not an option of {context.command_path}. {hint}")
        param: Any = options[key]
        if param.name in defaults:
            raise InputError(f"{file}: the option {key} is there twice. Remove one of them.")
        if value is None:
            continue
        defaults[param.name] = _as_words(param, value, f"{file}: {key}")
        try:
            param.process_value(context, defaults[param.name])
        except UsageError as error:
            raise InputError(f"{file}: {usage_message(error).removeprefix('--')}") from error
        except InputError as error:
            raise InputError(f"{file}: {str(error).removeprefix('--')}") from error
    context.default_map = defaults


def _as_words(param: Any, value: object, name: str) -> Any:
    """Return the value of an option as on the command line: text, a list of texts, or a truth value for a flag.

    Args:
        param: The option.
        value: Its value in the file.
        name: The file and the key, for error messages.
    """
    if param.is_flag:
        if not isinstance(value, bool):
            raise InputError(f"{name} is {value!r}, but must be true or false.")
        return value
    if param.multiple:
        if param.metavar == "KEY=VALUE" and isinstance(value, Mapping):
            return [f"{key}={_to_json(item, f'{name} {key}')}" for key, item in value.items()]
        return [_as_word(item, name) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and str(param.metavar).endswith(",..."):
        return ",".join(_as_word(item, name) for item in value)
    return _as_word(value, name)


def _as_word(value: object, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{name} is {_shortened(value)}, but must be text or a number. Put text in quotes.")
    return str(value)


def _to_json(value: object, name: str) -> str:
    try:
        return json.dumps(value)
    except PARSING_ERRORS as error:
        raise InputError(f"{name} is {_shortened(value)}, but must be a value that JSON can store.") from error


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_config_file(file: Path) -> dict[str, object]:
    """Return the options in a YAML or JSON file.

    Raises:
        InputError: If the file cannot be read, is larger than `MAX_BYTES`, is not a mapping, or contains YAML tags
            that create Python objects, aliases or duplicate keys; or if PyYAML is not installed.
    """
    from metabridge.files import read_regular_file

    parsers: dict[str, Callable[[str], object]] = {".json": _parse_json, ".yaml": _parse_yaml, ".yml": _parse_yaml}
    if file.suffix.lower() not in parsers:
        raise InputError(f"--config is {file}, but its name must end in .yaml, .yml or .json.")
    try:
        size = file.stat().st_size
        content = b"" if size > MAX_BYTES else read_regular_file(file)
    except OSError as error:
        raise InputError(f"--config is {file}, which cannot be read ({error.strerror}).") from error
    if max(size, len(content)) > MAX_BYTES:
        raise InputError(f"--config is {file}, which is larger than {MAX_BYTES // 2**10} KiB. Use a smaller file.")
    try:
        options = parsers[file.suffix.lower()](content.decode("utf-8-sig"))
        repr(options)  # raises a ValueError if an integer is too long to be converted to text
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    except PARSING_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{file} is not a valid {file.suffix[1:].upper()} file ({reason}).") from error
    if not isinstance(options, dict):
        raise InputError(f"{file} must contain options and their values, such as batch-size: 8.")
    return {str(name): value for name, value in options.items()}


def _parse_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[Any, object]]) -> dict[Any, object]:
    values: dict[Any, object] = {}
    for key, value in pairs:
        if key in values:
            raise InputError(f"the key {key!r} is there twice. Remove one of them.")
        values[key] = value
    return values


def _parse_yaml(text: str) -> object:
    """Parse YAML without aliases, which could expand to any size, and without tags, which could create objects."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InputError(
            "reading YAML needs PyYAML. Install it with pip install 'metabridge[yaml]', or use a JSON file."
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                raise InputError(f"it contains the alias *{event.anchor}. Write the value again instead.")
            if tag := getattr(event, "tag", None):
                raise InputError(f"it contains the tag {tag}. Remove it: only plain values are allowed.")
            if self.depth > MAX_DEPTH:
                raise InputError(f"it has more than {MAX_DEPTH} levels of nesting. Use fewer.")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, object]:
            pairs = [
                (self.construct_object(key, deep=True), self.construct_object(value, deep=True))
                for key, value in node.value
            ]
            return _without_duplicates(pairs)

    try:
        options: object = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    return {} if options is None else options  # None if the file is empty
