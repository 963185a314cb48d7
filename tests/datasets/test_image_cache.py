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
from metabridge.datasets.image_cache import CachedImages, fingerprint, load_or_decode
from metabridge.datasets.image_files import ClassInfo, ImageSource, RawImage
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError
from pictures import encoded, flat

OPTIONS = DecodeOptions(size=8, channels=1)
CLASSES = (
    ClassInfo("cat", "animals", "train"),
    ClassInfo("yeti", "animals", "train"),
    ClassInfo("oak", "trees", "test"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Use a new cache folder, and return its path."""
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source_of(*images: RawImage, classes: tuple[ClassInfo, ...] = CLASSES) -> ImageSource:
    return ImageSource("a toy", classes, len(images), lambda: iter(images))


def valid_source() -> ImageSource:
    return source_of(
        *(RawImage(f"{label}/{n}.png", label, encoded(flat(10 * label + n))) for label in (0, 2) for n in range(3))
    )


def faulty_source() -> ImageSource:
    return source_of(
        RawImage("cat/1.png", 0, flat(7)), RawImage("cat/2.png", 0, b"no image"), RawImage("oak/1.png", 2, flat(9))
    )


def no_source() -> ImageSource:
    raise AssertionError("the files were read again")


def test_images_are_decoded_once_and_memory_mapped_after_that(folder):
    decoded = load_or_decode("toy", "key", OPTIONS, valid_source)
    cached = load_or_decode("toy", "key", OPTIONS, no_source)
    assert decoded.images.flatten(1).float().mean(dim=1).tolist() == [0, 1, 2, 20, 21, 22]
    assert torch.equal(decoded.images, cached.images)
    assert torch.equal(decoded.labels, cached.labels)
    assert decoded.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert decoded.classes == cached.classes == (CLASSES[0], CLASSES[2])
    assert decoded.empty_classes == cached.empty_classes == ("yeti",)


def test_another_key_size_or_number_of_channels_is_another_entry(folder):
    load_or_decode("toy", "key", OPTIONS, valid_source)
    for key, options in [("other", OPTIONS), ("key", DecodeOptions(4, 1)), ("key", DecodeOptions(8, 3))]:
        with pytest.raises(AssertionError, match="read again"):
            load_or_decode("toy", key, options, no_source)


def test_changing_the_images_in_memory_does_not_change_the_cache(folder):
    load_or_decode("toy", "key", OPTIONS, valid_source).images.fill_(99)
    assert load_or_decode("toy", "key", OPTIONS, no_source).images.max() == 22


@pytest.mark.parametrize("suffix", ["pixels", "json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut short", "too long"])
def test_a_damaged_entry_is_decoded_again(folder, suffix, damage):
    expected = load_or_decode("toy", "key", OPTIONS, valid_source).images.clone()
    (file,) = folder.glob(f"*.{suffix}")
    content = file.read_bytes()
    file.unlink()  # a memory-mapped file must not be truncated
    if damage != "missing":
        file.write_bytes({"empty": b"", "cut short": content[: len(content) // 2], "too long": content + b"0"}[damage])
    assert torch.equal(load_or_decode("toy", "key", OPTIONS, valid_source).images, expected)
    assert torch.equal(load_or_decode("toy", "key", OPTIONS, no_source).images, expected)


def test_the_files_of_a_process_killed_while_decoding_are_not_used(folder):
    script = textwrap.dedent("""
        import os, signal
        from metabridge.decode_options import DecodeOptions
        from metabridge.datasets.image_files import ClassInfo, RawImage, ImageSource
        from metabridge.datasets.image_cache import load_or_decode
        import numpy as np

        def images():
            for index in range(5000):
                yield RawImage(str(index), 0, np.zeros((8, 8), dtype=np.uint8))
            os.kill(os.getpid(), signal.SIGKILL)

        source = ImageSource("toy", (ClassInfo("cat", "", "train"),), 5000, images)
        load_or_decode("toy", "key", DecodeOptions(8, 1), lambda: source)
    """)
    process = subprocess.run([sys.executable, "-c", script], check=False)
    assert process.returncode == -signal.SIGKILL
    abandoned_files = list(folder.iterdir())
    assert abandoned_files
    assert all(file.suffix == ".part" for file in abandoned_files)
    assert len(load_or_decode("toy", "key", OPTIONS, valid_source).images) == 6
    for file in abandoned_files:
        os.utime(file, (0, 0))  # so old that it counts as abandoned
    load_or_decode("toy", "key", OPTIONS, no_source)
    # Abandoned files are removed when an entry is written.
    for file in folder.glob("*.json"):
        file.unlink()
    load_or_decode("toy", "key", OPTIONS, valid_source)
    assert not list(folder.glob("*.part"))


def test_unreadable_images_and_empty_classes_are_skipped_with_warnings(folder, caplog):
    with caplog.at_level(logging.WARNING, "metabridge"):
        images = load_or_decode("toy", "key", OPTIONS, faulty_source).to_labeled_images()
    assert [record.getMessage() for record in caplog.records] == [
        "Skipped 1 unreadable image: cat/2.png (it is not an image that Pillow reads).",
        "Skipped 1 class without a readable image: 'yeti'.",
    ]
    assert images.class_names == ("cat", "oak")
    assert images.labels.tolist() == [0, 1]
    assert images.superclass_names == ("animals", "trees")


def test_strict_rejects_skipped_images_also_from_the_cache(folder):
    for open_source in (faulty_source, no_source):
        with pytest.raises(InputError) as caught:
            load_or_decode("toy", "key", OPTIONS, open_source).to_labeled_images(strict=True)
        assert str(caught.value) == (
            "Skipped 1 unreadable image: cat/2.png (it is not an image that Pillow reads). "
            "Fix or remove these, or load without strict."
        )
    with pytest.raises(InputError, match="Skipped 1 class without a readable image: 'yeti'"):
        load_or_decode("toy", "other", OPTIONS, valid_source).to_labeled_images(strict=True)


def test_a_long_list_of_unreadable_images_is_shortened(folder):
    source = source_of(*(RawImage(f"{n}.png", 0, b"") for n in range(50)), RawImage("good.png", 0, flat(1)))
    (sentence, _) = load_or_decode("toy", "key", OPTIONS, lambda: source).problems()
    assert sentence.startswith("Skipped 50 unreadable images: 0.png (it is not an image that Pillow reads), 1.png")
    assert sentence.endswith("4.png (it is not an image that Pillow reads) and 45 more.")


def test_without_a_readable_image_there_is_an_error_and_no_entry(folder):
    with pytest.raises(
        InputError, match=r"toy has no readable image \(1 tried; a.png: it is not an image that Pillow reads\)"
    ):
        load_or_decode("toy", "key", OPTIONS, lambda: source_of(RawImage("a.png", 0, b"")))
    assert not list(folder.iterdir())


def test_classes_with_too_few_images_are_in_no_split():
    cached = CachedImages(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1, 2, 2]), CLASSES)
    splits = {split: classes.tolist() for split, classes in cached.to_labeled_images(min_images=2).splits.items()}
    assert splits == {"train": [0], "test": [2]}
    with pytest.raises(InputError, match=r"min_images is 3, but the largest class has 2 images\. Use min_images=2 or"):
        cached.to_labeled_images(min_images=3)


def test_a_cache_path_that_is_not_a_folder_is_rejected_before_decoding(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        InputError,
        match=r"cannot be cached in .*file/cache \(Not a directory\).* METABRIDGE_CACHE to a writable folder\.$",
    ):
        load_or_decode("toy", "key", OPTIONS, no_source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_is_rejected(folder):
    folder.mkdir()
    folder.chmod(0o500)
    with pytest.raises(
        InputError,
        match=r"cannot be cached in .*cache \(Permission denied\).* METABRIDGE_CACHE to a writable folder\.$",
    ):
        load_or_decode("toy", "key", OPTIONS, no_source)


def test_a_read_only_file_system_is_read_but_not_written(folder, monkeypatch):
    expected = load_or_decode("toy", "key", OPTIONS, valid_source)

    system_open = os.open

    def open_read_only(path: str, flags: int, *arguments: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return system_open(path, flags, *arguments)

    monkeypatch.setattr(os, "open", open_read_only)
    assert torch.equal(load_or_decode("toy", "key", OPTIONS, no_source).images, expected.images)
    with pytest.raises(
        InputError,
        match=r"cannot be cached in .*cache \(Read-only file system\).* METABRIDGE_CACHE to a writable folder\.$",
    ):
        load_or_decode("toy", "other", OPTIONS, no_source)


@pytest.mark.parametrize("failing_function", ["fsync", "replace"])
def test_a_full_disk_is_reported_and_leaves_no_files(folder, monkeypatch, failing_function):
    def raise_no_space(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing_function, raise_no_space)
    with pytest.raises(InputError, match=r"\(No space left on device\). Free space there, or set METABRIDGE_CACHE"):
        load_or_decode("toy", "key", OPTIONS, valid_source)
    assert not list(folder.iterdir())


def test_a_failed_write_leaves_no_files(folder):
    source = source_of(*(RawImage(str(n), 0, flat(n)) for n in range(200)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(InputError, match=r"\(File too large\). Free space there"):
            load_or_decode("toy", "key", DecodeOptions(64, 1), lambda: source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(folder.iterdir())


def test_the_index_describes_the_entry(folder):
    load_or_decode("toy", "key", OPTIONS, faulty_source)
    (index,) = folder.glob("*.json")
    entry = json.loads(index.read_text())
    assert (entry["shape"], entry["labels"], entry["skipped"]) == (
        [2, 1, 8, 8],
        [0, 1],
        [["cat/2.png", "it is not an image that Pillow reads"]],
    )


def test_the_fingerprint_covers_contents_of_few_files_and_times_of_many(tmp_path, monkeypatch):
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(b"one")
    content_key = fingerprint(files, tmp_path)
    os.utime(files[0], (1, 1))
    assert fingerprint(files, tmp_path) == content_key
    files[0].write_bytes(b"two")
    assert fingerprint(files, tmp_path) != content_key
    monkeypatch.setattr(image_cache, "MAX_HASHED_FILES", 1)
    time_key = fingerprint(files, tmp_path)
    os.utime(files[0], (2, 2))
    assert fingerprint(files, tmp_path) != time_key
    time_key = fingerprint(files, tmp_path)
    os.utime(files[1].rename(tmp_path / "c"), (2, 2))
    assert fingerprint([files[0], tmp_path / "c"], tmp_path) != time_key


def test_the_fingerprint_does_not_depend_on_the_location(tmp_path, monkeypatch):
    keys = set()
    for folder_name in ("here", "there/deeper"):
        (tmp_path / folder_name).mkdir(parents=True)
        (tmp_path / folder_name / "a.png").write_bytes(b"one")
        keys.add(fingerprint([tmp_path / folder_name / "a.png"], tmp_path / folder_name))
    monkeypatch.chdir(tmp_path / "here")
    keys.add(fingerprint([Path("a.png")], Path()))
    assert len(keys) == 1


def test_the_fingerprint_includes_broken_links(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "gone.png")
    assert fingerprint([tmp_path / "a.png"], tmp_path) != fingerprint([], tmp_path)


def corruptions(content: bytes, count: int) -> list[bytes]:
    """Return copies of the content with bytes changed, exchanged, removed or added."""
    rng, copies = random.Random(0), []
    while len(copies) < count:
        changed = bytearray(content)
        start, stop = sorted(rng.sample(range(len(content)), 2))
        match rng.randrange(6):
            case 0:
                changed[start] ^= 1 << rng.randrange(8)
            case 1:
                changed[start], changed[stop] = changed[stop], changed[start]
            case 2:
                del changed[start:stop]
            case 3:
                changed[start:start] = content[start:stop]
            case 4:
                changed[start:stop] = bytes(stop - start)
            case 5:
                changed[start:stop] = reversed(changed[start:stop])
        if changed != content:
            copies.append(bytes(changed))
    return copies


def contents_of(cached: CachedImages) -> tuple[object, ...]:
    return (
        cached.images.tolist(),
        cached.labels.tolist(),
        cached.classes,
        cached.empty_classes,
        cached.skipped,
        cached.notes,
        cached.duplicates,
    )


def random_image_source() -> ImageSource:
    """Return images of random pixels."""
    rng = random.Random(1)
    images = [
        RawImage(
            f"{label}.png", label, torch.randint(256, (8, 8), generator=torch.Generator().manual_seed(label)).byte()
        )
        for label in (0, 2)
        for _ in range(3)
    ]
    rng.shuffle(images)
    return source_of(*(image._replace(content=image.content.numpy()) for image in images))


@pytest.mark.parametrize("suffix", ["pixels", "json"])
def test_corrupted_entries_never_give_other_data(folder, monkeypatch, suffix):
    monkeypatch.setattr(image_cache, "CHECKSUM_BYTES", 100)  # so that there are several checksums
    expected = contents_of(load_or_decode("toy", "key", OPTIONS, random_image_source))
    (file,) = folder.glob(f"*.{suffix}")
    content = file.read_bytes()
    for corrupted_content in corruptions(content, 150):
        file.unlink()
        file.write_bytes(corrupted_content)
        assert contents_of(load_or_decode("toy", "key", OPTIONS, random_image_source)) == expected
        assert suffix == "json" or file.read_bytes() == content  # different JSON text can have the same content


@pytest.mark.parametrize("missing_key", ["checksum", "blocks"])
def test_an_entry_without_checksums_is_decoded_again(folder, missing_key):
    load_or_decode("toy", "key", OPTIONS, valid_source)
    (index,) = folder.glob("*.json")
    entry = json.loads(index.read_text())
    del entry[missing_key]
    if missing_key == "blocks":
        entry["checksum"] = image_cache._checksum({name: value for name, value in entry.items() if name != "checksum"})
    index.write_text(json.dumps(entry))
    with pytest.raises(AssertionError, match="read again"):
        load_or_decode("toy", "key", OPTIONS, no_source)
    assert len(load_or_decode("toy", "key", OPTIONS, valid_source).images) == 6


@pytest.mark.parametrize(
    "changes",
    [
        *({"labels": labels} for labels in (6 * [2], 6 * [-1], 5 * [0], 6 * [0.5], 6 * ["x"], 6 * [10**12])),
        *({"classes": classes} for classes in ([], 2 * [["a", "b", "no split"]], 2 * [["a", 7, "train"]])),
        *({"same": [[[row, "a"]]]} for row in (6, -1, "x")),
        {"shape": [0, 1, 8, 8], "labels": [], "same": []},
    ],
    ids=str,
)
def test_a_forged_entry_is_decoded_again(folder, changes):
    load_or_decode("toy", "key", OPTIONS, valid_source)
    (index,) = folder.glob("*.json")
    entry = json.loads(index.read_text()) | changes
    del entry["checksum"]
    index.write_text(json.dumps({**entry, "checksum": image_cache._checksum(entry)}))
    assert len(load_or_decode("toy", "key", OPTIONS, valid_source).to_labeled_images().images) == 6


def test_an_entry_of_an_earlier_version_is_not_read(folder):
    load_or_decode("toy", "key", OPTIONS, valid_source)
    for file in list(folder.iterdir()):
        shutil.move(file, folder / file.name.replace(f"-v{image_cache.FORMAT}-", "-v1-"))
    with pytest.raises(AssertionError, match="read again"):
        load_or_decode("toy", "key", OPTIONS, no_source)


def raise_permission_error() -> bytes:
    raise PermissionError(errno.EACCES, "Permission denied", "cat/2.png")


def raise_memory_error() -> bytes:
    raise MemoryError


@pytest.mark.parametrize(
    ("read", "reason"),
    [(raise_permission_error, "Permission denied"), (raise_memory_error, "not enough memory")],
)
def test_temporarily_unreadable_images_are_reported_and_tried_again(folder, read, reason):
    def open_source(content: object) -> ImageSource:
        return source_of(
            RawImage("cat/1.png", 0, flat(7)), RawImage("cat/2.png", 0, content), RawImage("oak/1.png", 2, flat(9))
        )

    for _ in range(2):
        cached = load_or_decode("toy", "key", OPTIONS, lambda: open_source(read))
        assert len(cached.images) == 2
        assert cached.problems()[0] == (
            f"Skipped 1 unreadable image: cat/2.png ({reason}). "
            "Images that the system could not read are tried again on every load."
        )
    assert len(load_or_decode("toy", "key", OPTIONS, lambda: open_source(flat(8))).images) == 3
    assert len(load_or_decode("toy", "key", OPTIONS, no_source).images) == 3


def test_an_error_reading_the_data_is_not_reported_as_an_error_writing_the_cache(folder):
    def open_unreadable() -> ImageSource:
        raise PermissionError(errno.EACCES, "Permission denied", "train.pkl")

    def iterate_with_error() -> object:
        yield RawImage("cat/1.png", 0, flat(7))
        raise OSError(errno.EIO, "Input/output error", "train.pkl")

    for open_source in (open_unreadable, lambda: ImageSource("a toy", CLASSES, 2, iterate_with_error)):
        with pytest.raises(InputError, match=r"^train\.pkl cannot be read \(.*\)\. Fix or remove it\.$"):
            load_or_decode("toy", "key", OPTIONS, open_source)


def test_duplicates_in_two_splits_are_reported_on_every_load(folder, caplog):
    def open_source() -> ImageSource:
        names = [("cat/1.png", 0, 7), ("cat/2.png", 0, 8), ("oak/1.png", 2, 7), ("oak/2.png", 2, 9)]
        return source_of(*(RawImage(name, label, flat(value)) for name, label, value in names))

    for source in (open_source, no_source):
        caplog.clear()
        cached = load_or_decode("toy", "key", OPTIONS, source)
        cached.to_labeled_images()
        assert (
            "1 image is in more than one split, so accuracies may be too high: cat/1.png in train and "
            "oak/1.png in test. `metabridge data check` lists them."
        ) in caplog.text
    caplog.clear()
    load_or_decode("toy", "other", OPTIONS, valid_source).to_labeled_images()
    assert "more than one split" not in caplog.text


def test_duplicates_in_one_split_are_not_reported(folder, caplog):
    source = source_of(
        RawImage("cat/1.png", 0, flat(7)), RawImage("yeti/1.png", 1, flat(7)), RawImage("oak", 2, flat(9))
    )
    load_or_decode("toy", "key", OPTIONS, lambda: source).to_labeled_images()
    assert caplog.text == ""


def test_sizes_too_large_for_disk_or_memory_are_rejected_before_decoding(folder, monkeypatch):
    def open_source() -> ImageSource:
        return ImageSource("a toy", CLASSES, 10**6, lambda: pytest.fail("an image was read"))

    usage = shutil.disk_usage("/")._replace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        InputError,
        match=r"1000000 images of 100 × 100 pixels take 9\.3 GiB, but .*cache has only 1\.0 GiB free\. Use",
    ):
        load_or_decode("toy", "key", DecodeOptions(100, 1), open_source)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2**50))
    monkeypatch.setattr(image_cache, "free_memory", lambda: 2**20)
    with pytest.raises(InputError, match=r"decoding images of 1000 × 1000 .* GiB of memory, but only 0\.0 GiB"):
        load_or_decode("toy", "key", DecodeOptions(1000, 1), open_source)
    assert not list(folder.iterdir())


def test_pipes_among_the_files_or_in_the_cache_do_not_block(folder, tmp_path):
    os.mkfifo(tmp_path / "a.png")
    assert fingerprint([tmp_path / "a.png"], tmp_path) != fingerprint([], tmp_path)
    load_or_decode("toy", "key", OPTIONS, valid_source)
    (index,) = folder.glob("*.json")
    index.unlink()
    os.mkfifo(index)
    assert len(load_or_decode("toy", "key", OPTIONS, valid_source).images) == 6


@pytest.mark.parametrize("num_conflicts", [1, image_cache.MAX_WRITES])
def test_entries_written_by_two_processes_at_once_are_not_mixed(folder, monkeypatch, num_conflicts):
    """Simulate another process that replaces the pixel file by a shorter one, which does not match the index."""
    replace, truncated_files = os.replace, []

    def replace_and_truncate(source: Path, target: Path) -> None:
        replace(source, target)
        if str(target).endswith(".pixels") and len(truncated_files) < num_conflicts:
            truncated_files.append(target)
            target.write_bytes(target.read_bytes()[:-1])

    monkeypatch.setattr(os, "replace", replace_and_truncate)
    if num_conflicts < image_cache.MAX_WRITES:
        assert load_or_decode("toy", "key", OPTIONS, valid_source).labels.tolist() == 3 * [0] + 3 * [1]
    else:
        with pytest.raises(
            InputError, match=r"differ from the images written to it: .* METABRIDGE_CACHE to another folder\.$"
        ):
            load_or_decode("toy", "key", OPTIONS, valid_source)
    assert len(truncated_files) == num_conflicts
