"""CIFAR-FS, FC100 and FS-CIFAR100: three splits of the 100 classes of CIFAR-100, with 600 images each.

Read from CIFAR-100's files: `cifar-100-python` (the pickles train, test and meta) or `cifar-100-binary` (train.bin,
test.bin and the label names), as folders or as the published .tar.gz archives. Images are 32 × 32 in RGB.
Superclasses are CIFAR's 20 coarse labels.

- CIFAR-FS (Bertinetto et al. 2019): 64, 16 and 20 classes.
- FC100 (Oreshkin et al. 2018): 60, 20 and 20 classes; no coarse label is in two splits.
- FS-CIFAR100 (Collins et al. 2022): 80 training and 20 test classes. The paper does not list them and cites Oreshkin
  et al., so we use FC100's test classes. As in the paper, 450 images of each training class are for training and 150
  for measuring the accuracy on seen classes. These 150 images are the validation split, as classes named
  "apple (held out)". The paper does not say which images they are: we use CIFAR's test images and the last 50 of
  its training images.
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

from metabridge.datasets.image_decoding import DecodeOptions
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
from metabridge.errors import InputError

DECODE_OPTIONS = DecodeOptions(size=32, channels=3)
PIXELS = 3 * 32 * 32
MAX_ARCHIVE_BYTES = 2**29  # packed or unpacked; CIFAR-100 has 178 MiB
MAX_MEMBERS = 1000  # files in an archive; CIFAR-100 has five
GZIP_MAGIC = b"\x1f\x8b"
TRAINING_IMAGES = 450  # per training class of FS-CIFAR100
FILES = {
    "cifar-100-python": ("train", "test", "meta"),
    "cifar-100-binary": ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
}


class _Cifar(NamedTuple):
    images: NDArray[np.uint8]  # (n, 3072): the red, green and blue planes of each image
    fine: NDArray[np.int64]
    coarse: NDArray[np.int64]
    fine_names: list[str]
    coarse_names: list[str]
    train_images: int  # the number of images from CIFAR's training file, which come first


def matches(root: Path) -> bool:
    """Return whether a path is the folder or the archive of CIFAR-100, or a folder that contains one of these.

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
    form, path = location
    return [path / file for file in FILES[form]] if path.is_dir() else [path]


def open_source(root: Path, name: str = "cifar-fs") -> ImageSource:
    """Return the classes and images of "cifar-fs", "fc100" or "fs-cifar100".

    >>> open_source(Path("nowhere"), "fc100")
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere does not contain CIFAR-100. Put cifar-100-python.tar.gz or ...
    """
    list_files(root)
    form, path = _locate(root) or ("", root)
    cifar = _read(form, path)
    split_of = {fine: split for split, fine in read_split_table({"cifar-fs": "cifar_fs"}.get(name, "fc100"))}
    classes: dict[ClassInfo, list[int]] = {}
    for number, fine in enumerate(cifar.fine_names):
        if fine not in split_of:
            raise InputError(
                f"{path} has a class {short_repr(fine)}, which is not in CIFAR-100. Download the files again."
            )
        rows = np.flatnonzero(cifar.fine == number).tolist()
        superclass = cifar.coarse_names[cifar.coarse[rows[0]]] if rows else "none"
        if name == "fs-cifar100" and split_of[fine] != "test":
            classes[ClassInfo(fine, superclass, "train")] = rows[:TRAINING_IMAGES]
            if rows[TRAINING_IMAGES:]:
                classes[ClassInfo(f"{fine} (held out)", superclass, "validation")] = rows[TRAINING_IMAGES:]
        else:
            classes[ClassInfo(fine, superclass, split_of[fine])] = rows

    def images() -> Iterator[RawImage]:
        for label, rows in enumerate(classes.values()):
            for row in rows:
                planes = cifar.images[row].reshape(3, 32, 32)
                in_train = row < cifar.train_images
                image_name = f"train: row {row}" if in_train else f"test: row {row - cifar.train_images}"
                yield RawImage(image_name, label, np.ascontiguousarray(planes.transpose(1, 2, 0)))

    return ImageSource(f"CIFAR-100, {path.name}", tuple(classes), sum(map(len, classes.values())), images)


def _locate(root: Path) -> tuple[str, Path] | None:
    """Return the key in `FILES` of the files at a path, and their folder or archive."""
    for form, files in FILES.items():
        for folder in (root, root / form):
            if all((folder / file).is_file() for file in files):
                return form, folder
        for archive in (root, root / f"{form}.tar.gz"):
            if archive.name == f"{form}.tar.gz" and archive.is_file():
                return form, archive
    return None


def _read(form: str, path: Path) -> _Cifar:
    contents = _read_archive(path, form) if path.is_file() else {file: read_file(path / file) for file in FILES[form]}
    parse = _parse_python if form == "cifar-100-python" else _parse_binary
    cifar = parse(contents, path)
    if not len(cifar.images) == len(cifar.fine) == len(cifar.coarse):
        raise InputError(
            f"{path} has {len(cifar.images)} images, {len(cifar.fine)} fine labels and {len(cifar.coarse)} coarse "
            "labels, but must have as many of each. Download the files again."
        )
    return cifar


def _read_archive(archive: Path, folder: str) -> dict[str, bytes]:
    """Return the contents of the needed files in an archive, by file name."""
    with reading_errors(archive), open_regular(archive) as stream:
        packed = stream.read(MAX_ARCHIVE_BYTES)
    contents = {}
    try:
        unpacked = packed
        if packed.startswith(GZIP_MAGIC):
            with gzip.open(BytesIO(packed)) as unpacker:
                unpacked = unpacker.read(MAX_ARCHIVE_BYTES + 1)
        if len(unpacked) > MAX_ARCHIVE_BYTES:
            raise tarfile.TarError(f"it contains more than {MAX_ARCHIVE_BYTES // 2**20} MiB")
        with tarfile.open(fileobj=BytesIO(unpacked), mode="r:") as members:
            for number, member in enumerate(members):
                if number == MAX_MEMBERS:
                    raise tarfile.TarError(f"it contains more than {MAX_MEMBERS} files")
                if not 0 <= member.size <= len(unpacked):  # tarfile would read without end, or a sparse file
                    raise tarfile.TarError(f"its entry {member.name} declares {member.size} bytes")
                if member.isreg() and member.name.startswith(f"{folder}/"):
                    contents[member.name.removeprefix(f"{folder}/")] = members.extractfile(member).read()  # type: ignore[union-attr]
    except Exception as error:  # damaged archives raise exceptions of many types
        raise InputError(f"{archive} is not a complete archive ({error}). Download the file again.") from error
    for file in FILES[folder]:
        if file not in contents:
            raise InputError(f"{archive} does not contain {folder}/{file}. Download the file again.")
    return contents


def _parse_python(contents: dict[str, bytes], path: Path) -> _Cifar:
    train, test, meta = (
        _with_text_keys(unpickle(contents[file], f"{path / file}")) for file in FILES["cifar-100-python"]
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
        fine=labels["fine_labels"],
        coarse=labels["coarse_labels"],
        fine_names=fine_names,
        coarse_names=coarse_names,
        train_images=len(images[0]),
    )


def _parse_planes(file: Path, images: Any) -> NDArray[np.uint8]:
    planes = parse_uint8(file, "data", images)
    if planes.ndim != 2 or planes.shape[1] != PIXELS:
        raise InputError(
            f"{file} has data of shape {planes.shape}, but must have rows of {PIXELS}. Download the file again."
        )
    return planes


def _parse_binary(contents: dict[str, bytes], path: Path) -> _Cifar:
    """Parse rows of bytes: the coarse label, the fine label and the pixels of an image."""
    train, test, fine_text, coarse_text = (contents[file] for file in FILES["cifar-100-binary"])
    if len(train) % (PIXELS + 2) or len(test) % (PIXELS + 2):
        raise InputError(f"{path} has a file that ends in the middle of an image. Download the files again.")
    rows = np.frombuffer(train + test, dtype=np.uint8).reshape(-1, PIXELS + 2)
    fine_names, coarse_names = (text.decode("latin1").split() for text in (fine_text, coarse_text))
    return _Cifar(
        images=rows[:, 2:],
        fine=np.array(parse_indices(path, "the fine labels", rows[:, 1], len(fine_names)), dtype=np.int64),
        coarse=np.array(parse_indices(path, "the coarse labels", rows[:, 0], len(coarse_names)), dtype=np.int64),
        fine_names=fine_names,
        coarse_names=coarse_names,
        train_images=len(train) // (PIXELS + 2),
    )


def _with_text_keys(content: Any) -> dict[str, Any]:
    return {decode_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
