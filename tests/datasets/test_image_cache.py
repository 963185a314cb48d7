import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from metabridge.datasets import image_cache
from metabridge.datasets.image_cache import Stored, fingerprint, stored
from metabridge.datasets.image_decoding import Form
from metabridge.datasets.image_files import Category, Picture, Source
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
        from metabridge.datasets.image_decoding import Form
        from metabridge.datasets.image_files import Category, Picture, Source
        from metabridge.datasets.image_cache import stored
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
        if "x" in mode:
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
    monkeypatch.setattr(image_cache, "HASHED_FILES", 1)
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


def corruptions(content: bytes, count: int) -> list[bytes]:
    """The content with bytes changed, exchanged, moved, cut or added."""
    chance, found = random.Random(0), []
    while len(found) < count:
        changed = bytearray(content)
        one, other = sorted(chance.sample(range(len(content)), 2))
        match chance.randrange(6):
            case 0:
                changed[one] ^= 1 << chance.randrange(8)
            case 1:
                changed[one], changed[other] = changed[other], changed[one]
            case 2:
                del changed[one:other]
            case 3:
                changed[one:one] = content[one:other]
            case 4:
                changed[one:other] = bytes(other - one)
            case 5:
                changed[one:other] = reversed(changed[one:other])
        if changed != content:
            found.append(bytes(changed))
    return found


def facts(held: Stored) -> tuple[object, ...]:
    return (held.images.tolist(), held.labels.tolist(), held.classes, held.empty, held.skipped, held.notes, held.same)


def varied() -> Source:
    """Pictures of which no two bytes next to each other are equal."""
    chance = random.Random(1)
    pictures = [
        Picture(
            f"{label}.png", label, torch.randint(256, (8, 8), generator=torch.Generator().manual_seed(label)).byte()
        )
        for label in (0, 2)
        for _ in range(3)
    ]
    chance.shuffle(pictures)
    return source_of(*(picture._replace(content=picture.content.numpy()) for picture in pictures))


@pytest.mark.parametrize("end", ["pixels", "json"])
def test_no_corruption_of_an_entry_gives_other_data(folder, monkeypatch, end):
    monkeypatch.setattr(image_cache, "BLOCK", 100)  # several blocks
    expected = facts(stored("toy", "key", FORM, varied))
    (file,) = folder.glob(f"*.{end}")
    content = file.read_bytes()
    for corrupt in corruptions(content, 150):
        file.unlink()
        file.write_bytes(corrupt)
        assert facts(stored("toy", "key", FORM, varied)) == expected
        assert end == "json" or file.read_bytes() == content  # JSON may say the same in other words.


@pytest.mark.parametrize("missing", ["checksum", "blocks"])
def test_an_entry_without_checksums_is_decoded_again(folder, missing):
    stored("toy", "key", FORM, good)
    (index,) = folder.glob("*.json")
    held = json.loads(index.read_text())
    del held[missing]
    if missing == "blocks":
        held["checksum"] = image_cache._checksum({name: value for name, value in held.items() if name != "checksum"})
    index.write_text(json.dumps(held))
    with pytest.raises(AssertionError, match="read again"):
        stored("toy", "key", FORM, never)
    assert len(stored("toy", "key", FORM, good).images) == 6


@pytest.mark.parametrize(
    "wrong",
    [
        *({"labels": labels} for labels in (6 * [2], 6 * [-1], 5 * [0], 6 * [0.5], 6 * ["x"], 6 * [10**12])),
        *({"classes": classes} for classes in ([], 2 * [["a", "b", "no split"]], 2 * [["a", 7, "train"]])),
        *({"same": [[[row, "a"]]]} for row in (6, -1, "x")),
        {"shape": [0, 1, 8, 8], "labels": [], "same": []},
    ],
    ids=str,
)
def test_an_entry_that_was_made_up_is_decoded_again(folder, wrong):
    stored("toy", "key", FORM, good)
    (index,) = folder.glob("*.json")
    held = json.loads(index.read_text()) | wrong
    del held["checksum"]
    index.write_text(json.dumps({**held, "checksum": image_cache._checksum(held)}))
    assert len(stored("toy", "key", FORM, good).labelled().images) == 6


def test_an_entry_of_an_earlier_version_is_not_read(folder):
    stored("toy", "key", FORM, good)
    for file in list(folder.iterdir()):
        shutil.move(file, folder / file.name.replace(f"-v{image_cache.FORMAT}-", "-v1-"))
    with pytest.raises(AssertionError, match="read again"):
        stored("toy", "key", FORM, never)


def denied() -> bytes:
    raise PermissionError(errno.EACCES, "Permission denied", "cat/2.png")


def out_of_memory() -> bytes:
    raise MemoryError


@pytest.mark.parametrize(("failure", "reason"), [(denied, "Permission denied"), (out_of_memory, "not enough memory")])
def test_what_could_not_be_read_for_now_is_reported_and_read_once_it_can_be(folder, failure, reason):
    def gather(content: object) -> Source:
        return source_of(
            Picture("cat/1.png", 0, flat(7)), Picture("cat/2.png", 0, content), Picture("oak/1.png", 2, flat(9))
        )

    for _ in range(2):
        held = stored("toy", "key", FORM, lambda: gather(failure))
        assert len(held.images) == 2
        assert held.troubles()[0] == (
            f"1 unreadable image is left out: cat/2.png ({reason}). "
            "What the system did not let read is tried again on every load."
        )
    assert len(stored("toy", "key", FORM, lambda: gather(flat(8))).images) == 3
    assert len(stored("toy", "key", FORM, never).images) == 3


def test_a_failure_to_read_the_data_is_not_taken_for_one_to_write_the_cache(folder):
    def unreadable() -> Source:
        raise PermissionError(errno.EACCES, "Permission denied", "train.pkl")

    def fails() -> object:
        yield Picture("cat/1.png", 0, flat(7))
        raise OSError(errno.EIO, "Input/output error", "train.pkl")

    for gather in (unreadable, lambda: Source("a toy", CLASSES, 2, fails)):
        with pytest.raises(InputError, match=r"^train\.pkl cannot be read \(.*\)\. Fix or remove it\.$"):
            stored("toy", "key", FORM, gather)


def test_pictures_in_two_splits_are_reported_on_every_load(folder, caplog):
    def gather() -> Source:
        names = [("cat/1.png", 0, 7), ("cat/2.png", 0, 8), ("oak/1.png", 2, 7), ("oak/2.png", 2, 9)]
        return source_of(*(Picture(name, label, flat(value)) for name, label, value in names))

    for source in (gather, never):
        caplog.clear()
        held = stored("toy", "key", FORM, source)
        held.labelled()
        assert (
            "1 picture is in more than one split, so that accuracies may be too high: cat/1.png in train and "
            "oak/1.png in test. `metabridge data check` lists them."
        ) in caplog.text
    caplog.clear()
    stored("toy", "other", FORM, good).labelled()
    assert "more than one split" not in caplog.text


def test_equal_pictures_in_one_split_are_not_reported(folder, caplog):
    same = source_of(Picture("cat/1.png", 0, flat(7)), Picture("yeti/1.png", 1, flat(7)), Picture("oak", 2, flat(9)))
    stored("toy", "key", FORM, lambda: same).labelled()
    assert caplog.text == ""


def test_a_size_that_fits_neither_disk_nor_memory_is_refused_before_anything_is_decoded(folder, monkeypatch):
    def source() -> Source:
        return Source("a toy", CLASSES, 10**6, lambda: pytest.fail("an image was read"))

    usage = shutil.disk_usage("/")._replace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        InputError,
        match=r"1000000 images of 100 × 100 pixels take 9\.3 GiB, but .*cache has 1\.0 GiB free\. Use a smaller",
    ):
        stored("toy", "key", Form(100, 1), source)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2**50))
    monkeypatch.setattr(image_cache, "free_memory", lambda: 2**20)
    with pytest.raises(InputError, match=r"decoding images of 1000 × 1000 pixels takes .* GiB of memory, but 0\.0 GiB"):
        stored("toy", "key", Form(1000, 1), source)
    assert not list(folder.iterdir())


def test_a_pipe_among_the_files_or_in_the_cache_does_not_stop_the_reading(folder, tmp_path):
    os.mkfifo(tmp_path / "a.png")
    assert fingerprint([tmp_path / "a.png"], tmp_path) != fingerprint([], tmp_path)
    stored("toy", "key", FORM, good)
    (index,) = folder.glob("*.json")
    index.unlink()
    os.mkfifo(index)
    assert len(stored("toy", "key", FORM, good).images) == 6


@pytest.mark.parametrize("times", [1, 3])
def test_another_process_that_writes_the_same_entry_does_not_mix_with_this_one(folder, monkeypatch, times):
    """The other cannot read one image, so that its pixels do not fit this one's index."""
    replace, meetings = os.replace, []

    def met(source: Path, target: Path) -> None:
        replace(source, target)
        if str(target).endswith(".pixels") and len(meetings) < times:
            meetings.append(target)
            target.write_bytes(target.read_bytes()[:-1])

    monkeypatch.setattr(os, "replace", met)
    if times < 3:
        assert stored("toy", "key", FORM, good).labels.tolist() == 3 * [0] + 3 * [1]
    else:
        with pytest.raises(InputError, match=r"are not what was written there: .* in METABRIDGE_CACHE\.$"):
            stored("toy", "key", FORM, good)
    assert len(meetings) == times
