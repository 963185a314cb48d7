"""Glyphs: letters and signs of many alphabets, drawn from the fonts that come with matplotlib.

The built-in data set. Like Omniglot it has many classes (characters) with 20 images each, in
superclasses (alphabets), and the splits share no alphabet. The variants of a character differ in
typeface, weight of the pen, slant, size, place and in an elastic warp.
"""

from __future__ import annotations

import zipfile
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, grid_sample, interpolate

from metabridge.datasets.image_cache import cache_folder, written_whole
from metabridge.datasets.image_files import open_regular
from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.ImageFont import FreeTypeFont

FORMAT = 1  # Raise it with every change to how the images are drawn or stored: it names the cache file.
VARIANTS = 20
SIZE = 28
LARGEST = 2**26  # Bytes of an array in the cache; the images have 11 MB.
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # What else there is unpacks without a limit.
_FRAME = 84  # Side of the frame in which a shape is drawn before it is warped,
_BODY = 60  # and the length that the longer side of every shape has in it.

# No italics: in some scripts they are other letters (т becomes m), and the shear already slants.
REGULAR = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral")
BOLD = ("DejaVuSans-Bold", "DejaVuSerif-Bold", "DejaVuSansMono-Bold", "STIXGeneralBol")


class Alphabet(NamedTuple):
    """Characters of one script, as Unicode ranges; what no face holds or what looks like another is left out."""

    name: str
    split: Literal["train", "validation", "test"]
    ranges: str


# Where characters of two alphabets look alike the earlier alphabet keeps its own: letters before signs.
# Gaps in the ranges leave out marks, accented letters, and what only a count of dots or strokes tells apart.
ALPHABETS = (
    Alphabet("Latin", "train", "41-5A 61-7A DE-DF E6 F0 FE"),
    Alphabet("Greek", "train", "391-3A9 3B1-3BC 3BE-3C9 3D0-3D1 3D5-3F0 3F7-3FB"),
    Alphabet("Cyrillic", "train", "410-44F 402 404-406 408-40B 40F 452-455 458-45B 45F 460-473 478-481"),
    Alphabet("Hebrew", "test", "5D0-5EA"),
    Alphabet(
        "Arabic", "test", "621-62B 62D-637 639-63A 641-64A 679-680 687-688 691 698 6A4 6A9 6AD 6AF 6BA 6BE 6C1 6CC 6D2"
    ),
    Alphabet("Armenian", "test", "531-556 561-586"),
    Alphabet("Georgian Mkhedruli", "test", "10D0-10FA"),
    Alphabet("Georgian Asomtavruli", "test", "10A0-10C5"),
    Alphabet("Georgian Nuskhuri", "test", "2D00-2D25"),
    Alphabet("Tifinagh", "test", "2D30-2D3D 2D3F-2D41 2D43-2D45 2D47 2D49-2D56 2D59-2D65 2D6F"),
    Alphabet("N'Ko", "validation", "7CA-7E6 7E8-7EA 7C1-7C9"),
    Alphabet("Lao", "validation", "E81-EB0 EBD-EC6 ED0-EDD"),
    Alphabet("Old Italic", "validation", "10300-10323"),
    Alphabet("Ogham", "validation", "1681-1683 1685-1688 168A-168D 168F-1692 1694-169C"),
    Alphabet("Fraktur", "validation", "1D504-1D537 210C 2111 211C 2128 212D"),
    Alphabet("Script", "test", "1D49C-1D4CF 210A-210B 2110 2112 211B 212C 212F-2131 2133-2134"),
    Alphabet(
        "Syllabics",
        "train",
        "1401-1405 140A 142F-1433 1438 144C-1450 1455 146B-146F 1472 1489-148D 1490 14A3-14A7 14AA 14C0-14C4 14C7 "
        "14D3-14D7 14DA 14ED-14F1 14F4 1510-1513 1515 1526-152A 152D 1542-1548 154B 1553-1557 1559 155E-1566 "
        "156B-1577 15A0-15AE",
    ),
    Alphabet("Extended Cyrillic", "train", "48A-4C0 4C3-4CC 4E0-4E1 500-51D 520-525 A640-A697"),
    Alphabet("Extended Latin", "train", "180-1BF 1DD 222-223 238-24F A728-A72F A760-A769"),
    Alphabet("Phonetic", "train", "250-2AF"),
    Alphabet("Mathematics", "train", "2200-2218 221A-222D 2238-224D 2263-226A 227A 2282 2286-22C9 22D0-22D5 22F2-22FF"),
    Alphabet("Arrows", "train", "2190-21BB 21C4-21DB 21E6-21ED"),
    Alphabet("APL", "train", "2336-237A"),
    Alphabet("Shapes", "train", "25A0-25FF"),
    Alphabet("Signs", "train", "260A-260E 2611-2614 2618 2620-262F 2638-263B 263D-2667 2669-266F 2692-269C 26A2-26B1"),
    Alphabet("Braille", "train", "2801-283F"),
)


def load_glyphs(seed: int = 0, cache: str | Path | None = None) -> LabelledImages:
    """Return the glyphs, drawn on first use and kept in the cache folder from then on.

    `cache` is a folder; without it `$METABRIDGE_CACHE` or `~/.cache/metabridge` is used. Another
    seed gives other variants of the same characters.

    >>> glyphs = load_glyphs()
    >>> glyphs.images.shape[1:], sorted(glyphs.splits)
    (torch.Size([1, 28, 28]), ['test', 'train', 'validation'])
    """
    if seed < 0:
        raise InputError(f"seed is {seed}, but must not be negative. Use seed=0 or more.")
    folder = Path(cache or cache_folder())
    stem = f"glyphs-v{FORMAT}-seed{seed}-matplotlib"
    try:
        version = metadata.version("matplotlib")
    except metadata.PackageNotFoundError:
        version = "*"  # Without fonts of our own, glyphs drawn with those of any version will do.
    files = [folder / f"{stem}{version}.npz"] if version != "*" else sorted(folder.glob(f"{stem}*.npz"))
    for file in files:
        try:
            return _read(file)
        except Exception:  # Missing, or damaged, which can fail in every way.
            continue
    if version == "*":
        raise InputError(
            f"the glyphs are not in {folder}, and drawing them needs matplotlib's fonts, which are not installed. "
            f"Install matplotlib, or copy {stem}*.npz there from a machine that has it."
        )
    glyphs = _draw(seed)
    _write(glyphs, files[0])
    return glyphs


class _Character(NamedTuple):
    alphabet: int
    code: int
    shapes: NDArray[np.uint8]  # (faces, _FRAME, _FRAME), one for each face that holds it
    regular: int  # So many of the shapes, the first ones, are from regular faces.


def _draw(seed: int) -> LabelledImages:
    from rich.console import Console
    from rich.progress import track

    characters = _distinct(_candidates())
    # A page of characters at a time: torch is slow at many small operations.
    pages = [characters[first : first + 32] for first in range(0, len(characters), 32)]
    images = []
    for page in track(pages, "Drawing glyphs", console=Console(stderr=True), transient=True):
        parts = zip(*(_variants(character, seed) for character in page))
        images.append(_ink(*(torch.from_numpy(np.concatenate(part)) for part in parts)))
    superclasses = torch.tensor([character.alphabet for character in characters])
    return LabelledImages(
        images=torch.cat(images),
        labels=torch.arange(len(characters)).repeat_interleave(VARIANTS),
        class_names=tuple(f"{ALPHABETS[c.alphabet].name}/U+{c.code:04X}" for c in characters),
        superclasses=superclasses,
        superclass_names=tuple(alphabet.name for alphabet in ALPHABETS),
        splits=_splits(superclasses, [alphabet.split for alphabet in ALPHABETS]),
    )


def _splits(superclasses: Tensor, split_of: list[str]) -> dict[str, Tensor]:
    """Classes of each split, given the split of each superclass."""
    own = [split_of[index] for index in superclasses.tolist()]
    return {
        split: torch.tensor([index for index, name in enumerate(own) if name == split]) for split in dict.fromkeys(own)
    }


def _candidates() -> list[_Character]:
    """Every character of the alphabets that a face holds."""
    import matplotlib
    from matplotlib.ft2font import FT2Font
    from PIL import ImageFont

    paths = [Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf") for face in REGULAR + BOLD]
    held = [FT2Font(str(path)).get_charmap() for path in paths]
    fonts = [ImageFont.truetype(path, 96, layout_engine=ImageFont.Layout.BASIC) for path in paths]
    found = []
    for index, alphabet in enumerate(ALPHABETS):
        for first, _, last in (part.partition("-") for part in alphabet.ranges.split()):
            for code in range(int(first, 16), int(last or first, 16) + 1):
                shapes = [_shape(font, code) for font, codes in zip(fonts, held) if code in codes]
                if shapes and all(shape.any() for shape in shapes):
                    regular = sum(code in codes for codes in held[: len(REGULAR)])
                    found.append(_Character(index, code, np.stack(shapes), max(regular, 1)))
    return found


def _shape(font: FreeTypeFont, code: int) -> NDArray[np.uint8]:
    """The character in the middle of its frame, its longer side `_BODY` long; all zero if it leaves no ink."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = (int(edge) for edge in font.getbbox(chr(code)))
    page = Image.new("L", (max(right - left, 1), max(bottom - top, 1)))
    ImageDraw.Draw(page).text((-left, -top), chr(code), fill=255, font=font)
    frame = Image.new("L", (_FRAME, _FRAME))
    box = page.getbbox()
    if box is not None:
        ink = page.crop(box)
        scale = _BODY / max(ink.size)
        ink = ink.resize((max(round(ink.width * scale), 1), max(round(ink.height * scale), 1)))
        frame.paste(ink, ((_FRAME - ink.width) // 2, (_FRAME - ink.height) // 2))
    return np.asarray(frame)


def _distinct(candidates: list[_Character]) -> list[_Character]:
    """Leave out each character that in a regular face could be taken for an earlier one.

    Two shapes are alike if all but a speck of each lies within reach of the other. Since shapes are
    compared at equal size, letters whose cases differ by size alone (o and O) count as alike too.
    """
    reach, speck = 2, 5.0
    shapes = torch.from_numpy(np.concatenate([c.shapes[: c.regular] for c in candidates]))
    ink = avg_pool2d(shapes[:, None].float() / 255, 2)
    y, x = torch.meshgrid(*2 * [torch.arange(-reach, reach + 1)], indexing="ij")
    disc = (x**2 + y**2 <= reach**2).float()
    near = conv2d((ink > 0.35).float(), disc[None, None], padding=reach) > 0
    ink, far = ink.flatten(1), (~near).float().flatten(1)
    owner = torch.arange(len(candidates)).repeat_interleave(torch.tensor([c.regular for c in candidates]))
    alone = ink @ far.T
    alike = torch.maximum(alone, alone.T) <= speck
    pairs = torch.zeros(len(candidates), len(candidates), dtype=torch.bool)
    one, other = alike.nonzero(as_tuple=True)
    pairs[owner[one], owner[other]] = True
    return [character for index, character in enumerate(candidates) if not pairs[index, :index].any()]


def _variants(character: _Character, seed: int) -> tuple[NDArray[np.float32], ...]:
    """Choose how each variant is drawn.

    Return the depth below the outline (VARIANTS, _FRAME, _FRAME), the affine map (VARIANTS, 2, 3)
    and the bends of a coarse grid (VARIANTS, 2, 5, 5). Drawn at another level of the depth, a shape
    has another weight of the pen.
    """
    from scipy.ndimage import distance_transform_edt

    random = np.random.default_rng((seed, character.code))

    def uniform(low: float, high: float) -> NDArray[np.float64]:
        return random.uniform(low, high, VARIANTS)

    inside = character.shapes > 127
    depth = np.stack([distance_transform_edt(shape) - distance_transform_edt(~shape) for shape in inside])
    # Half the width of a stroke is twice its mean depth; it must not fall below what a final pixel can show.
    thickness = 2 * np.array([values[shape].mean() for values, shape in zip(depth, inside)])
    face = random.integers(len(depth), size=VARIANTS)
    weight = np.maximum(uniform(-0.8, 1.6), 1.8 - thickness[face])

    angle, shear, size, aspect = uniform(-0.25, 0.25), uniform(-0.3, 0.3), uniform(0.76, 1.04), uniform(0.85, 1.18)
    cosine, sine = np.cos(angle) / size, np.sin(angle) / size
    affine = [
        [cosine * aspect, (sine + shear * cosine) / aspect, uniform(-0.12, 0.12)],
        [-sine * aspect, (cosine - shear * sine) / aspect, uniform(-0.12, 0.12)],
    ]
    bends = random.normal(0, 0.07, (VARIANTS, 2, 5, 5))
    drawn = (depth[face] + weight[:, None, None], np.array(affine).transpose(2, 0, 1), bends)
    return tuple(part.astype(np.float32) for part in drawn)


def _ink(depth: Tensor, affine: Tensor, bends: Tensor) -> Tensor:
    """Warp the shapes and lay down the ink, uint8 of shape (n, 1, SIZE, SIZE)."""
    fine = 2 * SIZE  # Strokes are thin: lay the ink on finer pixels and average.
    line = (2 * torch.arange(fine) + 1) / fine - 1
    # Not affine_grid: its many tiny matrix products cost more than all the rest.
    right, down, shift = affine[:, None, None].unbind(-1)
    grid = right * line[:, None] + down * line[:, None, None] + shift
    warp = interpolate(bends, (fine, fine), mode="bicubic", align_corners=True).movedim(1, -1)
    warped = grid_sample(depth[:, None], grid + warp, padding_mode="border", align_corners=False)
    return (255 * avg_pool2d(torch.sigmoid(2 * warped), 2)).round().to(torch.uint8)


def _read(file: Path) -> LabelledImages:
    with open_regular(file) as stream, zipfile.ZipFile(stream) as archive:
        if not all(0 <= info.file_size <= LARGEST and info.compress_type in PACKINGS for info in archive.infolist()):
            raise ValueError(f"{file} holds more than glyphs")

        def array(name: str) -> NDArray[Any]:
            # Whole, which np.load does not do: only at the end of an entry its checksum is compared.
            return np.load(BytesIO(archive.read(f"{name}.npy")), allow_pickle=False)  # type: ignore[no-any-return]

        superclasses = torch.from_numpy(array("superclasses"))
        return LabelledImages(
            images=torch.from_numpy(array("images")),
            labels=torch.from_numpy(array("labels")),
            class_names=tuple(array("class_names").tolist()),
            superclasses=superclasses,
            superclass_names=tuple(array("superclass_names").tolist()),
            splits=_splits(superclasses, array("superclass_splits").tolist()),
        )


def _write(glyphs: LabelledImages, file: Path) -> None:
    with written_whole(file) as stream:
        np.savez_compressed(
            stream,
            images=glyphs.images.numpy(),
            labels=glyphs.labels.numpy(),
            class_names=np.array(glyphs.class_names),
            superclasses=glyphs.superclasses.numpy(),
            superclass_names=np.array(glyphs.superclass_names),
            superclass_splits=np.array([alphabet.split for alphabet in ALPHABETS]),
        )
