"""Files that are written whole or not at all, and folders that one process at a time writes to."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shlex
import socket
import stat
import sys
import weakref
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from metabridge.errors import PARSING_ERRORS, InputError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

log = logging.getLogger("metabridge")

STDOUT = "-"  # as the name of an output file
LOCK = ".lock"
_PART = re.compile(r"\..*\.(\d+)(\.[0-9a-f]{16})?\.part")  # with the process that writes it
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def make_folder(folder: str | Path) -> Path:
    """Return the folder, made if it was not there: done before the work whose results go into it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be made ({error.strerror}). Name another.") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"the folder {folder} cannot be written to. Name another.")
    return folder


def make_parent_folder(file: Path) -> None:
    """Make the folder of a file, before the work whose result it is, and see that it is no folder itself.

    Standard output (`-`), devices and pipes need no folder.

    >>> make_parent_folder(Path("."))
    Traceback (most recent call last):
    metabridge.errors.InputError: . is a folder. Name a file.
    """
    if file.is_dir():
        raise InputError(f"{file} is a folder. Name a file.")
    if str(file) != STDOUT and not (file.exists() and not file.is_file()):
        make_folder(Path(os.path.realpath(file)).parent)


def read_regular_file(file: Path) -> bytes:
    """Return what a regular file holds; an `OSError` if it is a pipe or a device, which might never end.

    >>> read_regular_file(Path("/dev/null"))
    Traceback (most recent call last):
    OSError: [Errno 22] Not a regular file: '/dev/null'
    """
    _check_regular(file, os.stat(file).st_mode)
    # What took the file's place in the meantime must not block.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_regular(file, os.fstat(descriptor).st_mode)
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(descriptor)


def _check_regular(file: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(file))


def write_atomically(file: Path, content: bytes, *, follow: bool = True) -> Path:
    """Write a file under another name first, so that no reader ever sees half of it, and return it.

    The target of a symbolic link is replaced, not the link. What is not a regular file, such as a pipe or
    /dev/stdout, is never replaced: the content is streamed to it. The mode of an existing file is kept.

    If `follow` is false, a link, pipe or device is replaced by the file. Use it for files in a run's folder, where a
    stranger may have put a link to a file elsewhere.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "note.txt"), b"whole").read_bytes()
    b'whole'
    """
    try:
        there = _stat(file, follow)
        if not follow:
            _replace(file, content, there if there is not None and stat.S_ISREG(there.st_mode) else None)
        elif there is not None and _is_stdout(there):
            _write_stdout(content)
        elif there is not None and not stat.S_ISREG(there.st_mode):
            _stream(file, there, content)
        else:
            _replace(Path(os.path.realpath(file)), content, there)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}). Name another folder, or free space.") from error
    return file


def write_output(destination: str | Path, content: bytes) -> None:
    """Write the one file that a command was asked for: to standard output if `destination` is "-"."""
    if str(destination) != STDOUT:
        write_atomically(Path(destination), content)
        return
    try:
        _write_stdout(content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"standard output cannot be written ({error.strerror}). Name a file.") from error


def _stat(file: Path, follow: bool = True) -> os.stat_result | None:
    try:
        return os.stat(file, follow_symlinks=follow)
    except FileNotFoundError:
        return None


def _is_stdout(there: os.stat_result) -> bool:
    """Whether a path such as /dev/stdout leads to where standard output goes, be it a file."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard output may be closed or no file
        return os.path.samestat(there, os.fstat(sys.stdout.fileno()))
    return False


def _write_stdout(content: bytes) -> None:
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    sys.stdout.flush()
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:  # a notebook's takes text alone
        sys.stdout.write(content.decode())
    else:
        stream.write(content)
    sys.stdout.flush()


def _stream(file: Path, there: os.stat_result, content: bytes) -> None:
    if not (stat.S_ISCHR(there.st_mode) or stat.S_ISFIFO(there.st_mode)):
        raise InputError(f"{file} is neither a regular file nor a pipe. Name a file.")
    with open(os.open(file, os.O_WRONLY | getattr(os, "O_NOCTTY", 0)), "wb") as stream:
        stream.write(content)


def _replace(file: Path, content: bytes, there: os.stat_result | None) -> None:
    """Write next to the file and rename; after a crash there is the old content or the new."""
    part = file.with_name(f".{file.name[:40]}.{os.getpid()}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(part, flags, 0o666)  # less the umask
    try:
        with open(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        if there is not None:
            with contextlib.suppress(OSError):  # some file systems have no modes
                os.chmod(part, stat.S_IMODE(there.st_mode))
        os.replace(part, file)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a crash, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class FolderLock:
    """The right to write to a folder, held by one process and one object in it until `release`.

    The kernel releases the lock of a process that dies, so that none is ever stale. Reading needs no lock. With the
    lock taken, part files that killed processes left in the folder are removed.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, FolderLock(folder):
    ...     FolderLock(folder)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    metabridge.errors.InputError: the folder ... is in use by process ... Wait for its end, or name another folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = make_folder(folder)
        try:
            descriptor = self._acquire(self.folder / LOCK)
        except OSError as error:
            raise InputError(
                f"the folder {folder} cannot be locked ({error.strerror}). Name another folder."
            ) from error
        self._own = os.fstat(descriptor)
        self.release = weakref.finalize(self, _release, descriptor, self.folder / LOCK, os.getpid())
        _remove_parts(self.folder)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Refuse to go on if the folder was moved or removed: that of the same name may be of another process."""
        there = _stat(self.folder / LOCK, follow=False)
        if there is None or not os.path.samestat(there, self._own):
            raise InputError(
                f"the folder {self.folder} is not the one that was locked: it, or its {LOCK}, was moved or removed. "
                "Begin again, or name another folder."
            )

    def _acquire(self, file: Path) -> int:
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise InputError(f"{file} is no regular file. Remove it, or name another folder.")
                if not _try_lock(descriptor):
                    self._refuse(descriptor)
                there = _stat(file)
                if there is not None and os.path.samestat(there, os.fstat(descriptor)):
                    holder = {
                        "pid": os.getpid(),
                        "host": socket.gethostname(),
                        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
                        "command": shlex.join(sys.argv),
                    }
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, json.dumps(holder).encode())
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the holder released and removed the file between the two calls: try the new one

    def _refuse(self, descriptor: int) -> NoReturn:
        try:
            told = json.loads(os.read(descriptor, 100_000))
            holder = f"process {told['pid']} on {told['host']} since {told['since']} ({told['command']!r})"
        except (OSError, *PARSING_ERRORS):  # it has not yet written who it is
            holder = "another process"
        raise InputError(f"the folder {self.folder} is in use by {holder}. Wait for its end, or name another folder.")


def _try_lock(descriptor: int) -> bool:
    """Lock an open file unless another has; where the file system has no locks, warn and go on without."""
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, 2**30, os.SEEK_SET)  # far from what the file says, which others read
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            log.warning("this file system has no locks (%s): let only one process write to a folder.", error.strerror)
            return True
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


def _release(descriptor: int, file: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child only closes its copy
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(file), os.fstat(descriptor)):  # else the folder was moved: it is another's
                file.unlink()  # while it is locked: whoever opened it before sees that it is gone
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _remove_parts(folder: Path) -> None:
    """Remove the part files of processes that are gone."""
    with contextlib.suppress(OSError):
        for file in list(folder.iterdir()):
            found = _PART.fullmatch(file.name)
            if found and not _alive(int(found[1])):
                with contextlib.suppress(OSError):
                    file.unlink()


def _alive(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # a signal would end it
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def json_bytes(value: object, indent: int | None = None) -> bytes:
    r"""Return a value as a line of JSON in UTF-8; in names, bytes that are no UTF-8 are escaped and read back the same.

    >>> json_bytes(["é", "caf\udce9"])
    b'["\xc3\xa9", "caf\\udce9"]\n'
    """
    return f"{json.dumps(value, indent=indent, ensure_ascii=False)}\n".encode(errors="backslashreplace")
