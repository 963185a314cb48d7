"""All readers, on so many inputs each: shared out to workers, counted, and kept so that a killed run goes on."""

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

CHUNK = 200  # cases between two writes of what was found


@dataclass
class Tally:
    """What came of the cases of one reader. A failure is kept once for every place that it comes from."""

    reader: str
    inputs: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one case."""
        self.inputs += 1
        self.counts[outcome.kind] = self.counts.get(outcome.kind, 0) + 1
        self.peak = max(self.peak, outcome.peak)
        if outcome.kind in FAILURES:
            place = f"{outcome.kind} {outcome.where or outcome.what}"
            known = self.failures.setdefault(place, {"case": outcome.case, "what": outcome.what, "count": 0})
            known["count"] += 1

    @property
    def failed(self) -> int:
        """How many cases failed."""
        return sum(self.counts.get(kind, 0) for kind in FAILURES)

    def row(self) -> dict[str, object]:
        """Return the counts as a result holds them."""
        named = {
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
        counts = {name: self.counts.get(kind, 0) for name, kind in named.items()}
        return {"reader": self.reader, "inputs": self.inputs, **counts, "peak_mib": self.peak >> 20}


class Campaign:
    """A run over readers, whose tallies are kept in a folder: those of the same seed and code are gone on with."""

    def __init__(self, readers: str, names: Iterable[str], *, inputs: int, seed: int, out: Path) -> None:
        self.readers, self.inputs, self.seed = readers, inputs, seed
        self.key = f"{seed}-{_code_key()}"
        self.out = make_folder(out)
        self.tallies = {name: self._restored(name) for name in names}

    def run(self, workers: int, on_case: Callable[[Tally], None] = lambda tally: None) -> None:
        """Read the cases that are missing, in so many processes at once."""
        waiting: queue.SimpleQueue[Tally] = queue.SimpleQueue()
        for tally in self.tallies.values():
            waiting.put(tally)
        errors: list[BaseException] = []
        self.stopped = False

        def work() -> None:
            worker = Worker(self.readers, self.seed)
            try:
                while not self.stopped and not waiting.empty():
                    self._finish(waiting.get_nowait(), worker, on_case)
            except queue.Empty:
                pass
            except BaseException as error:
                errors.append(error)
            finally:
                worker.close()

        threads = [threading.Thread(target=work) for _ in range(workers)]
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
            for outcome in worker.run(tally.reader, tally.inputs, min(tally.inputs + CHUNK, self.inputs)):
                tally.add(outcome)
                on_case(tally)
            write_atomically(self._file(tally.reader), json.dumps({"key": self.key, **vars(tally)}).encode())

    def _restored(self, name: str) -> Tally:
        file = self._file(name)
        held = json.loads(file.read_text()) if file.exists() else {}
        if held.pop("key", None) != self.key:
            return Tally(name)
        return Tally(**held)

    def _file(self, name: str) -> Path:
        return self.out / f"{name}.json"


def _code_key() -> str:
    """A key of the code that is fuzzed and of the code that fuzzes it."""
    key = 0
    for file in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "fuzz").glob("*.py")]):
        key = zlib.crc32(file.read_bytes(), key)
    return f"{key:08x}"
