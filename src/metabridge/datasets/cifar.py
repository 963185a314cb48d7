"""CIFAR-FS, FC100 and FS-CIFAR100: three ways to split the 100 classes of CIFAR-100.

CIFAR-100 has 600 RGB images of 32 × 32 pixels per class. They are read from the folder `cifar-100-python` (the pickles
train, test and meta), from the folder `cifar-100-binary` (train.bin, test.bin and the label names), or from the
published archive of either folder (.tar.gz). The superclasses are the 20 coarse labels of CIFAR-100.

- CIFAR-FS (Bertinetto et al. 2019): 64, 16 and 20 classes.
- FC100 (Oreshkin et al. 2018): 60, 20 and 20 classes. The splits share no coarse label.
- FS-CIFAR100 (Collins et al. 2022): 80 training and 20 test classes. The paper does not list the classes and cites
  Oreshkin et al., so metabridge uses the test classes of FC100. As in the paper, 450 images of each training class are
  used for training, and 150 to measure the accuracy on seen classes. These 150 images form the validation split, with
  class names such as "apple (held out)". The paper does not say which images are held out; metabridge holds out
  all 100 images of the class in CIFAR-100's test file and the last 50 images of the class in the training file.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metabridge.datasets.image_files import (
    ClassInfo,
    ImageSource,
    RawImage,
    decode_text,
    open_regular,
    parse_indices,
    parse_names,
    parse_uint8,
    read_file,
    reading_errors,
    short_repr,
)
from metabridge.datasets.safe_unpickle import unpickle
from metabridge.datasets.splits import read_split_table
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError

DECODE_OPTIONS = DecodeOptions(size=32, channels=3)
IMAGE_BYTES = 3 * 32 * 32  # one uint8 value per pixel and channel
MAX_ARCHIVE_BYTES = 2**29  # limit before and after decompression; CIFAR-100 is 178 MiB after it
MAX_ARCHIVE_FILES = 1000  # the published archives contain fewer than ten
GZIP_MAGIC = b"\x1f\x8b"
TRAINING_IMAGES = 450  # per training class of FS-CIFAR100
LAYOUT_FILES = {  # folder name of each layout -> its files
    "cifar-100-python": ("train", "test", "meta"),
    "cifar-100-binary": ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
}


class _Cifar(NamedTuple):
    """All images of CIFAR-100, those of the training file first, with their labels and the names of the labels."""

    images: NDArray[np.uint8]  # (n, 3072): red, green and blue plane of each image
    fine_labels: NDArray[np.int64]  # (n,), indices into `fine_names`
    coarse_labels: NDArray[np.int64]  # (n,), indices into `coarse_names`
    fine_names: list[str]
    coarse_names: list[str]
    train_count: int  # the first `train_count` images are from the training file


def matches(root: Path) -> bool:
    """Return whether a path is the CIFAR-100 folder or archive, or a folder that contains one of them.

    >>> matches(Path("nowhere"))
    False
    """
    return bool(_locate(root))


def list_files(root: Path) -> list[Path]:
    """Return the files of the data set.

    >>> list_files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere does not contain CIFAR-100. Put cifar-100-python.tar.gz or ...
    """
    location = _locate(root)
    if not location:
        raise InputError(
            f"{root} does not contain CIFAR-100. Put cifar-100-python.tar.gz or cifar-100-binary.tar.gz there."
        )
    layout, path = location
    return [path / file for file in LAYOUT_FILES[layout]] if path.is_dir() else [path]


def open_source(root: Path, name: str = "cifar-fs") -> ImageSource:
    """Return the classes and images of "cifar-fs", "fc100" or "fs-cifar100".

    >>> open_source(Path("nowhere"), "fc100")
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere does not contain CIFAR-100. Put cifar-100-python.tar.gz or ...
    """
    list_files(root)  # raises an error if the data set is not there
    layout, path = _locate(root) or ("", root)  # not None, or `list_files` would have raised
    cifar = _read(layout, path)
    split_table = "cifar_fs" if name == "cifar-fs" else "fc100"  # FS-CIFAR100 has the test classes of FC100
    split_of = {class_name: split for split, class_name in read_split_table(split_table)}
    classes: dict[ClassInfo, list[int]] = {}
    for fine_label, class_name in enumerate(cifar.fine_names):
        if class_name not in split_of:
            raise InputError(
                f"{path} has a class {short_repr(class_name)}, which is not in CIFAR-100. Download the files again."
            )
        rows = np.flatnonzero(cifar.fine_labels == fine_label).tolist()
        superclass = cifar.coarse_names[cifar.coarse_labels[rows[0]]] if rows else "none"
        if name == "fs-cifar100" and split_of[class_name] != "test":
            classes[ClassInfo(class_name, superclass, "train")] = rows[:TRAINING_IMAGES]
            if rows[TRAINING_IMAGES:]:
                classes[ClassInfo(f"{class_name} (held out)", superclass, "validation")] = rows[TRAINING_IMAGES:]
        else:
            classes[ClassInfo(class_name, superclass, split_of[class_name])] = rows

    def images() -> Iterator[RawImage]:
        for label, rows in enumerate(classes.values()):
            for row in rows:
                planes = cifar.images[row].reshape(3, 32, 32)
                in_train = row < cifar.train_count
                image_name = f"train: row {row}" if in_train else f"test: row {row - cifar.train_count}"
                yield RawImage(image_name, label, np.ascontiguousarray(planes.transpose(1, 2, 0)))

    return ImageSource(f"CIFAR-100, {path.name}", tuple(classes), sum(map(len, classes.values())), images)


def _locate(root: Path) -> tuple[str, Path] | None:
    """Return the layout (a key of `LAYOUT_FILES`) and the folder or archive of the data set, or None if not found."""
    for layout, files in LAYOUT_FILES.items():
        for folder in (root, root / layout):
            if all((folder / file).is_file() for file in files):
                return layout, folder
        for archive in (root, root / f"{layout}.tar.gz"):
            if archive.name == f"{layout}.tar.gz" and archive.is_file():
                return layout, archive
    return None


def _read(layout: str, path: Path) -> _Cifar:
    """Read the data set from `path`, a folder or an archive with the files `LAYOUT_FILES[layout]`."""
    if path.is_file():
        contents = _read_archive(path, layout)
    else:
        contents = {file: read_file(path / file) for file in LAYOUT_FILES[layout]}
    parse = _parse_python if layout == "cifar-100-python" else _parse_binary
    cifar = parse(contents, path)
    if not len(cifar.images) == len(cifar.fine_labels) == len(cifar.coarse_labels):
        raise InputError(
            f"{path} has {len(cifar.images)} images, {len(cifar.fine_labels)} fine labels and "
            f"{len(cifar.coarse_labels)} coarse labels, but needs one label of each kind per image. "
            "Download the files again."
        )
    return cifar


def _read_archive(archive: Path, layout: str) -> dict[str, bytes]:
    """Read the files of `layout` from an archive, and return their contents by file name."""
    with reading_errors(archive), open_regular(archive) as stream:
        archive_bytes = stream.read(MAX_ARCHIVE_BYTES)
    contents = {}
    try:
        tar_bytes = archive_bytes
        if archive_bytes.startswith(GZIP_MAGIC):
            with gzip.open(BytesIO(archive_bytes)) as gzip_stream:
                tar_bytes = gzip_stream.read(MAX_ARCHIVE_BYTES + 1)
        if len(tar_bytes) > MAX_ARCHIVE_BYTES:
            raise tarfile.TarError(f"it contains more than {MAX_ARCHIVE_BYTES // 2**20} MiB")
        with tarfile.open(fileobj=BytesIO(tar_bytes), mode="r:") as tar:
            for index, member in enumerate(tar):
                if index == MAX_ARCHIVE_FILES:
                    raise tarfile.TarError(f"it contains more than {MAX_ARCHIVE_FILES} files")
                # With a negative size, tarfile would read forever. A sparse file may declare any size, and tarfile
                # would fill the memory with that many zeros.
                if not 0 <= member.size <= len(tar_bytes):
                    raise tarfile.TarError(f"its entry {member.name} declares {member.size} bytes")
                if member.isreg() and member.name.startswith(f"{layout}/"):
                    contents[member.name.removeprefix(f"{layout}/")] = tar.extractfile(member).read()  # type: ignore[union-attr]
    except Exception as error:  # damaged archives raise exceptions of many types
        raise InputError(f"{archive} is not a valid CIFAR-100 archive ({error}). Download the file again.") from error
    for file in LAYOUT_FILES[layout]:
        if file not in contents:
            raise InputError(f"{archive} does not contain {layout}/{file}. Download the file again.")
    return contents


def _parse_python(contents: dict[str, bytes], path: Path) -> _Cifar:
    train, test, meta = (
        _with_text_keys(unpickle(contents[file], f"{path / file}")) for file in LAYOUT_FILES["cifar-100-python"]
    )
    fine_names, coarse_names = (
        parse_names(path / "meta", key, meta.get(key)) for key in ("fine_label_names", "coarse_label_names")
    )
    images = [_parse_planes(path / file, batch.get("data")) for file, batch in (("train", train), ("test", test))]
    labels = {
        key: np.array(
            [
                *parse_indices(path / "train", key, train.get(key), len(names)),
                *parse_indices(path / "test", key, test.get(key), len(names)),
            ],
            dtype=np.int64,
        )
        for key, names in (("fine_labels", fine_names), ("coarse_labels", coarse_names))
    }
    return _Cifar(
        images=np.concatenate(images),
        fine_labels=labels["fine_labels"],
        coarse_labels=labels["coarse_labels"],
        fine_names=fine_names,
        coarse_names=coarse_names,
        train_count=len(images[0]),
    )


def _parse_planes(file: Path, images: Any) -> NDArray[np.uint8]:
    planes = parse_uint8(file, "data", images)
    if planes.ndim != 2 or planes.shape[1] != IMAGE_BYTES:
        raise InputError(
            f"{file} has data of shape {planes.shape}, but expected shape (images, {IMAGE_BYTES}). "
            "Download the file again."
        )
    return planes


def _parse_binary(contents: dict[str, bytes], path: Path) -> _Cifar:
    """Parse files in which each image is a row of bytes: coarse label, fine label and pixel values."""
    train, test, fine_text, coarse_text = (contents[file] for file in LAYOUT_FILES["cifar-100-binary"])
    if len(train) % (IMAGE_BYTES + 2) or len(test) % (IMAGE_BYTES + 2):
        raise InputError(f"{path} has a file that ends in the middle of an image. Download the files again.")
    rows = np.frombuffer(train + test, dtype=np.uint8).reshape(-1, IMAGE_BYTES + 2)
    fine_names, coarse_names = (text.decode("latin1").split() for text in (fine_text, coarse_text))
    return _Cifar(
        images=rows[:, 2:],
        fine_labels=np.array(parse_indices(path, "the fine labels", rows[:, 1], len(fine_names)), dtype=np.int64),
        coarse_labels=np.array(parse_indices(path, "the coarse labels", rows[:, 0], len(coarse_names)), dtype=np.int64),
        fine_names=fine_names,
        coarse_names=coarse_names,
        train_count=len(train) // (IMAGE_BYTES + 2),
    )


def _with_text_keys(content: Any) -> dict[str, Any]:
    """Return a dictionary with its keys as text; an empty one if `content` is not a dictionary."""
    return {decode_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
