"""Small image files for tests of data sets."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metabridge.environments import LabeledImages

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared(name: str) -> Path:
    """Return the path of a real data set, or skip the test if it is not installed."""
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not in {SHARED}")
    return SHARED / name


def encoded(image: Image.Image | np.ndarray, form: str = "png", **options: object) -> bytes:
    """Return the bytes of an image file."""
    stream = BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(stream, form, **options)
    return stream.getvalue()


def flat(value: int, size: int = 8, channels: int = 3) -> np.ndarray:
    """Return an image whose pixels all have the brightness `value`, by which tests identify the image."""
    return np.full((size, size) if channels == 1 else (size, size, channels), value, dtype=np.uint8)


def write_tree(root: Path, classes: Mapping[str, int], start: int = 0) -> Path:
    """Write folders with the given numbers of PNG files; the brightness of the images counts up from `start`."""
    value = start
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for index in range(count):
            (root / name / f"{index}.png").write_bytes(encoded(flat(value)))
            value += 1
    return root


def png16(pixels: np.ndarray) -> bytes:
    """Return a PNG file with 16 bits per channel in RGB, which Pillow reads but cannot write."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def names_in(images: LabeledImages) -> dict[str, set[str]]:
    """Return the class names of every split."""
    return {split: {images.class_names[member] for member in members} for split, members in images.splits.items()}


def values_of(images: LabeledImages, name: str) -> list[int]:
    """Return the sorted brightness values of the images of a class."""
    rows = images.labels == images.class_names.index(name)
    return sorted(images.images[rows].flatten(1).float().mean(dim=1).round().int().tolist())
