"""Run cases in a separate process with limits on memory and time, and record which files and programs they open.

The process writes the outcome of each case to standard output as a line of JSON. A signal ends it if a case takes
too long. `fuzz.worker` starts and watches it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import resource
import shutil
import signal
import stat
import sys
import traceback
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from fuzz.cases import Corpus, digest, lay_out
from metabridge.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 10  # processor time or idle time after which a case counts as a hang
MEMORY = 2**30  # number of bytes that a case may allocate
SPARE = 2**28  # bytes above MEMORY that can be allocated, so that cases above the limit can be measured

# The kinds of outcomes:
# - equal: the data of a valid input were returned
# - different: other data were returned, which is allowed unless the case expects otherwise
# - refused: an `InputError`
# - traceback: another exception
# - memory: more than `MEMORY` was allocated or requested
# - outside: a file outside the folder of the case was opened or changed, or one that is not a regular file
# - code: a program was started, or code in the folder of the case was loaded
# - silent: data were returned that the case does not allow
# - hang: more than `SECONDS`
# - crash: the process died
Kind = Literal["equal", "different", "refused", "traceback", "memory", "outside", "code", "silent", "hang", "crash"]
FAILURES: tuple[Kind, ...] = ("traceback", "memory", "outside", "code", "silent", "hang", "crash")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case. `where` is the line of the library that failed, and `peak` the peak memory in bytes."""

    reader: str
    case: int
    kind: Kind
    description: str = ""
    where: str = ""
    peak: int = 0


class Watch:
    """Records what Python code opens, writes, starts or imports, from the audit events of the interpreter."""

    # Audit events (see Python's `sys.addaudithook`) that write files, list folders, or start programs and load code.
    WRITES = frozenset(
        {
            "os.remove",
            "os.rename",
            "os.mkdir",
            "os.rmdir",
            "os.link",
            "os.symlink",
            "os.chmod",
            "os.truncate",
            "os.utime",
        }
    )
    LISTS = frozenset({"os.listdir", "os.scandir"})
    CODE: tuple[str, ...] = (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "subprocess.Popen",
        "pty.",
        "socket.connect",
    )
    CODE += ("ctypes.dlopen", "pickle.find_class", "webbrowser.")

    def __init__(self, folder: Path) -> None:
        self.folder, self.active, self.violations = str(folder), False, list[tuple[Kind, str]]()
        allowed = (ROOT / "src", ROOT / "fuzz", sys.prefix, sys.base_prefix, *sys.path)
        allowed_folders = (f"{os.path.realpath(path)}/" for path in map(str, allowed) if path)
        self.readable_prefixes = ("/proc/", "/sys/", *allowed_folders)
        sys.addaudithook(self.on_event)

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record an audit event if a case is running."""
        if not self.active:
            return
        if event == "open":
            path, mode, flags = arguments
            if not isinstance(path, int):
                writes = (
                    bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
                    if flags
                    else "r" not in (mode or "r")
                )
                self.on_path(path, writes)
        elif event in self.WRITES:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                if not isinstance(path, int):
                    self.on_path(path, True)
        elif event in self.LISTS:
            if not isinstance(arguments[0], int):
                self.on_path(arguments[0] or ".", False)
        elif event.startswith(self.CODE) and "/importlib/" not in str(sys._getframe(1).f_code.co_filename):
            self.violations.append(("code", f"{event} {arguments!r}"[:200]))

    def on_path(self, path: Any, writes: bool) -> None:
        """Record a path outside the folder of the case, or one that is not a regular file."""
        full_path = os.path.abspath(os.fsdecode(path))
        if full_path == os.devnull:
            return
        if full_path == self.folder or full_path.startswith(f"{self.folder}/"):
            if full_path.endswith((".py", ".pyc", ".so", ".pth")):
                self.violations.append(("code", f"opened {full_path[len(self.folder) :]}"))
            with suppress(OSError, ValueError):
                mode = os.stat(full_path).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    self.violations.append(
                        ("outside", f"opened {full_path[len(self.folder) :]}, which is not a regular file")
                    )
            return
        if writes or not f"{os.path.realpath(full_path)}/".startswith(self.readable_prefixes):
            self.violations.append(("outside", f"{'wrote' if writes else 'opened'} {full_path}"))


class Sandbox:
    """Runs cases in this process and determines their outcomes.

    Args:
        readers: Where to import the dictionary of readers from, as "module:name".
        seed: Seed of the random changes.
        folder: Folder in which the folder of each case is created.
        seconds: Processor time after which a case counts as a hang.
    """

    def __init__(self, readers: str, seed: int, folder: Path, seconds: int) -> None:
        module, _, name = readers.partition(":")
        self.readers = getattr(import_module(module), name)
        self.seed, self.seconds, self.folder = seed, seconds, folder / "case"
        self.outside = folder / "outside"
        self.outside.mkdir(parents=True, exist_ok=True)
        (self.outside / "secret.png").write_bytes(b"never read")
        self.log = _Log()
        logging.getLogger("metabridge").addHandler(self.log)
        self.corpora: dict[str, Corpus] = {}
        self.valid_digests: dict[tuple[str, int], set[str]] = {}
        self.watch = Watch(self.folder)

    def prepare(self, name: str) -> int:
        """Create the inputs of a reader, read the valid ones, and return the number of cases that are not random."""
        if name not in self.corpora:
            lay_out(self.folder, {})
            corpus = self.corpora[name] = Corpus.of(self.readers[name], self.folder)
            for entry, read in enumerate(corpus.reader.entries):
                digests = self.valid_digests.setdefault((name, entry), set())
                for files in corpus.valid_inputs:
                    lay_out(self.folder, files)
                    digests.add(digest(read(self.folder)))
        return self.corpora[name].num_fixed_cases

    def run(self, name: str, number: int) -> Outcome:
        """Run one case and return its outcome."""
        case = self.corpora[name].case(self.seed, number)
        lay_out(self.folder, case.files)
        before = _listing(self.outside)
        self.log.texts.clear()
        self.watch.violations.clear()
        start_memory = _reset_peak()
        kind: Kind
        description = where = ""
        _limit_memory(_virtual_size() + MEMORY + SPARE)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        self.watch.active = True
        try:
            result = self.readers[name].entries[case.entry](self.folder)
            self.watch.active = False
            is_equal = digest(result) in self.valid_digests[name, case.entry]
            kind = "equal" if is_equal else "different"
            if case.expected == "refused" or (case.expected == "same" and not is_equal):
                kind, description = "silent", f"accepted, but {_expectation(case.expected)}"
        except InputError as error:
            kind, description = "memory" if _is_memory_error(error) else "refused", str(error)
        except MemoryError as error:
            kind, description, where = "memory", repr(error), _line_of(error)
        except Exception as error:
            kind, description, where = "traceback", f"{type(error).__name__}: {error}", _line_of(error)
            traceback.print_exc()
        finally:
            self.watch.active = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            _limit_memory(resource.RLIM_INFINITY)
        peak = max(0, _peak() - start_memory)
        if peak > MEMORY or any(_MEMORY_ERROR.search(text) for text in self.log.texts):
            kind, description = "memory", description or "more than 1 GiB was allocated or requested"
        if self.watch.violations:
            kind, description = self.watch.violations[0]
        if _listing(self.outside) != before:
            kind, description = "outside", "a file next to the folder of the case was changed"
        return Outcome(name, number, kind, description.replace(f"{self.folder}/", "")[:300], where, peak)


class _Log(logging.Handler):
    """Collects the warnings of the library, which warns if it skips an image that needs too much memory."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


_MEMORY_ERROR = re.compile(
    r"MemoryError|not enough memory|out of memory|malloc of size|"
    r"allocate (?:memory|bytes)|cannot allocate|can't allocate",
    re.IGNORECASE,
)


def _is_memory_error(error: BaseException | None) -> bool:
    """Return whether an error was caused by a failed allocation."""
    while error is not None:
        if isinstance(error, MemoryError) or _MEMORY_ERROR.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _expectation(expected: str) -> str:
    return "it must be refused" if expected == "refused" else "it is damaged and gives different data"


def _line_of(error: BaseException) -> str:
    """Return the innermost line of the library in a traceback, or of other code if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    library_frames = [frame for frame in frames if "/metabridge/" in frame.filename] or frames
    frame = library_frames[-1]
    short = frame.filename.rpartition("/metabridge/")[2].rpartition("/site-packages/")[2]
    return f"{short}:{frame.lineno} in {frame.name}"


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(folder))


def _limit_memory(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _virtual_size() -> int:
    """Return the size of this process's address space in bytes, which `_limit_memory` limits."""
    with open("/proc/self/statm", "rb") as stream:
        return int(stream.read().split()[0]) * resource.getpagesize()


def _reset_peak() -> int:
    """Reset the peak memory of this process to its current memory, and return it."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return _peak()


def _peak() -> int:
    """Return the peak memory of this process in bytes, or 0 if the system does not tell."""
    with open("/proc/self/status", "rb") as stream:
        for line in stream:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def serve(readers: str, seed: int, folder: Path, seconds: int) -> None:
    """Run the cases that standard input requests, until it is closed."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)  # discard what the library prints
    faulthandler.enable()
    # SIGPROF prints a traceback and ends the process
    faulthandler.register(signal.SIGPROF, all_threads=True, chain=True)
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    sandbox = Sandbox(readers, seed, folder, seconds)
    for line in sys.stdin:
        name, first, last, keep = json.loads(line)
        answers.write(f"{sandbox.prepare(name)}\n")
        if keep is not None:
            lay_out(Path(keep), sandbox.corpora[name].case(seed, first).files)
        for number in range(first, last):
            answers.write(f"{json.dumps(asdict(sandbox.run(name, number)))}\n")


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    shutil.rmtree(sys.argv[3], ignore_errors=True)  # the parent removes the folder too, unless it was killed
