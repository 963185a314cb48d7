"""Start the process that runs cases, end it if it hangs, and restart it after it has died."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fuzz.sandbox import ROOT, SECONDS, Kind, Outcome

POLL_SECONDS = 0.5  # interval between checks of a process without output


class Worker:
    """A process that runs cases. If it has died, the next call starts a new one.

    Args:
        readers: Where the process imports the dictionary of readers from, as "module:name".
        seed: Seed of the random changes.
        seconds: Processor time or idle time after which a case counts as a hang.
    """

    def __init__(self, readers: str, seed: int, seconds: int = SECONDS) -> None:
        self.readers, self.seed, self.seconds = readers, seed, seconds
        parent = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a file system in memory, if there is one
        self.folder = Path(tempfile.mkdtemp(prefix="metabridge-fuzz-", dir=parent))
        self.stderr_file = self.folder / "stderr"
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()

    def run(self, reader: str, first: int, last: int, keep: Path | None = None) -> Iterator[Outcome]:
        """Yield the outcome of each case from `first` to `last` - 1; copy the files of the first case to `keep`."""
        while first < last:
            self._send_request(reader, first, last, keep)
            while first < last:
                line = self._next_line()
                if line is None:
                    yield self._death_outcome(reader, first)
                    first += 1
                    break
                yield Outcome(**json.loads(line))
                first += 1

    def prepare(self, reader: str) -> int:
        """Create the inputs of a reader, and return the number of cases that are not random."""
        return self._send_request(reader, 0, 0, None)

    def close(self) -> None:
        """End the process and remove its files."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send_request(self, reader: str, first: int, last: int, keep: Path | None) -> int:
        """Request cases from the process, start it if necessary, and return the number of cases that are not random."""
        if self.process is None:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "MALLOC_ARENA_MAX": "2",  # otherwise each thread reserves 64 MiB, which count against the limit
                "METABRIDGE_CACHE": str(self.folder / "case" / "cache"),
                "HOME": str(self.folder / "case"),
            }
            command = [
                sys.executable,
                "-m",
                "fuzz.sandbox",
                self.readers,
                str(self.seed),
                str(self.folder),
                str(self.seconds),
            ]
            with self.stderr_file.open("w") as stderr:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
                )
            self.lines = queue.Queue()
            threading.Thread(target=_forward, args=(self.process, self.lines), daemon=True).start()
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps([reader, first, last, keep and str(keep.resolve())])}\n")
        self.process.stdin.flush()
        answer = self.lines.get()
        if answer is None:
            raise RuntimeError(f"the valid inputs of {reader} cannot be read:\n{self.stderr_file.read_text()}")
        return int(answer)

    def _next_line(self) -> str | None:
        """Return the next line of output, or None if the process died or was ended because it was idle for too long.

        The process ends itself after `seconds` of processor time. Waiting for a processor does not count as idle.
        """
        idle_seconds, last_ticks = 0.0, -1
        while True:
            with suppress(queue.Empty):
                return self.lines.get(timeout=POLL_SECONDS)
            assert self.process is not None
            ticks = _ticks(self.process.pid)
            is_idle = ticks == last_ticks and _is_asleep(self.process.pid)
            idle_seconds = idle_seconds + POLL_SECONDS if is_idle else 0.0
            last_ticks = ticks
            if idle_seconds >= self.seconds:
                self.process.send_signal(signal.SIGPROF)  # its handler prints the traceback and ends the process
                idle_seconds = 0.0

    def _death_outcome(self, reader: str, case: int) -> Outcome:
        """Return the outcome of a case in which the process died."""
        assert self.process is not None
        status = self.process.wait()
        self.process = None
        text = self.stderr_file.read_text(errors="replace")
        frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', text)
        library_frames = [frame for frame in frames if "/metabridge/" in frame[0]] or frames or [("", "", "")]
        file, line, function = library_frames[0]
        where = f"{file.rpartition('/metabridge/')[2]}:{line} in {function}"
        kind: Kind = "hang" if status == -signal.SIGPROF else "crash"
        description = (
            f"did not finish within {self.seconds} s" if kind == "hang" else f"the process died with status {status}"
        )
        return Outcome(reader, case, kind, description, where)


def _forward(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _ticks(process: int) -> int:
    """Return the processor time of a process in clock ticks, or -1 if it does not exist."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return -1


def _is_asleep(process: int) -> bool:
    """Return whether no thread of a process is running or waiting for a processor."""
    with suppress(OSError):
        states = [Path(task, "stat").read_text().rpartition(")")[2].split()[0] for task in _tasks(process)]
        return "R" not in states
    return False


def _tasks(process: int) -> list[str]:
    return [entry.path for entry in os.scandir(f"/proc/{process}/task")]
