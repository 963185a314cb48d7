import contextlib
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from metabridge.datasets import image_files as module
from metabridge.datasets.image_files import (
    ClassInfo,
    ImageSource,
    RawImage,
    assign_splits,
    find_class_folders,
    list_tree,
    merge_image_splits,
    parse_indices,
    parse_uint8,
    path_inside,
    read_file,
    read_image_file,
)
from metabridge.errors import InputError


def classes_without_split(count: int) -> list[ClassInfo]:
    return [ClassInfo(f"class{index:03}", "all", "") for index in range(count)]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(100, (64, 16, 20)), (10, (6, 2, 2)), (4, (2, 1, 1)), (3, (1, 1, 1)), (2, (1, 0, 1)), (1, (1, 0, 0))],
)
def test_classes_are_split_64_16_20_without_empty_splits_if_possible(count, sizes):
    counts = Counter(info.split for info in assign_splits(classes_without_split(count)))
    assert tuple(counts[split] for split in ("train", "validation", "test")) == sizes


def test_the_split_depends_on_the_seed_and_the_names_but_not_on_their_order():
    classes = classes_without_split(50)
    expected = set(assign_splits(classes, seed=3))
    assert set(assign_splits(classes[::-1], seed=3)) == expected
    assert set(assign_splits(classes, seed=4)) != expected


def test_existing_splits_are_not_changed():
    classes = (ClassInfo("a", "all", "test"), ClassInfo("b", "all", "test"))
    assert assign_splits(classes, seed=1) == classes


def test_a_negative_seed_is_rejected():
    with pytest.raises(InputError, match="seed is -1, but must not be negative"):
        assign_splits(classes_without_split(3), seed=-1)


def make_source(*classes: ClassInfo) -> ImageSource:
    """Return a source with one image per class."""
    images = [RawImage(str(label), label, b"") for label in range(len(classes))]
    return ImageSource("a toy", classes, len(images), lambda: iter(images))


def test_splits_that_share_a_class_are_merged_with_a_note():
    source = merge_image_splits(
        make_source(ClassInfo("a", "", "train"), ClassInfo("b", "", "train"), ClassInfo("a", "", "test"))
    )
    assert source.classes == (ClassInfo("a", "", ""), ClassInfo("b", "", ""))
    assert [image.label for image in source.images()] == [0, 1, 0]
    assert source.notes[0].startswith("class 'a' is in the splits 'train' and 'test', so these are splits of images")


def test_complete_splits_of_classes_are_kept_and_others_are_removed():
    source = make_source(ClassInfo("a", "", "train"), ClassInfo("b", "", "test"))
    assert merge_image_splits(source) is source
    for second_split in ("train", ""):
        source = make_source(ClassInfo("a", "", "train"), ClassInfo("b", "", second_split))
        assert merge_image_splits(source).classes == (ClassInfo("a", "", ""), ClassInfo("b", "", ""))


def test_hidden_files_and_other_files_are_not_images(tmp_path):
    for file in ("cat/1.JPG", "cat/.1.jpg", "cat/notes.txt", ".git/a.png", "__MACOSX/cat/1.jpg", "loose.png"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert find_class_folders(tmp_path).images == {"cat": ["cat/1.JPG"]}


@pytest.fixture
def folders(tmp_path) -> Path:
    for name in ("train/cat", "train/dog", "test/elm"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.png").touch()
    return tmp_path


def test_a_link_to_a_parent_folder_is_skipped_with_a_note(folders):
    (folders / "train" / "cat" / "again").symlink_to(folders)
    (folders / "test" / "up").symlink_to(folders / "test")
    images, notes = find_class_folders(folders)
    assert list(images) == ["test/elm", "train/cat", "train/dog"]
    assert notes == (
        "skipped links to folders that are read under another path: test/up (the same folder as test), "
        "train/cat/again (the same folder as .).",
    )
    assert len(list_tree(folders)) == 3


def test_the_second_link_to_a_folder_is_skipped_with_a_note(folders, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "1.png").touch()
    for name in ("train/ape", "test/bee"):
        (folders / name).symlink_to(elsewhere)
    images, notes = find_class_folders(folders, ["train", "test"])
    assert list(images) == ["train/ape", "train/cat", "train/dog", "test/elm"]
    assert images["train/ape"] == ["train/ape/1.png"]
    assert notes == (
        "skipped links to folders that are read under another path: test/bee (the same folder as train/ape).",
    )


def test_a_folder_is_named_by_its_path_and_not_by_a_link(folders):
    (folders / "ant").symlink_to(folders / "train" / "dog")
    images, notes = find_class_folders(folders)
    assert "train/dog" in images
    assert "ant" not in images
    assert len(notes) == 1


def test_links_to_folders_elsewhere_are_classes(folders):
    images, notes = find_class_folders(folders, ["train"])
    (folders / "linked").mkdir()
    for name in ("cat", "dog"):
        (folders / "linked" / name).symlink_to(folders / "train" / name)
    linked_images, linked_notes = find_class_folders(folders, ["linked"])
    assert [name.split("/")[1] for name in linked_images] == [name.split("/")[1] for name in images]
    assert notes == linked_notes == ()


def test_an_unreadable_folder_is_rejected(folders, monkeypatch):
    scandir = os.scandir

    def deny(path):
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    for function in (find_class_folders, list_tree):
        with pytest.raises(InputError, match=r"train/dog cannot be read \(Permission denied\)\. Fix or remove it\.$"):
            function(folders)


class UnreadableLink:
    """A directory entry: a link to a folder without permission."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_symlink(self) -> bool:
        return True

    def is_dir(self) -> bool:
        raise PermissionError(13, "Permission denied", self.name)


def test_a_link_without_permission_is_rejected_unless_it_is_an_image(folders, monkeypatch):
    scandir, name = os.scandir, "ape.png"

    @contextlib.contextmanager
    def add_link(path):
        with scandir(path) as entries:
            yield [*entries, *([UnreadableLink(name)] if Path(path).name == "dog" else [])]

    monkeypatch.setattr(os, "scandir", add_link)
    assert find_class_folders(folders).images["train/dog"] == ["train/dog/1.png", "train/dog/ape.png"]
    name = "ape"
    for function in (find_class_folders, list_tree):
        with pytest.raises(InputError, match=r"cannot be read \(Permission denied\)\. Fix or remove it\.$"):
            function(folders)


@pytest.fixture(params=["pipe", "device", "folder"])
def irregular_file(request, tmp_path) -> Path:
    file = tmp_path / "a.png"
    if request.param == "pipe":
        os.mkfifo(file)
    elif request.param == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    return file


def test_pipes_devices_and_folders_are_not_opened(irregular_file, monkeypatch):
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(OSError, match="it is not a regular file"):
        read_image_file(irregular_file)


def test_pipes_devices_and_folders_are_rejected(irregular_file):
    with pytest.raises(OSError, match="it is not a regular file"):
        read_image_file(irregular_file)
    with pytest.raises(InputError, match=r"a\.png cannot be read \(it is not a regular file\)"):
        read_file(irregular_file)


def test_files_too_large_for_an_image_or_for_memory_are_not_read(tmp_path, monkeypatch):
    file = tmp_path / "a.png"
    with file.open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(OSError, match="it is 1048576 MiB, but at most 512 MiB are read"):
        read_image_file(file)
    monkeypatch.setattr(module, "free_memory", lambda: 2**30)
    with pytest.raises(InputError, match=r"a\.png is 1024\.0 GiB, but 1\.0 GiB of memory are free"):
        read_file(file)


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.png", "a/../../b.png", "..", "", None, b"a.png", "a\0b"])
def test_names_of_files_outside_the_folder_are_rejected(tmp_path, name):
    assert path_inside(tmp_path, "a/b..png", tmp_path / "train.csv") == tmp_path / "a" / "b..png"
    with pytest.raises(InputError, match=r"train\.csv names the image .*, which is not in "):
        path_inside(tmp_path, name, tmp_path / "train.csv")


@pytest.mark.parametrize("label", [-1, 3, 0.9, np.float32(0.5), float("nan"), float("inf"), "1", None, 10**30])
def test_invalid_labels_are_rejected(label):
    assert parse_indices(Path("a.pkl"), "labels", np.array([0.0, 2.0]), 3) == [0, 2]
    with pytest.raises(InputError, match=r"^a\.pkl has .+ in labels, but expected integers from 0 to 2\. Download"):
        parse_indices(Path("a.pkl"), "labels", [0, label, 1], 3)


@pytest.mark.parametrize("pixel", [256, -1, 0.5, np.nan, np.inf])
def test_invalid_pixels_are_rejected(pixel):
    values = np.array([0, 255, pixel])
    assert parse_uint8("a.pkl", "data", values[:2]).tolist() == [0, 255]
    with pytest.raises(InputError, match=r"^a\.pkl has \S+ in data, but expected integers from 0 to 255\. Download"):
        parse_uint8("a.pkl", "data", values)
