"""Pictures into pixels: any format and mode that Pillow reads, to square uint8 arrays, many at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from metabridge.environments.source import Content, Picture, Source

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")
CHUNK = 16  # Pictures that a thread takes at once.
# Photographs gain from every thread. Images of 100 pixels gain from two and lose with 16, which wait for Python's lock.
THREADS = 8


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
    """Why a picture could not be decoded."""

    reason: str


def opened(content: Content) -> Image:
    """Open a picture's file or pixels; of an animation this is the first frame.

    >>> opened(np.zeros((4, 6), dtype=np.uint8)).size
    (6, 4)
    """
    from PIL import Image

    if isinstance(content, np.ndarray):
        return Image.fromarray(content)
    return Image.open(BytesIO(content if isinstance(content, bytes) else content()))


def plain(image: Image, channels: int) -> Image:
    """Turn an image upright, as its camera noted, and into 8 bits: grey for one channel, RGB for three.

    16 bits are scaled down, floats are taken to go from 0 to 1 (or to 255 if any exceeds 1), and what
    is transparent is laid on white.

    >>> deep = opened(np.full((2, 2), 65535, dtype=np.uint16))
    >>> deep.mode, plain(deep, 1).getpixel((0, 0))
    ('I;16', 255)
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.float64)
        image = Image.fromarray((deep.clip(0, 65535) / 257).round().astype(np.uint8))
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        scale = 255 if values.max(initial=0) <= 1 else 1
        image = Image.fromarray((scale * values).clip(0, 255).round().astype(np.uint8))
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image)
        image = paper
    return image.convert("L" if channels == 1 else "RGB")


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
    workers = min(os.cpu_count() or 1, THREADS)
    pictures = source.pictures()
    chunks = iter(lambda: tuple(islice(pictures, CHUNK)), ())
    pending: deque[Future[list[tuple[Picture, Result | Unreadable]]]] = deque()
    executor = ThreadPoolExecutor(workers)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task(title, total=source.total)
            pending.extend(executor.submit(attempt, chunk) for chunk in islice(chunks, 2 * workers))
            while pending:
                done = pending.popleft().result()
                pending.extend(executor.submit(attempt, chunk) for chunk in islice(chunks, 1))
                yield from done
                progress.advance(bar, len(done))
    finally:
        executor.shutdown(cancel_futures=True)


def _attempt(work: Callable[[Content], Result], content: Content) -> Result | Unreadable:
    from PIL import UnidentifiedImageError

    try:
        return work(content)
    except UnidentifiedImageError:
        return Unreadable("it is not an image that Pillow reads")
    except Exception as error:  # Damaged files make the decoders fail in every way.
        return Unreadable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
