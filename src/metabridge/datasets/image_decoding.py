"""Decode images into square uint8 arrays in several threads. Supports all common formats and modes of Pillow."""

from __future__ import annotations

import contextlib
import math
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

from metabridge.datasets.image_files import Content, ImageSource, RawImage, reading_errors
from metabridge.decode_options import DecodeOptions

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")
CHUNK_SIZE = 16  # number of images that a thread decodes per job
# Decoding photographs scales with the number of threads. Images of about 100 × 100 pixels decode fastest with two
# threads; with 16, contention for Python's interpreter lock makes decoding slower. Eight is a compromise.
MAX_THREADS = 8
# Pillow reads other formats too, but some start external programs (EPS), and the rest are not used in image data sets.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "HEIF", "JXL")
MAX_PIXELS = 50_000_000  # per image; Pillow keeps up to five copies of a WebP image
MAX_WIDTH_OR_HEIGHT = 2**16 - 1  # in pixels; for longer sides, some decoders and resizing need gigabytes of memory
# A progressive JPEG file stores an image in several scans, and the decoder processes all pixels in every scan, even if
# the scan has only 10 bytes. This limits the number of pixels times the number of scans.
MAX_SCANNED_PIXELS = 2**32
SCAN_MARKER = b"\xff\xda"  # the first bytes of a scan
ORIENTATION, TILE_WIDTH, TILE_HEIGHT = 0x0112, 0x0142, 0x0143  # EXIF and TIFF tags
OUT_OF_MEMORY = ("decoder error -9", "out of memory when reading image file")  # Pillow's messages
_memory_freed = threading.Condition()  # notified when an image has been converted
_pixels_in_use = [0]  # total number of pixels of the images that are being converted


@dataclass(frozen=True)
class Unreadable:
    """The result for an image that could not be decoded.

    Args:
        reason: The reason, as in the message "NAME (REASON)".
        temporary: Whether the failure may be temporary, such as missing memory or permission.
    """

    reason: str
    temporary: bool = field(default=False, repr=False)


def open_image(content: Content) -> Image:
    """Open an image from the bytes of its file or from pixels. For an animation, open the first frame.

    Raise an error for formats that are not in `FORMATS`, for images with more than `MAX_PIXELS` pixels, and for JPEG
    files with so many scans that decoding would take minutes.

    >>> open_image(np.zeros((4, 6), dtype=np.uint8)).size
    (6, 4)
    """
    from PIL import Image

    if isinstance(content, np.ndarray):
        return Image.fromarray(content)
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    data = content if isinstance(content, bytes) else content()
    image = Image.open(BytesIO(data), formats=formats)
    tags = getattr(image, "tag_v2", {})  # check tiles too: a small TIFF file may declare huge tiles
    for width, height in (image.size, (tags.get(TILE_WIDTH, 0), tags.get(TILE_HEIGHT, 0))):
        if not (isinstance(width, int) and isinstance(height, int)):
            raise ValueError("the width or height of its tiles is not an integer")
        if width * height > MAX_PIXELS:
            raise ValueError(f"it has {width} × {height} pixels, but at most {MAX_PIXELS} pixels are decoded")
    if image.format in ("JPEG", "MPO") and data.count(SCAN_MARKER) * image.width * image.height > MAX_SCANNED_PIXELS:
        raise ValueError(
            f"it has {data.count(SCAN_MARKER)} scans of {image.width} × {image.height} pixels, too many to decode"
        )
    return image


def to_8_bit(image: Image, channels: int) -> Image:
    """Convert an image to 8-bit gray (1 channel) or RGB (3 channels), and apply its EXIF orientation.

    16-bit and 32-bit integers are scaled from [0, 65535] to [0, 255]. Floats are scaled from [0, 1] to [0, 255], unless
    a value exceeds 1: then they are in [0, 255] already. Transparent images are composited onto white. Raise
    `ValueError` for values outside these ranges, and for images whose width or height exceeds `MAX_WIDTH_OR_HEIGHT`.

    >>> white = open_image(np.full((2, 2), 65535, dtype=np.uint16))
    >>> white.mode, to_8_bit(white, 1).getpixel((0, 0))
    ('I;16', 255)
    """
    if max(image.size) > MAX_WIDTH_OR_HEIGHT:
        raise ValueError(
            f"it has {image.width} × {image.height} pixels, but width and height must be at most {MAX_WIDTH_OR_HEIGHT}"
        )
    with _limit_pixels(image.width * image.height):
        return _convert(image, channels)


@contextlib.contextmanager
def _limit_pixels(pixels: int) -> Iterator[None]:
    """Limit memory: wait until this image and all images being converted have at most `MAX_PIXELS` pixels in total."""
    with _memory_freed:
        _memory_freed.wait_for(lambda: _pixels_in_use[0] == 0 or _pixels_in_use[0] + pixels <= MAX_PIXELS)
        _pixels_in_use[0] += pixels
    try:
        yield
    finally:
        with _memory_freed:
            _pixels_in_use[0] -= pixels
            _memory_freed.notify_all()


def _convert(image: Image, channels: int) -> Image:
    from PIL import Image, ImageOps

    image.load()
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        integers = np.asarray(image).astype(np.int32)
        _check_pixel_range(integers, 65535)
        # Divide by 257, so that 65535 becomes 255, and round. In-place, because the array may be large.
        integers += 128
        integers //= 257
        image = Image.fromarray(integers.astype(np.uint8))
    elif image.mode == "F":
        floats = np.asarray(image)
        _check_pixel_range(floats, 255)
        scale = 255 if floats.max(initial=0) <= 1 else 1
        image = Image.fromarray((scale * floats).round().astype(np.uint8))
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def _check_pixel_range(values: NDArray[Any], maximum: int) -> None:
    for value in (values.min(initial=0), values.max(initial=0)):
        if not 0 <= value <= maximum:  # also true for NaN
            raise ValueError(f"it has a pixel of value {value}, but pixels must be from 0 to {maximum}")


def decode(content: Content, options: DecodeOptions) -> NDArray[np.uint8]:
    """Decode an image to uint8 pixels of shape (channels, size, size).

    >>> decode(np.full((40, 30, 3), 200, dtype=np.uint8), DecodeOptions(size=8, channels=1)).shape
    (1, 8, 8)
    """
    image = open_image(content)
    if (
        options.crop and options.resize is None
    ):  # likely a photograph, which a JPEG decoder reads faster at low resolution
        image.draft(None, (4 * options.size, 4 * options.size))
    image = _resize(to_8_bit(image, options.channels), options)
    pixels = np.asarray(image).reshape(options.size, options.size, options.channels).transpose(2, 0, 1)
    invert = _has_light_border(pixels) if options.invert == "auto" else options.invert
    return np.ascontiguousarray(255 - pixels if invert else pixels)


def _resize(image: Image, options: DecodeOptions) -> Image:
    """Resize and crop an image to a square of `options.size` pixels."""
    from PIL.Image import Resampling

    size, (width, height) = options.size, image.size
    interpolation = Resampling[options.interpolation.upper()]
    if options.resize is None:
        if (width, height) == (size, size):
            return image
        crop_size = min(width, height)
        left, top = (width - crop_size) // 2, (height - crop_size) // 2
        box = (left, top, left + crop_size, top + crop_size) if options.crop else None
        return image.resize((size, size), interpolation, box)
    shorter = min(width, height)
    if not options.crop:
        width = height = options.resize
    else:
        width, height = (options.resize * side // shorter for side in (width, height))
    if max(width, height) > MAX_WIDTH_OR_HEIGHT:
        raise ValueError(f"its sides have the ratio {max(image.size) / shorter:.0f} : 1, which is too large to resize")
    if (width, height) != image.size:
        image = image.resize((width, height), interpolation)
    offsets = [(side - size) / 2 for side in (width, height)]
    left, top = (round(offset) if options.round_crop else math.floor(offset) for offset in offsets)
    return image.crop((left, top, left + size, top + size))


def _has_light_border(pixels: NDArray[np.uint8]) -> bool:
    """Return whether most of the border of an image of shape (channels, height, width) is light."""
    border = [pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]]
    return bool(np.median(np.concatenate(border, axis=None)) > 127)


def map_images(
    source: ImageSource, function: Callable[[Content], Result], title: str
) -> Iterator[tuple[RawImage, Result | Unreadable]]:
    """Apply a function to the content of every image in several threads, and yield (image, result) pairs in order.

    If the function raises an error, the result is an `Unreadable`. Only the images that are being processed are in
    memory. On a terminal, a progress bar with this title is shown.

    >>> source = ImageSource("a toy", (), 1, lambda: iter([RawImage("a.png", 0, b"no image")]))
    >>> [result for _, result in map_images(source, open_image, "Opening")]
    [Unreadable(reason='it is not an image that Pillow reads')]
    """
    from rich.console import Console
    from rich.progress import Progress

    def process(chunk: tuple[RawImage, ...]) -> list[tuple[RawImage, Result | Unreadable]]:
        return [(image, _try_apply(function, image.content)) for image in chunk]

    console = Console(stderr=True)
    images = _iterate_images(source)
    chunks = iter(lambda: tuple(islice(images, CHUNK_SIZE)), ())
    pending: deque[Future[list[tuple[RawImage, Result | Unreadable]]]] = deque()
    progress_bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with decoding_executor() as executor, progress_bar as progress:
        task = progress.add_task(title, total=source.total)
        pending.extend(executor.submit(process, chunk) for chunk in islice(chunks, 2 * decoding_threads()))
        while pending:
            results = pending.popleft().result()
            pending.extend(executor.submit(process, chunk) for chunk in islice(chunks, 1))
            yield from results
            progress.advance(task, len(results))


@contextlib.contextmanager
def decoding_executor() -> Iterator[ThreadPoolExecutor]:
    """Start `decoding_threads()` threads. On exit, cancel pending jobs and stop the threads.

    >>> with decoding_executor() as executor:
    ...     list(executor.map(abs, [-1, 2]))
    [1, 2]
    """
    executor = ThreadPoolExecutor(decoding_threads())
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def decoding_threads() -> int:
    """Return the number of decoding threads.

    >>> 1 <= decoding_threads() <= MAX_THREADS
    True
    """
    return min(os.cpu_count() or 1, MAX_THREADS)


def _iterate_images(source: ImageSource) -> Iterator[RawImage]:
    with reading_errors(source.description):
        yield from source.images()


def _try_apply(function: Callable[[Content], Result], content: Content) -> Result | Unreadable:
    from PIL import UnidentifiedImageError

    try:
        return function(content)
    except UnidentifiedImageError:
        return Unreadable("it is not an image that Pillow reads")
    except MemoryError:
        return Unreadable("not enough memory", temporary=True)
    except FileNotFoundError as error:
        # Not temporary: if the file is added later, the fingerprint in the names of the cache files changes, so the
        # images are decoded again anyway.
        return Unreadable(error.strerror or str(error))
    except OSError as error:  # Pillow raises OSError without errno for damaged files
        temporary = error.errno is not None or str(error).endswith(OUT_OF_MEMORY)
        return Unreadable(error.strerror or str(error), temporary)
    except Exception as error:  # decoders raise exceptions of many types for damaged files
        return Unreadable(str(error) or type(error).__name__)
