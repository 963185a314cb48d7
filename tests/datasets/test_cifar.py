import gzip
import io
import pickle
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from metabridge.datasets import cifar as module
from metabridge.datasets import detect, load
from metabridge.datasets.splits import read_split_table
from metabridge.errors import InputError
from pictures import names_in, shared

pytestmark = pytest.mark.usefixtures("empty_cache")

FINE_NAMES = sorted(name for _, name in read_split_table("fc100"))
COARSE_NAMES = [f"coarse{number:02}" for number in range(20)]
TRAIN_COUNT, TEST_COUNT = 5, 1  # images per class in the two files; the published files have 500 and 100


def make_images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` images per class and their labels.

    The first red value is the class, and the green values are the number of the image in its class.
    """
    fine_labels = np.tile(np.arange(100), count)
    images = np.zeros((len(fine_labels), 3, 32, 32), dtype=np.uint8)
    images[:, 0, 0, 0] = fine_labels
    images[:, 1] = np.arange(count).repeat(100)[:, None, None]
    return images.reshape(-1, 3072), fine_labels


def write_python(root: Path, *, text_keys: bool = True) -> Path:
    """Write pickles with text keys, like the published files, or with bytes keys."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)

    def key(name: str) -> str | bytes:
        return name if text_keys else name.encode()

    for name, count in [("train", TRAIN_COUNT), ("test", TEST_COUNT)]:
        images, fine_labels = make_images(count)
        labels = {"fine_labels": fine_labels, "coarse_labels": fine_labels // 5}
        batch = {key("data"): images, **{key(kind): values.tolist() for kind, values in labels.items()}}
        (folder / name).write_bytes(pickle.dumps(batch, 2))
    names = {key("fine_label_names"): FINE_NAMES, key("coarse_label_names"): COARSE_NAMES}
    (folder / "meta").write_bytes(pickle.dumps(names, 2))
    return folder


def write_binary(root: Path) -> Path:
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, count in [("train", TRAIN_COUNT), ("test", TEST_COUNT)]:
        images, fine_labels = make_images(count)
        labels = np.stack([fine_labels // 5, fine_labels], axis=1).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels, images], axis=1).tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(FINE_NAMES) + "\n\n")
    (folder / "coarse_label_names.txt").write_text("\n".join(COARSE_NAMES) + "\n")
    return folder


def pack(folder: Path) -> Path:
    """Replace a folder by its archive, and return the folder that contains the archive."""
    with tarfile.open(folder.parent / f"{folder.name}.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    shutil.rmtree(folder)
    return folder.parent


LAYOUTS = {
    "python": write_python,
    "python with bytes keys": lambda root: write_python(root, text_keys=False),
    "within a folder": lambda root: write_python(root).parent,
    "binary": write_binary,
    "python archive": lambda root: pack(write_python(root)),
    "binary archive": lambda root: pack(write_binary(root)),
    "archive itself": lambda root: pack(write_python(root)) / "cifar-100-python.tar.gz",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_classes_and_images(tmp_path, layout):
    root = LAYOUTS[layout](tmp_path)
    assert detect(root) == "cifar-fs"
    images = load("cifar-fs", root)
    assert images.images.shape == (600, 3, 32, 32)
    expected = [FINE_NAMES[number] for number in images.images[:, 0, 0, 0].tolist()]
    assert expected == [images.class_names[label] for label in images.labels]
    # both files have an image 0 of each class
    assert Counter(images.images[:, 1, 9, 9].tolist()) == {0: 200, 1: 100, 2: 100, 3: 100, 4: 100}
    superclass_of = {
        name: images.superclass_names[index] for name, index in zip(images.class_names, images.superclasses)
    }
    assert superclass_of == {name: COARSE_NAMES[number // 5] for number, name in enumerate(FINE_NAMES)}


@pytest.mark.parametrize(("name", "folder"), [("cifar-fs", "cifar_fs"), ("fc100", "fc100")])
def test_splits_are_as_published(tmp_path, name, folder):
    splits = names_in(load(name, write_python(tmp_path)))
    for split, file in [("train", "train.txt"), ("validation", "val.txt"), ("test", "test.txt")]:
        published = (shared("splits") / folder / file).read_text().splitlines()
        assert splits[split] == {line.split("\t")[0] for line in published}


def test_fs_cifar100_has_80_training_classes_with_held_out_images_and_20_test_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRAINING_IMAGES", 4)
    images = load("fs-cifar100", write_python(tmp_path))
    splits = names_in(images)
    assert len(splits["train"]) == 80
    assert splits["test"] == names_in(load("fc100", tmp_path))["test"]
    assert splits["validation"] == {f"{name} (held out)" for name in splits["train"]}
    counts = torch.bincount(images.labels)
    # of the 5 + 1 images of a class
    assert {split: set(counts[labels].tolist()) for split, labels in images.splits.items()} == {
        "train": {4},
        "validation": {2},
        "test": {6},
    }
    held_out_images = images.images[images.labels == images.class_names.index("apple (held out)")]
    assert held_out_images[:, 1, 9, 9].tolist() == [4, 0]  # CIFAR's last training image and its test image
    superclass, held_out_superclass = (
        images.superclasses[images.class_names.index(name)] for name in ("apple", "apple (held out)")
    )
    assert superclass == held_out_superclass


@pytest.mark.parametrize("write", [write_python, write_binary])
def test_images_are_named_by_file_and_row(tmp_path, write):
    source = module.open_source(write(tmp_path), "cifar-fs")
    names = [image.name for image in source.images()]
    # the images of a class are 100 rows apart, because `make_images` alternates between the 100 classes
    assert names[:6] == [*(f"train: row {100 * index}" for index in range(TRAIN_COUNT)), "test: row 0"]


def test_a_file_that_ends_in_the_middle_of_an_image_is_rejected(tmp_path):
    folder = write_binary(tmp_path)
    (folder / "test.bin").write_bytes((folder / "test.bin").read_bytes()[:-1])
    with pytest.raises(InputError, match=r"cifar-100-binary has a file that ends in the middle of an image"):
        load("fc100", folder)


def test_a_truncated_archive_is_rejected(tmp_path):
    file = pack(write_python(tmp_path)) / "cifar-100-python.tar.gz"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(
        InputError, match=r"cifar-100-python\.tar\.gz is not a valid CIFAR-100 archive \(.*\)\. Download the"
    ):
        load("fc100", tmp_path)


def test_an_archive_without_one_of_the_files_is_rejected(tmp_path):
    (write_python(tmp_path) / "meta").unlink()
    pack(tmp_path / "cifar-100-python")
    with pytest.raises(InputError, match=r"does not contain cifar-100-python/meta\. Download the file again"):
        load("fc100", tmp_path)


def test_fewer_labels_than_images_are_rejected(tmp_path):
    folder = write_python(tmp_path)
    images, fine_labels = make_images(1)
    batch = {"data": images, "fine_labels": fine_labels[:-1].tolist(), "coarse_labels": (fine_labels // 5).tolist()}
    (folder / "test").write_bytes(pickle.dumps(batch))
    with pytest.raises(InputError, match="has 600 images, 599 fine labels and 600 coarse labels"):
        load("cifar-fs", folder)


def test_unknown_class_names_are_rejected(tmp_path):
    folder = write_binary(tmp_path)
    (folder / "fine_label_names.txt").write_text("\n".join(["yeti", *FINE_NAMES[1:]]))
    with pytest.raises(InputError, match="has a class 'yeti', which is not in CIFAR-100"):
        load("cifar-fs", folder)


@pytest.mark.parametrize("file", ["train", "meta"])
def test_a_pickle_with_code_in_it_is_rejected(tmp_path, file):
    folder = write_python(tmp_path)
    (folder / file).write_bytes(pickle.dumps({"data": exec}))
    with pytest.raises(InputError, match=rf"cifar-100-python/{file} refers to builtins\.exec, which is code, not data"):
        load("cifar-fs", folder)


@pytest.mark.parametrize("key", ["fine_labels", "coarse_labels"])
@pytest.mark.parametrize("label", [-1, 100, 0.9, None])
def test_invalid_labels_are_rejected(tmp_path, key, label):
    folder = write_python(tmp_path)
    batch = pickle.loads((folder / "test").read_bytes())
    batch[key][7] = label
    (folder / "test").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(
        InputError, match=rf"cifar-100-python/test has {label} in {key}, but expected integers from 0 to"
    ):
        load("cifar-fs", folder)


@pytest.mark.parametrize("pixel", [256, -1, 0.5, np.nan])
def test_pixels_that_are_not_bytes_are_rejected(tmp_path, pixel):
    folder = write_python(tmp_path)
    batch = pickle.loads((folder / "train").read_bytes())
    batch["data"] = batch["data"].astype(np.float64 if isinstance(pixel, float) else np.int64)
    (folder / "train").write_bytes(pickle.dumps(batch, 2))
    assert len(load("cifar-fs", folder).images) == 600  # integers of another type are accepted
    batch["data"][3, 4] = pixel
    (folder / "train").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(
        InputError, match=rf"cifar-100-python/train has {pixel} in data, but expected integers from 0 to 255"
    ):
        load("cifar-fs", folder)


def write_archive(root: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    (root / "cifar-100-python.tar.gz").write_bytes(gzip.compress(stream.getvalue()))
    return root


def test_an_archive_that_unpacks_to_too_much_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_ARCHIVE_BYTES", 2**20)
    info = tarfile.TarInfo("cifar-100-python/train")
    info.size = 2**21
    root = write_archive(tmp_path, (info, bytes(2**21)))
    assert (root / "cifar-100-python.tar.gz").stat().st_size < 2**14
    with pytest.raises(
        InputError, match=r"is not a valid CIFAR-100 archive \(it contains more than 1 MiB\)\. Download the file again"
    ):
        load("cifar-fs", root)


def test_an_archive_with_a_negative_member_size_is_rejected(tmp_path):
    root = write_archive(tmp_path, (tarfile.TarInfo("cifar-100-python/train"), b""))
    raw = bytearray(gzip.decompress((root / "cifar-100-python.tar.gz").read_bytes()))
    raw[124:136] = b"\xff" * 10 + b"\xfe\x00"  # the size, -512
    raw[148:156] = b" " * 8  # the checksum of the header, computed with spaces in its place
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    (root / "cifar-100-python.tar.gz").write_bytes(gzip.compress(bytes(raw)))
    with pytest.raises(InputError, match=r"cifar-100-python/train declares -512 bytes\)\. Download the file again"):
        load("cifar-fs", root)


def test_a_link_in_an_archive_is_not_followed(tmp_path):
    link = tarfile.TarInfo("cifar-100-python/train")
    link.type, link.linkname = tarfile.SYMTYPE, "cifar-100-python/train"
    with pytest.raises(InputError, match=r"does not contain cifar-100-python/train\. Download the file again"):
        load("cifar-fs", write_archive(tmp_path, (link, b"")))


def test_an_archive_of_too_many_files_is_rejected(tmp_path):
    members = [(tarfile.TarInfo(f"{number}"), b"") for number in range(1001)]
    with pytest.raises(InputError, match=r"is not a valid CIFAR-100 archive \(it contains more than 1000 files\)"):
        load("cifar-fs", write_archive(tmp_path, *members))
