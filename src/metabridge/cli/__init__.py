"""The command line. Commands import PyTorch and other large packages only when they run."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import NoReturn, cast

import typer

from metabridge.cli import (  # noqa: F401  # registers the commands
    data_commands,
    diagnose_command,
    experiment_commands,
    inference_commands,
    search_commands,
    train_commands,
)
from metabridge.cli.options import app
from metabridge.cli.terminal import note, terminal_output
from metabridge.errors import InputError

__all__ = ["app", "main"]

# The base class of typer's usage errors; typer does not export it.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])
INTERRUPTED = 130  # exit status


def main() -> None:
    """Run the command line. For errors that the user can fix, print one message and exit with status 2."""
    try:
        with terminal_output():
            status = app(prog_name="metabridge", standalone_mode=False)
    except InputError as error:
        _end(_with_option_names(str(error)), 2)
    except UsageError as error:
        _end(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except OSError as error:
        _end(f"{error.filename} cannot be used ({error.strerror or error}).", 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        _end("not enough memory. Use smaller images, networks or batches.", 2)
    if status == INTERRUPTED:
        hint = " Run the same command again to continue." if _resumes(sys.argv[1:]) else ""
        _end(f"interrupted.{hint}", INTERRUPTED)
    sys.exit(status)


def _resumes(words: list[str]) -> bool:
    """Return whether running the same command again continues the interrupted work."""
    from metabridge.experiments import experiment_modules, load_experiment

    if words[:1] == ["reproduce"]:
        return any(load_experiment(word).resumable for word in words if word in experiment_modules())
    return words[:1] in (["train"], ["search"])


def _with_option_names(message: str) -> str:
    """Replace `Use min_images=3` in a message by `Use --min-images 3` if the command has that option."""
    command = typer.main.get_command(app)
    for word in _command_words():
        command = command.commands[word]  # type: ignore[attr-defined]
    flags = {param.name: param.opts[0] for param in command.params if param.opts[0].startswith("--")}

    def as_flag(match: re.Match[str]) -> str:
        return f"{flags[match[1]]} {match[3]}" if match[1] in flags else match[0]

    return re.sub(r"(?<=\bUse )(\w+)=(['\"]?)([\w.-]*\w)\2", as_flag, message)


def _command_words() -> list[str]:
    """Return the words of the command line that name the command, such as `["data", "check"]`."""
    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups if group.name}
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    while words and words[0] not in names | groups:
        words.pop(0)
    return words[: 2 if words[:1] and words[0] in groups else 1]


def _end(message: str, status: int) -> NoReturn:
    """Print an error message that starts with the command's name, and exit."""
    with contextlib.suppress(OSError):
        note(f"{' '.join(['metabridge', *_command_words()])}: {message}")
    sys.exit(status)
