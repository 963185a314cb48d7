from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from metabridge import InputError
from metabridge.episodes import Episodes
from metabridge.training import Augment

# Pillow's classes for the changes that Augment numbers 0 (brightness), 1 (contrast) and 2 (saturation).
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
LEVEL = 1 / 255  # difference of adjacent 8-bit levels


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_image(channels: int, size: int = 24) -> torch.Tensor:
    """Return a high-contrast image of 8-bit levels, (channels, size, size)."""
    levels = torch.randint(256, (channels, size // 4, size // 4), generator=seeded(3))
    return levels.repeat_interleave(4, 1).repeat_interleave(4, 2) / 255


def as_pillow(image: torch.Tensor) -> Image.Image:
    pixels = (image * 255).round().to(torch.uint8).movedim(0, -1).numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def from_pillow(image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.asarray(image).astype(np.float32)) / 255
    return pixels[None] if pixels.ndim == 2 else pixels.movedim(-1, 0)


@pytest.fixture
def jittered(monkeypatch):
    """Return a function that changes an image by factors of brightness, contrast and saturation, in a given order."""

    def jitter(image: torch.Tensor, order: tuple[int, ...], factors: tuple[float, ...]) -> torch.Tensor:
        draws = torch.zeros(2, 3, 1, 1, 1, 1)  # sorting draws[0] gives the order, and draws[1] the factors
        for position, change in enumerate(order):
            draws[0, change] = position / 3
            draws[1, position] = factors[change] / 2  # with jitter 1, factors are from 0 to 2
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *shape, **_: draws)
            return Augment(padding=0, jitter=1.0, flip=False)(image[None], seeded())[0]

    return jitter


def enhanced(image: torch.Tensor, order: tuple[int, ...], factors: tuple[float, ...]) -> torch.Tensor:
    """Return the image that Pillow computes for the same changes."""
    changed = as_pillow(image)
    for change in order:
        changed = ENHANCERS[change](changed).enhance(factors[change])
    return from_pillow(changed)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.4])
@pytest.mark.parametrize("change", range(3), ids=["brightness", "contrast", "saturation"])
def test_each_color_change_equals_pillows_up_to_rounding(jittered, change, factor, channels):
    image, factors = random_image(channels), tuple(factor if index == change else 1.0 for index in range(3))
    changed = jittered(image, (0, 1, 2), factors)
    assert (changed - enhanced(image, (change,), factors)).abs().max() < 1.8 * LEVEL
    if factor != 1 and (channels, change) != (1, 2):  # a gray image has no saturation
        assert (changed - image).abs().max() > 20 * LEVEL


ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("order", ORDERS)
def test_color_changes_in_any_order_equal_pillows_in_that_order(jittered, order):
    image, factors = random_image(3), (1.8, 1.8, 2.0)
    changed = jittered(image, order, factors)
    differences = {other: (changed - enhanced(image, other, factors)).abs() for other in ORDERS}
    assert differences[order].max() < 8 * LEVEL  # each of three rounding errors is magnified by the changes after it
    assert all(difference.max() > 40 * LEVEL for other, difference in differences.items() if other != order)


def test_factors_are_uniform_and_independent_for_each_image():
    """A uniform gray image is changed only by brightness, whose factor is the ratio of output to input."""
    gray_images = torch.full((4000, 3, 2, 2), 0.5)
    factors = Augment(padding=0, jitter=0.4, flip=False)(gray_images, seeded())[:, 0, 0, 0] / 0.5
    frequencies = torch.histc(factors, bins=8, min=0.6, max=1.4) / 4000
    assert (frequencies - 1 / 8).abs().max() < 5 * (7 / 64 / 4000) ** 0.5  # five standard errors
    assert frequencies.sum() == 1


def all_crops(image: torch.Tensor, padding: int) -> torch.Tensor:
    """Return all crops of the zero-padded image that have its size, (offsets, channels, height, width)."""
    height, width = image.shape[1:]
    padded = torch.zeros(len(image), height + 2 * padding, width + 2 * padding)
    padded[:, padding : padding + height, padding : padding + width] = image
    offsets = itertools.product(range(2 * padding + 1), repeat=2)
    return torch.stack([padded[:, down : down + height, right : right + width] for down, right in offsets])


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_crops_of_the_padded_image_are_equally_likely(channels, flip):
    image = 0.1 + 0.9 * torch.rand(channels, 5, 6, generator=seeded())
    possible_crops = all_crops(image, padding=2)
    if flip:
        possible_crops = torch.cat([possible_crops, possible_crops.flip(-1)])
    crops = Augment(padding=2, jitter=0, flip=flip)(image.expand(5000, -1, -1, -1), seeded(1))
    equal = (crops[:, None] == possible_crops).flatten(2).all(-1)
    assert (equal.sum(1) == 1).all()
    expected = 5000 / len(possible_crops)
    # it has about the mean n and the variance 2n for n possible crops, so this is a bound of five standard deviations
    chi_square = ((equal.sum(0) - expected) ** 2 / expected).sum()
    assert chi_square < len(possible_crops) + 5 * (2 * len(possible_crops)) ** 0.5


def test_images_are_mirrored_with_probability_one_half():
    images = torch.rand(2000, 3, 4, 5, generator=seeded())
    changed = Augment(padding=0, jitter=0)(images, seeded(1))
    mirrored = (changed == images.flip(-1)).flatten(1).all(1)
    assert ((changed == images).flatten(1).all(1) ^ mirrored).all()
    # up to five standard errors
    assert float(mirrored.float().mean()) == pytest.approx(0.5, abs=5 * (0.25 / 2000) ** 0.5)


def rectangles(augment: Augment, count: int) -> tuple[torch.Tensor, ...]:
    """Return the width, the height and the center (x, y) of random rectangles in `count` copies of an image.

    Width and height are fractions of those of the image, and the width is negative if the rectangle is mirrored. The
    center has coordinates from −1 to 1.
    """
    size, low, high = 64, 20, 43  # the pixels low and high are at the same distance from the center
    coordinates = (torch.arange(size) * 2 + 1) / size - 1
    # the two channels of the image are the coordinates of its pixels
    image = torch.stack([coordinates.expand(size, size), coordinates[:, None].expand(size, size)])
    crops = augment(image.expand(count, -1, -1, -1), seeded())
    row_x, column_y = crops[:, 0, size // 2], crops[:, 1, :, size // 2]
    distance = coordinates[high] - coordinates[low]
    width, height = ((line[:, high] - line[:, low]) / distance for line in (row_x, column_y))
    return width, height, (row_x[:, high] + row_x[:, low]) / 2, (column_y[:, high] + column_y[:, low]) / 2


@pytest.mark.parametrize("scale", [(0.3, 1.0), (0.9, 1.0), (0.5, 0.6)])
def test_random_rectangles_have_areas_in_the_range_and_lie_inside_the_image(scale):
    width, height, x, y = rectangles(Augment(jitter=0, scale=scale), 3000)
    area = width.abs() * height
    assert scale[0] - 1e-4 < area.min() < scale[0] + 0.01
    assert scale[1] - 0.01 < area.max() < scale[1] + 1e-4
    assert float(area.mean()) == pytest.approx(sum(scale) / 2, abs=0.02)
    ratio = width.abs() / height
    assert 3 / 4 - 1e-3 < ratio.min() < ratio.max() < 4 / 3 + 1e-3
    assert float((width < 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    for length, center in ((width.abs(), x), (height, y)):
        assert (center.abs() <= 1 - length + 1e-4).all()
        can_move = length < 0.999
        # position of the rectangle within its range of motion
        positions = center[can_move] / (1 - length[can_move])  # from −1 to 1
        assert positions.min() < -0.95
        assert positions.max() > 0.95
        assert float(positions.mean()) == pytest.approx(0, abs=0.06)


@pytest.mark.parametrize("width", [9, 12])
def test_a_rectangle_of_the_whole_area_is_the_image_if_flip_is_false(width):
    images = torch.rand(20, 3, 9, width, generator=seeded())
    changed = Augment(jitter=0, flip=False, scale=(1.0, 1.0))(images, seeded())
    assert torch.allclose(changed, images, atol=1e-5)


VARIANTS = [Augment(), Augment(padding=0), Augment(jitter=0), Augment(flip=False), Augment(scale=(0.3, 1.0))]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", VARIANTS)
def test_the_generator_state_determines_the_images(augment, channels):
    images = torch.rand(6, channels, 12, 12, generator=seeded())
    first, same_seed, other_seed = (augment(images, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, same_seed)
    assert not torch.equal(first, other_seed)
    assert first.shape == images.shape
    assert 0 <= first.min() < first.max() <= 1


def test_images_and_generator_do_not_change_if_crop_jitter_and_flip_are_off():
    images, generator = torch.rand(3, 3, 8, 8, generator=seeded()), seeded(1)
    assert torch.equal(Augment(padding=0, jitter=0, flip=False)(images, generator), images)
    assert torch.equal(generator.get_state(), seeded(1).get_state())


def test_support_and_query_images_change_independently_and_keep_their_labels():
    x = torch.rand(1, 1, 3, 8, 8, generator=seeded()).expand(2, 4, -1, -1, -1).contiguous()
    y = torch.arange(4).expand(2, 4)
    episodes = Episodes(x, y, x.clone(), y.clone(), classes=torch.arange(8).view(2, 4))
    changed = Augment(padding=2).episodes(episodes, seeded())
    all_images = torch.cat([changed.support_x, changed.query_x]).flatten(0, 1)
    assert len(all_images.unique(dim=0)) == 16  # 4 support and 4 query images of 2 tasks, which were all equal
    assert torch.equal(changed.support_y, y)
    assert torch.equal(changed.query_y, y)
    assert torch.equal(changed.classes, episodes.classes)


def test_changed_tasks_without_a_query_set_have_no_query_set():
    x, y = torch.rand(2, 4, 3, 8, 8, generator=seeded()), torch.arange(4).expand(2, 4)
    # if both sets are the same tensors, the tasks have only one set
    changed = Augment(padding=2).episodes(Episodes(x, y, x, y), seeded())
    assert not changed.is_split
    assert not torch.equal(changed.support_x, x)


@pytest.mark.parametrize("scale", [None, (1.0, 1.0)])
def test_images_are_small_for_the_first_fraction_of_training_and_then_of_full_size(scale):
    augment = Augment(padding=0, jitter=0, flip=False, scale=scale, growth=(6, 0.5))
    ramp = torch.linspace(0, 1, 12).expand(2, 3, 1, 12, 12).contiguous()
    episodes = Episodes(ramp, torch.zeros(2, 3, dtype=torch.int64), ramp.clone(), torch.zeros(2, 3, dtype=torch.int64))
    sizes = {
        progress: augment.episodes(episodes, seeded(), progress).query_x.shape[-2:]
        for progress in (0.0, 0.49, 0.5, 1.0)
    }
    assert sizes == {0.0: (6, 6), 0.49: (6, 6), 0.5: (12, 12), 1.0: (12, 12)}
    small = augment.episodes(episodes, seeded(), 0.0).support_x[0, 0, 0]
    means = ramp[0, 0, 0, 0].view(6, 2).mean(1)  # a pixel of the small image is the mean of pixels of the large one
    assert torch.allclose(small[:, 1:-1], means[1:-1].expand(6, 4), atol=0.01)


def test_the_default_padding_depends_on_the_image_size():
    assert [Augment.for_size(size).padding for size in (28, 32, 84)] == [4, 4, 8]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"padding": -1}, "padding is -1, but must be 0 pixels or more. Use padding=0."),
        ({"jitter": 1.5}, "jitter is 1.5, but must be between 0 and 1. Use jitter=0.4."),
        ({"jitter": -0.1}, "jitter is -0.1, but must be between 0 and 1. Use jitter=0.4."),
        (
            {"scale": (0.0, 1.0)},
            "scale is (0.0, 1.0), but must be two fractions of the area in ascending order, such as (0.3, 1.0).",
        ),
        (
            {"scale": (0.8, 0.5)},
            "scale is (0.8, 0.5), but must be two fractions of the area in ascending order, such as (0.3, 1.0).",
        ),
        (
            {"growth": (0, 0.5)},
            "growth is (0, 0.5), but must be a size in pixels and a fraction of training, such as (60, 0.5).",
        ),
        (
            {"growth": (8, 1.5)},
            "growth is (8, 1.5), but must be a size in pixels and a fraction of training, such as (60, 0.5).",
        ),
        (
            {"scale": (0.5, 1.2)},
            "scale is (0.5, 1.2), but must be two fractions of the area in ascending order, such as (0.3, 1.0).",
        ),
    ],
)
def test_invalid_arguments_raise_an_error_with_a_clear_message(options, sentence):
    with pytest.raises(InputError) as caught:
        Augment(**options)
    assert str(caught.value) == sentence
