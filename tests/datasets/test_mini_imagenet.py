import json
import pickle
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from metabridge.datasets import detect, load
from metabridge.datasets import mini_imagenet as module
from metabridge.errors import InputError
from pictures import encoded, flat, names_in, shared, values_of

pytestmark = pytest.mark.usefixtures("empty_cache")

# For each split name in file names and each class: the brightness of its two images.
BRIGHTNESS = {
    "train": {"n01532829": [1, 2], "n01558993": [3, 4]},
    "val": {"n01855672": [5, 6]},
    "test": {"n01930112": [7, 8]},
}
SPLITS = {"train": {"n01532829", "n01558993"}, "validation": {"n01855672"}, "test": {"n01930112"}}


def write_parquet(root: Path) -> None:
    # mini-ImageNet is recognized by its 100 class names; only the first four have images here.
    names = [name for classes in BRIGHTNESS.values() for name in classes] + [f"n{number:08}" for number in range(96)]
    features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    for split_name, classes in BRIGHTNESS.items():
        images = [{"bytes": encoded(flat(value)), "path": ""} for values in classes.values() for value in values]
        labels = [names.index(name) for name, values in classes.items() for _ in values]
        table = pyarrow.table({"image": images, "label": labels})
        split = {"val": "validation"}.get(split_name, split_name)
        file = root / f"{split}-00000-of-00001.parquet"
        parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), file)


def write_csv(root: Path) -> None:
    (root / "images").mkdir()
    for split_name, classes in BRIGHTNESS.items():
        lines = ["filename,label"]
        for name, values in classes.items():
            for value in values:
                (root / "images" / f"{name}{value}.jpg").write_bytes(encoded(flat(value), "jpeg"))
                lines.append(f"{name}{value}.jpg,{name}")
        (root / f"{split_name}.csv").write_text("\n".join(lines) + "\n")


def write_pickles(root: Path) -> None:
    for split_name, classes in BRIGHTNESS.items():
        images = np.stack([flat(value, 84) for values in classes.values() for value in values])
        rows = {name: [2 * index, 2 * index + 1] for index, name in enumerate(classes)}
        content = {"image_data": images, "class_dict": rows}
        (root / f"mini-imagenet-cache-{split_name}.pkl").write_bytes(pickle.dumps(content, 2))


LAYOUTS = {"parquet": write_parquet, "csv": write_csv, "pickles": write_pickles}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_classes_images_and_splits(tmp_path, layout):
    LAYOUTS[layout](tmp_path)
    assert detect(tmp_path) == "mini-imagenet"
    images = load("mini-imagenet", tmp_path)
    assert names_in(images) == SPLITS
    assert images.images.shape == (8, 3, 84, 84)
    for classes in BRIGHTNESS.values():
        for name, values in classes.items():
            assert values_of(images, name) == values


def test_an_image_missing_from_the_folder_is_skipped(tmp_path, caplog):
    write_csv(tmp_path)
    (tmp_path / "images" / "n018556725.jpg").unlink()  # the image of brightness 5 in class n01855672
    assert len(load(tmp_path).images) == 7
    assert "Skipped 1 unreadable image: n018556725.jpg (No such file or directory)." in caplog.text


def test_a_csv_file_without_a_header_is_rejected(tmp_path):
    write_csv(tmp_path)
    (tmp_path / "val.csv").write_text("a.jpg,n01\n")
    with pytest.raises(InputError, match=r"val\.csv has no columns filename and label in its first line"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "has no uint8 array image_data of shape"),
        ({"image_data": np.zeros((2, 4, 4, 3)), "class_dict": {}}, "has no uint8 array image_data of shape"),
        (
            {"image_data": np.zeros((2, 4, 4, 3), np.uint8), "class_dict": {"n1": [2]}},
            r"has 2 in class_dict\['n1'\], but expected integers from 0 to 1",
        ),
    ],
)
def test_a_pickle_with_other_content_is_rejected(tmp_path, content, sentence):
    write_pickles(tmp_path)
    (tmp_path / "mini-imagenet-cache-val.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match=rf"mini-imagenet-cache-val\.pkl {sentence}"):
        load(tmp_path)


def test_a_pickle_with_code_in_it_is_rejected(tmp_path):
    write_pickles(tmp_path)
    (tmp_path / "mini-imagenet-cache-test.pkl").write_bytes(pickle.dumps({"image_data": exec}))
    with pytest.raises(InputError, match=r"mini-imagenet-cache-test\.pkl refers to builtins\.exec, which is code"):
        load(tmp_path)


def test_an_empty_folder_is_rejected_with_a_list_of_formats(tmp_path):
    with pytest.raises(InputError, match=r"has no files of mini-ImageNet\. Put its parquet files there, or"):
        load("mini-imagenet", tmp_path)


def test_the_real_parquet_files_have_100_classes_with_the_published_splits():
    root = shared("mini-imagenet")
    from metabridge.datasets.mini_imagenet import open_source

    assert detect(root) == "mini-imagenet"
    source = open_source(root)
    assert source.total == 60_000
    assert Counter(info.split for info in source.classes) == {"train": 64, "validation": 16, "test": 20}
    published = (shared("splits") / "mini_imagenet" / "classes.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in published]
    expected = {(name, {"val": "validation"}.get(split, split)) for _, name, _, split, *_ in rows}
    assert {(info.name, info.split) for info in source.classes} == expected


@pytest.mark.parametrize("row", [0.9, -1, 2, float("nan"), None])
def test_a_pickle_with_an_invalid_row_number_is_rejected(tmp_path, row):
    write_pickles(tmp_path)
    content = {"image_data": np.zeros((2, 84, 84, 3), np.uint8), "class_dict": {"n1": [0, row]}}
    (tmp_path / "mini-imagenet-cache-val.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(
        InputError, match=rf"-val\.pkl has {row} in class_dict\['n1'\], but expected integers from 0 to 1"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/etc/passwd,n1", r"val\.csv names the image '/etc/passwd', which is not in .*images\. Put it there"),
        ("../val.csv,n1", r"val\.csv names the image '\.\./val\.csv', which is not in .*images\. Put it there"),
        (f"a.jpg,{131_073 * 'n'}", r"val\.csv is not a CSV file after line 1 \(field larger than field limit"),
        ("a.jpg", r"val\.csv has no label in line 2\. Add it"),
        (",n1", r"val\.csv names the image '', which is not in"),
    ],
)
def test_a_csv_file_with_an_invalid_line_is_rejected(tmp_path, line, sentence):
    write_csv(tmp_path)
    (tmp_path / "val.csv").write_text(f"filename,label\n{line}\n")
    with pytest.raises(InputError, match=sentence):
        load(tmp_path)


def test_reading_a_csv_file_takes_time_linear_in_its_lines(tmp_path):
    write_csv(tmp_path)
    text = "filename,label" + 3000 * ",x" + "\n" + 3000 * "a.jpg,n1\n\n"
    (tmp_path / "val.csv").write_text(text)
    executed_lines = 0  # of Python

    def trace(frame, event, _):
        nonlocal executed_lines
        executed_lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        source = module._source_from_csv(tmp_path, {"validation": tmp_path / "val.csv"})
    finally:
        sys.settrace(None)
    assert source.total == 3000
    assert executed_lines < 3000 * 300  # copying all 3000 columns for each of 3000 lines would take far more


def test_a_pickle_with_more_rows_than_images_is_rejected(tmp_path):
    write_pickles(tmp_path)
    rows = 3000 * [0]
    content = {"image_data": np.zeros((1, 4, 4, 3), np.uint8), "class_dict": {f"n{name}": rows for name in range(9)}}
    (tmp_path / "mini-imagenet-cache-val.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match=r"has more rows in class_dict than its 1 images\. Download the file again"):
        load(tmp_path)
