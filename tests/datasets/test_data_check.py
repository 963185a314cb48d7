import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metabridge.datasets import load
from metabridge.datasets.data_check import check_dataset
from metabridge.errors import InputError
from pictures import encoded, flat, write_tree


@pytest.fixture
def root(tmp_path) -> Path:
    return write_tree(tmp_path / "data", {"train/cat": 3, "train/dog": 4, "train/elk": 9, "val/elm": 5, "test/oak": 6})


def test_a_data_set_without_problems_is_fine(root):
    report = check_dataset(root, ways=1, shots=1, queries=2)
    assert report.fine
    assert (report.data, report.description) == ("folder", "folders of images, split into train, validation, test")
    # name, number of classes and of images, and the fewest, the median and the most images per class
    assert [split[:6] for split in report.splits] == [
        ("train", 3, 16, 3, 4, 9),
        ("validation", 1, 5, 5, 5, 5),
        ("test", 1, 6, 6, 6, 6),
    ]
    assert report.sizes == {(8, 8): 27}
    assert report.modes == {"RGB": 27}


def test_too_few_classes_or_images_are_reported_for_each_split(root):
    report = check_dataset(root, ways=2, shots=1, queries=3)
    assert not report.fine
    assert [split.obstacle for split in report.splits] == [
        "1-shot tasks with 3 queries need 4 images per class, but 1 class has fewer: 'cat' has 3; "
        "--min-images 4 leaves 2 classes",
        "2 ways need 2 classes, but there is 1: add more classes",
        "2 ways need 2 classes, but there is 1: add more classes",
    ]
    assert (
        check_dataset(root, ways=2, shots=4, queries=1).splits[0].obstacle.endswith("2 classes have fewer: 'cat' has 3")
    )


@pytest.mark.parametrize(("validation_classes", "fine"), [(2, True), (1, False)])
def test_validation_may_have_fewer_classes_than_ways_but_at_least_two(tmp_path, validation_classes, fine):
    sizes = {"train": 3, "val": validation_classes, "test": 3}
    root = write_tree(
        tmp_path, {f"{split}/{split}{index}": 4 for split, count in sizes.items() for index in range(count)}
    )
    report = check_dataset(root, ways=3, shots=1, queries=3)
    assert [bool(split.obstacle) for split in report.splits] == [False, True, False]
    assert report.fine is fine
    assert (report.splits[1].obstacle == "2 classes, so validation tasks will have 2 ways") is fine


def test_validation_may_have_fewer_images_than_tasks_need(tmp_path):
    root = write_tree(
        tmp_path, {"train/a": 4, "train/b": 4, "validation/c": 3, "validation/d": 4, "test/e": 4, "test/f": 4}
    )
    report = check_dataset(root, ways=2, shots=1, queries=3)
    assert report.fine
    assert report.splits[1].obstacle == (
        "1-shot tasks with 3 queries need 4 images per class, but 'c' has 3, "
        "so validation tasks will have fewer queries if necessary"
    )


def test_equal_images_in_two_splits_are_reported_for_any_file_format(root):
    image = Image.open(root / "train" / "cat" / "1.png")
    image.save(root / "test" / "oak" / "copy.bmp")
    image.save(root / "train" / "dog" / "copy.png")
    report = check_dataset(root, ways=1, queries=1)
    assert report.duplicates == (
        (("train", "train/cat/1.png"), ("train", "train/dog/copy.png"), ("test", "test/oak/copy.bmp")),
    )
    assert not report.fine


def test_equal_images_in_one_split_are_not_reported(root):
    Image.open(root / "train" / "cat" / "1.png").save(root / "train" / "dog" / "copy.png")
    assert check_dataset(root, ways=1, queries=1).duplicates == ()


def test_images_of_different_shapes_with_equal_bytes_are_not_duplicates(root):
    Image.new("RGB", (4, 16), (200, 200, 200)).save(root / "train" / "cat" / "tall.png")
    Image.new("RGB", (16, 4), (200, 200, 200)).save(root / "test" / "oak" / "wide.png")
    assert check_dataset(root, ways=1, queries=1).duplicates == ()


def test_unreadable_files_and_empty_classes_are_reported(root):
    (root / "train" / "cat" / "bad.png").write_bytes(encoded(flat(3))[:40])
    (root / "train" / "yeti").mkdir()
    report = check_dataset(root, ways=1, queries=1)
    assert [name for name, _ in report.unreadable] == ["train/cat/bad.png"]
    assert report.empty_classes == ("yeti",)
    assert not report.fine


def test_sizes_and_modes_are_those_of_the_files(root):
    (root / "test" / "oak" / "big.jpg").write_bytes(encoded(Image.new("L", (40, 30), 9), "jpeg"))
    report = check_dataset(root, ways=1, queries=1)
    assert report.sizes == {(8, 8): 27, (40, 30): 1}
    assert report.modes == {"RGB": 27, "L": 1}


def test_the_name_of_the_data_set_overrides_detection(tmp_path):
    root = write_tree(tmp_path / "data", {"train/n01530575": 1, "test/n03314780": 1})
    assert check_dataset(root, ways=1).data == "tiered-imagenet"
    assert check_dataset(root, data="folder", ways=1).data == "folder"
    with pytest.raises(InputError, match="data is 'photos', but must be one of 'omniglot', "):
        check_dataset(root, data="photos")


def test_data_without_a_readable_image_is_rejected(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"no")
    with pytest.raises(InputError, match=r"^None of the 1 images in .* can be read\. Convert"):
        check_dataset(tmp_path)


def test_nothing_is_written(root, tmp_path, monkeypatch):
    monkeypatch.setenv("METABRIDGE_CACHE", str(tmp_path / "cache"))
    check_dataset(root)
    assert not (tmp_path / "cache").exists()


def test_the_suggested_min_images_leaves_the_stated_number_of_classes(tmp_path):
    for label in range(20):
        count = 2 if label < 9 else 4  # tasks need 1 + 3 images per class
        for index in range(count):
            file = tmp_path / "all" / f"class {label}" / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 10 * label + index, dtype=np.uint8)).save(file)
    train_report = check_dataset(tmp_path / "all", ways=2, shots=1, queries=3).splits[0]
    remaining_classes = load(tmp_path / "all", size=8, min_images=4).splits["train"]
    assert train_report.obstacle.endswith(f"--min-images 4 leaves {len(remaining_classes)} classes")


def test_a_class_folder_without_permission_is_rejected(root, monkeypatch):
    scandir = os.scandir

    def deny(path):
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    for function in (check_dataset, load):
        with pytest.raises(InputError, match=r"train/dog cannot be read \(Permission denied\)\. Fix or remove it\.$"):
            function(root)


def test_pipes_and_links_to_devices_are_unreadable_images(root):
    os.mkfifo(root / "train" / "cat" / "pipe.png")
    (root / "train" / "cat" / "zero.png").symlink_to("/dev/zero")
    report = check_dataset(root, ways=1, queries=1)
    assert report.unreadable == (
        ("train/cat/pipe.png", "it is not a regular file"),
        ("train/cat/zero.png", "it is not a regular file"),
    )
    assert len(load(root, size=8).images) == 27


def test_links_between_folders_add_no_classes(root):
    (root / "train" / "cat" / "loop").symlink_to(root)
    (root / "test" / "cat").symlink_to(root / "train" / "cat")
    report = check_dataset(root, ways=1, queries=1)
    assert [split.classes for split in report.splits] == [3, 1, 1]
    assert "test/cat (the same folder as train/cat)" in report.notes[0]
    assert len(load(root, size=8).class_names) == 5


def test_a_folder_without_permission_is_reported_as_unreadable(tmp_path, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", deny)
    with pytest.raises(InputError, match=r"photographs cannot be read \(Permission denied\)"):
        check_dataset("photographs")
