import numpy as np
import pytest
from PIL import Image

from metabridge.environments.decode import Form, Unreadable, decoded, each, opened
from metabridge.environments.source import Category, Picture, Source
from pictures import encoded, flat, png16

ORANGE = (255, 128, 0)


def solid(mode: str, colour: object) -> Image.Image:
    return Image.new(mode, (8, 8), colour)


def transparent_palette() -> bytes:
    image = solid("P", 0)
    image.putpalette([*ORANGE, 0, 0, 255])
    image.paste(1, (0, 0, 4, 8))
    return encoded(image, transparency=1)


FILES = {
    "grey": (encoded(solid("L", 100)), (100, 100, 100)),
    "1 bit": (encoded(solid("1", 1)), (255, 255, 255)),
    "RGB": (encoded(solid("RGB", ORANGE)), ORANGE),
    "palette": (encoded(solid("RGB", ORANGE).quantize(4)), ORANGE),
    "CMYK": (encoded(solid("CMYK", (0, 127, 255, 0)), "tiff"), ORANGE),
    "RGBA": (encoded(solid("RGBA", (*ORANGE, 255))), ORANGE),
    "RGBA seen through": (encoded(solid("RGBA", (*ORANGE, 0))), (255, 255, 255)),
    "grey half seen through": (encoded(solid("LA", (0, 128))), (127, 127, 127)),
    "16 bits": (encoded(np.full((8, 8), 0x6464, dtype=np.uint16)), (100, 100, 100)),
    "16 bits RGB": (png16(np.full((8, 8, 3), [0xFFFF, 0x8080, 0])), ORANGE),
    "32 bits": (encoded(Image.fromarray(np.full((8, 8), 0x6464, dtype=np.int32)), "tiff"), (100, 100, 100)),
    "float to 1": (encoded(Image.fromarray(np.full((8, 8), 100 / 255, np.float32)), "tiff"), (100, 100, 100)),
    "float to 255": (encoded(Image.fromarray(np.full((8, 8), 100, np.float32)), "tiff"), (100, 100, 100)),
    "animation": (
        encoded(solid("RGB", ORANGE), "webp", lossless=True, save_all=True, append_images=[solid("RGB", "blue")]),
        ORANGE,
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_mode_comes_out_in_its_colours(kind):
    content, colour = FILES[kind]
    pixels = decoded(content, Form(size=8, channels=3))
    assert pixels.shape == (3, 8, 8)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - np.array(colour)[:, None, None]).max() <= 1


@pytest.mark.parametrize("kind", FILES)
def test_every_mode_comes_out_in_grey(kind):
    content, colour = FILES[kind]
    luma = np.dot(colour, [0.299, 0.587, 0.114])
    assert np.abs(decoded(content, Form(size=8, channels=1)) - luma).max() <= 1.5


def test_sixteen_bits_keep_their_gradations_instead_of_being_clipped():
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pixels = decoded(encoded(ramp), Form(size=8, channels=1))[0]
    assert np.array_equal(pixels, np.round(ramp / 257).astype(np.uint8))


def test_what_a_palette_leaves_transparent_is_white():
    pixels = decoded(transparent_palette(), Form(size=8, channels=3))
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]
    assert pixels[:, 0, 7].tolist() == list(ORANGE)


def test_a_photograph_is_turned_as_its_camera_was():
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))
    turned = Image.Exif()
    turned[0x0112] = 6  # The top of the scene is at the right of the file.
    pixels = decoded(encoded(image, "png", exif=turned), Form(size=8, channels=1))[0]
    assert pixels[:, 7].min() == 255
    assert pixels[:, 0].max() == 0


def wide() -> np.ndarray:
    """A white square in the middle, black to its left and right."""
    pixels = np.zeros((10, 30), dtype=np.uint8)
    pixels[:, 10:20] = 255
    return pixels


def test_with_crop_the_middle_square_is_kept_and_without_it_the_whole():
    assert decoded(wide(), Form(size=10, channels=1, crop=True)).min() > 250
    squeezed = decoded(wide(), Form(size=30, channels=1))[0]
    assert squeezed[15, 3] == 0
    assert squeezed[15, 15] == 255


def test_a_large_jpeg_decoded_at_a_fraction_is_the_same_picture():
    y, x = np.mgrid[0:800, 0:1200]
    photograph = np.stack([128 + 100 * np.sin(x / 90), 128 + 100 * np.cos(y / 70), x / 5], axis=-1).astype(np.uint8)
    form = Form(size=32, channels=3, crop=True)
    exact = decoded(photograph, form).astype(int)
    assert np.abs(decoded(encoded(photograph, "jpeg", quality=95), form) - exact).mean() < 2


def test_inverted_ink_is_bright():
    assert decoded(flat(10, channels=1), Form(size=8, channels=1, invert=True)).min() == 245


def source_of(contents: list) -> Source:
    pictures = [Picture(str(index), 0, content) for index, content in enumerate(contents)]
    return Source("a toy", (Category("a", "", ""),), len(pictures), lambda: iter(pictures))


def test_results_come_in_the_order_of_the_pictures():
    source = source_of([flat(index % 251, channels=1) for index in range(1000)])
    found = [(picture.name, image.getpixel((0, 0))) for picture, image in each(source, opened, "Opening")]
    assert found == [(str(index), index % 251) for index in range(1000)]


def missing() -> bytes:
    raise FileNotFoundError(2, "No such file or directory", "a.png")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not an image that Pillow reads"),
        (b"GIF89a", ""),
        (encoded(flat(3, 64))[:80], ""),
        (encoded(np.arange(64 * 64, dtype=np.uint8).reshape(64, 64), "jpeg")[:700], "truncated"),
        (missing, "No such file or directory"),
    ],
)
def test_what_cannot_be_decoded_is_told_with_the_reason_and_the_others_are_decoded(content, reason):
    good = flat(1)
    before, bad, after = (
        result for _, result in each(source_of([good, content, good]), lambda c: decoded(c, Form(8, 3)), "Decoding")
    )
    assert isinstance(bad, Unreadable)
    assert bad.reason
    assert reason in bad.reason
    assert before.shape == after.shape == (3, 8, 8)
