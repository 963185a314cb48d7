"""Readers of files of published data sets, parquet files, and the caches of images and glyphs."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from fuzz import mutate
from fuzz.cases import Expected, Files, Hostile, Reader, lay_out
from fuzz.images import SIZE, encode, load_dataset
from metabridge.datasets import glyphs, image_cache
from metabridge.datasets.data_check import check_dataset
from metabridge.environments.image_tasks import LabeledImages

ChangeFiles = Callable[[Files, random.Random, Sequence[Files]], tuple[Files, Expected]]


def changer(
    rules: Mapping[str, mutate.Change],
    chance: float = 0.5,
    *,
    expected_by_rule: Expected = "any",
    expected_by_damage: Expected = "any",
    prefix: str = "",
) -> ChangeFiles:
    """Return a function that changes one of the files whose names start with `prefix`.

    With probability `chance` the rule for its suffix changes the file, and the expected outcome is `expected_by_rule`.
    Otherwise raw bytes are changed, and the expected outcome is `expected_by_damage`.
    """

    def change(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
        name = rng.choice([name for name in files if name.startswith(prefix)])
        content, other = files[name], rng.choice(all_files).get(name, b"")
        assert isinstance(content, bytes)
        assert isinstance(other, bytes)
        rule = next((rules[ending] for ending in rules if name.endswith(ending)), None)
        if rule is not None and rng.random() < chance:
            return {**files, name: rule(content, rng)}, expected_by_rule
        return {**files, name: mutate.damage(content, rng, [other])}, expected_by_damage

    return change


def to_pickle(value: object, protocol: int = 2) -> bytes:
    """Return a value as a pickle."""
    return pickle.dumps(value, protocol=protocol)


PROTOCOLS = (2, 4, 5)
BOMB_BYTES = 3 * 2**29  # unpacked size of a decompression bomb
BOMBS = (  # small pickles that take much memory or time, or run code, in a careless reader
    b"\x80\x04\x96\xff\xff\xff\xff\0\0\0\0.",  # a bytearray of 4 GiB
    b"\x80\x04\x8e\xff\xff\xff\xff\0\0\0\0.",
    b"\x80\x02" + b"]" + b"(" * 1_000_000,
    b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    b"\x80\x02)" + b"2\x86" * 60 + b".",  # a tuple of 2^60 leaves
    b"\x80\x02)" + b"2\x86" * 60 + b"}2s.",
    b"\x80\x02}" + b")" + b"2\x86" * 40 + b"Ns.",  # a key that takes very long to hash
    b"\x80\x04j\xff\xff\xff\x7f.",
    b"\x80\x04Nr\xff\xff\xff\x7f.",  # a memo index of about 2**31
    b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.",
    b"\x80\x04cbuiltins\nexec\n\x8c\x04True\x85R.",
    b"\x80\x04cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\x01b\x87R"
    b"(K\x01J\xff\xff\xff\x7f\x85cnumpy\ndtype\n\x8c\x02u1\x89\x88\x87R\x89C\x00tb.",
    b"N" + b"".join(b"p%d\n" % (number * (2**61 - 1)) for number in range(100_000)) + b".",  # with equal hashes
    b"I" + b"9" * 200_000 + b"\n.",
    b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\1" * 100 + b".",
    b"",
)


def _mini(**changes: object) -> dict[str, object]:
    """Return the content of a small pickle of mini-ImageNet, with changed entries."""
    images = np.arange(4 * 4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 4, 3)
    return {"image_data": images, "class_dict": {"n01": [0, 1], "n02": [2, 3]}, **changes}


def _mini_files(train: object, protocol: int = 2) -> Files:
    content = train if isinstance(train, bytes) else to_pickle(train, protocol)
    test = _mini(class_dict={"n03": [0, 2], "n04": [1, 3]})
    prefix = "data/mini-imagenet-cache"
    return {f"{prefix}-train.pkl": content, f"{prefix}-test.pkl": to_pickle(test, protocol)}


def _hostile_mini(inputs: Sequence[Files]) -> list[Hostile]:
    images = np.asarray(_mini()["image_data"])
    # unusual row numbers of the images of a class, and unusual dictionaries of all classes
    rows: tuple[Any, ...] = ([0.9], [-1], [4], ["0"], [None], [1e300], [float("nan")], 3, None, "01", [[0]])
    classes: tuple[Any, ...] = ({}, {3: [0]}, {None: [0]}, {("a",): [0]}, {"n01": {0: 1}}, {"n01": []})
    wrong_arrays: list[Any] = [images.astype(np.int64) + 200, images / 2, images[0], images[:0], images.astype("U")]
    wrong_arrays += [[[1]], None]
    unreadable_images = (images[..., :2], images[..., :1], images[:, :0], np.zeros((4, 4, 4, 9), np.uint8))
    refused = [
        *(_mini(class_dict={"n01": each}) for each in rows),
        *(_mini(class_dict=None), _mini(class_dict=[])),
        *(_mini(image_data=data) for data in wrong_arrays),
    ]
    same = [_mini(class_dict={"n01": np.array([0, 1]), "n02": (2, 3)}), _mini(image_data=np.asfortranarray(images))]
    return [
        *(Hostile(_mini_files(value), "refused") for value in refused),
        *(Hostile(_mini_files(value), "same") for value in same),
        *(Hostile(_mini_files(_mini(class_dict=each))) for each in classes),
        *(Hostile(_mini_files(_mini(image_data=data))) for data in unreadable_images),
        *(Hostile(_mini_files(bomb), "refused") for bomb in BOMBS),
        Hostile(_mini_files(_mini(class_dict=dict.fromkeys(map(str, range(270)), [0] * 60_000))), "refused"),
    ]


def _tiered(**changes: object) -> dict[str, object]:
    """Return the content of a small pickle of tiered-ImageNet labels, with changed entries."""
    names = {"label_specific_str": ["oak", "elm"], "label_general_str": ["tree"]}
    return {"label_specific": np.array([0, 1, 0]), "label_general": np.array([0, 0, 0]), **names, **changes}


def _tiered_files(labels: object, images: object = None, protocol: int = 2) -> Files:
    pictures = [np.frombuffer(encode(value=value), dtype=np.uint8) for value in (0, 40, 90)]
    files: dict[str, bytes] = {}
    for part, part_labels, part_images in (
        ("train", labels, pictures if images is None else images),
        ("test", _tiered(label_specific_str=["ash", "fir"]), pictures),
    ):
        for suffix, value in (("images_png", part_images), ("labels", part_labels)):
            files[f"data/{part}_{suffix}.pkl"] = value if isinstance(value, bytes) else to_pickle(value, protocol)
    return files


def _hostile_tiered(inputs: Sequence[Files]) -> list[Hostile]:
    png = encode()
    numbers: tuple[Any, ...] = (0.9, -1, 2, "1", None, float("nan"), [1], 10**30)
    refused: list[object] = [
        *(_tiered(label_specific=[0, number, 0]) for number in numbers),
        *(_tiered(label_specific=labels) for labels in ([0, 1], 7, None, "010")),
        *(_tiered(label_general=[0, number, 0]) for number in numbers),
        *(_tiered(label_general=labels) for labels in ([0, 0], 7, None)),
        *(_tiered(label_specific_str=names) for names in ([], 7, None, ["oak"])),
        *(7, None, [], {}),
    ]
    images: list[object] = [7, None, {}, [png], [png, None, png], [png, 7, png], [png, 10**12, png], [png, [300], png]]
    images += [[png, np.array([300.5]), png], [png, {}, png], [png, "\u4e2d", png], [png, ["x"], png]]
    return [
        *(Hostile(_tiered_files(value), "refused") for value in refused),
        *(Hostile(_tiered_files(_tiered(), value), "any") for value in images),
        *(Hostile(_tiered_files(bomb), "refused") for bomb in BOMBS),
        *(Hostile(_tiered_files(_tiered(), bomb), "refused") for bomb in BOMBS),
    ]


FINE_NAMES, COARSE_NAMES = ("apple", "baby", "bear", "bed"), ("fruit", "people")


def _cifar(rows: int = 4, **changes: object) -> dict[str, object]:
    """Return the content of a small pickle of CIFAR-100 images, with changed entries."""
    data = (np.arange(rows * 3072) % 251).astype(np.uint8).reshape(rows, 3072)
    return {"data": data, "fine_labels": [0, 1, 2, 3], "coarse_labels": [0, 1, 0, 1], **changes}


def _cifar_parts(train: object = None, meta: object = None, protocol: int = 2) -> dict[str, bytes]:
    names = {"fine_label_names": list(FINE_NAMES), "coarse_label_names": list(COARSE_NAMES)}
    values = {"train": train or _cifar(), "test": _cifar(), "meta": meta or names}
    return {part: value if isinstance(value, bytes) else to_pickle(value, protocol) for part, value in values.items()}


def _binary_parts() -> dict[str, bytes]:
    rows = bytes([0, 0]) + bytes(3072) + bytes([1, 1]) + bytes(range(256)) * 12
    fine, coarse = "\n".join(FINE_NAMES).encode(), "\n".join(COARSE_NAMES).encode()
    return {"train.bin": rows, "test.bin": rows, "fine_label_names.txt": fine, "coarse_label_names.txt": coarse}


def _in_folder(folder: str, parts: Mapping[str, bytes]) -> Files:
    return {f"data/{folder}/{name}": content for name, content in parts.items()}


def _hostile_cifar(inputs: Sequence[Files]) -> list[Hostile]:
    data = np.asarray(_cifar()["data"])
    numbers: tuple[Any, ...] = (-1, 0.9, 4, "3", None, 10**30, [3], float("nan"))
    wrong: tuple[Any, ...] = (data.astype(np.int64) + 200, data / 2, data[:, :9], data[0], data[:3], None, 7, [[1]])
    refused = [
        *(_cifar(fine_labels=[0, 1, 2, number]) for number in numbers),
        *(_cifar(coarse_labels=[0, 1, 0, number]) for number in numbers),
        *(_cifar(fine_labels=labels) for labels in ([0, 1, 2], None, 7)),
        *(_cifar(data=values) for values in (*wrong, data.astype("U"), np.full((4, 3072), np.nan))),
    ]
    names = [{"fine_label_names": list(FINE_NAMES)}, {"fine_label_names": 7, "coarse_label_names": 7}, 7]
    names += [{"fine_label_names": ["unknown"] * 4, "coarse_label_names": list(COARSE_NAMES)}]
    folder = "cifar-100-python"
    return [
        *(Hostile(_in_folder(folder, _cifar_parts(train)), "refused") for train in (*refused, *BOMBS[:-1])),
        *(Hostile(_in_folder(folder, _cifar_parts(meta=meta)), "refused") for meta in (*names, *BOMBS[:-1])),
        Hostile(_in_folder(folder, _cifar_parts(_cifar(fine_labels=np.arange(4)))), "same"),
    ]


def _hostile_binary(inputs: Sequence[Files]) -> list[Hostile]:
    parts, folder = _binary_parts(), "cifar-100-binary"
    row = parts["train.bin"][:3074]
    return [
        Hostile(_in_folder(folder, parts | {"train.bin": bytes([0, 9]) + row[2:]}), "refused"),
        Hostile(_in_folder(folder, parts | {"train.bin": bytes([9, 0]) + row[2:]}), "refused"),
        Hostile(_in_folder(folder, parts | {"train.bin": row[:-1]}), "refused"),
        Hostile(_in_folder(folder, parts | {"fine_label_names.txt": b"\xff\n" * 3}), "refused"),
        Hostile(_in_folder(folder, parts | {"train.bin": b"", "test.bin": b""}), "refused"),
        Hostile(_in_folder(folder, parts | {"fine_label_names.txt": b"a\n" * 10**6})),
    ]


def _tar_gz(folder: str, parts: Mapping[str, bytes], kinds: Mapping[str, bytes] | None = None) -> bytes:
    """Return an archive of files. Those in `kinds` are links, with their type in tar; their content is the target."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in parts.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            if kinds and name in kinds:
                info.type, info.linkname, info.size = kinds[name], content.decode(), 0
            archive.addfile(info, io.BytesIO(content))
    return gzip.compress(stream.getvalue(), 1, mtime=0)


def change_archive(data: bytes, rng: random.Random) -> bytes:
    """Return a compressed tar archive with changed headers, some with a valid checksum, or with changed bytes."""
    raw = bytearray(gzip.decompress(data))
    if rng.random() < 0.5:
        block = 512 * rng.randrange(max(1, len(raw) // 512))
        for _ in range(rng.choice((1, 3))):  # the first 100 bytes, the name, are changed twice as often as the others
            raw[block + rng.randrange(400) % 300] = rng.choice((0, 0x37, 0x2F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.7:  # the checksum, computed with spaces in its place
            raw[block + 148 : block + 156] = b" " * 8
            raw[block + 148 : block + 156] = f"{sum(raw[block : block + 512]):06o}\0 ".encode()
        return gzip.compress(bytes(raw), 1, mtime=0)
    return gzip.compress(mutate.damage(bytes(raw), rng), 1, mtime=0)


def _hostile_archives(inputs: Sequence[Files]) -> list[Hostile]:
    folder = "cifar-100-python"
    huge, bomb = tarfile.TarInfo(f"{folder}/train"), tarfile.TarInfo(f"{folder}/train")
    huge.size, bomb.size = 2**40, BOMB_BYTES
    packed_bomb = gzip.compress(bomb.tobuf(), mtime=0) + gzip.compress(bytes(2**24), mtime=0) * (BOMB_BYTES // 2**24)
    links = [
        _tar_gz(folder, _cifar_parts() | {"train": target}, {"train": kind})
        for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE)
        for target in (b"../../outside/secret.png", b"/dev/zero", b"train", b"meta")
    ]
    contents = [
        *links,
        gzip.compress(huge.tobuf(), mtime=0),  # a header without its content
        gzip.compress(tarfile.TarInfo("x").tobuf() * 2048, mtime=0) * 500,  # a million files
        packed_bomb,
        b"",
        gzip.compress(b"", mtime=0),
        _tar_gz(folder, {}),
    ]
    return [Hostile({f"data/{folder}.tar.gz": content}, "refused") for content in contents]


def _drawings(part: str) -> list[tuple[str, bytes]]:
    return [
        (f"{part}/{alphabet}/character0{number}/{number}.png", encode("L", value=number))
        for alphabet in "AB"
        for number in (1, 2)
    ]


def _omniglot_files() -> Files:
    parts = ("images_background", "images_evaluation")
    return {f"data/{part}.zip": mutate.zip_archive(_drawings(part), zipfile.ZIP_STORED) for part in parts}


def _zip_bomb(name: str) -> bytes:
    """Return an archive of 1.5 MB whose only member is 1.5 GiB of zeros."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)  # a block that can be repeated
    data = bytearray(mutate.zip_archive([(name, block * (BOMB_BYTES // 2**24) + packer.flush())], zipfile.ZIP_STORED))
    central = data.index(b"PK\x01\x02")
    for at in (8, central + 10):  # the compression method, in the header of the member and in the directory
        struct.pack_into("<H", data, at, zipfile.ZIP_DEFLATED)
    for at in (22, central + 24):  # the unpacked size, in both places
        struct.pack_into("<I", data, at, BOMB_BYTES)
    return bytes(data)


def _hostile_omniglot(inputs: Sequence[Files]) -> list[Hostile]:
    valid_files, name = inputs[0], "data/images_background.zip"
    drawings = _drawings("images_background")
    contents = [
        _zip_bomb("images_background/A/b/1.png"),
        mutate.zip_archive([]),
        b"",
        b"PK\x05\x06" + bytes(18),
        mutate.zip_archive([(f"images_background/A/c{number}/1.png", b"") for number in range(20000)]),
        *(
            mutate.zip_archive([*drawings, (f"images_background/A/{file_name}/1.png", drawings[0][1])])
            for file_name in mutate.NAMES
        ),
        *(
            mutate.zip_archive([*drawings, (f"images_background/{file_name}", drawings[0][1])])
            for file_name in ("../../../outside/x/1.png", "/x/1.png", "a/b/" + "c" * 300 + ".png")
        ),
    ]
    return [Hostile({**valid_files, name: content}) for content in contents]


def _csv_dataset(rows: Sequence[Sequence[str]]) -> Files:
    stream = io.StringIO()
    csv.writer(stream).writerows([["filename", "label"], *rows])
    images = {f"data/images/{name}.png": encode(value=index) for index, name in enumerate("abcd")}
    test = b"filename,label\nc.png,n3\nd.png,n4\n"
    return {"data/train.csv": stream.getvalue().encode("utf-8", "surrogatepass"), "data/test.csv": test, **images}


def change_table(data: bytes, rng: random.Random) -> bytes:
    """Return a CSV file with changed fields or line ends."""
    rows = [line.split(",") for line in data.decode().splitlines()]
    for _ in range(rng.choice((1, 2))):
        row = rng.choice(rows)
        kind = rng.randrange(6)
        if kind < 3 and row:
            row[rng.randrange(len(row))] = rng.choice((*mutate.NAMES, "a.png", "../images/a.png", "sub/../a.png"))
        elif kind == 3:
            row.append(rng.choice(mutate.NAMES))
        elif kind == 4:
            row.clear()
        else:
            rows.insert(rng.randrange(len(rows)), list(row))
    text = rng.choice(("\n", "\r\n", "\r", "\n\n", "\x0b")).join(",".join(row) for row in rows)
    if rng.random() < 0.1:
        text = text.replace(",", rng.choice((";", ',"', "\t", "," * 300)), 1)
    return text.encode("utf-8", "surrogatepass")


def _hostile_csv_dataset(inputs: Sequence[Files]) -> list[Hostile]:
    valid_row = ["a.png", "n1"]
    rows = [
        [valid_row, [file_name, "n2"]] for file_name in (*mutate.NAMES, "../../../outside/secret.png", "x" * 200_000)
    ]
    rows += [[valid_row, ["b.png", file_name]] for file_name in (*mutate.NAMES, "x" * 200_000)]
    contents = [
        b"",
        b"filename,label\n",
        b"filename,label\n\0\n",
        b'filename,label\n"a.png,n1\n',
        b"\xff\xfe\0",
        b"filename\n",
        b"filename,label\na.png\n",
    ]
    contents.append(b"filename,label" + b",x" * 20_000 + b"\n" + b"a.png,n1\n" * 20_000 + b"a.png\n")
    valid_files = _csv_dataset([valid_row])
    return [
        *(Hostile(_csv_dataset(each)) for each in rows),
        *(Hostile({**valid_files, "data/train.csv": text}) for text in contents),
    ]


NAMES_METADATA = {"info": {"features": {"label": {"names": ["cat", "dog"]}}}}
WORDNET_METADATA = {"info": {"features": {"label": {"names": [f"n{number:08}" for number in range(100)]}}}}


def _parquet_file(
    images: Sequence[Any], labels: Sequence[Any], metadata: object = None, column: str = "image"
) -> bytes:
    table = pyarrow.table({column: images, "label": labels})
    if metadata is not None:
        text = metadata if isinstance(metadata, str) else json.dumps(metadata)
        table = table.replace_schema_metadata({"huggingface": text})
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, compression="none", write_statistics=False)
    return stream.getvalue()


def _image_column(*values: int) -> list[dict[str, object]]:
    return [{"bytes": encode(value=value), "path": f"{value}.png"} for value in values]


def _parquet_datasets(folder: Path) -> list[Files]:
    contents = [
        _parquet_file(_image_column(0, 40, 80, 120), labels, metadata)
        for labels, metadata in (
            ([0, 1, 0, 1], NAMES_METADATA),
            (["a", "b", "a", None], None),
            ([0, 1, -1, 1], WORDNET_METADATA),
        )
    ]
    contents.append(_parquet_file([each["bytes"] for each in _image_column(0, 40)], [0, 1], column="img"))
    return [{"data/train.parquet": content} for content in contents]


COLUMNS: tuple[Sequence[Any], ...] = (  # unusual columns of images or labels
    *([0, 1], [-1, 2**62], [0.5, float("nan")], ["a", None], [b"\xff", b""], [True, False], [None, None], [[1], []]),
    *(
        [{"x": 1}, None],
        [{"bytes": None, "path": "../../outside/secret.png"}, {"bytes": b"", "path": None}],
        ["\x1b[31m", "[/]"],
    ),
    [{"bytes": None, "path": "/dev/zero"}, {"bytes": None, "path": "data"}],
    [{"bytes": None, "path": ""}, {"bytes": None, "path": "nul\0"}],
)


def change_parquet(data: bytes, rng: random.Random) -> bytes:
    """Damage the footer, or write a table with other columns or metadata."""
    if rng.random() < 0.5:
        size = int.from_bytes(data[-8:-4], "little") + 8
        return data[:-size] + mutate.damage(data[-size:], rng)
    metadata = mutate.change_json(json.dumps(NAMES_METADATA).encode(), rng).decode("utf-8", "replace")
    images = rng.choice((_image_column(0, 40), rng.choice(COLUMNS)))
    return _parquet_file(images, rng.choice(COLUMNS), rng.choice((None, metadata, NAMES_METADATA)))


def _repeated_row(image: bytes, label: object) -> bytes:
    """Return a file with one stored row that is repeated 1536 times."""
    rows = pyarrow.array(np.zeros(BOMB_BYTES // 2**20, dtype=np.int32))
    columns = {
        name: pyarrow.DictionaryArray.from_arrays(rows, [value]) for name, value in (("image", image), ("label", label))
    }
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), stream, store_schema=False)
    return stream.getvalue()


def _packed_image() -> bytes:
    """Return a file of 2 kB with an image of 60 MiB that 32 rows share."""
    rows = pyarrow.array(np.zeros(32, dtype=np.int32))
    table = pyarrow.table(
        {"image": pyarrow.DictionaryArray.from_arrays(rows, [bytes(60 * 2**20)]), "label": [0, 1] * 16}
    )
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, store_schema=False, compression="zstd", dictionary_pagesize_limit=2**30)
    return stream.getvalue()


def _hostile_parquets(inputs: Sequence[Files]) -> list[Hostile]:
    outside = [{"bytes": None, "path": path} for path in mutate.NAMES if "\ud800" not in path]
    contents = [
        *(_parquet_file([*_image_column(0), each], ["a", "b"]) for each in outside),
        *(_parquet_file(_image_column(0, 40), column) for column in COLUMNS),
        *(
            _parquet_file(_image_column(0, 40), [0, 1], metadata)
            for metadata in (
                "[" * mutate.NESTING_DEPTH,
                "{",
                "null",
                '{"info": 7}',
                json.dumps({"info": {"features": {"label": {"names": "ab"}}}}),
            )
        ),
        *(
            _parquet_file(_image_column(0, 40), [0, 1], {"info": {"features": {"label": {"names": names}}}})
            for names in ([], [None, 1], {"a": 1}, ["x"] * 10**5)
        ),
        _repeated_row(b"\0" * 2**20, 0),
        _repeated_row(b"", "x" * 2**20),
        _packed_image(),
        b"PAR1PAR1",
        b"",
    ]
    return [Hostile({"data/train.parquet": content}) for content in contents]


def _folders_with_cache(folder: Path) -> list[Files]:
    """Return a folder of images with the cache that the library creates for it."""
    images = {f"data/{name}/{image}.png": encode(value=image) for name in ("cat", "dog", "elm") for image in (0, 50)}
    lay_out(folder, images)
    load_dataset("folder", folder, size=SIZE)
    cache = {f"cache/{file.name}": file.read_bytes() for file in sorted((folder / "cache").iterdir())}
    assert len(cache) >= 2
    return [images | cache]


UNEXPECTED_VALUES: tuple[Any, ...] = (None, 7, [], {}, "x", [10**9] * 4, [-1], [[1]])


def _hostile_caches(inputs: Sequence[Files]) -> list[Hostile]:
    (valid_files,) = inputs
    cases = []
    for name in valid_files:
        if name.startswith("cache/") and name.endswith(".json"):
            content = valid_files[name]
            assert isinstance(content, bytes)
            index = json.loads(content)
            texts = [b"", b"[" * mutate.NESTING_DEPTH, b"null", b"7", b"[]", b"{}"]
            texts += [json.dumps(index | {key: value}).encode() for key in index for value in UNEXPECTED_VALUES]
            cases += [Hostile({**valid_files, name: text}, "same") for text in texts]
            del index["checksum"]
            keys = ("shape", "labels", "classes", "same", "blocks")
            forged = [index | {key: value} for key in keys for value in UNEXPECTED_VALUES]
            forged += [index | {"labels": [value] * 6} for value in (-1, 3, 10**12, 0.5)]
            with_valid_checksums = (
                json.dumps({**entry, "checksum": image_cache._checksum(entry)}).encode() for entry in forged
            )
            cases += [Hostile({**valid_files, name: text}) for text in with_valid_checksums]
    return cases


def _few_glyphs() -> LabeledImages:
    classes = len(glyphs.ALPHABETS)
    return LabeledImages(
        images=torch.arange(classes * 4, dtype=torch.uint8).view(classes, 1, 2, 2),
        labels=torch.arange(classes),
        class_names=tuple(alphabet.name for alphabet in glyphs.ALPHABETS),
        superclasses=torch.arange(classes),
        superclass_names=tuple(alphabet.name for alphabet in glyphs.ALPHABETS),
        splits=glyphs._class_splits(torch.arange(classes), [alphabet.split for alphabet in glyphs.ALPHABETS]),
    )


def read_glyphs(folder: Path) -> object:
    """Load the glyphs. If the cache is damaged, only a few glyphs are drawn."""
    with mock.patch.object(glyphs, "_draw", return_value=_few_glyphs()):
        return glyphs.load_glyphs(cache=folder / "cache")


def _glyph_caches(folder: Path) -> list[Files]:
    read_glyphs(folder)
    return [{f"cache/{file.name}": file.read_bytes() for file in sorted((folder / "cache").iterdir())}]


def _entries(*names: str, size: int | None = None) -> tuple[Callable[[Path], object], ...]:
    """Return functions that load the folder of a case as each of these data sets, and one that checks it."""
    return (*(partial(load_dataset, name, size=size) for name in names), lambda folder: check_dataset(folder / "data"))


# By the end of a file's name; the pickles of CIFAR-100 (train, test and meta) have no suffix.
PICKLE: dict[str, mutate.Change] = dict.fromkeys((".pkl", "train", "test", "meta"), mutate.change_pickle)
CIFAR = ("cifar-fs", "fc100", "fs-cifar100")

DATASET_READERS = (
    Reader(
        "omniglot",
        _entries("omniglot"),
        lambda folder: [_omniglot_files()],
        changer({".zip": partial(mutate.change_zip, inner=mutate.change_png)}),
        _hostile_omniglot,
    ),
    Reader(
        "mini-imagenet-pickle",
        _entries("mini-imagenet", size=SIZE),
        lambda folder: [_mini_files(_mini(), protocol) for protocol in PROTOCOLS],
        changer(PICKLE, 0.6),
        _hostile_mini,
    ),
    Reader(
        "mini-imagenet-csv",
        _entries("mini-imagenet", size=SIZE),
        lambda folder: [_csv_dataset([["a.png", "n1"], ["b.png", "n2"]])],
        changer({".csv": change_table}, 0.7, prefix="data/t"),  # changes train.csv or test.csv
        _hostile_csv_dataset,
    ),
    Reader(
        "tiered-imagenet-pickle",
        _entries("tiered-imagenet", size=SIZE),
        lambda folder: [_tiered_files(_tiered(), protocol=protocol) for protocol in PROTOCOLS],
        changer(PICKLE, 0.6),
        _hostile_tiered,
    ),
    Reader(
        "cifar-python",
        _entries(*CIFAR),
        lambda folder: [_in_folder("cifar-100-python", _cifar_parts(protocol=protocol)) for protocol in PROTOCOLS],
        changer(PICKLE, 0.6),
        _hostile_cifar,
    ),
    Reader(
        "cifar-binary",
        _entries(*CIFAR),
        lambda folder: [_in_folder("cifar-100-binary", _binary_parts())],
        changer({}),
        _hostile_binary,
    ),
    Reader(
        "cifar-archive",
        _entries("cifar-fs"),
        lambda folder: [
            {"data/cifar-100-python.tar.gz": _tar_gz("cifar-100-python", _cifar_parts())},
            {"data/cifar-100-binary.tar.gz": _tar_gz("cifar-100-binary", _binary_parts())},
        ],
        changer({".tar.gz": change_archive}, 0.8),
        _hostile_archives,
    ),
    Reader(
        "parquet",
        (
            partial(load_dataset, "parquet", size=SIZE),
            partial(load_dataset, "mini-imagenet", size=SIZE),
            lambda folder: check_dataset(folder / "data"),
        ),
        _parquet_datasets,
        changer({".parquet": change_parquet}, 0.7),
        _hostile_parquets,
    ),
    Reader(
        "decoded-cache",
        (partial(load_dataset, "folder", size=SIZE),),
        _folders_with_cache,
        changer({".json": mutate.change_json}, expected_by_rule="same", expected_by_damage="same", prefix="cache/"),
        _hostile_caches,
    ),
    Reader(
        "glyphs-cache",
        (read_glyphs,),
        _glyph_caches,
        changer({".npz": mutate.change_zip}, expected_by_damage="same"),
        lambda inputs: [Hostile({name: _zip_bomb("superclasses.npy")}, "same") for name in inputs[0]],
    ),
)
