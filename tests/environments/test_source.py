from collections import Counter

import pytest

from metabridge.environments.source import Category, Picture, Source, class_folders, pooled, split_by_class
from metabridge.errors import InputError


def unsplit(count: int) -> list[Category]:
    return [Category(f"class{index:03}", "all", "") for index in range(count)]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(100, (64, 16, 20)), (10, (6, 2, 2)), (4, (2, 1, 1)), (3, (1, 1, 1)), (2, (1, 0, 1)), (1, (1, 0, 0))],
)
def test_classes_are_split_64_16_20_and_no_split_is_empty_where_that_is_possible(count, sizes):
    counted = Counter(category.split for category in split_by_class(unsplit(count)))
    assert tuple(counted[split] for split in ("train", "validation", "test")) == sizes


def test_the_split_rests_on_the_seed_and_the_names_and_not_on_their_order():
    classes = unsplit(50)
    once = split_by_class(classes, seed=3)
    assert set(split_by_class(classes[::-1], seed=3)) == set(once)
    assert set(split_by_class(classes, seed=4)) != set(once)


def test_a_given_split_is_left_as_it_is():
    classes = (Category("a", "all", "test"), Category("b", "all", "test"))
    assert split_by_class(classes, seed=1) == classes


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed is -1, but must not be negative"):
        split_by_class(unsplit(3), seed=-1)


def toy(*classes: Category) -> Source:
    return Source("a toy", classes, len(classes), lambda: (Picture(str(n), n, b"") for n in range(len(classes))))


def test_splits_that_share_a_class_are_pooled_with_a_note():
    source = pooled(toy(Category("a", "", "train"), Category("b", "", "train"), Category("a", "", "test")))
    assert source.classes == (Category("a", "", ""), Category("b", "", ""))
    assert [picture.label for picture in source.pictures()] == [0, 1, 0]
    assert source.notes[0].startswith("class 'a' is in split 'train' and in 'test', so these are splits of images")


def test_splits_of_classes_stay_and_a_single_split_is_the_whole_set():
    split = toy(Category("a", "", "train"), Category("b", "", "test"))
    assert pooled(split) is split
    assert pooled(toy(Category("a", "", "train"), Category("b", "", "train"))).classes[1] == Category("b", "", "")
    assert pooled(toy(Category("a", "", "train"), Category("b", "", ""))).classes[0] == Category("a", "", "")


def test_hidden_files_and_other_files_are_no_images(tmp_path):
    for file in ("cat/1.JPG", "cat/.1.jpg", "cat/notes.txt", ".git/a.png", "__MACOSX/cat/1.jpg", "loose.png"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert class_folders(tmp_path) == {"cat": ["cat/1.JPG"]}
