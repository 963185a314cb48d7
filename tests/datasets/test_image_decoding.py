import errno
import struct
import subprocess
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from metabridge.datasets import image_decoding as module
from metabridge.datasets.image_decoding import Unreadable, decode, map_images, open_image
from metabridge.datasets.image_files import ClassInfo, ImageSource, RawImage
from metabridge.decode_options import DecodeOptions
from pictures import encoded, flat, png16

ORANGE = (255, 128, 0)


def solid_image(mode: str, color: object) -> Image.Image:
    return Image.new(mode, (8, 8), color)


def transparent_palette() -> bytes:
    image = solid_image("P", 0)
    image.putpalette([*ORANGE, 0, 0, 255])
    image.paste(1, (0, 0, 4, 8))
    return encoded(image, transparency=1)


# Kind of image -> its file and its color in RGB. In 16 or 32 bits, 0x6464 = 257 · 100 is the brightness 100 of 255.
FILES = {
    "gray": (encoded(solid_image("L", 100)), (100, 100, 100)),
    "1 bit": (encoded(solid_image("1", 1)), (255, 255, 255)),
    "RGB": (encoded(solid_image("RGB", ORANGE)), ORANGE),
    "palette": (encoded(solid_image("RGB", ORANGE).quantize(4)), ORANGE),
    "CMYK": (encoded(solid_image("CMYK", (0, 127, 255, 0)), "tiff"), ORANGE),
    "RGBA": (encoded(solid_image("RGBA", (*ORANGE, 255))), ORANGE),
    "RGBA transparent": (encoded(solid_image("RGBA", (*ORANGE, 0))), (255, 255, 255)),
    "gray half transparent": (encoded(solid_image("LA", (0, 128))), (127, 127, 127)),
    "16 bits": (encoded(np.full((8, 8), 0x6464, dtype=np.uint16)), (100, 100, 100)),
    "16 bits RGB": (png16(np.full((8, 8, 3), [0xFFFF, 0x8080, 0])), ORANGE),
    "32 bits": (encoded(Image.fromarray(np.full((8, 8), 0x6464, dtype=np.int32)), "tiff"), (100, 100, 100)),
    "float to 1": (encoded(Image.fromarray(np.full((8, 8), 100 / 255, np.float32)), "tiff"), (100, 100, 100)),
    "float to 255": (encoded(Image.fromarray(np.full((8, 8), 100, np.float32)), "tiff"), (100, 100, 100)),
    "animation": (
        encoded(
            solid_image("RGB", ORANGE), "webp", lossless=True, save_all=True, append_images=[solid_image("RGB", "blue")]
        ),
        ORANGE,
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_mode_is_converted_to_rgb(kind):
    content, color = FILES[kind]
    pixels = decode(content, DecodeOptions(size=8, channels=3))
    assert pixels.shape == (3, 8, 8)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - np.array(color)[:, None, None]).max() <= 1


@pytest.mark.parametrize("kind", FILES)
def test_every_mode_is_converted_to_gray(kind):
    content, color = FILES[kind]
    luma = np.dot(color, [0.299, 0.587, 0.114])
    assert np.abs(decode(content, DecodeOptions(size=8, channels=1)) - luma).max() <= 1.5


def test_16_bit_values_are_scaled_and_not_clipped():
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pixels = decode(encoded(ramp), DecodeOptions(size=8, channels=1))[0]
    assert np.array_equal(pixels, np.round(ramp / 257).astype(np.uint8))


def test_transparent_palette_colors_become_white():
    pixels = decode(transparent_palette(), DecodeOptions(size=8, channels=3))
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]
    assert pixels[:, 0, 7].tolist() == list(ORANGE)


def test_photographs_are_rotated_upright_by_their_exif_tag():
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))
    tags = Image.Exif()
    tags[0x0112] = 6  # the top of the scene is at the right of the file
    pixels = decode(encoded(image, "png", exif=tags), DecodeOptions(size=8, channels=1))[0]
    assert pixels[:, 7].min() == 255
    assert pixels[:, 0].max() == 0


def wide_image() -> np.ndarray:
    """Return a white square with black to its left and right."""
    pixels = np.zeros((10, 30), dtype=np.uint8)
    pixels[:, 10:20] = 255
    return pixels


def test_crop_keeps_the_central_square():
    assert decode(wide_image(), DecodeOptions(size=10, channels=1, crop=True)).min() > 250
    resized = decode(wide_image(), DecodeOptions(size=30, channels=1))[0]
    assert resized[15, 3] == 0
    assert resized[15, 15] == 255


def test_a_large_jpeg_decoded_at_reduced_size_looks_the_same():
    y, x = np.mgrid[0:800, 0:1200]
    photograph = np.stack([128 + 100 * np.sin(x / 90), 128 + 100 * np.cos(y / 70), x / 5], axis=-1).astype(np.uint8)
    options = DecodeOptions(size=32, channels=3, crop=True)
    expected = decode(photograph, options).astype(int)
    assert np.abs(decode(encoded(photograph, "jpeg", quality=95), options) - expected).mean() < 2


def test_invert_makes_dark_pixels_bright():
    assert decode(flat(10, channels=1), DecodeOptions(size=8, channels=1, invert=True)).min() == 245


def source_of(contents: list) -> ImageSource:
    images = [RawImage(str(index), 0, content) for index, content in enumerate(contents)]
    return ImageSource("a toy", (ClassInfo("a", "", ""),), len(images), lambda: iter(images))


def test_results_are_in_the_order_of_the_images():
    source = source_of([flat(index % 251, channels=1) for index in range(1000)])
    results = [(raw.name, image.getpixel((0, 0))) for raw, image in map_images(source, open_image, "Opening")]
    assert results == [(str(index), index % 251) for index in range(1000)]


def read_missing_file() -> bytes:
    raise FileNotFoundError(2, "No such file or directory", "a.png")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not an image that Pillow reads"),
        (b"GIF89a", ""),
        (encoded(flat(3, 64))[:80], ""),
        (encoded(np.arange(64 * 64, dtype=np.uint8).reshape(64, 64), "jpeg")[:700], "truncated"),
        (read_missing_file, "No such file or directory"),
    ],
)
def test_an_unreadable_image_has_a_reason_and_others_are_decoded(content, reason):
    readable = flat(1)
    before, unreadable, after = (
        result
        for _, result in map_images(
            source_of([readable, content, readable]), lambda c: decode(c, DecodeOptions(8, 3)), "Decoding"
        )
    )
    assert isinstance(unreadable, Unreadable)
    assert unreadable.reason
    assert reason in unreadable.reason
    assert before.shape == after.shape == (3, 8, 8)


def decode_one(content: object) -> np.ndarray | Unreadable:
    ((_, result),) = map_images(source_of([content]), lambda c: decode(c, DecodeOptions(8, 1)), "Decoding")
    return result


def test_floats_are_rounded_to_the_nearest_of_256_values():
    values = (np.arange(64, dtype=np.float32).reshape(8, 8) * 4 + np.float32(0.6)) / 255
    pixels = decode(encoded(Image.fromarray(values), "tiff"), DecodeOptions(size=8, channels=1))
    assert np.array_equal(pixels[0], np.arange(64).reshape(8, 8) * 4 + 1)
    pixels = decode(encoded(Image.fromarray(255 * values), "tiff"), DecodeOptions(size=8, channels=1))
    assert np.array_equal(pixels[0], np.arange(64).reshape(8, 8) * 4 + 1)


@pytest.mark.parametrize(
    ("value", "dtype", "reason"),
    [
        (256, np.float32, "it has a pixel of value 256.0, but pixels must be from 0 to 255"),
        (-0.5, np.float32, "it has a pixel of value -0.5, but pixels must be from 0 to 255"),
        (np.nan, np.float32, "it has a pixel of value nan, but pixels must be from 0 to 255"),
        (np.inf, np.float32, "it has a pixel of value inf, but pixels must be from 0 to 255"),
        (65536, np.int32, "it has a pixel of value 65536, but pixels must be from 0 to 65535"),
        (-1, np.int32, "it has a pixel of value -1, but pixels must be from 0 to 65535"),
    ],
)
def test_pixels_out_of_range_are_rejected(value, dtype, reason):
    values = np.ones((8, 8), dtype=dtype)
    values[3, 4] = value
    assert decode_one(encoded(Image.fromarray(values), "tiff")) == Unreadable(reason)


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that declares a size but has no pixels."""

    def make_chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(make_chunk(kind, data) for kind, data in chunks)


def tiff_with_tiles(tile_size: int) -> bytes:
    """Return a TIFF file of 9 × 9 pixels that declares much larger tiles."""
    tags = {256: 9, 257: 9, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile_size, 323: tile_size, 324: 8, 325: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(
    ("content", "size"), [(png_header(8000, 8000), "8000 × 8000"), (tiff_with_tiles(40_000), "40000 × 40000")]
)
def test_the_size_is_checked_before_decoding(content, size, monkeypatch):
    monkeypatch.setattr(module, "_convert", lambda image, channels: pytest.fail("the image was decoded"))
    assert len(content) < 150
    assert decode_one(content) == Unreadable(f"it has {size} pixels, but at most 50000000 pixels are decoded")


@pytest.mark.parametrize(
    "content",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n",
        encoded(flat(3), "pcx"),
        encoded(flat(3), "ico"),
    ],
)
def test_other_formats_are_rejected_and_start_no_program(content, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    assert decode_one(content) == Unreadable("it is not an image that Pillow reads")


def bmp_with_one_skip(width: int, height: int) -> bytes:
    """Return a compressed BMP file whose only instruction skips 255 lines."""
    file_header = struct.pack("<2sIHHI", b"BM", 1084, 0, 0, 1078)
    image_header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 4, 1, 1, 256, 0)
    return file_header + image_header + bytes(1024) + b"\0\x02\xff\xff\0\1"


def jpeg_with_scans(size: int, scans: int) -> bytes:
    """Return a progressive JPEG file, which has six scans, with `scans` more that are empty (ten bytes)."""
    content = encoded(np.zeros((size, size), dtype=np.uint8), "jpeg", progressive=True)
    last_scan = content.rindex(b"\xff\xda")
    return content[:-2] + content[last_scan : last_scan + 10] * scans + content[-2:]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (png_header(50_000_000, 1), "it has 50000000 × 1 pixels, but width and height must be at most 65535"),
        (bmp_with_one_skip(50_000_000, 1), "it has 50000000 × 1 pixels, but width and height must be at most 65535"),
        (np.zeros((1, 65_536), dtype=np.uint8), "it has 65536 × 1 pixels, but width and height must be at most 65535"),
        (
            tiff_with_tiles(2**31).replace(struct.pack("<HHII", 322, 4, 1, 2**31), b"\x42\1\2\0\4\0\0\0aaa\0"),
            "the width or height of its tiles is not an integer",
        ),
        # 1024² pixels × 4106 scans is just above the limit 2³²
        (jpeg_with_scans(1024, 4100), "it has 4106 scans of 1024 × 1024 pixels, too many to decode"),
    ],
    ids=["long PNG", "BMP that skips lines", "long array", "tile size is text", "JPEG of many scans"],
)
def test_small_files_that_take_gigabytes_or_minutes_are_rejected(content, reason, monkeypatch):
    monkeypatch.setattr(module, "_convert", lambda image, channels: pytest.fail("the image was decoded"))
    assert decode_one(content) == Unreadable(reason)


def test_a_small_jpeg_with_many_scans_is_read():
    assert isinstance(decode_one(jpeg_with_scans(8, 100)), np.ndarray)


def test_threads_limit_the_pixels_in_conversion(monkeypatch):
    pixels_in_use = []

    def convert(image, channels):
        time.sleep(0.002)
        pixels_in_use.append(module._pixels_in_use[0])
        return image

    monkeypatch.setattr(module, "_convert", convert)
    monkeypatch.setattr(module, "MAX_PIXELS", 200)
    monkeypatch.setattr(module, "decoding_threads", lambda: 8)
    contents = [flat(value, size=size, channels=1) for value in range(60) for size in (6, 8)]
    assert len(list(map_images(source_of(contents), lambda c: module.to_8_bit(open_image(c), 1), "Decoding"))) == 120
    assert 64 < max(pixels_in_use) <= 200  # several images at once, as an image has 36 or 64 pixels
    assert module._pixels_in_use == [0]


def reader_that_raises(error: Exception) -> object:
    def read() -> bytes:
        raise error

    return read


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.EMFILE, "Too many open files"), True),
        (MemoryError(), True),
        (OSError("decoder error -9"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (OSError("image file is truncated"), False),
        (ValueError("bad"), False),
    ],
)
def test_system_errors_are_temporary_and_damaged_files_are_not(error, temporary):
    assert decode_one(reader_that_raises(error)).temporary is temporary


def test_images_of_which_the_limit_admits_one_at_a_time_are_all_decoded(monkeypatch):
    monkeypatch.setattr(module, "MAX_PIXELS", 70)  # an image has 64 pixels
    contents = [encoded(flat(value, channels=1)) for value in range(60)]
    results = map_images(source_of(contents), lambda c: decode(c, DecodeOptions(8, 1)), "Decoding")
    assert [int(image.max()) for _, image in results] == list(range(60))
