"""Glyphs, the built-in data set: characters of many alphabets, drawn with the fonts that come with matplotlib.

Like Omniglot, it has many classes (characters) with 20 images each, grouped into superclasses (alphabets). The splits
share no alphabet. The images of a character differ in typeface, stroke width, rotation, slant, size, position and
elastic deformation.
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

from metabridge.datasets.image_cache import cache_folder, cache_writer
from metabridge.datasets.image_files import open_regular
from metabridge.environments.image_tasks import LabeledImages
from metabridge.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.ImageFont import FreeTypeFont

FORMAT = 1  # version in the cache file name; increase it if the images are drawn or stored differently
IMAGES_PER_CHARACTER = 20
IMAGE_SIZE = 28
MAX_ARRAY_BYTES = 2**26  # per array in the cache file; the images are 18 MB
# With other compression methods, zipfile does not limit the unpacked size.
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_FRAME_SIZE = 84  # width and height of the frame in which a shape is drawn before it is deformed, in pixels
_SHAPE_SIZE = 60  # max(width, height) of the shape in the frame, in pixels

# No italic fonts: some italic letters look like other letters (italic т looks like m), and a shear adds slant anyway.
REGULAR = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral")
BOLD = ("DejaVuSans-Bold", "DejaVuSerif-Bold", "DejaVuSansMono-Bold", "STIXGeneralBol")


class Alphabet(NamedTuple):
    """The characters of a script, as hexadecimal ranges of Unicode such as "41-5A".

    Characters that no font contains, and characters that look like others, are removed later.
    """

    name: str
    split: Literal["train", "validation", "test"]
    ranges: str


# Only the first of several characters that look alike is kept, so letters come before signs in this list.
# The ranges omit diacritical marks, accented letters, and characters that differ only in the number of dots or strokes.
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


def load_glyphs(seed: int = 0, cache: str | Path | None = None) -> LabeledImages:
    """Load the glyphs data set. The glyphs are drawn on first use and cached on disk.

    Args:
        seed: Seed for drawing. Each seed gives different images of the same characters.
        cache: The cache folder. Default: `$METABRIDGE_CACHE` or `~/.cache/metabridge`.

    Returns:
        Images of 28 × 28 pixels with one channel, with classes, superclasses and splits.

    Raises:
        InputError: The seed is negative, the cache cannot be written, or matplotlib is not installed and the cache
            does not contain the glyphs.

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
        version = "*"  # without matplotlib, accept glyphs that were drawn with any version
    files = [folder / f"{stem}{version}.npz"] if version != "*" else sorted(folder.glob(f"{stem}*.npz"))
    for file in files:
        try:
            return _read(file)
        except Exception:  # the file is missing or damaged
            continue
    if version == "*":
        raise InputError(
            f"{folder} does not contain the glyphs, and drawing them needs the fonts of matplotlib, which is not "
            f"installed. Install matplotlib, or copy {stem}*.npz there from a machine that has it."
        )
    glyphs = _draw(seed)
    _write(glyphs, files[0])
    return glyphs


class _Character(NamedTuple):
    alphabet: int  # index in `ALPHABETS`
    code: int  # Unicode code point
    shapes: NDArray[np.uint8]  # (fonts, _FRAME_SIZE, _FRAME_SIZE), for the fonts that contain the character
    # Number of shapes that are compared with those of other characters: the first shapes, which are from regular fonts,
    # or only the first one if all are from bold fonts.
    regular_count: int


def _draw(seed: int) -> LabeledImages:
    from rich.console import Console
    from rich.progress import track

    characters = _remove_lookalikes(_candidates())
    # Render 32 characters at once, because many small PyTorch operations are slow.
    batches = [characters[start : start + 32] for start in range(0, len(characters), 32)]
    images = []
    for batch in track(batches, "Drawing glyphs", console=Console(stderr=True), transient=True):
        parameters = zip(*(_sample_render_parameters(character, seed) for character in batch))
        images.append(_render(*(torch.from_numpy(np.concatenate(arrays)) for arrays in parameters)))
    superclasses = torch.tensor([character.alphabet for character in characters])
    return LabeledImages(
        images=torch.cat(images),
        labels=torch.arange(len(characters)).repeat_interleave(IMAGES_PER_CHARACTER),
        class_names=tuple(f"{ALPHABETS[c.alphabet].name}/U+{c.code:04X}" for c in characters),
        superclasses=superclasses,
        superclass_names=tuple(alphabet.name for alphabet in ALPHABETS),
        splits=_class_splits(superclasses, [alphabet.split for alphabet in ALPHABETS]),
    )


def _class_splits(superclasses: Tensor, split_of: list[str]) -> dict[str, Tensor]:
    """Return the class indices of each split, given the superclass of each class and the split of each superclass."""
    split_names = [split_of[superclass] for superclass in superclasses.tolist()]
    return {
        split: torch.tensor([index for index, name in enumerate(split_names) if name == split])
        for split in dict.fromkeys(split_names)
    }


def _candidates() -> list[_Character]:
    """Return the characters of `ALPHABETS` that are in at least one font, except those that a font draws blank."""
    import matplotlib
    from matplotlib.ft2font import FT2Font
    from PIL import ImageFont

    paths = [Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf") for font in REGULAR + BOLD]
    charmaps = [FT2Font(str(path)).get_charmap() for path in paths]
    fonts = [ImageFont.truetype(path, 96, layout_engine=ImageFont.Layout.BASIC) for path in paths]
    candidates = []
    for index, alphabet in enumerate(ALPHABETS):
        for first_code, _, last_code in (code_range.partition("-") for code_range in alphabet.ranges.split()):
            for code in range(int(first_code, 16), int(last_code or first_code, 16) + 1):
                shapes = [_draw_shape(font, code) for font, charmap in zip(fonts, charmaps) if code in charmap]
                if shapes and all(shape.any() for shape in shapes):
                    regular_count = sum(code in charmap for charmap in charmaps[: len(REGULAR)])
                    candidates.append(_Character(index, code, np.stack(shapes), max(regular_count, 1)))
    return candidates


def _draw_shape(font: FreeTypeFont, code: int) -> NDArray[np.uint8]:
    """Draw a character in the center of a frame, scaled to `_SHAPE_SIZE`. For a blank character, all pixels are 0."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = (int(edge) for edge in font.getbbox(chr(code)))
    canvas = Image.new("L", (max(right - left, 1), max(bottom - top, 1)))
    ImageDraw.Draw(canvas).text((-left, -top), chr(code), fill=255, font=font)
    frame = Image.new("L", (_FRAME_SIZE, _FRAME_SIZE))
    box = canvas.getbbox()
    if box is not None:
        shape = canvas.crop(box)
        scale = _SHAPE_SIZE / max(shape.size)
        shape = shape.resize((max(round(shape.width * scale), 1), max(round(shape.height * scale), 1)))
        frame.paste(shape, ((_FRAME_SIZE - shape.width) // 2, (_FRAME_SIZE - shape.height) // 2))
    return np.asarray(frame)


def _remove_lookalikes(candidates: list[_Character]) -> list[_Character]:
    """Remove each character that looks like an earlier character of the list in a regular font.

    A character that only bold fonts contain is compared in the first of them.

    Shapes are compared at half resolution. Two shapes look alike if in each of them, at most `tolerance` foreground
    pixels are more than `distance` pixels away from the other shape; a gray pixel counts in part. All shapes are scaled
    to equal size, so upper and lower case letters that differ only in size (o and O) look alike.
    """
    distance, tolerance = 2, 5.0
    shapes = torch.from_numpy(np.concatenate([c.shapes[: c.regular_count] for c in candidates]))
    foreground = avg_pool2d(shapes[:, None].float() / 255, 2)
    y, x = torch.meshgrid(*2 * [torch.arange(-distance, distance + 1)], indexing="ij")
    disc = (x**2 + y**2 <= distance**2).float()
    # for each shape: the pixels that are at most `distance` away from its foreground
    is_near = conv2d((foreground > 0.35).float(), disc[None, None], padding=distance) > 0
    foreground, is_far = foreground.flatten(1), (~is_near).float().flatten(1)
    character_of = torch.arange(len(candidates)).repeat_interleave(torch.tensor([c.regular_count for c in candidates]))
    far_pixels = foreground @ is_far.T  # entry (i, j): number of foreground pixels of shape i that are far from shape j
    shapes_alike = torch.maximum(far_pixels, far_pixels.T) <= tolerance
    characters_alike = torch.zeros(len(candidates), len(candidates), dtype=torch.bool)
    rows, columns = shapes_alike.nonzero(as_tuple=True)
    characters_alike[character_of[rows], character_of[columns]] = True
    return [character for index, character in enumerate(candidates) if not characters_alike[index, :index].any()]


def _sample_render_parameters(character: _Character, seed: int) -> tuple[NDArray[np.float32], ...]:
    """Sample the rendering parameters of the n images of a character.

    Return the signed distances of the pixels to the outline, positive inside the strokes (n, _FRAME_SIZE, _FRAME_SIZE),
    the affine maps (n, 2, 3), and the displacements of the points of a coarse grid, for the elastic deformation
    (n, 2, 5, 5). A constant added to the distances changes the stroke width.
    """
    from scipy.ndimage import distance_transform_edt

    rng = np.random.default_rng((seed, character.code))

    def uniform(low: float, high: float) -> NDArray[np.float64]:
        return rng.uniform(low, high, IMAGES_PER_CHARACTER)

    inside = character.shapes > 127
    distance = np.stack([distance_transform_edt(shape) - distance_transform_edt(~shape) for shape in inside])
    # Half the stroke width is about twice the mean distance inside the strokes. Strokes are widened until this half is
    # at least 1.8 pixels of the frame; otherwise, they would be thinner than a pixel of the final image, which is three
    # times smaller.
    half_width = 2 * np.array([values[shape].mean() for values, shape in zip(distance, inside)])
    font = rng.integers(len(distance), size=IMAGES_PER_CHARACTER)
    widening = np.maximum(uniform(-0.8, 1.6), 1.8 - half_width[font])

    angle, shear, size, aspect = uniform(-0.25, 0.25), uniform(-0.3, 0.3), uniform(0.76, 1.04), uniform(0.85, 1.18)
    cosine, sine = np.cos(angle) / size, np.sin(angle) / size
    affine = [
        [cosine * aspect, (sine + shear * cosine) / aspect, uniform(-0.12, 0.12)],
        [-sine * aspect, (cosine - shear * sine) / aspect, uniform(-0.12, 0.12)],
    ]
    displacements = rng.normal(0, 0.07, (IMAGES_PER_CHARACTER, 2, 5, 5))
    parameters = (distance[font] + widening[:, None, None], np.array(affine).transpose(2, 0, 1), displacements)
    return tuple(array.astype(np.float32) for array in parameters)


def _render(distance: Tensor, affine: Tensor, displacements: Tensor) -> Tensor:
    """Deform the shapes and render them as uint8 images of shape (n, 1, IMAGE_SIZE, IMAGE_SIZE)."""
    size = 2 * IMAGE_SIZE  # render at twice the resolution and average, because strokes are thin
    coordinates = (2 * torch.arange(size) + 1) / size - 1
    # Equivalent to torch's affine_grid, but faster: its many small matrix products would dominate the run time.
    x_column, y_column, translation = affine[:, None, None].unbind(-1)
    grid = x_column * coordinates[:, None] + y_column * coordinates[:, None, None] + translation
    warp = interpolate(displacements, (size, size), mode="bicubic", align_corners=True).movedim(1, -1)
    warped = grid_sample(distance[:, None], grid + warp, padding_mode="border", align_corners=False)
    # The sigmoid turns distances into gray values: 1 inside the strokes, 0 outside, and a soft edge at the outline.
    return (255 * avg_pool2d(torch.sigmoid(2 * warped), 2)).round().to(torch.uint8)


def _read(file: Path) -> LabeledImages:
    with open_regular(file) as stream, zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if not all(
            0 <= entry.file_size <= MAX_ARRAY_BYTES and entry.compress_type in COMPRESSIONS for entry in entries
        ):
            raise ValueError(f"{file} contains arrays that are too large, or uses an unknown compression method")

        def read_array(name: str) -> NDArray[Any]:
            # Read the whole entry, because zipfile checks its checksum only at the end. np.load may stop earlier.
            return np.load(BytesIO(archive.read(f"{name}.npy")), allow_pickle=False)  # type: ignore[no-any-return]

        superclasses = torch.from_numpy(read_array("superclasses"))
        return LabeledImages(
            images=torch.from_numpy(read_array("images")),
            labels=torch.from_numpy(read_array("labels")),
            class_names=tuple(read_array("class_names").tolist()),
            superclasses=superclasses,
            superclass_names=tuple(read_array("superclass_names").tolist()),
            splits=_class_splits(superclasses, read_array("superclass_splits").tolist()),
        )


def _write(glyphs: LabeledImages, file: Path) -> None:
    with cache_writer(file) as stream:
        np.savez_compressed(
            stream,
            images=glyphs.images.numpy(),
            labels=glyphs.labels.numpy(),
            class_names=np.array(glyphs.class_names),
            superclasses=glyphs.superclasses.numpy(),
            superclass_names=np.array(glyphs.superclass_names),
            superclass_splits=np.array([alphabet.split for alphabet in ALPHABETS]),
        )
