"""No file of any kind makes a reader fail, hang, take much memory or reach outside; and the harness would notice."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import fuzz.__main__
import pytest
from fuzz import mutate
from fuzz.campaign import Campaign
from fuzz.cases import Corpus, digest, lay_out
from fuzz.readers import READERS
from fuzz.sandbox import FAILURES
from fuzz.worker import Worker

import planted_readers

PLANTED = "planted_readers:READERS"
RANDOM = 8  # cases of each reader, besides those made by hand


@pytest.fixture(scope="module")
def worker():
    worker = Worker("fuzz.readers:READERS", 0)
    yield worker
    worker.close()


@pytest.mark.parametrize("name", READERS)
def test_damaged_and_hostile_files_are_refused_or_read_within_limits(worker, name):
    cases = worker.prepare(name) + RANDOM
    failed = [outcome for outcome in worker.run(name, 0, cases) if outcome.kind in FAILURES]
    assert not failed


@pytest.fixture(scope="module")
def planted():
    worker = Worker(PLANTED, 0)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def impatient():
    """A worker that waits for what hangs no longer than it must; taking memory can take a slow machine that long."""
    worker = Worker(PLANTED, 0, seconds=1)
    yield worker
    worker.close()


@pytest.mark.parametrize("read", planted_readers.FAULTS, ids=lambda read: read.__name__)
def test_a_planted_fault_is_found(planted, impatient, read):
    expected = planted_readers.FAULTS[read]
    worker = impatient if expected == "hang" else planted
    (good, bad) = worker.run(read.__name__, 0, 2)
    assert (good.kind, bad.kind) == ("equal", expected)


def test_a_sound_reader_has_no_failure(planted):
    kinds = {outcome.kind for outcome in planted.run("sound", 0, 60)}
    assert kinds == {"equal", "refused"}


def test_a_failure_names_its_line_and_the_worker_goes_on_after_it(planted):
    outcomes = list(planted.run("crashes", 0, 4))
    assert [outcome.case for outcome in outcomes] == [0, 1, 2, 3]
    assert "in crashes" in outcomes[1].where


def test_a_case_depends_on_seed_reader_and_number_alone():
    one, other = (Corpus.of(planted_readers.planted(planted_readers.sound), Path("unused")) for _ in range(2))
    assert one.case(5, 77) == other.case(5, 77) != one.case(6, 77)
    assert len({digest(one.case(0, number).files) for number in range(50, 150)}) > 40


def test_cases_made_of_runs_are_the_same_in_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digests = set()
    for _ in range(6):  # safetensors orders its notes by chance
        lay_out(tmp_path / "case", {})
        digests.add(digest(READERS["run-weights"].seeds(tmp_path / "case")))
    assert len(digests) == 1


def test_a_stopped_run_goes_on_to_the_same_counts(tmp_path):
    def finished(inputs, out):
        campaign = Campaign(PLANTED, ["sound", "traceback"], inputs=inputs, seed=3, out=out)
        before = {name: tally.inputs for name, tally in campaign.tallies.items()}
        campaign.run(workers=1)
        return before, {name: tally.row() for name, tally in campaign.tallies.items()}

    finished(20, tmp_path / "parts")
    before, parts = finished(50, tmp_path / "parts")
    _, whole = finished(50, tmp_path / "whole")
    assert before == {"sound": 20, "traceback": 20}
    peaks = [row.pop("peak_mib") for rows in (parts, whole) for row in rows.values()]
    assert parts == whole
    assert max(peaks) < 64
    assert parts["sound"]["refused"] + parts["sound"]["accepted_equal"] == 50
    assert parts["traceback"]["tracebacks"] == 50 - parts["traceback"]["accepted_equal"]


@pytest.mark.parametrize("change", [mutate.change_json, mutate.change_json_lines, mutate.change_pickle, mutate.damage])
def test_a_changed_file_mostly_differs(change):
    content = json.dumps({"a": [1, 2.5, "x"], "b": {"c": None}}).encode()
    if change is mutate.change_pickle:
        import pickle

        content = pickle.dumps({"a": [1, 2.5, "x"], "b": {"c": None}})
    changed = [change(content, random.Random(number)) for number in range(100)]
    assert sum(each != content for each in changed) > 80


def test_one_case_can_be_read_again_by_its_number(tmp_path, monkeypatch, capsys):
    words = ["fuzz", "--reader", "architecture", "--case", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert fuzz.__main__.main() == 0
    outcome = json.loads(capsys.readouterr().out.partition("\nThe files")[0])
    assert (outcome["case"], outcome["kind"]) == (2, "refused")
    assert (tmp_path / "architecture-2" / "run" / "architecture.json").exists()
