"""Readers handle damaged and hostile files within their limits, and the fuzzing harness detects failures."""

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
RANDOM_CASES = 8  # number of random cases of each reader, in addition to the hand-written ones


@pytest.fixture(scope="module")
def worker():
    worker = Worker("fuzz.readers:READERS", 0)
    yield worker
    worker.close()


@pytest.mark.parametrize("name", READERS)
def test_damaged_and_hostile_files_are_refused_or_read_within_limits(worker, name):
    cases = worker.prepare(name) + RANDOM_CASES
    failures = [outcome for outcome in worker.run(name, 0, cases) if outcome.kind in FAILURES]
    assert not failures


@pytest.fixture(scope="module")
def planted():
    worker = Worker(PLANTED, 0)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def impatient():
    """Return a worker with a limit of 1 s, for cases that hang; allocating much memory can take longer."""
    worker = Worker(PLANTED, 0, seconds=1)
    yield worker
    worker.close()


@pytest.mark.parametrize("read", planted_readers.FAULTS, ids=lambda read: read.__name__)
def test_a_planted_fault_is_detected(planted, impatient, read):
    expected = planted_readers.FAULTS[read]
    worker = impatient if expected == "hang" else planted
    (good, bad) = worker.run(read.__name__, 0, 2)
    assert (good.kind, bad.kind) == ("equal", expected)


def test_a_correct_reader_has_no_failure(planted):
    kinds = {outcome.kind for outcome in planted.run("sound", 0, 60)}
    assert kinds == {"equal", "refused"}


def test_a_crash_is_located_and_the_worker_continues(planted):
    outcomes = list(planted.run("crashes", 0, 4))
    assert [outcome.case for outcome in outcomes] == [0, 1, 2, 3]
    assert "in crashes" in outcomes[1].where


def test_a_case_depends_only_on_seed_reader_and_number():
    first, second = (Corpus.of(planted_readers.planted(planted_readers.sound), Path("unused")) for _ in range(2))
    assert first.case(5, 77) == second.case(5, 77) != first.case(6, 77)
    assert len({digest(first.case(0, number).files) for number in range(50, 150)}) > 40


def test_cases_generated_from_runs_are_reproducible(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digests = set()
    for _ in range(6):  # the order of metadata in safetensors files is random
        lay_out(tmp_path / "case", {})
        digests.add(digest(READERS["run-weights"].valid_inputs(tmp_path / "case")))
    assert len(digests) == 1


def test_a_stopped_run_continues_to_the_same_counts(tmp_path):
    def run_campaign(inputs, out):
        campaign = Campaign(PLANTED, ["sound", "traceback"], inputs=inputs, seed=3, out=out)
        inputs_before = {name: tally.inputs for name, tally in campaign.tallies.items()}
        campaign.run(workers=1)
        return inputs_before, {name: tally.row() for name, tally in campaign.tallies.items()}

    run_campaign(20, tmp_path / "parts")
    inputs_before, resumed = run_campaign(50, tmp_path / "parts")
    _, complete = run_campaign(50, tmp_path / "complete")
    assert inputs_before == {"sound": 20, "traceback": 20}
    peaks = [row.pop("peak_mib") for rows in (resumed, complete) for row in rows.values()]
    assert resumed == complete
    assert max(peaks) < 64
    assert resumed["sound"]["refused"] + resumed["sound"]["accepted_equal"] == 50
    assert resumed["traceback"]["tracebacks"] == 50 - resumed["traceback"]["accepted_equal"]


@pytest.mark.parametrize("change", [mutate.change_json, mutate.change_json_lines, mutate.change_pickle, mutate.damage])
def test_most_changes_have_an_effect(change):
    content = json.dumps({"a": [1, 2.5, "x"], "b": {"c": None}}).encode()
    if change is mutate.change_pickle:
        import pickle

        content = pickle.dumps({"a": [1, 2.5, "x"], "b": {"c": None}})
    changed = [change(content, random.Random(number)) for number in range(100)]
    assert sum(copy != content for copy in changed) > 80


def test_a_single_case_can_be_repeated(tmp_path, monkeypatch, capsys):
    words = ["fuzz", "--reader", "architecture", "--case", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert fuzz.__main__.main() == 0
    outcome = json.loads(capsys.readouterr().out.partition("\nThe files")[0])
    assert (outcome["case"], outcome["kind"]) == (2, "refused")
    assert (tmp_path / "architecture-2" / "run" / "architecture.json").exists()
