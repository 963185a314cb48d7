import os
import re
from pathlib import Path

import pytest

from metabridge.datasets import detect, load
from metabridge.errors import InputError
from pictures import names_in, write_tree

NAMES = "glyphs, omniglot, mini-imagenet, tiered-imagenet, cifar-fs, fc100, fs-cifar100, parquet, folder"


@pytest.fixture
def root(tmp_path, empty_cache):
    return write_tree(tmp_path / "data", {"train/cat": 3, "train/dog": 1, "test/oak": 2})


def test_path_and_name_can_be_given_in_four_ways(root):
    data_sets = [load(root), load(str(root)), load("folder", root), load(f"folder:{root}")]
    assert [names_in(images) for images in data_sets] == 4 * [{"train": {"cat", "dog"}, "test": {"oak"}}]


def test_min_images_leaves_small_classes_out_of_the_splits(root):
    assert names_in(load(root, min_images=2)) == {"train": {"cat"}, "test": {"oak"}}
    with pytest.raises(InputError, match="min_images is 0, but must be an integer of at least 1"):
        load(root, min_images=0)


def test_glyphs_accept_min_images(glyphs):
    assert load("glyphs", min_images=20).splits.keys() == glyphs.splits.keys()
    assert load("glyphs", min_images=21).splits == {}
    assert load("glyphs", min_images=10**9).splits == {}


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("glyphs", {"size": 84}, "size is 84, but 'glyphs' does not accept it. Leave size out."),
        ("glyphs", {"strict": True}, "strict is True, but 'glyphs' does not accept it. Leave strict out."),
        ("folder", {"rotations": True}, "rotations is True, but 'folder' does not accept it. Leave rotations out."),
        ("cifar-fs", {"seed": 3}, "seed is 3, but 'cifar-fs' does not accept it. Leave seed out."),
        ("folder", {"size": 0}, "size is 0, but must be an integer of at least 1. Use size=1 or more."),
        (
            "folder",
            {"size": 100_000},
            "size is 100000, but must be at most 7071 pixels. Use a smaller size.",
        ),
        ("folder", {"channels": 2}, "channels is 2, but images have 1 (gray) or 3 (RGB). Use one of these."),
    ],
)
def test_invalid_options_are_rejected(root, name, option, message):
    with pytest.raises(InputError) as caught:
        load(name, root, **option)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "root", "message"),
    [
        (
            "omniglott",
            None,
            "the data set is 'omniglott', which is neither the name of a data set nor an existing path. Pass glyphs, "
            "the path of a folder of images, or NAME:PATH with one of the names omniglot, mini-imagenet, ",
        ),
        ("omniglott", ".", f"the data set is 'omniglott', but must be one of {NAMES}."),
        ("omniglot", None, "the path of omniglot is missing. Use omniglot:FOLDER."),
        ("omniglot", "nowhere", "nowhere does not exist. Check the path."),
        ("omniglot:nowhere", None, "nowhere does not exist."),
    ],
)
def test_unknown_names_and_missing_paths_are_rejected(name, root, message):
    with pytest.raises(InputError) as caught:
        load(name, root)
    assert str(caught.value).startswith(message)


def test_a_path_without_a_data_set_is_rejected_with_a_list_of_formats(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"no recognized data set\. Supported formats: omniglot, .* parquet and"):
        detect(tmp_path)
    with pytest.raises(InputError, match=r"is not a recognized file\. Supported formats: omniglot, .* and parquet\."):
        detect(tmp_path / "notes.txt")


def test_a_folder_without_readable_images_is_rejected_with_its_path(tmp_path, empty_cache):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=rf"^{re.escape(str(tmp_path))} has no readable image \(1 tried; "):
        load(tmp_path)


def test_a_name_that_is_too_long_for_a_path_is_rejected():
    with pytest.raises(InputError, match="neither the name of a data set nor an existing path"):
        load(5000 * "a")


def test_a_file_without_permission_is_reported_as_unreadable(root, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", deny)
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\)\. Fix or remove it\."):
        load(root)


def test_a_path_in_a_folder_without_permission_is_reported_as_unreadable(root, monkeypatch):
    def deny(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", deny)
    with pytest.raises(InputError, match=rf"^{re.escape(str(root))} cannot be read \(Permission denied\)\."):
        load(root)
