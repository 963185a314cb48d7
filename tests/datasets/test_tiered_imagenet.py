import pickle
from pathlib import Path

import numpy as np
import pytest

from metabridge.datasets import detect, load
from metabridge.datasets.splits import read_split_table
from metabridge.errors import InputError
from pictures import encoded, flat, names_in, shared, values_of, write_tree

pytestmark = pytest.mark.usefixtures("empty_cache")

TREE = {"train/n01530575": 2, "train/n01531178": 1, "val/n02099267": 2, "test/n03314780": 1}


def write_pickles(root: Path, image_type: str = "array") -> None:
    """Write two classes per split, such as 't0' and 't1' in category 'T' for train, with images as arrays or as bytes.

    Like images, the keys of the labels are bytes if `image_type` is "bytes".
    """
    for start, split_name in [(0, "train"), (10, "val"), (20, "test")]:
        files = [encoded(flat(start + row)) for row in range(4)]
        images = [np.frombuffer(file, np.uint8)[:, None].copy() if image_type == "array" else file for file in files]
        letter = split_name[0]  # train and test have the same letter, so their different classes have equal names
        labels = {
            "label_specific": np.array([0, 1, 0, 1]),
            "label_general": np.array([0, 0, 0, 0]),
            "label_specific_str": [f"{letter}0", f"{letter}1"],
            "label_general_str": [letter.upper()],
        }
        if image_type == "bytes":
            labels = {key.encode(): value for key, value in labels.items()}
        (root / f"{split_name}_images_png.pkl").write_bytes(pickle.dumps(images, 2))
        (root / f"{split_name}_labels.pkl").write_bytes(pickle.dumps(labels, 2))


@pytest.mark.parametrize("image_type", ["array", "bytes"])
def test_pickles_have_categories_as_superclasses(tmp_path, image_type):
    write_pickles(tmp_path, image_type)
    assert detect(tmp_path) == "tiered-imagenet"
    images = load(tmp_path)
    assert names_in(images) == {"train": {"t0", "t1"}, "validation": {"v0", "v1"}, "test": {"t0", "t1"}}
    assert len(images.class_names) == 6
    assert images.superclass_names == ("T", "V")
    assert values_of(images, "v0") == [10, 12]
    assert values_of(images, "v1") == [11, 13]
    assert images.images.shape == (12, 3, 84, 84)


def test_folders_get_their_categories_from_the_published_table(tmp_path):
    root = write_tree(tmp_path / "data", TREE)
    assert detect(root) == "tiered-imagenet"
    images = load(root)
    assert names_in(images) == {
        "train": {"n01530575", "n01531178"},
        "validation": {"n02099267"},
        "test": {"n03314780"},
    }
    assert images.superclass_names == ("n01524359", "n02098550", "n00020090")
    assert values_of(images, "n02099267") == [3, 4]


def test_folders_of_other_classes_are_not_tiered_imagenet(tmp_path):
    assert detect(write_tree(tmp_path / "data", {"train/n00000001": 1, "test/n03314780": 1})) == "folder"


def test_the_table_has_the_608_published_classes_and_no_category_is_in_two_splits():
    published = shared("splits") / "tiered_imagenet"
    for split, file in [("train", "train.csv"), ("validation", "val.csv"), ("test", "test.csv")]:
        lines = {tuple(line.split(",")) for line in (published / file).read_text().split()}
        assert {
            (name, category)
            for table_split, name, category in read_split_table("tiered_imagenet")
            if table_split == split
        } == lines
    categories = {(split, category) for split, _, category in read_split_table("tiered_imagenet")}
    assert len(categories) == len({category for _, category in categories}) == 34


def test_a_different_number_of_images_and_labels_is_rejected(tmp_path):
    write_pickles(tmp_path)
    (tmp_path / "val_images_png.pkl").write_bytes(pickle.dumps([b""]))
    with pytest.raises(InputError, match=r"val_images_png\.pkl is not a list of 4 images, one for each label"):
        load(tmp_path)


def test_labels_larger_than_the_number_of_names_are_rejected(tmp_path):
    write_pickles(tmp_path)
    labels = {"label_specific": [0, 7], "label_specific_str": ["a"]}
    (tmp_path / "val_labels.pkl").write_bytes(pickle.dumps(labels))
    with pytest.raises(InputError, match=r"val_labels\.pkl has 7 in label_specific, but expected integers from 0 to 0"):
        load(tmp_path)


def test_missing_labels_are_rejected(tmp_path):
    write_pickles(tmp_path)
    (tmp_path / "test_labels.pkl").unlink()
    with pytest.raises(InputError, match=r"test_images_png\.pkl has no test_labels\.pkl next to it\. Put it there"):
        load("tiered-imagenet", tmp_path)


@pytest.mark.parametrize("file", ["train_images_png.pkl", "train_labels.pkl"])
def test_a_pickle_with_code_in_it_is_rejected(tmp_path, file):
    write_pickles(tmp_path)
    (tmp_path / file).write_bytes(pickle.dumps([exec]))
    with pytest.raises(InputError, match=rf"{file} refers to builtins\.exec, which is code, not data"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["label_specific", "label_general"])
@pytest.mark.parametrize("label", [0.9, -1, float("nan")])
def test_invalid_labels_are_rejected(tmp_path, key, label):
    write_pickles(tmp_path)
    for names in (True, False):
        labels = pickle.loads((tmp_path / "val_labels.pkl").read_bytes())
        labels[key] = np.array([0, label, 0, 0])
        if not names:
            del labels[f"{key}_str"]
        (tmp_path / "val_labels.pkl").write_bytes(pickle.dumps(labels))
        with pytest.raises(
            InputError, match=rf"val_labels\.pkl has {label:g}\S* in {key}, but expected integers from 0 to"
        ):
            load(tmp_path)


def test_the_number_of_unnamed_classes_is_limited(tmp_path):
    write_pickles(tmp_path)
    (tmp_path / "val_labels.pkl").write_bytes(pickle.dumps({"label_specific": [0, 0, 0, 10**12]}))
    with pytest.raises(
        InputError, match=r"val_labels\.pkl has 1000000000000 in label_specific, but expected integers from"
    ):
        load(tmp_path)


@pytest.mark.parametrize("image", [np.array([1, 256]), np.array([0.5]), 10**10, [1, 2]])
def test_images_that_are_not_bytes_are_rejected(tmp_path, image):
    write_pickles(tmp_path)
    images = pickle.loads((tmp_path / "val_images_png.pkl").read_bytes())
    images[2] = image
    (tmp_path / "val_images_png.pkl").write_bytes(pickle.dumps(images))
    with pytest.raises(
        InputError, match=r"val_images_png\.pkl has \S+.* in row 2, but expected .*\. Download the file"
    ):
        load(tmp_path)
