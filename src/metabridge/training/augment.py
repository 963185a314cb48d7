"""Random changes to training images: crops, color jitter and flips of a whole batch at once, on its device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.episodes import Episodes
from metabridge.errors import InputError

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in perceived brightness (ITU-R BT.601)


@dataclass(frozen=True)
class Augment:
    """Random padded crop, color jitter and horizontal flip of each image (Wang et al. 2021, section 5.2).

    Color jitter changes brightness, contrast and saturation in random order. Each change replaces an image x by
    clamp(f·x + (1 − f)·o), where f is uniform in [1 − jitter, 1 + jitter], and o is black (brightness), the mean gray
    value of the image (contrast) or the image in gray (saturation).

    Args:
        padding: Number of zero pixels added on each side before a crop of the original size.
        jitter: Strength of the color jitter, from 0 to 1.
        flip: Whether to mirror each image with probability 1/2.
        scale: Smallest and largest fraction of the image area. If set, a random rectangle whose area is in this range
            and whose aspect ratio is between 3/4 and 4/3 is resized to the original size; this replaces the padded
            crop.
        growth: A size in pixels and a fraction of training, such as (60, 0.5). If set, images are resized to this
            height and width until this fraction of the training steps is done, and keep their original size afterwards.
            With a size below the original one, the first steps are cheaper.

    Raises:
        InputError: If an argument is out of range.

    >>> images = torch.rand(4, 3, 84, 84)
    >>> Augment()(images, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 84, 84])
    """

    padding: int = 8
    jitter: float = 0.4
    flip: bool = True
    scale: tuple[float, float] | None = None
    growth: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise InputError(f"padding is {self.padding}, but must be 0 pixels or more. Use padding=0.")
        if not 0 <= self.jitter <= 1:
            raise InputError(f"jitter is {self.jitter}, but must be between 0 and 1. Use jitter=0.4.")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise InputError(
                f"scale is {self.scale}, but must be two fractions of the area in ascending order, such as (0.3, 1.0)."
            )
        if self.growth is not None and not (self.growth[0] > 0 and 0 <= self.growth[1] <= 1):
            raise InputError(
                f"growth is {self.growth}, but must be a size in pixels and a fraction of training, such as (60, 0.5)."
            )

    @classmethod
    def for_size(cls, size: int) -> Augment:
        """Return the default augmentation: `padding` is 8 for images of at least 64 pixels, and 4 for smaller ones.

        Args:
            size: Height and width of the images in pixels.

        Returns:
            The augmentation.
        """
        return cls(padding=8 if size >= 64 else 4)

    def __call__(self, images: Tensor, generator: torch.Generator, size: int | None = None) -> Tensor:
        """Return randomly changed copies of images.

        Args:
            images: Images (n, channels, height, width) with values from 0 to 1.
            generator: Random generator on the device of the images.
            size: Height and width of the copies in pixels. None for the height and width of `images`.

        Returns:
            The changed copies.
        """
        shape = images.shape[-2:] if size is None else (size, size)
        if self.scale is not None:
            images = self._random_rectangles(images, self.scale, shape, generator)
        elif self.padding or self.flip:
            images = self._random_shifts(images, generator)
        if shape != images.shape[-2:]:
            images = F.interpolate(images, shape, mode="bilinear", antialias=True)
        return self._color_jitter(images, generator) if self.jitter else images

    def episodes(self, episodes: Episodes, generator: torch.Generator, progress: float = 1.0) -> Episodes:
        """Return tasks with random changes to each image.

        Args:
            episodes: Tasks of images.
            generator: Random generator on the device of the images.
            progress: Fraction of training that is done, which decides the size of the images if `growth` is set. The
                default gives images of full size.

        Returns:
            The changed tasks.
        """
        size = self.size_at(progress)
        return episodes.map_inputs(lambda x: self(x.flatten(0, 1), generator, size).unflatten(0, x.shape[:2]))

    def shrunk(self, episodes: Episodes, progress: float) -> Episodes:
        """Return tasks with each image resized to the size that `growth` prescribes.

        Args:
            episodes: Tasks of images.
            progress: Fraction of training that is done.

        Returns:
            The tasks, unchanged if images have their full size at this point of training.
        """
        size = self.size_at(progress)
        if size is None:
            return episodes

        def shrink(x: Tensor) -> Tensor:
            resized: Tensor = F.interpolate(x.flatten(0, 1), size, mode="bilinear", antialias=True)
            return resized.unflatten(0, x.shape[:2])  # type: ignore[no-any-return]

        return episodes.map_inputs(shrink)

    def size_at(self, progress: float) -> int | None:
        """Return the height and width of the images in pixels at some point of training.

        Args:
            progress: Fraction of training that is done.

        Returns:
            The height and width, or None for the full size.
        """
        return self.growth[0] if self.growth is not None and progress < self.growth[1] else None

    def _random_shifts(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return random crops of the padded images, mirrored with probability 1/2 if `flip` is set."""
        n, _, height, width = images.shape
        device = images.device
        down, right = torch.randint(2 * self.padding + 1, (2, n, 1), generator=generator, device=device)
        rows, columns = (torch.arange(length, device=device).expand(n, length) for length in (height, width))
        if self.flip:
            mirrored = torch.rand(n, 1, generator=generator, device=device) < 0.5
            columns = torch.where(mirrored, width - 1 - columns, columns)
        padded = F.pad(images, [self.padding] * 4)
        indices = torch.arange(n, device=device)[:, None, None]
        # indexing puts the channels last, the layout in which convolutions are fastest
        return padded[indices, :, (rows + down)[:, :, None], (columns + right)[:, None, :]].movedim(-1, 1)

    def _random_rectangles(
        self, images: Tensor, scale: tuple[float, float], shape: tuple[int, ...], generator: torch.Generator
    ) -> Tensor:
        """Return random rectangles resized to `shape`, mirrored with probability 1/2 if `flip` is set."""
        n, channels = images.shape[:2]
        # from 0 to 1; they determine the area, the aspect ratio and the position, and whether the image is mirrored
        area, ratio, down, right, flip = torch.rand(5, n, generator=generator, device=images.device)
        area = scale[0] + (scale[1] - scale[0]) * area
        sqrt_ratio = torch.exp((ratio - 0.5) * math.log(4 / 3))  # square root of the aspect ratio
        sqrt_ratio = sqrt_ratio.clamp(area.sqrt(), area.rsqrt())  # a large rectangle fits only if it is nearly square
        width, height = area.sqrt() * sqrt_ratio, area.sqrt() / sqrt_ratio
        zero = torch.zeros_like(width)
        signed_width = torch.where(flip < 0.5, -width, width) if self.flip else width  # negative if mirrored
        # rows of the affine map from pixels of the result to those of the image, in coordinates from −1 to 1
        x_row = torch.stack([signed_width, zero, (1 - width) * (2 * right - 1)], -1)
        y_row = torch.stack([zero, height, (1 - height) * (2 * down - 1)], -1)
        grid = F.affine_grid(torch.stack([x_row, y_row], 1), [n, channels, *shape], align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)

    def _color_jitter(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return images with random brightness, contrast and saturation."""
        n, channels = images.shape[:2]
        draws = torch.rand(2, 3, n, 1, 1, 1, generator=generator, device=images.device)
        order = draws[0].argsort(0)  # a random order of 0 (brightness), 1 (contrast) and 2 (saturation) for each image
        factors = 1 + self.jitter * (2 * draws[1] - 1)
        luma = torch.tensor(LUMA if channels == 3 else (1 / channels,) * channels, device=images.device)
        for change, factor in zip(order, factors):
            gray = (images * luma.view(-1, 1, 1)).sum(1, keepdim=True)
            # this is `o` in the formula of the class docstring
            reference = torch.where(change == 2, gray, torch.where(change == 1, gray.mean((-2, -1), keepdim=True), 0))
            images = torch.lerp(reference.expand_as(images), images, factor).clamp(0, 1)
        return images
