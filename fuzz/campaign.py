"""Run all readers in several processes, count the outcomes, and save the counts, so that a run can be resumed."""

from __future__ import annotations

import json
import queue
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.sandbox import FAILURES, ROOT, Outcome
from fuzz.worker import Worker
from metabridge.files import make_folder, write_atomically

CASES_PER_SAVE = 200  # number of cases after which the counts are saved


@dataclass
class Tally:
    """The counts of the outcomes of one reader. Failures at the same line of code are stored as one, with a count."""

    reader: str
    inputs: int = 0  # number of cases so far
    counts: dict[str, int] = field(default_factory=dict)  # by kind of outcome
    peak: int = 0  # largest memory of a case, in bytes
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)  # by kind and line of code

    def add(self, outcome: Outcome) -> None:
        """Count one case."""
        self.inputs += 1
        self.counts[outcome.kind] = self.counts.get(outcome.kind, 0) + 1
        self.peak = max(self.peak, outcome.peak)
        if outcome.kind in FAILURES:
            location = f"{outcome.kind} {outcome.where or outcome.description}"
            failure = self.failures.setdefault(
                location, {"case": outcome.case, "description": outcome.description, "count": 0}
            )
            failure["count"] += 1

    @property
    def num_failed(self) -> int:
        """The number of failed cases."""
        return sum(self.counts.get(kind, 0) for kind in FAILURES)

    def row(self) -> dict[str, object]:
        """Return the counts as a row of the result file."""
        kinds = {  # for each column of the result file, the kind of outcome that it counts
            "accepted_equal": "equal",
            "accepted_different": "different",
            "refused": "refused",
            "tracebacks": "traceback",
            "hangs": "hang",
            "crashes": "crash",
            "over_1_gib": "memory",
            "files_outside": "outside",
            "code_run": "code",
            "silent_differences": "silent",
        }
        counts = {name: self.counts.get(kind, 0) for name, kind in kinds.items()}
        return {"reader": self.reader, "inputs": self.inputs, **counts, "peak_mib": self.peak >> 20}


class Campaign:
    """A run of several readers. If its folder has counts for the same seed and code, the run is resumed.

    Args:
        readers: Where the workers import the dictionary of readers from, as "module:name".
        names: Names of the readers to run.
        inputs: Number of cases per reader.
        seed: Seed of the random changes.
        out: Folder of the counts.
    """

    def __init__(self, readers: str, names: Iterable[str], *, inputs: int, seed: int, out: Path) -> None:
        self.readers, self.inputs, self.seed = readers, inputs, seed
        self.key = f"{seed}-{_code_key()}"  # stored with the counts, which are dropped if it differs
        self.out = make_folder(out)
        self.tallies = {name: self._load_tally(name) for name in names}

    def run(self, workers: int, on_case: Callable[[Tally], None] = lambda tally: None) -> None:
        """Run the remaining cases in `workers` processes."""
        remaining: queue.SimpleQueue[Tally] = queue.SimpleQueue()
        for tally in self.tallies.values():
            remaining.put(tally)
        errors: list[BaseException] = []
        self.stopped = False

        def run_cases() -> None:
            worker = Worker(self.readers, self.seed)
            try:
                while not self.stopped and not remaining.empty():
                    self._finish(remaining.get_nowait(), worker, on_case)
            except queue.Empty:
                pass
            except BaseException as error:
                errors.append(error)
            finally:
                worker.close()

        threads = [threading.Thread(target=run_cases) for _ in range(workers)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self.stopped = True  # after Ctrl-C
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def _finish(self, tally: Tally, worker: Worker, on_case: Callable[[Tally], None]) -> None:
        while tally.inputs < self.inputs and not self.stopped:
            for outcome in worker.run(tally.reader, tally.inputs, min(tally.inputs + CASES_PER_SAVE, self.inputs)):
                tally.add(outcome)
                on_case(tally)
            write_atomically(self._file(tally.reader), json.dumps({"key": self.key, **vars(tally)}).encode())

    def _load_tally(self, name: str) -> Tally:
        file = self._file(name)
        saved = json.loads(file.read_text()) if file.exists() else {}
        if saved.pop("key", None) != self.key:
            return Tally(name)
        return Tally(**saved)

    def _file(self, name: str) -> Path:
        return self.out / f"{name}.json"


def _code_key() -> str:
    """Return a checksum of the library and of the fuzzing code."""
    key = 0
    for file in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "fuzz").glob("*.py")]):
        key = zlib.crc32(file.read_bytes(), key)
    return f"{key:08x}"
