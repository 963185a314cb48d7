from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metabridge.errors import InputError
from metabridge.experiments import experiment_modules, load_experiment
from metabridge.experiments.result import Environment, Result, Row, environment

RESULT = Result(
    id="landscape-table3",
    scale="quick",
    seed=3,
    settings={"iterations": 5, "methods": {"maml": {"lr": 0.1}}},
    environment=Environment("a CPU, 2 cores", "2.13", "3.11", None),
    seconds=1.5,
    rows=(
        Row("MAML", "error", published=0.26, ours=0.27, ci95=0.01, agrees=True, note="ν has no part in it"),
        Row("NAL", "error", ours=0.8),
    ),
)


def test_a_written_result_reads_back_equal(tmp_path):
    assert Result.read(RESULT.write(tmp_path)) == RESULT


def test_the_file_has_the_keys_of_the_specification_in_their_order(tmp_path):
    path = RESULT.write(tmp_path / "new" / "folder")
    stored = json.loads(path.read_text())
    assert path.name == "landscape-table3.json"
    assert list(stored) == ["id", "scale", "seed", "settings", "environment", "seconds", "rows"]
    assert list(stored["environment"]) == ["device", "torch", "python", "commit"]
    for row in stored["rows"]:
        assert list(row) == ["name", "metric", "published", "ours", "ci95", "agrees", "note"]
    assert stored["rows"][1]["published"] is None
    assert stored["rows"][1]["agrees"] is None


@pytest.mark.parametrize("key", ["published", "ours", "ci95"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_refuses_what_is_not_finite(key, value):
    with pytest.raises(InputError, match=rf"'MAML' has {key}={value}"):
        Row("MAML", "error", **{"ours": 1.0, key: value})


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = RESULT.write(tmp_path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        replace(RESULT, seed=4).write(tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "keys must be exactly"),
        ('{"id": "x"}', "keys must be exactly"),
    ],
)
def test_a_file_that_is_no_result_is_named(tmp_path, content, complaint):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"broken\.json.*{complaint}"):
        Result.read(path)


def test_a_row_of_another_form_is_named(tmp_path):
    path = RESULT.write(tmp_path)
    stored = json.loads(path.read_text())
    del stored["rows"][0]["ours"]
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"malformed.*ours"):
        Result.read(path)


def test_the_environment_names_this_machine():
    here = environment("cpu")
    assert here.device.endswith(" cores")
    assert here.torch == torch.__version__


def test_the_commit_is_that_of_the_checkout_the_code_lies_in():
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if done.returncode:
        pytest.skip("the tests are not in a checkout")
    assert environment("cpu").commit == done.stdout.strip()


def test_there_is_no_commit_where_there_is_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment("cpu").commit is None


@pytest.mark.parametrize("name", experiment_modules())
def test_every_experiment_of_the_table_has_run_and_figure(name):
    assert callable(load_experiment(name).run)
    assert callable(load_experiment(name).draw)
