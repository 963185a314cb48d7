"""Pictures into pixels: any format and mode that Pillow reads, to square uint8 arrays, many at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from metabridge.datasets.image_files import Content, Picture, Source, readable

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")
CHUNK = 16  # Pictures that a thread takes at once.
# Photographs gain from every thread. Images of 100 pixels gain from two and lose with 16, which wait for Python's lock.
THREADS = 8
# What Pillow may read. Some of its other formats run programs (EPS), or are no images that data sets are made of.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "HEIF", "JXL")
PIXELS = 50_000_000  # Of the largest image that is decoded: Pillow takes up to five copies of a WebP image.
SIDE = 2**16 - 1  # And its longer side: a row that is longer makes some decoders, and resizing, take gigabytes.
SCANNED = 2**32  # Pixels of a JPEG times its scans, each of which goes over all of them, were it of 10 bytes.
SCAN = b"\xff\xda"
ORIENTATION, TILE_WIDTH, TILE_HEIGHT = 0x0112, 0x0142, 0x0143  # Tags of EXIF and TIFF.
OUT_OF_MEMORY = ("decoder error -9", "out of memory when reading image file")  # Pillow's words for it.
_room = threading.Condition()
_in_work = [0]  # Pixels of the images that threads convert just now.


@dataclass(frozen=True)
class Form:
    """How pictures are stored: `size` × `size` pixels in `channels` (1 grey, 3 RGB).

    With `crop` only the largest square in the middle is kept; without it the whole is squeezed into
    the square, as the published data sets were made. `invert` turns dark ink on paper into 255 on 0.
    """

    size: int
    channels: int
    crop: bool = False
    invert: bool = False


@dataclass(frozen=True)
class Unreadable:
    """Why a picture could not be decoded, and whether that is a failure to read it that may pass."""

    reason: str
    may_pass: bool = field(default=False, repr=False)


def opened(content: Content) -> Image:
    """Open a picture's file or pixels; of an animation this is the first frame.

    Only `FORMATS` are read, and nothing that has more than `PIXELS` pixels or would take far longer than others.

    >>> opened(np.zeros((4, 6), dtype=np.uint8)).size
    (6, 4)
    """
    from PIL import Image

    if isinstance(content, np.ndarray):
        return Image.fromarray(content)
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    data = content if isinstance(content, bytes) else content()
    image = Image.open(BytesIO(data), formats=formats)
    tags = getattr(image, "tag_v2", {})  # A small TIFF file may be made of huge tiles.
    for width, height in (image.size, (tags.get(TILE_WIDTH, 0), tags.get(TILE_HEIGHT, 0))):
        if not (isinstance(width, int) and isinstance(height, int)):
            raise ValueError("the sides of its tiles are not whole numbers")
        if width * height > PIXELS:
            raise ValueError(f"it has {width} × {height} pixels, but at most {PIXELS} pixels are decoded")
    if image.format in ("JPEG", "MPO") and data.count(SCAN) * image.width * image.height > SCANNED:
        raise ValueError(
            f"it has {data.count(SCAN)} scans of {image.width} × {image.height} pixels, too many to decode"
        )
    return image


def plain(image: Image, channels: int) -> Image:
    """Turn an image upright, as its camera noted, and into 8 bits: grey for one channel, RGB for three.

    16 bits are scaled down, floats are taken to go from 0 to 1 (or to 255 if any exceeds 1), and what
    is transparent is laid on white. Values outside of these ranges are refused.

    >>> deep = opened(np.full((2, 2), 65535, dtype=np.uint16))
    >>> deep.mode, plain(deep, 1).getpixel((0, 0))
    ('I;16', 255)
    """
    if max(image.size) > SIDE:
        raise ValueError(f"it has {image.width} × {image.height} pixels, but at most {SIDE} a side are decoded")
    with _work_on(image.width * image.height):
        return _plain(image, channels)


@contextlib.contextmanager
def _work_on(pixels: int) -> Iterator[None]:
    """Wait until threads have at most `PIXELS` pixels in work, these included, to save memory."""
    with _room:
        _room.wait_for(lambda: _in_work[0] == 0 or _in_work[0] + pixels <= PIXELS)
        _in_work[0] += pixels
    try:
        yield
    finally:
        with _room:
            _in_work[0] -= pixels
            _room.notify_all()


def _plain(image: Image, channels: int) -> Image:
    from PIL import Image, ImageOps

    image.load()
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int32)
        _check_range(deep, 65535)
        deep += 128  # In place, as such images may be large.
        deep //= 257
        image = Image.fromarray(deep.astype(np.uint8))
    elif image.mode == "F":
        values = np.asarray(image)
        _check_range(values, 255)
        scale = 255 if values.max(initial=0) <= 1 else 1
        image = Image.fromarray((scale * values).round().astype(np.uint8))
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def _check_range(values: NDArray[Any], most: int) -> None:
    for value in (values.min(initial=0), values.max(initial=0)):
        if not 0 <= value <= most:  # Which is true of a NaN too.
            raise ValueError(f"it has a pixel of value {value}, but pixels are from 0 to {most}")


def decoded(content: Content, form: Form) -> NDArray[np.uint8]:
    """Return a picture's pixels, uint8 of shape (channels, size, size).

    >>> decoded(np.full((40, 30, 3), 200, dtype=np.uint8), Form(size=8, channels=1)).shape
    (1, 8, 8)
    """
    from PIL.Image import Resampling

    image = opened(content)
    if form.crop:  # A photograph may be a hundred times larger than needed: JPEG can be decoded at a fraction.
        image.draft(None, (4 * form.size, 4 * form.size))
    image = plain(image, form.channels)
    width, height = image.size
    if (width, height) != (form.size, form.size):
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        box = (left, top, left + side, top + side) if form.crop else None
        image = image.resize((form.size, form.size), Resampling.LANCZOS, box)
    pixels = np.asarray(image).reshape(form.size, form.size, form.channels).transpose(2, 0, 1)
    return np.ascontiguousarray(255 - pixels if form.invert else pixels)


def each(
    source: Source, work: Callable[[Content], Result], title: str
) -> Iterator[tuple[Picture, Result | Unreadable]]:
    """Do `work` on every picture, in order, in threads and with a progress bar.

    Pillow decodes without Python's lock. Only as many pictures are in memory as the threads need.

    >>> source = Source("a toy", (), 1, lambda: iter([Picture("a.png", 0, b"no image")]))
    >>> [result for _, result in each(source, opened, "Opening")]
    [Unreadable(reason='it is not an image that Pillow reads')]
    """
    from rich.console import Console
    from rich.progress import Progress

    def attempt(chunk: tuple[Picture, ...]) -> list[tuple[Picture, Result | Unreadable]]:
        return [(picture, _attempt(work, picture.content)) for picture in chunk]

    console = Console(stderr=True)
    pictures = _guarded(source)
    chunks = iter(lambda: tuple(islice(pictures, CHUNK)), ())
    pending: deque[Future[list[tuple[Picture, Result | Unreadable]]]] = deque()
    executor = ThreadPoolExecutor(workers())
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task(title, total=source.total)
            pending.extend(executor.submit(attempt, chunk) for chunk in islice(chunks, 2 * workers()))
            while pending:
                done = pending.popleft().result()
                pending.extend(executor.submit(attempt, chunk) for chunk in islice(chunks, 1))
                yield from done
                progress.advance(bar, len(done))
    finally:
        executor.shutdown(cancel_futures=True)


def workers() -> int:
    """Return how many threads decode images.

    >>> 1 <= workers() <= THREADS
    True
    """
    return min(os.cpu_count() or 1, THREADS)


def _guarded(source: Source) -> Iterator[Picture]:
    with readable(source.form):
        yield from source.pictures()


def _attempt(work: Callable[[Content], Result], content: Content) -> Result | Unreadable:
    from PIL import UnidentifiedImageError

    try:
        return work(content)
    except UnidentifiedImageError:
        return Unreadable("it is not an image that Pillow reads")
    except MemoryError:
        return Unreadable("not enough memory", may_pass=True)
    except FileNotFoundError as error:  # When the file comes, it is another data set.
        return Unreadable(error.strerror or str(error))
    except OSError as error:  # Pillow's own, for damaged files, have no number.
        may_pass = error.errno is not None or str(error).endswith(OUT_OF_MEMORY)
        return Unreadable(error.strerror or str(error), may_pass)
    except Exception as error:  # Damaged files make the decoders fail in every way.
        return Unreadable(str(error) or type(error).__name__)
