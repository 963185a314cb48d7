from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metabridge.errors import InputError
from metabridge.experiments import ExperimentOptions, experiment_modules, load_experiment
from metabridge.report.results import Machine, Result, Row

RESULTS = Path(__file__).resolve().parents[2] / "results"
RESULT = Result(
    id="landscape-table3",
    scale="quick",
    seed=3,
    settings={"iterations": 5, "methods": {"maml": {"lr": 0.1}}},
    environment=Machine("a CPU, 2 cores", "2.13", "3.11", None),
    seconds=1.5,
    rows=(
        Row("MAML", "error", published=0.26, ours=0.27, ci95=0.01, agrees=True, note="does not depend on ν"),
        Row("NAL", "error", ours=0.8),
    ),
)


def test_a_written_result_reads_back_equal(tmp_path):
    assert Result.read(RESULT.write(tmp_path)) == RESULT


def test_the_keys_of_a_result_file_and_their_order(tmp_path):
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
def test_a_row_with_a_number_that_is_not_finite_raises_an_error(key, value):
    with pytest.raises(InputError, match=rf"'MAML' has {key}={value}"):
        Row("MAML", "error", **{"ours": 1.0, key: value})


@pytest.mark.parametrize(("ours", "agrees"), [(-1.9, True), (-2.1, True), (-1.7, False), (2.0, False)])
def test_a_row_agrees_within_a_relative_tolerance_of_the_published_number(ours, agrees):
    row = Row("exponent", "of L", ours=ours).with_published(-2.0, tolerance=0.1, note="within 10 %")
    assert (row.published, row.agrees, row.note) == (-2.0, agrees, "within 10 %")


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = RESULT.write(tmp_path)
    before = path.read_bytes()

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", raise_disk_full)
    with pytest.raises(InputError, match="No space left on device"):
        replace(RESULT, seed=4).write(tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "keys must be exactly"),
        ('{"id": "x"}', "keys must be exactly"),
    ],
)
def test_reading_a_file_that_is_not_a_result_raises_an_error(tmp_path, content, message):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"broken\.json.*{message}"):
        Result.read(path)


def test_reading_a_malformed_row_raises_an_error(tmp_path):
    path = RESULT.write(tmp_path)
    stored = json.loads(path.read_text())
    del stored["rows"][0]["ours"]
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"malformed.*ours"):
        Result.read(path)


def test_the_current_machine_has_its_processor_and_torch_version():
    machine = Machine.current("cpu")
    assert machine.device.endswith(" cores")
    assert machine.torch == torch.__version__


def test_the_commit_is_that_of_the_checkout():
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        process = subprocess.run(git, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if process.returncode:
        pytest.skip("the tests are not in a checkout")
    assert Machine.current("cpu").commit == process.stdout.strip()


def test_there_is_no_commit_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert Machine.current("cpu").commit is None


def test_an_unknown_scale_raises_an_error():
    with pytest.raises(InputError, match="scale is 'huge', but must be 'quick' or 'paper'"):
        ExperimentOptions("huge")


@pytest.mark.parametrize("name", experiment_modules())
def test_every_experiment_can_be_loaded_by_its_id(name):
    assert load_experiment(name).id == name


def test_every_experiment_has_a_committed_result():
    committed = {file.stem for file in RESULTS.glob("*.json")}
    assert set(experiment_modules()) <= committed
