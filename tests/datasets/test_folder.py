import logging
from collections import Counter

import pytest
import torch
from PIL import Image

from metabridge.datasets import detect, load
from metabridge.errors import InputError
from pictures import encoded, flat, names_in, values_of, write_tree

pytestmark = pytest.mark.usefixtures("empty_cache")


def test_every_folder_of_images_is_a_class(tmp_path):
    images = load(write_tree(tmp_path / "data", {"cat": 2, "dog": 3, "elm": 1}))
    assert set(images.class_names) == {"cat", "dog", "elm"}
    assert values_of(images, "cat") == [0, 1]
    assert values_of(images, "dog") == [2, 3, 4]
    assert images.images.shape == (6, 3, 84, 84)
    assert len(images.superclass_names) == 1


def test_the_parent_folder_of_a_class_is_its_superclass(tmp_path):
    images = load(write_tree(tmp_path / "data", {"animals/cat": 1, "animals/dog": 1, "trees/elm": 1}))
    superclass_of = {
        name: images.superclass_names[index] for name, index in zip(images.class_names, images.superclasses)
    }
    assert superclass_of == {"animals/cat": "animals", "animals/dog": "animals", "trees/elm": "trees"}


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_folders_named_after_splits_make_the_splits(tmp_path, name):
    root = write_tree(tmp_path / "data", {"train/cat": 1, "train/dog": 1, f"{name}/elm": 1, "test/trees/oak": 1})
    assert detect(root) == "folder"
    images = load("folder", root)
    assert names_in(images) == {"train": {"cat", "dog"}, "validation": {"elm"}, "test": {"trees/oak"}}
    assert images.superclass_names == ("all", "trees")


def test_without_split_folders_the_classes_are_split_by_the_seed(tmp_path):
    root = write_tree(tmp_path / "data", {f"class{index:02}": 1 for index in range(25)})
    images, with_same_seed, with_other_seed = (load(root, seed=seed) for seed in (0, 0, 1))
    assert Counter({split: len(labels) for split, labels in images.splits.items()}) == {
        "train": 16,
        "validation": 4,
        "test": 5,
    }
    assert names_in(images) == names_in(with_same_seed)
    assert names_in(images) != names_in(with_other_seed)


def test_splits_that_share_classes_are_merged_with_a_warning(tmp_path, caplog):
    root = write_tree(tmp_path / "data", {"train/cat": 2, "train/dog": 1, "test/cat": 1, "test/dog": 2})
    with caplog.at_level(logging.WARNING, "metabridge"):
        images = load("folder", root)
    assert values_of(images, "cat") == [0, 1, 3]
    assert names_in(images).keys() == {"train", "test"}
    assert "class 'cat' is in the splits 'train' and 'test', so these are splits of images" in caplog.text


def test_images_of_any_size_and_mode_become_squares(tmp_path):
    root = write_tree(tmp_path / "data", {"cat": 1, "dog": 1})
    (root / "cat" / "wide.jpg").write_bytes(encoded(Image.new("CMYK", (300, 100)), "jpeg"))
    (root / "cat" / "icon.gif").write_bytes(encoded(Image.new("P", (5, 9)), "gif"))
    assert load(root, size=32, channels=1).images.shape == (4, 1, 32, 32)


def test_a_changed_image_is_decoded_again(tmp_path):
    root = write_tree(tmp_path / "data", {"cat": 1, "dog": 1})
    assert values_of(load(root), "cat") == [0]
    (root / "cat" / "0.png").write_bytes(encoded(flat(200)))
    assert values_of(load(root), "cat") == [200]


def test_corrupt_images_and_empty_classes_are_skipped_but_rejected_if_strict(tmp_path, caplog):
    root = write_tree(tmp_path / "data", {"cat": 2, "dog": 1, "yeti": 0})
    (root / "cat" / "bad.png").write_bytes(encoded(flat(9, 64))[:50])
    (root / "cat" / "gone.png").symlink_to(root / "nowhere.png")
    images = load("folder", root)
    assert torch.bincount(images.labels).tolist() == [2, 1]
    assert "Skipped 2 unreadable images: cat/bad.png (" in caplog.text
    assert "cat/gone.png (No such file or directory)." in caplog.text
    assert "Skipped 1 class without a readable image: 'yeti'." in caplog.text
    with pytest.raises(InputError, match=r"^Skipped 2 unreadable images: cat/bad\.png .* load without strict"):
        load("folder", root, strict=True)


def test_a_folder_without_classes_is_rejected(tmp_path):
    (tmp_path / "loose.png").write_bytes(encoded(flat(1)))
    with pytest.raises(InputError, match=r"has no folders of images\. Make one subfolder per class there"):
        load("folder", tmp_path)


def test_splits_made_of_links_are_read_again_when_the_links_change(tmp_path):
    root = write_tree(tmp_path / "data", {f"all/class{index}": 1 for index in range(3)})
    for split, name in (("train", "class0"), ("val", "class1"), ("test", "class2")):
        (root / split).mkdir()
        (root / split / name).symlink_to(root / "all" / name)
    assert names_in(load("folder", root)) == {"train": {"class0"}, "validation": {"class1"}, "test": {"class2"}}
    for split, before, after in (("train", "class0", "class2"), ("test", "class2", "class0")):
        (root / split / before).unlink()
        (root / split / after).symlink_to(root / "all" / after)
    assert names_in(load("folder", root)) == {"train": {"class2"}, "validation": {"class1"}, "test": {"class0"}}


def test_links_that_lead_nowhere_and_folders_of_the_system_are_not_classes(tmp_path):
    root = write_tree(tmp_path / "data", {"cat": 1, "dog": 1, "lost+found": 1})
    (root / "loop").symlink_to("loop")
    (root / "cat" / "loop").symlink_to("loop")
    assert set(load(root).class_names) == {"cat", "dog"}
