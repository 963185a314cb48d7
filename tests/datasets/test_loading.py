import os
import re
from pathlib import Path

import pytest

from metabridge.datasets import detect, load
from metabridge.errors import InputError
from pictures import names_in, write_tree

KNOWN = (
    "'glyphs', 'omniglot', 'mini-imagenet', 'tiered-imagenet', 'cifar-fs', 'fc100', 'fs-cifar100', 'parquet', 'folder'"
)


@pytest.fixture
def root(tmp_path, own_cache):
    return write_tree(tmp_path / "data", {"train/cat": 3, "train/dog": 1, "test/oak": 2})


def test_a_path_a_name_with_a_path_and_both_in_one_load_the_same(root):
    forms = [load(root), load(str(root)), load("folder", root), load(f"folder:{root}")]
    assert [names_in(images) for images in forms] == 4 * [{"train": {"cat", "dog"}, "test": {"oak"}}]


def test_classes_with_fewer_images_are_left_out_on_request(root):
    assert names_in(load(root, min_images=2)) == {"train": {"cat"}, "test": {"oak"}}
    with pytest.raises(InputError, match="min_images is 0, but must be a whole number of at least 1"):
        load(root, min_images=0)


def test_glyphs_take_min_images_too(glyphs):
    assert load("glyphs", min_images=20).splits.keys() == glyphs.splits.keys()
    assert load("glyphs", min_images=21).splits == {}
    assert load("glyphs", min_images=10**9).splits == {}


@pytest.mark.parametrize(
    ("name", "option", "sentence"),
    [
        ("glyphs", {"size": 84}, "size is 84, but 'glyphs' does not take it. Leave size out."),
        ("glyphs", {"strict": True}, "strict is True, but 'glyphs' does not take it. Leave strict out."),
        ("folder", {"rotations": True}, "rotations is True, but 'folder' does not take it. Leave rotations out."),
        ("cifar-fs", {"seed": 3}, "seed is 3, but 'cifar-fs' does not take it. Leave seed out."),
        ("folder", {"size": 0}, "size is 0, but must be a whole number of at least 1. Use size=1 or more."),
        (
            "folder",
            {"size": 100_000},
            "size is 100000, but images have at most 7071 pixels a side. Use a smaller size.",
        ),
        ("folder", {"channels": 2}, "channels is 2, but images have 1 (grey) or 3 (RGB). Use one of these."),
    ],
)
def test_an_option_that_a_data_set_does_not_take_is_refused(root, name, option, sentence):
    with pytest.raises(InputError) as caught:
        load(name, root, **option)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("name", "place", "sentence"),
    [
        (
            "omniglott",
            None,
            f"the data set is 'omniglott', but the known ones are {KNOWN}, and there is no such path either.",
        ),
        ("omniglott", ".", f"the data set is 'omniglott', but the known ones are {KNOWN}. Use one of these"),
        ("omniglot", None, "omniglot is in no folder yet: say which one holds it, as in omniglot:FOLDER."),
        ("omniglot", "nowhere", "there is nothing at nowhere. Name the folder or file that holds the data set."),
        ("omniglot:nowhere", None, "there is nothing at nowhere."),
    ],
)
def test_what_is_not_there_is_named(name, place, sentence):
    with pytest.raises(InputError) as caught:
        load(name, place)
    assert str(caught.value).startswith(sentence)


def test_a_path_without_a_data_set_is_told_what_could_be_there(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"holds no data set that is known: no omniglot, .*no parquet files, and no"):
        detect(tmp_path)


def test_a_name_that_is_too_long_for_a_path_is_no_data_set():
    with pytest.raises(InputError, match="but the known ones are"):
        load(5000 * "a")


def test_without_permission_for_a_file_the_data_set_is_not_absent(root, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\)\. Fix or remove it\."):
        load(root)


def test_a_path_below_a_folder_without_permission_is_not_absent(root, monkeypatch):
    def denied(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(InputError, match=rf"^{re.escape(str(root))} cannot be read \(Permission denied\)\."):
        load(root)
