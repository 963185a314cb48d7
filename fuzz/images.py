"""Readers of image files and of folders of images."""

from __future__ import annotations

import io
import os
import random
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image, features

from fuzz import mutate
from fuzz.cases import Expected, Files, Hostile, Link, Node, Reader
from metabridge import cli
from metabridge.datasets import load
from metabridge.datasets.data_check import check_dataset
from metabridge.decode_options import DecodeOptions
from metabridge.environments.image_tasks import LabeledImages
from metabridge.errors import InputError
from metabridge.inference.image_input import convert_images

SIZE = 8  # height and width of decoded images


def encode(mode: str = "RGB", form: str = "png", value: int = 0, **options: object) -> bytes:
    """Return the bytes of a small image file whose pixels differ.

    `mode` and `form` are Pillow's names of the image mode and of the file format, and `value` is added to all pixels.
    """
    grid = (np.arange(6 * 5 * 4, dtype=np.uint8) * 2 + value).reshape(5, 6, 4)
    image = Image.fromarray(grid, "RGBA").convert("RGB" if mode in ("P", "1", "F", "I", "I;16", "CMYK") else mode)
    if mode == "I;16":
        image = Image.fromarray(grid[:, :, 0].astype(np.uint16) * 257)
    elif mode == "I":
        image = image.convert("L").convert("I")
    elif mode in ("P", "1", "F", "CMYK"):
        image = image.convert(mode)
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def load_dataset(name: str, folder: Path, **options: object) -> LabeledImages:
    """Load a data set from the folder of a case."""
    return load(name, folder / "data", **options)  # type: ignore[arg-type]


def run_command(*arguments: str) -> tuple[int, str]:
    """Run the command line, and return its status and its output, which must not contain escape codes.

    Raise `InputError` for status 2.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    status: object = 0
    with (
        mock.patch.object(sys, "argv", ["metabridge", *arguments]),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            cli.main()
        except SystemExit as error:
            status = error.code
    text = stdout.getvalue() + stderr.getvalue()
    text.encode()  # must be valid UTF-8
    control_characters = [code for code in text if ord(code) < 32 and code not in "\n\t\r"]
    assert not control_characters, f"control characters are printed: {control_characters[:3]}"
    assert status in (0, 1, 2), f"the status is {status}"
    if status == 2:
        raise InputError(" ".join(text.split()))
    return int(str(status)), text


def read_changed_image(folder: Path) -> object:
    """Read only the changed image, in the same way as a classifier."""
    (file,) = (folder / "data" / "b").iterdir()
    return convert_images([file], DecodeOptions(size=SIZE, channels=3))


def _folder_with_image(ending: str, content: bytes) -> Files:
    return {"data/a/1.png": encode("L"), f"data/b/1.{ending}": content}


def image_reader(
    ending: str, contents: Callable[[], Sequence[bytes]], hostile: Callable[[], Sequence[bytes]]
) -> Reader:
    """Return the reader of one image format; its folder contains a valid image and the changed image."""

    def change(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
        name = f"data/b/1.{ending}"
        content, other = files[name], rng.choice(all_files)[name]
        assert isinstance(content, bytes)
        assert isinstance(other, bytes)
        if ending == "png" and rng.random() < 0.6:
            return _folder_with_image(ending, mutate.change_png(content, rng)), "any"
        return _folder_with_image(ending, mutate.damage(content, rng, [other])), "any"

    return Reader(
        f"image-{ending}",
        (read_changed_image, partial(load_dataset, "folder", size=SIZE), lambda folder: check_dataset(folder / "data")),
        lambda folder: [_folder_with_image(ending, content) for content in contents()],
        change,
        lambda inputs: [Hostile(_folder_with_image(ending, content)) for content in hostile()],
    )


def _header(width: int, height: int, depth: int = 8, colors: int = 2) -> tuple[bytes, bytes]:
    """Return the first chunk of a PNG file; `depth` is the number of bits per value, and `colors` the color type."""
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colors, 0, 0, 0)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n%%EndComments\n(x) run\n%%EOF\n"


def _unsupported_formats() -> list[bytes]:
    """Return files of unsupported formats, which are stored with the suffix of a supported format."""
    files = [EPS, b"\xc5\xd0\xd3\xc6" + struct.pack("<6I", 32, len(EPS), 0, 0, 0, 0) + b"\0\0\0\0" + EPS]
    files += [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30000, 30000, 8, 3),
    ]
    files += [b"SIMPLE  =                    T" + b" " * 50 + b"NAXIS   =                    2" + b" " * 2800]
    files += [
        b"icns\0\0\0\x10" + bytes(8),
        b"\xd7\xcd\xc6\x9a" + bytes(60),
        b"P6 100000 100000 255\n",
        b"P7 332\n",
        b"",
    ]
    for form in ("TGA", "PCX", "SGI", "DDS", "IM", "PDF", "JPEG2000", "ICO", "MSP", "XBM"):
        try:
            files.append(encode("1" if form in ("MSP", "XBM") else "RGB", form))
        except (OSError, KeyError, ValueError):
            continue  # this Pillow cannot write the format
    return files


def _png_bombs() -> list[bytes]:
    """Return small files that declare or unpack to huge images or texts, and files of unsupported formats."""
    compressor = zlib.compressobj(9)
    stream = b"".join(compressor.compress(bytes(2**20)) for _ in range(64)) + compressor.flush()
    header, end, pixels = _header(5, 5), (b"IEND", b""), (b"IDAT", zlib.compress(bytes(80)))
    return [
        *(
            mutate.png_file([_header(size, size, depth, colors), pixels, end])
            for size in (13000, 23000, 60000, 2**31 - 1)
            for depth, colors in ((8, 2), (1, 0), (16, 6))
        ),
        mutate.png_file([_header(22000, 22000, 1, 0), (b"IDAT", stream), end]),
        mutate.png_file([_header(5000, 5000, 8, 0), (b"IDAT", stream), end]),
        mutate.png_file([header, (b"zTXt", b"a\0\0" + stream), pixels, end]),
        mutate.png_file([header, (b"iCCP", b"a\0\0" + stream), pixels, end]),
        mutate.png_file([header, *[(b"tEXt", b"a\0b")] * 20000, pixels, end]),
        mutate.png_file([_header(50_000_000, 1, 8, 0), (b"IDAT", zlib.compress(bytes(50_000_001))), end]),
        mutate.png_file([header, (b"acTL", struct.pack(">II", 2**31 - 1, 0)), pixels, end]),
        *_unsupported_formats(),
    ]


def _png_files() -> list[bytes]:
    return [
        *(encode(mode, "png") for mode in ("RGB", "L", "RGBA", "LA", "P", "1", "I;16")),
        encode("P", "png", transparency=3),
    ]


def _jpeg_bombs() -> list[bytes]:
    """Return a JPEG file whose 10,000 added scans take very long to decode, and files of unsupported formats."""
    stream = io.BytesIO()
    Image.new("L", (7000, 7000)).save(stream, "jpeg", progressive=True)
    content = stream.getvalue()
    last_scan = content.rindex(b"\xff\xda")
    return [content[:-2] + content[last_scan : last_scan + 10] * 10_000 + content[-2:], *_unsupported_formats()]


def _bmp_jump() -> bytes:
    """Return a compressed BMP file of one line whose only instruction skips 255 lines."""
    header = struct.pack("<IiiHHIIiiII", 40, 50_000_000, 1, 1, 8, 1, 4, 1, 1, 256, 0)
    return struct.pack("<2sIHHI", b"BM", 1084, 0, 0, 1078) + header + bytes(1024) + b"\0\x02\xff\xff\0\1"


def _jpeg_files() -> list[bytes]:
    tags = Image.Exif()
    tags[0x0112] = 6  # orientation
    images = [encode(mode, "jpeg") for mode in ("RGB", "L", "CMYK")]
    return [*images, encode("RGB", "jpeg", progressive=True), encode("RGB", "jpeg", exif=tags)]


def _animated(form: str, **options: object) -> bytes:
    stream = io.BytesIO()
    first, second = (Image.open(io.BytesIO(encode("RGB", value=value))) for value in (0, 90))
    first.save(stream, form, save_all=True, append_images=[second], **options)
    return stream.getvalue()


def _tiff_files() -> list[bytes]:
    images = [encode(mode, "tiff") for mode in ("RGB", "L", "1", "I;16", "F", "P", "CMYK", "RGBA")]
    return [
        *images,
        *(encode("RGB", "tiff", compression=method) for method in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")),
    ]


def _with_other_sizes(content: bytes, offsets: Sequence[int], layout: str) -> list[bytes]:
    """Return copies of a file with other widths and heights in its header.

    `offsets` are the positions of the width and the height, and `layout` is their format, as in `struct`.
    """
    files = []
    for size in ((13000, 13000), (30000, 30000), (65535, 65535), (0, 5), (5, 0), (1, 65535)):
        changed = bytearray(content)
        for offset, length in zip(offsets, size):
            struct.pack_into(layout, changed, offset, length)
        files.append(bytes(changed))
    return files


def _tiff_bombs() -> list[bytes]:
    """Return small files that declare huge images or tiles, and files of unsupported formats."""
    files = []
    for content in _tiff_files()[:1] + _tiff_files()[8:10]:  # without compression, with LZW and with deflate
        # Tag 256 is the width, 6 pixels, and tag 257 the height, 5 pixels; type 4 is 32 bits, and type 3 is 16 bits.
        for old, new in ((6, 60000), (6, 13000), (5, 60000)):
            files.append(
                content.replace(
                    struct.pack("<HHIH", 256 if old == 6 else 257, 4, 1, old),
                    struct.pack("<HHIH", 256 if old == 6 else 257, 4, 1, new),
                )
            )
            files.append(
                content.replace(
                    struct.pack("<HHIH", 256 if old == 6 else 257, 3, 1, old),
                    struct.pack("<HHIH", 256 if old == 6 else 257, 3, 1, new),
                )
            )
    tags = {256: 5, 257: 5, 258: 8, 259: 8, 262: 1, 277: 1, 323: 2**32 - 1, 324: 8, 325: 8}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    entries.insert(6, struct.pack("<HHI4s", 322, 2, 4, b"aaa"))  # the tile width as text
    files.append(b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4))
    return [*files, *_unsupported_formats()]


IMAGE_READERS = (
    image_reader("png", _png_files, _png_bombs),
    image_reader("jpg", _jpeg_files, _jpeg_bombs),
    image_reader(
        "bmp",
        lambda: [encode(mode, "bmp") for mode in ("RGB", "L", "1", "P")],
        lambda: [
            *_with_other_sizes(encode("RGB", "bmp"), (18, 22), "<i"),
            *_with_other_sizes(encode("1", "bmp"), (18, 22), "<i"),
            _bmp_jump(),
            *_unsupported_formats(),
        ],
    ),
    image_reader(
        "gif",
        lambda: [encode("P", "gif"), encode("L", "gif"), _animated("gif")],
        lambda: [*_with_other_sizes(encode("P", "gif"), (6, 8), "<H"), *_unsupported_formats()],
    ),
    image_reader(
        "webp",
        lambda: [encode("RGB", "webp"), encode("RGBA", "webp", lossless=True), _animated("webp", lossless=True)],
        lambda: [*_with_other_sizes(encode("RGB", "webp"), (26, 28), "<H"), *_unsupported_formats()],
    ),
    *(
        [
            image_reader(
                "avif",
                lambda: [encode("RGB", "avif"), encode("RGBA", "avif"), _animated("avif")],
                _unsupported_formats,
            )
        ]
        if features.check("avif")
        else []
    ),
    image_reader("tif", _tiff_files, _tiff_bombs),
    image_reader(
        "ppm",
        lambda: (
            [encode(mode, "ppm") for mode in ("RGB", "L", "1")] + [b"P3 2 1 255\n1 2 3 4 5 6\n", b"P1 2 2\n0 1 1 0\n"]
        ),
        lambda: [
            b"P6 60000 60000 255\n" + bytes(9),
            b"P5 30000 30000 65535\n",
            b"P2 3 1 255\n9999999 -1 x",
            b"P4 99999 99999\n",
            *_unsupported_formats(),
        ],
    ),
)


# Folders of images, to which files with unusual names, links, pipes and empty folders are added.

FOLDERS: tuple[Files, ...] = (
    {f"data/{name}/{image}.png": encode(value=image) for name in ("cat", "dog", "elm", "oak") for image in (0, 1)},
    {
        f"data/{split}/x/{name}{split}/0.png": encode(value=index)
        for index, split in enumerate(("train", "val", "test"))
        for name in "ab"
    },
)
# File names that are invalid UTF-8 or contain escape codes or markup.
RAW_NAMES = (b"\xff\xfe", b"\xc3", b"\x1b[31m", b"a\x80b", b"[\xff]")
LINKS = (  # targets of symbolic links
    "..",
    ".",
    "../..",
    "/dev/zero",
    "/dev/stdin",
    "/dev/tty",
    "/proc/self/mem",
    "nowhere",
    "self",
    "../cat",
    "../../outside",
)


def change_folder(files: Files, rng: random.Random, all_files: Sequence[Files]) -> tuple[Files, Expected]:
    """Add files with unusual names, links, pipes, empty folders, deep folders, and files of other data sets."""
    changed = dict(files)
    for _ in range(rng.choice((1, 1, 2, 3))):
        base = str(rng.choice(list(files))).rpartition("/")[0]
        kind = rng.randrange(8)
        name = rng.choice(mutate.NAMES).replace("\0", "").replace("/", "|")[:80] or "x"
        name = (  # surrogates become invalid UTF-8
            "dots"
            if name in (".", "..")
            else str(name).encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
        )
        if kind == 0:
            changed[f"{base}/{name}.png"] = encode()
        elif kind == 1:
            changed[f"{base}/../{name}/1.png"] = encode(value=40)
        elif kind == 2:
            ending = rng.choice((".png", "", ".parquet", ".pkl", ".zip", ".json"))
            changed[f"{base}/link{ending}"] = Link(rng.choice(LINKS))
        elif kind == 3:
            changed[f"{base}/pipe.png"] = Node("pipe")
        elif kind == 4:
            changed[f"{base}/empty{rng.randrange(3)}"] = Node("folder")
        elif kind == 5:
            changed[f"{base}/{'d/' * rng.choice((3, 30, 300))}1.png"] = encode()
        elif kind == 6:
            changed[os.fsdecode(f"{base}/".encode() + rng.choice(RAW_NAMES) + b".png")] = encode()
        else:
            name = rng.choice(
                (
                    "images_background",
                    "cifar-100-python",
                    "train.csv",
                    "images",
                    "meta",
                    "mini-imagenet-cache-train.pkl",
                )
            )
            changed[f"data/{name}"] = rng.choice(
                (Link(".."), Link("/dev/zero"), Node("pipe"), Node("folder"), b"", encode())
            )
    return changed, "any"


def _hostile_folders(inputs: Sequence[Files]) -> list[Hostile]:
    base = inputs[0]
    return [
        Hostile({**base, "data/cat/loop": Link("..")}),
        Hostile({**base, "data/cat/pipe.png": Node("pipe")}),
        Hostile({**base, "data/cat/zero.png": Link("/dev/zero")}),
        Hostile({**base, "data/zeros": Link("/dev")}),
        Hostile({**base, "data/cat/eps.png": EPS}),
        Hostile({**base, "data/\udcff\udcfe/1.png": encode()}),
        Hostile({**base, "data/[/]a/1.png": encode(), "data/\x1b[31mred/1.png": b"no image"}),
        Hostile({"data": Link("data")}, "refused"),
        Hostile({"data": Node("pipe")}, "refused"),
        Hostile({"data": Link("/dev/zero")}, "refused"),
        Hostile({"data/train.parquet": Link("/dev/zero")}),
        Hostile({"data/train.parquet": Node("pipe")}),
        Hostile({"data/cifar-100-python.tar.gz": Node("pipe")}),
        Hostile({"data/images_background.zip": Node("pipe"), "data/images_evaluation.zip": Node("pipe")}),
    ]


FOLDER_READER = Reader(
    "folder",
    (
        lambda folder: load(folder / "data", size=SIZE),
        lambda folder: check_dataset(folder / "data"),
        lambda folder: run_command("data", "check", str(folder / "data"), "--ways", "2", "--queries", "1"),
    ),
    lambda folder: FOLDERS,
    change_folder,
    _hostile_folders,
)
