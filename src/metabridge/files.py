"""Atomic file writes, and folder locks that prevent several processes from writing to the same folder."""

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
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NoReturn

from metabridge.errors import PARSING_ERRORS, InputError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

log = logging.getLogger("metabridge")

STDOUT = "-"  # path that stands for standard output
LOCK_FILE = ".lock"
# Earlier versions wrote names without the 16 hexadecimal digits.
_TEMPORARY_NAME = re.compile(r"\..*\.(\d+)(\.[0-9a-f]{16})?\.part")  # group 1 is the ID of the writing process
_UNSUPPORTED_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def make_folder(folder: str | Path) -> Path:
    """Create a folder and its parents if they do not exist, check that it is writable, and return its path.

    Call this before a long computation, so that an unusable output folder raises an error immediately.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be created ({error.strerror}). Choose another folder.") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"the folder {folder} is not writable. Choose another folder.")
    return folder


def make_parent_folder(file: Path) -> None:
    """Create the parent folder of an output file; raise `InputError` if `file` is an existing folder.

    Nothing is created for standard output (`-`), devices and pipes.

    >>> make_parent_folder(Path("."))
    Traceback (most recent call last):
    metabridge.errors.InputError: . is a folder. Choose a file.
    """
    if file.is_dir():
        raise InputError(f"{file} is a folder. Choose a file.")
    if str(file) != STDOUT and not (file.exists() and not file.is_file()):
        make_folder(Path(os.path.realpath(file)).parent)


def read_regular_file(file: Path) -> bytes:
    """Return the content of a regular file; raise `OSError` for a folder, a pipe or a device.

    Reading a pipe or a device might block forever.

    >>> read_regular_file(Path("/dev/null"))
    Traceback (most recent call last):
    OSError: [Errno 22] Not a regular file: '/dev/null'
    """
    _check_regular(file, os.stat(file).st_mode)
    # O_NONBLOCK: do not block if a pipe has replaced the file since the check.
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
    """Write a file atomically and return its path: other processes read either the old or the new content.

    If `file` is a symlink, its target is replaced, not the symlink. If `file` is a pipe, a character device or the file
    to which standard output is redirected (such as /dev/stdout), the content is streamed to it. An existing file keeps
    its permissions.

    If `follow` is false, a symlink, pipe or device is itself replaced by the new file. Use this in folders that may
    come from untrusted sources, such as a run folder, where a symlink could point to any file.

    Raises:
        InputError: If the file cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "note.txt"), b"content").read_bytes()
    b'content'
    """
    try:
        status = _stat(file, follow)
        if not follow:
            _replace(file, content, status if status is not None and stat.S_ISREG(status.st_mode) else None)
        elif status is not None and _is_stdout(status):
            _write_stdout(content)
        elif status is not None and not stat.S_ISREG(status.st_mode):
            _write_stream(file, status, content)
        else:
            _replace(Path(os.path.realpath(file)), content, status)
    except OSError as error:
        raise InputError(
            f"{file} cannot be written ({error.strerror}). Choose another folder, or free disk space."
        ) from error
    return file


def write_output(destination: str | Path, content: bytes) -> None:
    """Write to a file, or to standard output if `destination` is "-"."""
    if str(destination) != STDOUT:
        write_atomically(Path(destination), content)
        return
    try:
        _write_stdout(content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"standard output cannot be written ({error.strerror}). Choose a file.") from error


@contextlib.contextmanager
def atomic_writer(file: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file next to `file`, and rename it to `file` when the `with` block ends without an error.

    The content is flushed to disk before the rename, so that after a crash `file` has either its old or its new
    content. If the block raises an error, the temporary file is removed and `file` does not change. `mode` sets the
    permissions of the new file (default: determined by the umask).

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with atomic_writer(Path(folder, "images.npz")) as stream:
    ...         _ = stream.write(b"content")
    ...     Path(folder, "images.npz").read_bytes()
    b'content'
    """
    temporary = file.with_name(f".{file.name[:40]}.{os.getpid()}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(descriptor)
        if mode is not None:
            with contextlib.suppress(OSError):  # some file systems do not support permissions
                os.chmod(temporary, mode)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(file.parent)


def _stat(file: Path, follow: bool = True) -> os.stat_result | None:
    try:
        return os.stat(file, follow_symlinks=follow)
    except FileNotFoundError:
        return None


def _is_stdout(status: os.stat_result) -> bool:
    """Return whether `status` describes the file or pipe to which standard output is redirected."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard output may be closed or replaced
        return os.path.samestat(status, os.fstat(sys.stdout.fileno()))
    return False


def _write_stdout(content: bytes) -> None:
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    sys.stdout.flush()
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:  # in notebooks, standard output accepts only text
        sys.stdout.write(content.decode())
    else:
        stream.write(content)
    sys.stdout.flush()


def _write_stream(file: Path, status: os.stat_result, content: bytes) -> None:
    if not (stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
        raise InputError(f"{file} is neither a regular file nor a pipe. Choose a file.")
    with open(os.open(file, os.O_WRONLY | getattr(os, "O_NOCTTY", 0)), "wb") as stream:
        stream.write(content)


def _replace(file: Path, content: bytes, status: os.stat_result | None) -> None:
    with atomic_writer(file, mode=None if status is None else stat.S_IMODE(status.st_mode)) as stream:
        stream.write(content)


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename survives a crash, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class FolderLock:
    """An exclusive lock for writing to a folder.

    The lock is held until `release` is called, the `with` block ends or the object is deleted. The operating system
    releases the lock of a process that dies, so a lock is never stale. Reading needs no lock. If the file system does
    not support locks, a warning is logged and the folder is not locked. Acquiring a lock also removes the temporary
    files that killed processes left in the folder (not on Windows).

    Raises:
        InputError: If another `FolderLock` holds the lock, or the folder cannot be created, written to or locked.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, FolderLock(folder):
    ...     FolderLock(folder)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    metabridge.errors.InputError: the folder ... is in use by process ... Wait for it to finish, or choose another ...
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = make_folder(folder)
        try:
            descriptor = self._acquire(self.folder / LOCK_FILE)
        except OSError as error:
            raise InputError(
                f"the folder {folder} cannot be locked ({error.strerror}). Choose another folder."
            ) from error
        self._status = os.fstat(descriptor)
        self.release = weakref.finalize(self, _release, descriptor, self.folder / LOCK_FILE, os.getpid())
        _remove_temporary_files(self.folder)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Check that the folder at this path is still the one that was locked.

        Raises:
            InputError: If the folder or its lock file was moved, removed or replaced.
        """
        status = _stat(self.folder / LOCK_FILE, follow=False)
        if status is None or not os.path.samestat(status, self._status):
            raise InputError(
                f"the folder {self.folder} is not the one that was locked: the folder or its {LOCK_FILE} file was "
                "moved or removed. Start again, or choose another folder."
            )

    def _acquire(self, file: Path) -> int:
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise InputError(f"{file} is not a regular file. Remove it, or choose another folder.")
                if not _try_lock(descriptor):
                    self._raise_in_use(descriptor)
                status = _stat(file)
                if status is not None and os.path.samestat(status, os.fstat(descriptor)):
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
            # the previous holder removed this lock file after it was opened here: open the new one
            os.close(descriptor)

    def _raise_in_use(self, descriptor: int) -> NoReturn:
        try:
            holder = json.loads(os.read(descriptor, 100_000))
            description = f"process {holder['pid']} on {holder['host']} since {holder['since']} ({holder['command']!r})"
        except (OSError, *PARSING_ERRORS):  # the holder has not written the lock file yet
            description = "another process"
        raise InputError(
            f"the folder {self.folder} is in use by {description}. Wait for it to finish, or choose another folder."
        )


def _try_lock(descriptor: int) -> bool:
    """Try to lock an open file, and return whether it is locked. If locks are not supported, warn and return true."""
    try:
        if sys.platform == "win32":
            # lock a byte beyond the content, so that the content stays readable
            os.lseek(descriptor, 2**30, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED_LOCK_ERRNOS:
            log.warning(
                "This file system does not support locks (%s): make sure that only one process writes to each folder.",
                error.strerror,
            )
            return True
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


def _release(descriptor: int, file: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must only close its copy of the descriptor
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(file), os.fstat(descriptor)):  # false if the folder was moved
                file.unlink()  # before unlocking, so that a process that has opened the file notices the removal
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files of processes that are no longer running."""
    with contextlib.suppress(OSError):
        for file in list(folder.iterdir()):
            match = _TEMPORARY_NAME.fullmatch(file.name)
            if match and not _is_running(int(match[1])):
                with contextlib.suppress(OSError):
                    file.unlink()


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # unknown, because os.kill would terminate the process
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def json_bytes(value: object, indent: int | None = None) -> bytes:
    r"""Serialize a value as JSON in UTF-8 with a final newline.

    Surrogates, which Python uses for invalid UTF-8 in file names, are escaped and can be read back.

    >>> json_bytes(["é", "caf\udce9"])
    b'["\xc3\xa9", "caf\\udce9"]\n'
    """
    return f"{json.dumps(value, indent=indent, ensure_ascii=False)}\n".encode(errors="backslashreplace")
