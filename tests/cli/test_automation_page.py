"""The commands and programs in docs/automation.md work."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from metabridge.cli import app
from metabridge.training import load
from metabridge.training.trackers import read_tracked_runs
from small_runs import TRAIN

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "automation.md").read_text(encoding="utf-8")
SMALL = TRAIN[TRAIN.index("--validate-every") :]  # options that make training fast


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


COMMANDS = [shlex.split(line) for block in blocks("") for line in block.splitlines() if line.startswith("metabridge ")]


@pytest.fixture(autouse=True)
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (yaml,) = blocks("yaml")
    (tmp_path / yaml.partition("\n")[0].removeprefix("# ")).write_text(yaml)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_valid_options(words):
    _, *words = words
    command, context = typer.main.get_command(app), None
    while words and hasattr(command, "commands"):
        command, context = command.commands[words[0]], command.make_context(words.pop(0), [], resilient_parsing=True)
    assert command.make_context(command.name, words, parent=context).params


def test_options_on_the_command_line_override_the_file_on_the_page(metabridge):
    words = next(words for words in COMMANDS if "--seed" in words)
    assert metabridge(*words[1:], *SMALL, "--device", "cpu", "--minutes", 0)[0] == 0
    settings = json.loads(Path("runs/maml-1/settings.json").read_bytes())
    assert (settings["training"]["seed"], settings["method"]["inner"]["steps"]) == (1, 3)


def test_the_program_that_compares_methods_runs(metabridge, monkeypatch):
    def run(command, check, stdout):
        assert (command[0], check, stdout) == ("metabridge", True, subprocess.PIPE)
        status, printed, _ = metabridge(*(word.replace("200", "4") for word in command[1:]), *SMALL, "--device", "cpu")
        assert status == 0
        return SimpleNamespace(stdout=printed.encode())

    rows = []
    monkeypatch.setattr("subprocess.run", run)
    code = blocks("python")[0].replace('("anil", "mtl")', '("anil",)')
    exec(compile(code, "automation.md", "exec"), {"print": lambda *values: rows.append(values)})
    saved = load("runs/anil")
    assert rows == [("anil", saved.best.mean, saved.seconds)]


def test_the_program_with_a_tracker_runs():
    code = blocks("python")[1].replace("iterations=100", "iterations=2, progress=False")
    exec(compile(code, "automation.md", "exec"), {})
    assert read_tracked_runs(Path("runs/sinusoids"))["tensorboard"].iteration == 2
    assert list(Path("runs/sinusoids/tensorboard").iterdir())
