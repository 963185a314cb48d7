"""The command line: parses, calls, prints. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import sys
from typing import NoReturn, cast

import typer

from metabridge.cli import (  # noqa: F401  (each module adds its commands to the application)
    data,
    diagnose,
    search,
    studies,
    train,
    use,
)
from metabridge.cli.common import app
from metabridge.errors import InputError

__all__ = ["app", "main"]

# Typer shows one of the usage errors; this is the class they all come from.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])
INTERRUPTED = 130


def main() -> None:
    """Run the command line; what the user can mend ends in one sentence and the status 2."""
    try:
        status = app(prog_name="metabridge", standalone_mode=False)
    except InputError as error:
        _end(str(error), 2)
    except UsageError as error:
        _end(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    if status == INTERRUPTED:
        _end(f"interrupted.{' The same command goes on from there.' if _resumes(sys.argv[1:]) else ''}", INTERRUPTED)
    sys.exit(status)


def _resumes(words: list[str]) -> bool:
    from metabridge.experiments import IN_PARTS

    return words[:1] in (["train"], ["search"]) or (words[:1] == ["reproduce"] and not IN_PARTS.isdisjoint(words))


def _end(message: str, status: int) -> NoReturn:
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups if group.name}
    known |= groups
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    command = next((word for word in words if word in known), None)
    if command in groups and words[words.index(command) + 1 :]:
        command += f" {words[words.index(command) + 1]}"
    print(f"metabridge {command}: {message}" if command else f"metabridge: {message}", file=sys.stderr)
    sys.exit(status)
