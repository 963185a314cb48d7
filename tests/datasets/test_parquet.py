import json
import logging
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from metabridge.datasets import detect, load
from metabridge.datasets import parquet as module
from metabridge.errors import InputError
from pictures import encoded, flat, names_in, values_of

pytestmark = pytest.mark.usefixtures("empty_cache")


def write_file(
    file: Path, brightnesses: list[int], labels: list, *, names: list[str] | None = None, column: str = "image"
) -> Path:
    """Write images, each with its own brightness, in the layout of the hub."""
    images = [{"bytes": encoded(flat(value)), "path": f"{value}.png"} for value in brightnesses]
    table = pyarrow.table({column: images, "label": labels})
    if names is not None:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, file)
    return file


def test_file_names_define_splits_and_the_schema_names_classes(tmp_path):
    names = ["cat", "dog", "elm", "oak"]
    write_file(tmp_path / "data" / "train-00000-of-00002.parquet", [1, 2], [0, 1], names=names)
    write_file(tmp_path / "data" / "train-00001-of-00002.parquet", [3], [0], names=names)
    write_file(tmp_path / "data" / "validation-00000-of-00001.parquet", [4], [2], names=names)
    write_file(tmp_path / "data" / "test-00000-of-00001.parquet", [5], [3], names=names)
    assert detect(tmp_path) == "parquet"
    images = load(tmp_path)
    assert names_in(images) == {"train": {"cat", "dog"}, "validation": {"elm"}, "test": {"oak"}}
    assert values_of(images, "cat") == [1, 3]
    assert values_of(images, "oak") == [5]


def test_a_single_file_is_split_by_class(tmp_path):
    file = write_file(tmp_path / "train.parquet", [1, 2, 3, 4], ["cat", "dog", "elm", "cat"])
    images = load(file)
    assert sorted(map(len, names_in(images).values())) == [1, 1, 1]
    assert values_of(images, "cat") == [1, 4]


def test_splits_that_share_classes_are_merged_with_a_warning(tmp_path, caplog):
    write_file(tmp_path / "train.parquet", [1, 2], [7, 8])
    write_file(tmp_path / "test.parquet", [3, 4], [7, 8])
    with caplog.at_level(logging.WARNING, "metabridge"):
        images = load("parquet", tmp_path)
    assert set(images.class_names) == {"7", "8"}
    assert values_of(images, "7") == [1, 3]
    assert "so these are splits of images, not of classes" in caplog.text


def test_images_as_bytes_and_as_separate_files_are_read(tmp_path):
    (tmp_path / "one.png").write_bytes(encoded(flat(10)))
    table = pyarrow.table({"image": [{"bytes": None, "path": "one.png"}], "label": ["cat"]})
    parquet.write_table(table, tmp_path / "train.parquet")
    table = pyarrow.table({"img": [encoded(flat(20))], "fine_label": ["oak"], "coarse_label": ["tree"]})
    parquet.write_table(table, tmp_path / "test.parquet")
    images = load("parquet", tmp_path)
    assert (values_of(images, "cat"), values_of(images, "oak")) == ([10], [20])


def test_rows_without_a_label_are_skipped(tmp_path):
    images = load(write_file(tmp_path / "a.parquet", [1, 2, 3, 4], [0, -1, None, 1], names=["cat", "dog"]))
    assert len(images.images) == 2
    assert values_of(images, "dog") == [4]


def test_an_unreadable_image_is_named_by_file_and_path(tmp_path, caplog):
    images = [{"bytes": encoded(flat(1)), "path": "good.png"}, {"bytes": b"no", "path": "bad.png"}, None]
    parquet.write_table(pyarrow.table({"image": images, "label": [0, 0, 0]}), tmp_path / "a.parquet")
    assert len(load(tmp_path).images) == 1
    warning = "Skipped 2 unreadable images: a.parquet: bad.png (it is not an image that Pillow reads), a.parquet: row"
    assert f"{warning} 2 (" in caplog.text


@pytest.mark.parametrize("damaged_part", ["end", "middle"])
def test_a_damaged_file_is_rejected(tmp_path, damaged_part):
    file = write_file(tmp_path / "train.parquet", list(range(50)), 50 * [1])
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(content[:-10] if damaged_part == "end" else content[:30] + bytes(half) + content[30 + half :])
    with pytest.raises(
        InputError, match=r"train\.parquet is not a valid parquet file \(.*\)\. Download the file again\."
    ):
        load(file)


def test_a_file_without_image_or_label_column_is_rejected(tmp_path):
    file = write_file(tmp_path / "a.parquet", [1], [1], column="photo")
    with pytest.raises(InputError, match=r"has the columns photo, label, but none is called image or img\. Rename one"):
        load(file)


@pytest.mark.parametrize("path", ["/etc/hostname", "../secret.png", "a/../../secret.png"])
def test_a_row_that_names_a_file_outside_the_folder_is_rejected(tmp_path, path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(encoded(flat(10)))
    table = pyarrow.table({"image": [{"bytes": None, "path": path}], "label": ["cat"]})
    parquet.write_table(table, tmp_path / "data" / "train.parquet")
    with pytest.raises(InputError, match=rf"train\.parquet names the image '{path}', which is not in .*data\. Put it"):
        load(tmp_path / "data")


def test_a_row_that_names_a_missing_file_is_rejected(tmp_path):
    table = pyarrow.table({"image": [{"bytes": None, "path": "one.png"}], "label": ["cat"]})
    parquet.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(
        InputError, match=r"train\.parquet names the image 'one\.png', which is not in .*\. Put it there"
    ):
        load(tmp_path)
    (tmp_path / "one.png").write_bytes(encoded(flat(10)))
    assert len(load(tmp_path).images) == 1


@pytest.mark.parametrize(("labels", "invalid_label"), [([0.9, 1.0], "0.9"), ([0, 2], "2"), ([[1], [2]], r"\[1\]")])
def test_invalid_labels_are_rejected(tmp_path, labels, invalid_label):
    write_file(tmp_path / "train.parquet", [1, 2], labels, names=["cat", "dog"])
    with pytest.raises(
        InputError, match=rf"train\.parquet has {invalid_label} in column label, but .*\. Download the file again"
    ):
        load(tmp_path)


def test_a_file_that_unpacks_to_far_more_than_its_size_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BASE_UNPACKED_BYTES", 2**20)
    table = pyarrow.table({"image": [bytes(2**22)], "label": ["cat"]})
    parquet.write_table(table, tmp_path / "train.parquet", compression="gzip", use_dictionary=False)
    assert (tmp_path / "train.parquet").stat().st_size < 2**14
    with pytest.raises(InputError, match=r"is not a valid parquet file \(it has \d+ bytes, but declares 1 rows"):
        load(tmp_path)


def test_more_rows_than_bytes_are_rejected(tmp_path):
    table = pyarrow.table({"image": 10**5 * [b""], "label": 10**5 * [1]})
    parquet.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"but declares 100000 rows"):
        load(tmp_path)


def test_a_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"train\.parquet is not a valid parquet file \(it is not a regular file\)"):
        load("parquet", tmp_path)


def test_a_repeated_long_name_is_in_memory_once(tmp_path):
    indices = pyarrow.array(64 * [0], pyarrow.int32())
    names = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([2**20 * "n"]))
    parquet.write_table(pyarrow.table({"image": 64 * [encoded(flat(1))], "label": names}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2**21
    labels = module._row_class_names(tmp_path / "a.parquet")
    assert len(labels) == 64
    assert len({id(label) for label in labels}) == 1


@pytest.mark.parametrize("rows", [2, 64])
def test_an_image_shared_by_many_rows_takes_little_memory(tmp_path, rows):
    indices = pyarrow.array(rows * [0], pyarrow.int32())
    images = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([bytes(2**25)]))
    table = pyarrow.table({"image": images, "label": rows * [0]})
    options = {"store_schema": False, "compression": "gzip", "dictionary_pagesize_limit": 2**30}
    parquet.write_table(table, tmp_path / "a.parquet", **options)
    assert (tmp_path / "a.parquet").stat().st_size < 2**17
    allocated_before = pyarrow.default_memory_pool().bytes_allocated()
    raw_images = module._read_images(tmp_path / "a.parquet", "a", rows * [0])
    if rows == 2:  # the limit, at least 2^26 bytes, admits two images of 2^25 bytes
        assert len(list(raw_images)) == 2
    else:
        assert len(next(raw_images).content) == 2**25
        assert pyarrow.default_memory_pool().bytes_allocated() - allocated_before < 2**29
        with pytest.raises(InputError, match=r"its images are far larger than the file itself"):
            list(raw_images)
