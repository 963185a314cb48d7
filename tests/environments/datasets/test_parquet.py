import json
import logging
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from metabridge.environments.datasets import detect, load
from metabridge.errors import InputError
from pictures import encoded, flat, names_in, values_of

pytestmark = pytest.mark.usefixtures("own_cache")


def write(
    file: Path, values: list[int], labels: list, *, names: list[str] | None = None, column: str = "image"
) -> Path:
    """Images told by their brightness, as the hub writes them."""
    images = [{"bytes": encoded(flat(value)), "path": f"{value}.png"} for value in values]
    table = pyarrow.table({column: images, "label": labels})
    if names is not None:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, file)
    return file


def test_files_named_after_splits_make_the_splits_and_the_schema_names_the_classes(tmp_path):
    names = ["cat", "dog", "elm", "oak"]
    write(tmp_path / "data" / "train-00000-of-00002.parquet", [1, 2], [0, 1], names=names)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", [3], [0], names=names)
    write(tmp_path / "data" / "validation-00000-of-00001.parquet", [4], [2], names=names)
    write(tmp_path / "data" / "test-00000-of-00001.parquet", [5], [3], names=names)
    assert detect(tmp_path) == "parquet"
    images = load(tmp_path)
    assert names_in(images) == {"train": {"cat", "dog"}, "validation": {"elm"}, "test": {"oak"}}
    assert values_of(images, "cat") == [1, 3]
    assert values_of(images, "oak") == [5]


def test_a_single_file_is_split_by_class(tmp_path):
    file = write(tmp_path / "train.parquet", [1, 2, 3, 4], ["cat", "dog", "elm", "cat"])
    images = load(file)
    assert sorted(map(len, names_in(images).values())) == [1, 1, 1]
    assert values_of(images, "cat") == [1, 4]


def test_splits_that_share_classes_are_put_together_with_a_warning(tmp_path, caplog):
    write(tmp_path / "train.parquet", [1, 2], [7, 8])
    write(tmp_path / "test.parquet", [3, 4], [7, 8])
    with caplog.at_level(logging.WARNING, "metabridge"):
        images = load("parquet", tmp_path)
    assert set(images.class_names) == {"7", "8"}
    assert values_of(images, "7") == [1, 3]
    assert "so these are splits of images, not of classes" in caplog.text


def test_images_as_plain_bytes_and_as_files_beside_are_read(tmp_path):
    (tmp_path / "one.png").write_bytes(encoded(flat(10)))
    table = pyarrow.table({"image": [{"bytes": None, "path": "one.png"}], "label": ["cat"]})
    parquet.write_table(table, tmp_path / "train.parquet")
    plain = pyarrow.table({"img": [encoded(flat(20))], "fine_label": ["oak"], "coarse_label": ["tree"]})
    parquet.write_table(plain, tmp_path / "test.parquet")
    images = load("parquet", tmp_path)
    assert (values_of(images, "cat"), values_of(images, "oak")) == ([10], [20])


def test_rows_without_a_label_are_left_out(tmp_path):
    images = load(write(tmp_path / "a.parquet", [1, 2, 3, 4], [0, -1, None, 1], names=["cat", "dog"]))
    assert len(images.images) == 2
    assert values_of(images, "dog") == [4]


def test_an_unreadable_image_is_named_by_file_and_path(tmp_path, caplog):
    images = [{"bytes": encoded(flat(1)), "path": "good.png"}, {"bytes": b"no", "path": "bad.png"}, None]
    parquet.write_table(pyarrow.table({"image": images, "label": [0, 0, 0]}), tmp_path / "a.parquet")
    assert len(load(tmp_path).images) == 1
    told = "2 unreadable images are left out: a.parquet: bad.png (it is not an image that Pillow reads), a.parquet: row"
    assert f"{told} 2 (" in caplog.text


@pytest.mark.parametrize("where", ["end", "middle"])
def test_a_damaged_file_is_named(tmp_path, where):
    file = write(tmp_path / "train.parquet", list(range(50)), 50 * [1])
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(content[:-10] if where == "end" else content[:30] + bytes(half) + content[30 + half :])
    with pytest.raises(InputError, match=r"train\.parquet is not a whole parquet file \(.*\)\. Get the file again\."):
        load(file)


def test_a_file_without_images_or_labels_is_told_by_its_columns(tmp_path):
    file = write(tmp_path / "a.parquet", [1], [1], column="photo")
    with pytest.raises(InputError, match=r"has the columns photo, label, but none is called image or img\. Rename one"):
        load(file)
