"""Readers of the files of options (`--config`) and of the state of experiment trackers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fuzz import mutate
from fuzz.cases import Expected, Files, Hostile, Link, Node, Reader
from fuzz.datasets import changer
from metabridge.cli.config_file import MAX_BYTES, read_config_file
from metabridge.training.trackers import STATE_FILE, TrackedRun, read_tracked_runs

OPTIONS = {"method": "maml", "batch-size": 8, "lr": 0.1, "option": {"steps": 5}, "model-option": ["filters=4"]}
YAML = b"""\
# options
method: maml
batch_size: 8
lr: 1.0e-3
option: {steps: 5, "rates": 'fixed'}
model-option:
  - filters=4
rotated-classes: true
data: >
  a folder
"""
YAML_TOKENS = (
    *(b"!!python/object/apply:os.system [id]", b"!!python/name:os.system", b"!!binary aGk=", b"!x ", b"<<: ", b"? "),
    *(b"&a ", b"*a", b"[", b"]", b"{", b"}", b"- ", b": ", b"|", b">", b"'", b'"', b"\t", b"\n", b"---\n", b"...\n"),
    *(b"%YAML 1.1\n", b"0x1f", b"0o7", b"1:30:00", b"2020-01-01", b"9" * 5000, b".inf", b".nan", b"~", b"\xef\xbb\xbf"),
)


def _read_json(folder: Path) -> object:
    return read_config_file(folder / "options.json")


def _read_yaml(folder: Path) -> object:
    return read_config_file(folder / "options.yaml")


def _change_yaml(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
    """Insert tokens of YAML at random positions, or damage the file."""
    content = files["options.yaml"]
    assert isinstance(content, bytes)
    if rng.random() < 0.4:
        return {"options.yaml": mutate.damage(content, rng)}, "any"
    for _ in range(rng.choice((1, 2, 4))):
        position = rng.randint(0, len(content))
        content = content[:position] + rng.choice(YAML_TOKENS) * rng.choice((1, 1, 1, 50)) + content[position:]
    return {"options.yaml": content}, "any"


def _hostile_yaml(inputs: Sequence[Files]) -> list[Hostile]:
    levels = b"\n".join(b"a%d: &a%d [%s]" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 10))
    refused: list[bytes | Link | Node] = [
        b"a0: &a0 [x, x]\n" + levels,  # expands to billions of items
        b"a: &a [*a]",
        b"!!python/object/apply:os.system ['touch executed']",
        b"!!python/object/new:os.system ['touch executed']",
        b"data: !!python/module:os",
        b"[" * (MAX_BYTES - 1),
        b"a: [" + (b"[" * 200 + b"]" * 200 + b",") * 150 + b"]",
        b"- " * (MAX_BYTES // 2),
        b"#" * 10**7,
        b"a: " + b"9" * 50_000,
        b"\xff\xfe\x00",
        Link("/dev/zero"),
        Node("pipe"),
        Node("folder"),
    ]
    allowed = [b"", b"a: [" + b"1," * 30_000 + b"]", b"a: " + b"1:" * 30_000 + b"1", b"a: " + b"x" * 60_000]
    return [
        *(Hostile({"options.yaml": content}, "refused") for content in refused),
        *(Hostile({"options.yaml": content}) for content in allowed),
    ]


def _hostile_json(name: str) -> list[Hostile]:
    contents = (b"", b"[" * mutate.NESTING_DEPTH, b"\xff", b"null", b"7", b"[]", b"#" * 10**7)
    return [Hostile({name: content}, "refused") for content in contents]


def _tracked_runs(folder: Path) -> list[Files]:
    return [{STATE_FILE: json.dumps({"wandb": asdict(TrackedRun("run-1", 40))}).encode()}]


SETTINGS_READERS = (
    Reader(
        "config-json",
        (_read_json,),
        lambda folder: [{"options.json": json.dumps(OPTIONS).encode()}],
        changer({".json": mutate.change_json}, 0.7),
        lambda inputs: _hostile_json("options.json"),
    ),
    Reader("config-yaml", (_read_yaml,), lambda folder: [{"options.yaml": YAML}], _change_yaml, _hostile_yaml),
    Reader(
        "tracker",
        (read_tracked_runs,),
        _tracked_runs,
        changer({".json": mutate.change_json}, 0.7),
        lambda inputs: _hostile_json(STATE_FILE),
    ),
)
