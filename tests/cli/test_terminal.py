"""Unusual names, narrow terminals, terminals without Unicode, and output that cannot be written."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metabridge import InputError
from metabridge.cli.terminal import print_table, printable
from small_runs import TRAIN

ESCAPE, LATIN = b"\x1b[31mred", b"caf\xe9"
NAMES = (b"[red]x", b"[bold", ESCAPE, "é".encode(), LATIN, b"new\nline", b"<script>alert(1)<", b"$x^$", b"bell\x07")
CONTROL_CHARACTERS = "\x1b\x07"  # which must never be printed to a terminal


@pytest.fixture
def unusual_images(tmp_path) -> Path:
    """Folders of images whose names contain markup, escape codes, HTML or invalid UTF-8, and a class `[/train]`."""
    root, generator = tmp_path / "odd [red]", np.random.default_rng(0)
    for split in ("train", "validation", "test"):
        for name in [f"{split} {os.fsdecode(name)}" for name in NAMES] + [f"[/{split}]"]:
            folder = root / split / name
            try:
                folder.mkdir(parents=True)
            except (OSError, UnicodeError):
                pytest.skip("this file system does not accept these bytes in names")
            for index in range(5):
                pixels = generator.integers(0, 256, (16, 16, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index} {os.path.basename(name)}.png")
    (root / "test" / f"test {os.fsdecode(ESCAPE)}" / "bad.png").write_bytes(b"no image")
    return root


def shown(name: bytes) -> str:
    return printable(os.fsdecode(name))


def test_control_characters_and_invalid_bytes_are_printed_as_escapes():
    assert printable("a\x1b[31m\n\t\x9b\u202e") == r"a\x1b[31m\n\t\x9b\u202e"
    assert printable(os.fsdecode(b"caf\xe9 \xff")) == r"caf\xe9 \xff"
    assert printable("é × 数 [/] \\") == "é × 数 [/] \\"


def test_all_commands_work_with_unusual_names(metabridge, unusual_images, tmp_path):
    run, out = tmp_path / "run", tmp_path / "predictions.csv"
    shape = ("--ways", 3, "--shots", 1)
    status, checked, _ = metabridge("data", "check", unusual_images, *shape, "--queries", 2)
    assert status == 1
    assert f"unreadable: test/test {shown(ESCAPE)}/bad.png (it is not an image" in checked
    status, printed, errors = metabridge(
        *TRAIN, "--method", "mtl", "--data", unusual_images, "--size", 16, *shape, "--out", run
    )
    assert status == 0
    training_classes = {f"train {os.fsdecode(name)}" for name in NAMES} | {"[/train]"}
    assert set(json.loads((run / "settings.json").read_bytes())["tasks"]["class_names"]) == training_classes
    options = ("--tasks", 20, "--queries", 2, "--shots", 1, "--device", "cpu")
    status, evaluated, evaluation_errors = metabridge("evaluate", run, *options, "--json", tmp_path / "r.json")
    assert status == 0
    accuracies = json.loads((tmp_path / "r.json").read_bytes())[0]["classes"]
    assert set(accuracies) == {name.replace("train", "test") for name in training_classes}
    assert printable(min(accuracies, key=accuracies.get)) in evaluated
    query = ("--query", unusual_images / "test", "--device", "cpu")
    status, adapted, adaptation_errors = metabridge(
        "adapt", run, "--support", unusual_images / "train", *query, "--out", out, "--save", tmp_path / "[/]saved"
    )
    assert status == 1  # one file is not an image
    assert shown(ESCAPE) in adaptation_errors
    columns = next(csv.reader(out.read_text().splitlines(keepends=True)))
    assert {"train [red]x", "train new\nline", "train <script>alert(1)<", "train caf\\udce9"} <= set(columns)
    assert metabridge("predict", tmp_path / "[/]saved", *query, "--out", tmp_path / "again.csv")[0] == 1
    assert (tmp_path / "again.csv").read_bytes() == out.read_bytes()
    everything = checked + printed + errors + evaluated + evaluation_errors + adapted + adaptation_errors
    assert not set(CONTROL_CHARACTERS) & set(everything)
    assert "[/train]" in adapted
    assert all(f"train {shown(name)}" in adapted for name in NAMES)


def test_errors_print_markup_unchanged_and_escape_control_characters(metabridge, tmp_path):
    status, _, errors = metabridge("data", "check", tmp_path / "[/]\x1b[31m\nred")
    assert status == 2
    assert errors.startswith(f"metabridge data check: {tmp_path}/[/]\\x1b[31m\\nred does not exist. ")
    assert errors.count("\n") == 1


def test_warnings_are_notes_without_escape_codes(metabridge, monkeypatch):
    def warn(*_, **__):
        warnings.warn("left out: \x1b[31m", stacklevel=1)
        raise InputError("no image is left.")

    monkeypatch.setattr("metabridge.datasets.check_dataset", warn)
    errors = metabridge("data", "check", ".")[2]
    assert errors == "Note: left out: \\x1b[31m\nmetabridge data check: no image is left.\n"


@pytest.mark.parametrize("width", [10, 24, 40, 60, 80, 200])
def test_tables_are_complete_at_every_terminal_width(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [["a/very/long/path/to/some/run [/]", "5", "33.3 ± 12.1", "some class 0.1 %", "-12.1 ± 10.5"]]
    columns = ("run", "shots", "accuracy, %", "worst class", "against the first, %")
    print_table(columns, rows, left_aligned=("run", "worst class"), title="Tasks [red]")
    printed = capsys.readouterr().out
    assert "Tasks [red]" in printed
    assert "33.3 ± 12.1" in printed
    assert "-12.1 ± 10.5" in printed
    assert "0.1 %" in printed
    assert "…" not in printed
    joined = "".join(line.split("│")[1].strip() if "│" in line else line for line in printed.splitlines())
    assert rows[0][0].replace(" ", "") in joined.replace(" ", "")
    tables = [line for line in printed.splitlines() if line.startswith(("┃", "│"))]
    assert all(len(line) <= width for line in tables)
    assert bool(tables) == (width >= 80)  # in narrower terminals, rows are printed as lists


@pytest.mark.parametrize("command", [("methods",), ("data", "check", "{root}", "--ways", 2, "--queries", 1)])
def test_commands_print_all_cells_in_40_columns(metabridge, photographs, monkeypatch, command):
    words = [str(photographs) if word == "{root}" else word for word in command]
    wide = metabridge(*words)[1]
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((40, 20)))
    monkeypatch.setattr("rich.console.Console.width", 40)
    narrow = metabridge(*words)[1]
    assert "…" not in narrow
    cells = {cell.strip() for line in wide.splitlines() for cell in line.split("│")[1:-1]}
    assert len(cells) > 3
    folded = "".join(narrow.split())
    assert all("".join(cell.split()) in folded for cell in cells)


def run_program(*arguments: object, **options) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | options.pop("env", {})
    words = [sys.executable, "-m", "metabridge", *map(str, arguments)]
    return subprocess.run(words, env=environment, stderr=subprocess.PIPE, check=False, **options)


def test_characters_that_the_terminal_cannot_encode_are_escaped(unusual_images):
    process = run_program(
        *("data", "check", unusual_images, "--ways", 2, "--queries", 2),
        env={"PYTHONIOENCODING": "ascii"},
        stdout=subprocess.PIPE,
    )
    assert (process.returncode, process.stderr) == (1, b"")
    printed = process.stdout.decode("ascii")
    assert "sizes: 16\\xd716" in printed
    assert "Problems found; see above." in printed


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_device_prints_one_sentence():
    with open("/dev/full", "wb") as full:
        process = run_program("--version", stdout=full)
    assert process.returncode == 2
    assert process.stderr == b"metabridge: the output cannot be written (No space left on device).\n"


@pytest.mark.skipif(os.name == "nt", reason="closed pipes are reported differently")
def test_a_closed_pipe_ends_the_command_without_a_message():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        process = run_program("--help", stdout=closed)
    assert (process.returncode, process.stderr) == (1, b"")
