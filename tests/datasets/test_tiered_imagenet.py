import pickle
from pathlib import Path

import numpy as np
import pytest

from metabridge.datasets import detect, load
from metabridge.datasets.splits import table
from metabridge.errors import InputError
from pictures import encoded, flat, names_in, shared, values_of, write_tree

pytestmark = pytest.mark.usefixtures("own_cache")

TREE = {"train/n01530575": 2, "train/n01531178": 1, "val/n02099267": 2, "test/n03314780": 1}


def write_pickles(root: Path, form: str = "array") -> None:
    """Two classes a split, 'a0' and 'a1' in category 'A' for train and so on; images told by brightness."""
    for start, part in [(0, "train"), (10, "val"), (20, "test")]:
        files = [encoded(flat(start + row)) for row in range(4)]
        images = [np.frombuffer(file, np.uint8)[:, None].copy() if form == "array" else file for file in files]
        letter = part[0]
        labels = {
            "label_specific": np.array([0, 1, 0, 1]),
            "label_general": np.array([0, 0, 0, 0]),
            "label_specific_str": [f"{letter}0", f"{letter}1"],
            "label_general_str": [letter.upper()],
        }
        if form == "bytes":
            labels = {key.encode(): value for key, value in labels.items()}
        (root / f"{part}_images_png.pkl").write_bytes(pickle.dumps(images, 2))
        (root / f"{part}_labels.pkl").write_bytes(pickle.dumps(labels, 2))


@pytest.mark.parametrize("form", ["array", "bytes"])
def test_pickles_give_classes_with_their_categories_as_superclasses(tmp_path, form):
    write_pickles(tmp_path, form)
    assert detect(tmp_path) == "tiered-imagenet"
    images = load(tmp_path)
    assert names_in(images) == {"train": {"t0", "t1"}, "validation": {"v0", "v1"}, "test": {"t0", "t1"}}
    assert len(images.class_names) == 6
    assert images.superclass_names == ("T", "V")
    assert values_of(images, "v0") == [10, 12]
    assert values_of(images, "v1") == [11, 13]
    assert images.images.shape == (12, 3, 84, 84)


def test_folders_take_their_categories_from_the_published_table(tmp_path):
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


def test_folders_of_other_classes_are_just_folders(tmp_path):
    assert detect(write_tree(tmp_path / "data", {"train/n00000001": 1, "test/n03314780": 1})) == "folder"


def test_the_table_holds_the_608_published_classes_and_no_category_is_in_two_splits():
    published = shared("splits") / "tiered_imagenet"
    for split, file in [("train", "train.csv"), ("validation", "val.csv"), ("test", "test.csv")]:
        lines = {tuple(line.split(",")) for line in (published / file).read_text().split()}
        assert {(name, general) for own, name, general in table("tiered_imagenet") if own == split} == lines
    categories = {(split, general) for split, _, general in table("tiered_imagenet")}
    assert len(categories) == len({general for _, general in categories}) == 34


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path):
    write_pickles(tmp_path)
    (tmp_path / "val_images_png.pkl").write_bytes(pickle.dumps([b""]))
    with pytest.raises(InputError, match=r"val_images_png\.pkl is not a list of 4 images, which is how many labels"):
        load(tmp_path)


def test_labels_without_names_are_refused(tmp_path):
    write_pickles(tmp_path)
    held = {"label_specific": [0, 7], "label_specific_str": ["a"]}
    (tmp_path / "val_labels.pkl").write_bytes(pickle.dumps(held))
    with pytest.raises(
        InputError, match=r"val_labels\.pkl has 7 in label_specific, but whole numbers from 0 to 0 belong"
    ):
        load(tmp_path)


def test_missing_labels_are_named(tmp_path):
    write_pickles(tmp_path)
    (tmp_path / "test_labels.pkl").unlink()
    with pytest.raises(InputError, match=r"test_labels\.pkl is not beside .*test_images_png\.pkl\. Put it there"):
        load("tiered-imagenet", tmp_path)


@pytest.mark.parametrize("file", ["train_images_png.pkl", "train_labels.pkl"])
def test_a_pickle_with_code_in_it_is_refused(tmp_path, file):
    write_pickles(tmp_path)
    (tmp_path / file).write_bytes(pickle.dumps([exec]))
    with pytest.raises(InputError, match=rf"{file} asks for builtins\.exec, which is code, not data"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["label_specific", "label_general"])
@pytest.mark.parametrize("wrong", [0.9, -1, float("nan")])
def test_labels_that_number_no_class_are_refused(tmp_path, key, wrong):
    write_pickles(tmp_path)
    for names in (True, False):
        held = pickle.loads((tmp_path / "val_labels.pkl").read_bytes())
        held[key] = np.array([0, wrong, 0, 0])
        if not names:
            del held[f"{key}_str"]
        (tmp_path / "val_labels.pkl").write_bytes(pickle.dumps(held))
        with pytest.raises(
            InputError, match=rf"val_labels\.pkl has {wrong:g}\S* in {key}, but whole numbers from 0 to"
        ):
            load(tmp_path)


def test_numbers_without_names_make_no_more_classes_than_there_can_be(tmp_path):
    write_pickles(tmp_path)
    (tmp_path / "val_labels.pkl").write_bytes(pickle.dumps({"label_specific": [0, 0, 0, 10**12]}))
    with pytest.raises(
        InputError, match=r"val_labels\.pkl has 1000000000000 in label_specific, but whole numbers from"
    ):
        load(tmp_path)


@pytest.mark.parametrize("image", [np.array([1, 256]), np.array([0.5]), 10**10, [1, 2]])
def test_images_that_are_no_bytes_are_refused(tmp_path, image):
    write_pickles(tmp_path)
    images = pickle.loads((tmp_path / "val_images_png.pkl").read_bytes())
    images[2] = image
    (tmp_path / "val_images_png.pkl").write_bytes(pickle.dumps(images))
    with pytest.raises(
        InputError, match=r"val_images_png\.pkl has \S+.* in row 2, but .* belong.? there\. Get the file"
    ):
        load(tmp_path)
