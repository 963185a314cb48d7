from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from metabridge import InputError, files
from metabridge.files import FolderLock, make_parent_folder, write_atomically, write_output

POSIX = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX files")


def python(program: str, *arguments: object, **options) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


@POSIX
def test_writing_to_a_link_replaces_its_target_and_keeps_the_link(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("old", "new"):
        target, link = tmp_path / "there" / name, tmp_path / f"link to {name}"
        link.symlink_to(target)
        if name == "old":
            target.write_bytes(b"old")
        write_atomically(link, b"content")
        assert link.is_symlink()
        assert target.read_bytes() == b"content"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(InputError, match="loop cannot be written"):
        write_atomically(loop, b"content")
    assert loop.is_symlink()


@POSIX
def test_pipes_and_terminals_receive_the_content_and_folders_are_refused(tmp_path):
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"content")
    reader.join()
    assert received == [b"content"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    master, slave = os.openpty()
    link = tmp_path / "terminal"
    link.symlink_to(os.ttyname(slave))
    write_atomically(link, b"content")
    assert os.read(master, 100) == b"content"
    assert link.is_symlink()
    assert stat.S_ISCHR(link.stat().st_mode)
    os.close(master)
    os.close(slave)
    with pytest.raises(InputError, match=r"is neither a regular file nor a pipe\. Choose a file\."):
        write_atomically(tmp_path, b"content")


WRITE_STDOUT_PROGRAM = """
import sys
from metabridge.files import write_output
print("before")
write_output(sys.argv[1], b"content\\n")
print("after")
"""


@POSIX
@pytest.mark.parametrize("name", ["-", "link"])
@pytest.mark.parametrize("to_file", [False, True])
def test_standard_output_is_written_in_order_and_is_not_replaced(tmp_path, name, to_file):
    if name == "link":
        name = str(tmp_path / "link")
        Path(name).symlink_to("/dev/stdout")
    with (tmp_path / "printed").open("wb") as file:
        file.write(b"first\n")
        file.flush()
        command = [sys.executable, "-c", WRITE_STDOUT_PROGRAM, name]
        process = subprocess.run(command, stdout=file if to_file else subprocess.PIPE)
    assert process.returncode == 0
    printed = (tmp_path / "printed").read_bytes().removeprefix(b"first\n") if to_file else process.stdout
    assert printed == b"before\ncontent\nafter\n"
    assert Path("/dev/stdout").is_symlink()


def test_output_goes_to_a_file_or_to_standard_output(tmp_path, capsys):
    write_output(tmp_path / "table.csv", b"a,b\n")
    assert (tmp_path / "table.csv").read_bytes() == b"a,b\n"
    write_output("-", "ü\n".encode())
    assert capsys.readouterr().out == "ü\n"
    make_parent_folder(Path("-"))
    make_parent_folder(Path("/dev/stdout"))
    make_parent_folder(tmp_path / "new" / "table.csv")
    assert (tmp_path / "new").is_dir()


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    names = set()
    original_open = os.open

    def plant(path, flags, *arguments):
        if str(path).endswith(".part"):
            names.add(path)
            os.symlink(victim, path)
        return original_open(path, flags, *arguments)

    monkeypatch.setattr(os, "open", plant)
    for _ in range(2):
        with pytest.raises(InputError, match=r"cannot be written \(File exists\)"):
            write_atomically(tmp_path / "file", b"content")
    assert victim.read_bytes() == b"precious"
    assert len(names) == 2  # the name cannot be predicted


@POSIX
def test_an_existing_file_keeps_its_mode_and_a_new_file_follows_the_umask(tmp_path):
    for mode in (0o600, 0o640, 0o755):
        file = tmp_path / f"{mode:o}"
        file.write_bytes(b"old")
        file.chmod(mode)
        write_atomically(file, b"new")
        assert stat.S_IMODE(file.stat().st_mode) == mode
    previous_umask = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", b"new")
    finally:
        os.umask(previous_umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_readers_see_complete_files_while_several_threads_write(tmp_path):
    file, contents = tmp_path / "file", [bytes([65 + index]) * 200_000 for index in range(4)]
    write_atomically(file, contents[0])
    errors: list[BaseException] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(25):
                write_atomically(file, content)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=[content]) for content in contents]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        seen.add(file.read_bytes())
    assert not errors
    assert seen <= set(contents)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_content_is_flushed_to_disk_before_the_rename(tmp_path, monkeypatch):
    calls: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("sync"), sync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    write_atomically(tmp_path / "file", b"content")
    assert calls[:2] == ["sync", "replace"]


HOLD_LOCK_PROGRAM = """
import sys
from metabridge.files import FolderLock
lock = FolderLock(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_locked_folder_is_refused_until_the_process_that_holds_the_lock_ends(tmp_path):
    for end in (lambda holder: holder.stdin.close(), lambda holder: holder.kill()):
        with python(HOLD_LOCK_PROGRAM, tmp_path) as holder:
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(InputError) as caught:
                FolderLock(tmp_path)
            match = re.fullmatch(
                rf"the folder {tmp_path} is in use by process {holder.pid} on \S+ since \d{{4}}-\S+ \S+ \(.*-c.*\)\. "
                r"Wait for it to finish, or choose another folder\.",
                str(caught.value),
            )
            assert match, caught.value
            end(holder)
            holder.wait()
        FolderLock(tmp_path).release()
        assert not list(tmp_path.iterdir())


def test_one_thread_at_a_time_holds_the_lock(tmp_path):
    holders, holder_counts, refusals, barrier = [], [], [], threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(50):
            try:
                with FolderLock(tmp_path):
                    holders.append(1)
                    holder_counts.append(len(holders))
                    holders.pop()
            except InputError as error:
                refusals.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(holder_counts) == {1}
    assert len(holder_counts) + len(refusals) == 400
    assert all("is in use by" in message for message in refusals)


def test_a_lock_file_removed_during_locking_is_created_again(tmp_path, monkeypatch):
    calls, try_lock = [], files._try_lock

    def remove_and_lock(descriptor: int) -> bool:
        if not calls:
            (tmp_path / files.LOCK_FILE).unlink()
        calls.append(descriptor)
        return try_lock(descriptor)

    monkeypatch.setattr(files, "_try_lock", remove_and_lock)
    with FolderLock(tmp_path), pytest.raises(InputError, match=f"is in use by process {os.getpid()} on"):
        FolderLock(tmp_path)


def test_deleting_a_lock_object_releases_the_lock(tmp_path):
    lock = FolderLock(tmp_path)
    del lock
    FolderLock(tmp_path).release()


@POSIX
@pytest.mark.parametrize("text", ["", "7", "{}", "[" * 100_000, '{"pid": 1, "host": 2}'])
def test_a_damaged_lock_file_is_reported_as_held_by_another_process(tmp_path, text):
    with FolderLock(tmp_path):
        (tmp_path / ".lock").write_text(text)
        with pytest.raises(InputError, match="is in use by another process"):
            FolderLock(tmp_path)


@POSIX  # Windows does not move a folder that contains an open file
def test_a_lock_does_not_cover_a_new_folder_in_place_of_the_moved_one(tmp_path):
    run, old_lock = tmp_path / "run", FolderLock(tmp_path / "run")
    old_lock.check()
    run.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"run is not the one that was locked: .* Start again, or choose another"):
        old_lock.check()
    with FolderLock(run) as new_lock:
        with pytest.raises(InputError, match="is not the one that was locked"):
            old_lock.check()
        old_lock.release()
        new_lock.check()
        with pytest.raises(InputError, match="is in use by"):
            FolderLock(run)


def test_releasing_a_lock_with_a_relative_path_after_chdir_leaves_other_locks(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    lock = FolderLock("run")
    monkeypatch.chdir("elsewhere")
    with FolderLock("run") as other_lock:  # of the folder elsewhere/run
        lock.release()
        other_lock.check()


def test_a_link_or_pipe_in_place_of_the_lock_file_is_refused(tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / files.LOCK_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match="cannot be locked"):
        FolderLock(tmp_path)
    assert (tmp_path / "victim").read_bytes() == b"precious"
    (tmp_path / files.LOCK_FILE).unlink()
    os.mkfifo(tmp_path / files.LOCK_FILE)
    with pytest.raises(InputError, match="is not a regular file"):
        FolderLock(tmp_path)


KILLED_WRITER_PROGRAM = """
import os, signal, sys
from pathlib import Path
from metabridge.files import write_atomically
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), b"content")
"""


@POSIX
def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    with python(KILLED_WRITER_PROGRAM, tmp_path / "weights") as killed:
        assert killed.wait() == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    old = tmp_path / f".state.{killed.pid}.part"  # the naming scheme of earlier versions
    of_this_process = [tmp_path / f".state.{os.getpid()}.part", tmp_path / f".state.{os.getpid()}.{'0' * 16}.part"]
    others = [tmp_path / "download.part", tmp_path / ".film.part"]
    for file in (old, *of_this_process, *others):
        file.touch()
    with FolderLock(tmp_path):
        pass
    assert set(tmp_path.iterdir()) == {*of_this_process, *others}
    assert leftover.name.startswith(".weights.")


def test_a_file_system_without_support_for_locks_gives_a_warning(tmp_path, monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")

    def unsupported(*_):
        raise OSError(files.errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / files.LOCK_FILE).read_text())["command"] == shlex.join(sys.argv)
    assert "does not support locks (Operation not supported)" in caplog.text


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path):
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    program = """
import os, sys
from metabridge.files import FolderLock
lock = FolderLock(sys.argv[1])
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print(os.path.exists(os.path.join(sys.argv[1], ".lock")))
"""
    with python(program, tmp_path) as parent:
        assert parent.stdout.read() == "True\n"
    with contextlib.closing(parent.stdin):
        assert not list(tmp_path.iterdir())


@POSIX
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_replaced_if_follow_is_false(tmp_path, kind):
    victim, file = tmp_path / "victim", tmp_path / "metrics.jsonl"
    victim.write_bytes(b"mine")
    if kind == "link":
        file.symlink_to(victim)
    else:
        os.mkfifo(file)
    write_atomically(file, b"written", follow=False)
    assert victim.read_bytes() == b"mine"
    assert stat.S_ISREG(file.lstat().st_mode)
    assert file.read_bytes() == b"written"


@POSIX
def test_a_pipe_is_not_opened_for_reading(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "settings.json")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(OSError, match="Not a regular file"):
        files.read_regular_file(tmp_path / "settings.json")


@POSIX
def test_a_pipe_that_replaces_a_file_before_opening_does_not_block(tmp_path, monkeypatch):
    regular_status, file = os.stat(__file__), tmp_path / "settings.json"
    os.mkfifo(file)
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular_status)
    with pytest.raises(OSError, match="Not a regular file"):
        files.read_regular_file(file)
