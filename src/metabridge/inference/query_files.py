"""Find the image files to classify in folders and among single files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from metabridge.datasets.image_files import IMAGE_SUFFIXES, READABLE_SUFFIXES, list_tree, open_regular
from metabridge.errors import InputError

# First bytes of image files. WebP files start with RIFF and have WEBP at byte 8.
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")


class QueryFile(NamedTuple):
    """An image file to classify, and the path of its folder relative to the folder that was searched.

    The path is "." for images directly in that folder, and for single files.
    """

    path: Path
    folder: str


def find_query_files(queries: Sequence[Path]) -> list[QueryFile]:
    """Return single files as they are, and the image files in folders and their subfolders.

    In folders, images are recognized by their suffix or, if they have none, by their first bytes. Hidden files are
    omitted.

    Args:
        queries: Files and folders.

    Returns:
        The image files, in the order of `queries`, and sorted by path in each folder.

    Raises:
        InputError: If a path does not exist, or a folder contains no images.
    """
    files = []
    for query in queries:
        if not query.exists():
            raise InputError(f"--query is {query}, which does not exist. Pass a folder of images, or image files.")
        if not query.is_dir():
            files.append(QueryFile(query, "."))
            continue
        images = [file for file in list_tree(query) if _is_image(file)]
        if not images:
            raise InputError(f"--query is {query}, which contains no images ({', '.join(READABLE_SUFFIXES)}).")
        files += [QueryFile(image, image.parent.relative_to(query).as_posix()) for image in images]
    return files


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES or (not file.suffix and has_image_signature(file))


def has_image_signature(file: Path) -> bool:
    """Return whether the first bytes of a file are those of a PNG, JPEG, WebP, GIF, BMP or TIFF image.

    >>> has_image_signature(Path("/dev/zero"))
    False
    """
    try:
        with open_regular(file) as stream:
            start = stream.read(12)
    except OSError:
        return False
    return start.startswith(_SIGNATURES) or (start.startswith(b"RIFF") and start[8:] == b"WEBP")
