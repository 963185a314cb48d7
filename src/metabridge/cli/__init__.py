"""The command-line interface. Commands import PyTorch and other large packages only when they run."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import NoReturn

import typer

from metabridge.cli import (  # noqa: F401  # importing these modules registers their commands
    data_commands,
    diagnose_command,
    experiment_commands,
    inference_commands,
    search_commands,
    train_commands,
)
from metabridge.cli.options import app
from metabridge.cli.terminal import print_stderr, terminal_output
from metabridge.cli.usage_errors import UsageError, usage_message
from metabridge.errors import InputError

__all__ = ["app", "main"]

INTERRUPTED_STATUS = 130  # exit status after Ctrl+C


def main() -> None:
    """Run the command-line interface. On errors that users can fix, print one message and exit with status 2."""
    try:
        with terminal_output():
            status = app(prog_name="metabridge", standalone_mode=False)
    except InputError as error:
        _exit_with_error(_with_option_names(str(error)), 2)
    except UsageError as error:
        _exit_with_error(usage_message(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED_STATUS
    except OSError as error:
        _exit_with_error(f"{error.filename} cannot be used ({error.strerror or error}).", 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        _exit_with_error("not enough memory. Use smaller images, networks or batches.", 2)
    if status == INTERRUPTED_STATUS:
        hint = " Run the same command again to continue." if _is_resumable(sys.argv[1:]) else ""
        _exit_with_error(f"interrupted.{hint}", INTERRUPTED_STATUS)
    sys.exit(status)


def _is_resumable(words: list[str]) -> bool:
    """Return whether running the command again continues the interrupted work."""
    from metabridge.experiments import experiment_modules, load_experiment

    if words[:1] == ["reproduce"]:
        return any(load_experiment(word).resumable for word in words if word in experiment_modules())
    return words[:1] in (["train"], ["search"])


def _with_option_names(message: str) -> str:
    """Replace names of arguments in a message of the library by the options of the current command.

    NAME is replaced at the start of the message if it is followed by "is"; after "Use", "Omit", "Leave" and "Remove";
    and everywhere if it contains an underscore. If NAME was passed as NAME=VALUE, for example with `--option`, that
    option is put in front of NAME instead.
    """
    command = typer.main.get_command(app)
    for word in _command_words():
        command = command.commands[word]  # type: ignore[attr-defined]
    options = {param.name: param.opts[0] for param in command.params if param.opts[0].startswith("--")}
    for flag, name in _passed_pairs():
        options.pop(name, None)
        message = re.sub(rf"^{name}(?= is )|(?<=\b[Uu]se ){name}(?==)", f"{flag} {name}", message)
    if "data" in options:
        message = re.sub("^the data set is ", "data is ", message)
    names = "|".join(options) or "(?!)"
    underscored_names = "|".join(name for name in options if "_" in name) or "(?!)"
    values = r"=(['\"]?)([\w.-]*\w)\3(?: \(--[^)]*\))?"  # such as ='logistic' (--head logistic)
    message = re.sub(
        rf"(\b[Uu]se |\band )({names}){values}", lambda match: f"{match[1]}{options[match[2]]} {match[4]}", message
    )
    for pattern in (
        rf"^(?:{names})(?= is )",
        rf"(?<=\b[Oo]mit )(?:{names})(?=[ .])",
        rf"(?<=\bLeave )(?:{names})(?= out\b)",
        rf"(?<=\bRemove )(?:{names})(?: and (?:{names}))*(?=\.)",
        rf"(?<!\S)(?:{underscored_names})(?![^\s.,;])",
    ):
        message = re.sub(
            pattern, lambda match: re.sub(rf"\b(?:{names})\b", lambda name: options[name[0]], match[0]), message
        )
    return message


def _passed_pairs() -> list[tuple[str, str]]:
    """Return the options of the command line whose values are NAME=VALUE, such as `("--option", "steps")`."""
    pairs = re.findall(r"(?:^|\s)(-o|--option|--model-option)[\s=]?([a-zA-Z_]\w*)=", " ".join(sys.argv[1:]))
    return [("--option" if flag == "-o" else flag, name) for flag, name in pairs]


def _command_words() -> list[str]:
    """Return the name of the command in `sys.argv` as a list of words, such as `["data", "check"]`."""
    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups if group.name}
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    while words and words[0] not in names | groups:
        words.pop(0)
    return words[: 2 if words[:1] and words[0] in groups else 1]


def _exit_with_error(message: str, status: int) -> NoReturn:
    """Print an error message, prefixed with the command's name, and exit."""
    with contextlib.suppress(OSError):
        print_stderr(f"{' '.join(['metabridge', *_command_words()])}: {message}")
    sys.exit(status)
