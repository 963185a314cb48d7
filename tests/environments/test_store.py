import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from metabridge.environments import store
from metabridge.environments.decode import Form
from metabridge.environments.source import Category, Picture, Source
from metabridge.environments.store import Stored, fingerprint, stored
from metabridge.errors import InputError
from pictures import encoded, flat

FORM = Form(size=8, channels=1)
CLASSES = (Category("cat", "animals", "train"), Category("yeti", "animals", "train"), Category("oak", "trees", "test"))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source_of(*pictures: Picture, classes: tuple[Category, ...] = CLASSES) -> Source:
    return Source("a toy", classes, len(pictures), lambda: iter(pictures))


def good() -> Source:
    return source_of(
        *(Picture(f"{label}/{n}.png", label, encoded(flat(10 * label + n))) for label in (0, 2) for n in range(3))
    )


def faulty() -> Source:
    return source_of(
        Picture("cat/1.png", 0, flat(7)), Picture("cat/2.png", 0, b"no image"), Picture("oak/1.png", 2, flat(9))
    )


def never() -> Source:
    raise AssertionError("the files were read again")


def test_what_was_decoded_once_is_mapped_from_then_on(folder):
    first, again = stored("toy", "key", FORM, good), stored("toy", "key", FORM, never)
    assert first.images.flatten(1).float().mean(dim=1).tolist() == [0, 1, 2, 20, 21, 22]
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert first.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert first.classes == again.classes == (CLASSES[0], CLASSES[2])
    assert first.empty == again.empty == ("yeti",)


def test_another_key_size_or_number_of_channels_is_another_entry(folder):
    stored("toy", "key", FORM, good)
    for key, form in [("other", FORM), ("key", Form(4, 1)), ("key", Form(8, 3))]:
        with pytest.raises(AssertionError, match="read again"):
            stored("toy", key, form, never)


def test_changed_images_in_memory_leave_the_store_as_it_was(folder):
    stored("toy", "key", FORM, good).images.fill_(99)
    assert stored("toy", "key", FORM, never).images.max() == 22


@pytest.mark.parametrize("end", ["pixels", "json"])
@pytest.mark.parametrize("how", ["missing", "empty", "cut short", "too long"])
def test_a_damaged_entry_is_decoded_again(folder, end, how):
    whole = stored("toy", "key", FORM, good).images.clone()
    (file,) = folder.glob(f"*.{end}")
    content = file.read_bytes()
    file.unlink()  # A mapped file must not be cut under the eyes of its readers.
    if how != "missing":
        file.write_bytes({"empty": b"", "cut short": content[: len(content) // 2], "too long": content + b"0"}[how])
    assert torch.equal(stored("toy", "key", FORM, good).images, whole)
    assert torch.equal(stored("toy", "key", FORM, never).images, whole)


def test_a_process_killed_while_decoding_leaves_nothing_that_is_believed(folder):
    script = textwrap.dedent("""
        import os, signal
        from metabridge.environments.decode import Form
        from metabridge.environments.source import Category, Picture, Source
        from metabridge.environments.store import stored
        import numpy as np

        def pictures():
            for index in range(5000):
                yield Picture(str(index), 0, np.zeros((8, 8), dtype=np.uint8))
            os.kill(os.getpid(), signal.SIGKILL)

        stored("toy", "key", Form(8, 1), lambda: Source("toy", (Category("cat", "", "train"),), 5000, pictures))
    """)
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL
    left = list(folder.iterdir())
    assert left
    assert all(file.suffix == ".part" for file in left)
    assert len(stored("toy", "key", FORM, good).images) == 6
    for file in left:
        os.utime(file, (0, 0))
    stored("toy", "key", FORM, never)
    for file in folder.glob("*.json"):
        file.unlink()
    stored("toy", "key", FORM, good)
    assert not list(folder.glob("*.part"))


def test_unreadable_images_and_empty_classes_are_left_out_and_named_in_a_warning(folder, caplog):
    with caplog.at_level(logging.WARNING, "metabridge"):
        images = stored("toy", "key", FORM, faulty).labelled()
    assert [record.getMessage() for record in caplog.records] == [
        "1 unreadable image is left out: cat/2.png (it is not an image that Pillow reads).",
        "1 class without a readable image is left out: 'yeti'.",
    ]
    assert images.class_names == ("cat", "oak")
    assert images.labels.tolist() == [0, 1]
    assert images.superclass_names == ("animals", "trees")


def test_strict_refuses_what_would_be_left_out_also_when_it_comes_from_the_store(folder):
    for gather in (faulty, never):
        with pytest.raises(InputError) as caught:
            stored("toy", "key", FORM, gather).labelled(strict=True)
        assert str(caught.value) == (
            "1 unreadable image is left out: cat/2.png (it is not an image that Pillow reads). "
            "Mend or remove what is named, or load without strict."
        )
    with pytest.raises(InputError, match="class without a readable image is left out: 'yeti'"):
        stored("toy", "other", FORM, good).labelled(strict=True)


def test_a_long_list_of_unreadable_images_is_cut(folder):
    bad = source_of(*(Picture(f"{n}.png", 0, b"") for n in range(50)), Picture("good.png", 0, flat(1)))
    (told, _) = stored("toy", "key", FORM, lambda: bad).troubles()
    assert told.startswith("50 unreadable images are left out: 0.png (it is not an image that Pillow reads), 1.png")
    assert told.endswith("4.png (it is not an image that Pillow reads) and 45 more.")


def test_without_a_single_readable_image_there_is_an_error_and_no_entry(folder):
    with pytest.raises(
        InputError, match=r"toy has no image that can be read \(1 tried; a.png: it is not an image that Pillow reads\)"
    ):
        stored("toy", "key", FORM, lambda: source_of(Picture("a.png", 0, b"")))
    assert not list(folder.iterdir())


def test_classes_with_too_few_images_are_in_no_split():
    held = Stored(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1, 2, 2]), CLASSES)
    splits = {split: members.tolist() for split, members in held.labelled(min_images=2).splits.items()}
    assert splits == {"train": [0], "test": [2]}
    with pytest.raises(InputError, match=r"min_images is 3, but the largest class has 2 images\. Use min_images=2 or"):
        held.labelled(min_images=3)


def test_a_cache_that_is_no_folder_is_named_before_anything_is_decoded(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match=r"cannot be kept in .*file/cache \(Not a directory\).* METABRIDGE_CACHE\.$"):
        stored("toy", "key", FORM, never)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_is_named(folder):
    folder.mkdir()
    folder.chmod(0o500)
    with pytest.raises(InputError, match=r"cannot be kept in .*cache \(Permission denied\).* METABRIDGE_CACHE\.$"):
        stored("toy", "key", FORM, never)


def test_a_read_only_file_system_is_named_but_what_it_holds_is_read(folder, monkeypatch):
    whole = stored("toy", "key", FORM, good)

    def read_only(path: Path, mode: str = "r", *arguments: object, **options: object) -> object:
        if "w" in mode:
            raise OSError(errno.EROFS, "Read-only file system")
        return open(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", read_only)
    assert torch.equal(stored("toy", "key", FORM, never).images, whole.images)
    with pytest.raises(InputError, match=r"cannot be kept in .*cache \(Read-only file system\).* METABRIDGE_CACHE\.$"):
        stored("toy", "other", FORM, never)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_is_told_and_nothing_half_written_stays(folder, monkeypatch, fails):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(InputError, match=r"\(No space left on device\). Free space there, or name a folder"):
        stored("toy", "key", FORM, good)
    assert not list(folder.iterdir())


def test_a_write_that_the_system_refuses_midway_leaves_nothing(folder):
    many = source_of(*(Picture(str(n), 0, flat(n)) for n in range(200)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(InputError, match=r"\(File too large\). Free space there"):
            stored("toy", "key", Form(64, 1), lambda: many)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(folder.iterdir())


def test_the_index_says_what_was_stored(folder):
    stored("toy", "key", FORM, faulty)
    (index,) = folder.glob("*.json")
    held = json.loads(index.read_text())
    assert (held["shape"], held["labels"], held["skipped"]) == (
        [2, 1, 8, 8],
        [0, 1],
        [["cat/2.png", "it is not an image that Pillow reads"]],
    )


def test_few_files_are_keyed_by_their_contents_and_many_by_their_dates(tmp_path, monkeypatch):
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(b"one")
    by_content = fingerprint(files, tmp_path)
    os.utime(files[0], (1, 1))
    assert fingerprint(files, tmp_path) == by_content
    files[0].write_bytes(b"two")
    assert fingerprint(files, tmp_path) != by_content
    monkeypatch.setattr(store, "HASHED_FILES", 1)
    by_date = fingerprint(files, tmp_path)
    os.utime(files[0], (2, 2))
    assert fingerprint(files, tmp_path) != by_date
    by_date = fingerprint(files, tmp_path)
    os.utime(files[1].rename(tmp_path / "c"), (2, 2))
    assert fingerprint([files[0], tmp_path / "c"], tmp_path) != by_date


def test_the_key_of_a_tree_does_not_tell_where_it_lies(tmp_path, monkeypatch):
    keys = set()
    for place in ("here", "there/deeper"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.png").write_bytes(b"one")
        keys.add(fingerprint([tmp_path / place / "a.png"], tmp_path / place))
    monkeypatch.chdir(tmp_path / "here")
    keys.add(fingerprint([Path("a.png")], Path()))
    assert len(keys) == 1


def test_a_link_to_nothing_does_not_stop_the_key(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "gone.png")
    assert fingerprint([tmp_path / "a.png"], tmp_path) != fingerprint([], tmp_path)
