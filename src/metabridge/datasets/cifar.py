"""CIFAR-FS, FC100 and FS-CIFAR100: three splits of CIFAR-100's hundred classes of 600 images.

Read from CIFAR-100's own files: `cifar-100-python` (the pickles train, test and meta) or
`cifar-100-binary` (train.bin, test.bin and the label names), as folders or as the .tar.gz they come
in. Images are 32 × 32, RGB. Superclasses are CIFAR's twenty coarse labels.

- CIFAR-FS (Bertinetto et al., 2019): 64, 16 and 20 classes.
- FC100 (Oreshkin et al., 2018): 60, 20 and 20 classes, and no coarse label is in two splits.
- FS-CIFAR100 (Collins et al., 2022): 80 classes to train and 20 to test. The paper does not list
  them and refers to Oreshkin et al., so the 20 here are FC100's test classes: our choice. As in the
  paper each training class is parted into 450 images to train and 150 to measure the accuracy on
  classes seen; these 150 are the validation split, as classes called "apple (held out)". Which
  images they are is our choice too: CIFAR's own test images and the last 50 of its training images.
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

from metabridge.datasets.image_decoding import Form
from metabridge.datasets.image_files import (
    Category,
    Picture,
    Source,
    as_text,
    eight_bits,
    indices,
    open_regular,
    read_bytes,
    readable,
    shortened,
    texts,
)
from metabridge.datasets.safe_unpickle import unpickle
from metabridge.datasets.splits import table
from metabridge.errors import InputError

FORM = Form(size=32, channels=3)
PIXELS = 3 * 32 * 32
LARGEST_ARCHIVE = 2**29  # Bytes, packed or unpacked. CIFAR-100 is 178 MiB.
MOST_MEMBERS = 1000  # CIFAR-100 has five.
GZIP = b"\x1f\x8b"
TRAINED_IMAGES = 450  # Of each training class of FS-CIFAR100.
FOLDERS = {
    "cifar-100-python": ("train", "test", "meta"),
    "cifar-100-binary": ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
}


class _Cifar(NamedTuple):
    images: NDArray[np.uint8]  # (n, 3072): the red, green and blue planes of each
    fine: NDArray[np.int64]
    coarse: NDArray[np.int64]
    fine_names: list[str]
    coarse_names: list[str]
    trained: int  # So many of the images, the first ones, are from CIFAR's training file.


def holds(root: Path) -> bool:
    """Say whether a path is CIFAR-100's folder or archive, or a folder with one of these in it.

    >>> holds(Path("nowhere"))
    False
    """
    return bool(_found(root))


def files(root: Path) -> list[Path]:
    """Return the files that the data set is read from.

    >>> files(Path("nowhere"))
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has no CIFAR-100 in it. Put cifar-100-python.tar.gz or ...
    """
    found = _found(root)
    if not found:
        raise InputError(
            f"{root} has no CIFAR-100 in it. Put cifar-100-python.tar.gz or cifar-100-binary.tar.gz there."
        )
    name, place = found
    return [place / part for part in FOLDERS[name]] if place.is_dir() else [place]


def source(root: Path, name: str = "cifar-fs") -> Source:
    """Return the classes and images of one of the three splits.

    >>> source(Path("nowhere"), "fc100")
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere has no CIFAR-100 in it. Put cifar-100-python.tar.gz or ...
    """
    files(root)
    folder, place = _found(root) or ("", root)
    cifar = _read(folder, place)
    split_of = {fine: split for split, fine in table({"cifar-fs": "cifar_fs"}.get(name, "fc100"))}
    classes: dict[Category, list[int]] = {}
    for number, fine in enumerate(cifar.fine_names):
        if fine not in split_of:
            raise InputError(f"{place} has a class {shortened(fine)}, which CIFAR-100 has not. Get the files again.")
        rows = np.flatnonzero(cifar.fine == number).tolist()
        superclass = cifar.coarse_names[cifar.coarse[rows[0]]] if rows else "none"
        if name == "fs-cifar100" and split_of[fine] != "test":
            classes[Category(fine, superclass, "train")] = rows[:TRAINED_IMAGES]
            if rows[TRAINED_IMAGES:]:
                classes[Category(f"{fine} (held out)", superclass, "validation")] = rows[TRAINED_IMAGES:]
        else:
            classes[Category(fine, superclass, split_of[fine])] = rows

    def pictures() -> Iterator[Picture]:
        for label, rows in enumerate(classes.values()):
            for row in rows:
                planes = cifar.images[row].reshape(3, 32, 32)
                name = f"train: row {row}" if row < cifar.trained else f"test: row {row - cifar.trained}"
                yield Picture(name, label, np.ascontiguousarray(planes.transpose(1, 2, 0)))

    return Source(f"CIFAR-100, {place.name}", tuple(classes), sum(map(len, classes.values())), pictures)


def _found(root: Path) -> tuple[str, Path] | None:
    """The name of the form, and its folder or archive."""
    for name, parts in FOLDERS.items():
        for place in (root, root / name):
            if all((place / part).is_file() for part in parts):
                return name, place
        for place in (root, root / f"{name}.tar.gz"):
            if place.name == f"{name}.tar.gz" and place.is_file():
                return name, place
    return None


def _read(name: str, place: Path) -> _Cifar:
    contents = _members(place, name) if place.is_file() else {part: read_bytes(place / part) for part in FOLDERS[name]}
    read = _read_python if name == "cifar-100-python" else _read_binary
    cifar = read(contents, place)
    if not len(cifar.images) == len(cifar.fine) == len(cifar.coarse):
        raise InputError(f"{place} has images, labels and names that do not fit together. Get the files again.")
    return cifar


def _members(archive: Path, folder: str) -> dict[str, bytes]:
    """The files in an archive that are read."""
    with readable(archive), open_regular(archive) as stream:
        packed = stream.read(LARGEST_ARCHIVE)
    found = {}
    try:
        content = packed
        if packed.startswith(GZIP):
            with gzip.open(BytesIO(packed)) as unpacked:
                content = unpacked.read(LARGEST_ARCHIVE + 1)
        if len(content) > LARGEST_ARCHIVE:
            raise tarfile.TarError(f"it holds more than {LARGEST_ARCHIVE // 2**20} MiB")
        with tarfile.open(fileobj=BytesIO(content), mode="r:") as members:
            for number, member in enumerate(members):
                if number == MOST_MEMBERS:
                    raise tarfile.TarError(f"it holds more than {MOST_MEMBERS} files")
                if not 0 <= member.size <= len(content):  # Would be read without end, or would be a file of holes.
                    raise tarfile.TarError(f"{member.name} is said to have {member.size} bytes")
                if member.isreg() and member.name.startswith(f"{folder}/"):
                    found[member.name.removeprefix(f"{folder}/")] = members.extractfile(member).read()  # type: ignore[union-attr]
    except Exception as error:  # A damaged archive can fail in every way.
        raise InputError(f"{archive} is not a whole archive ({error}). Get the file again.") from error
    for part in FOLDERS[folder]:
        if part not in found:
            raise InputError(f"{archive} has no {folder}/{part} in it. Get the file again.")
    return found


def _read_python(contents: dict[str, bytes], place: Path) -> _Cifar:
    train, test, meta = (_texts(unpickle(contents[part], f"{place / part}")) for part in FOLDERS["cifar-100-python"])
    names, coarse_names = (
        texts(place / "meta", key, meta.get(key)) for key in ("fine_label_names", "coarse_label_names")
    )
    images = [_planes(place / part, held.get("data")) for part, held in (("train", train), ("test", test))]
    labels = {
        key: np.array(
            [
                *indices(place / "train", key, train.get(key), len(known)),
                *indices(place / "test", key, test.get(key), len(known)),
            ],
            dtype=np.int64,
        )
        for key, known in (("fine_labels", names), ("coarse_labels", coarse_names))
    }
    return _Cifar(
        images=np.concatenate(images),
        fine=labels["fine_labels"],
        coarse=labels["coarse_labels"],
        fine_names=names,
        coarse_names=coarse_names,
        trained=len(images[0]),
    )


def _planes(file: Path, images: Any) -> NDArray[np.uint8]:
    planes = eight_bits(file, "data", images)
    if planes.ndim != 2 or planes.shape[1] != PIXELS:
        raise InputError(
            f"{file} has data of shape {planes.shape}, but must have rows of {PIXELS}. Get the file again."
        )
    return planes


def _read_binary(contents: dict[str, bytes], place: Path) -> _Cifar:
    """A row is the coarse label, the fine label and the pixels, a byte each."""
    train, test, fine_text, coarse_text = (contents[part] for part in FOLDERS["cifar-100-binary"])
    if len(train) % (PIXELS + 2) or len(test) % (PIXELS + 2):
        raise InputError(f"{place} has a file that ends within an image. Get the files again.")
    rows = np.frombuffer(train + test, dtype=np.uint8).reshape(-1, PIXELS + 2)
    names, coarse_names = (text.decode("latin1").split() for text in (fine_text, coarse_text))
    return _Cifar(
        images=rows[:, 2:],
        fine=np.array(indices(place, "the fine labels", rows[:, 1], len(names)), dtype=np.int64),
        coarse=np.array(indices(place, "the coarse labels", rows[:, 0], len(coarse_names)), dtype=np.int64),
        fine_names=names,
        coarse_names=coarse_names,
        trained=len(train) // (PIXELS + 2),
    )


def _texts(held: Any) -> dict[str, Any]:
    return {as_text(key): value for key, value in held.items()} if isinstance(held, dict) else {}
