"""Random changes to training images, for a whole batch at once and where the batch lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.episodes import Episodes
from metabridge.errors import InputError

LUMA = (0.299, 0.587, 0.114)  # how bright red, green and blue look (ITU-R 601)


@dataclass(frozen=True)
class Augment:
    """Padded random crop, colour jitter and horizontal flip, drawn for every image by itself (A §5.2).

    - Crop: pad with `padding` zeros on every side and cut out the original size anywhere in it. With
      `scale`, a pair of shares, cut out a rectangle instead that has a share of the area between them
      and sides of a ratio between 3/4 and 4/3, and stretch it to the original size.
    - Jitter: brightness, contrast and saturation in random order; each replaces x by
      clamp(f·x + (1 − f)·o) with f uniform in [1 − jitter, 1 + jitter], where o is black, the mean
      grey of the image, and the image in grey.
    - Flip: mirror half of the images.

    With `growth`, a pair of a size and a share, images are shrunk to that size for the first share of a
    training: what is learnt there costs less, and the last share learns to see the full size.

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
            raise InputError(f"padding is {self.padding}, but must be 0 pixels or more.")
        if not 0 <= self.jitter <= 1:
            raise InputError(f"jitter is {self.jitter}, but must be between 0 and 1.")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise InputError(f"scale is {self.scale}, but must be two shares of the area, from small to at most 1.")
        if self.growth is not None and not (self.growth[0] > 0 and 0 <= self.growth[1] <= 1):
            raise InputError(f"growth is {self.growth}, but must be a size in pixels and a share of the training.")

    @classmethod
    def for_size(cls, size: int) -> Augment:
        """Return the usual changes for photographs of `size` pixels: padding 8 at 84 pixels, 4 at 32."""
        return cls(padding=8 if size >= 64 else 4)

    def __call__(self, images: Tensor, generator: torch.Generator, size: int | None = None) -> Tensor:
        """Return changed copies of images (n, channels, height, width) with values from 0 to 1, `size` pixels wide."""
        shape = images.shape[-2:] if size is None else (size, size)
        if self.scale is not None:
            images = self._stretched(images, self.scale, shape, generator)
        elif self.padding or self.flip:
            images = self._moved(images, generator)
        if shape != images.shape[-2:]:
            images = F.interpolate(images, shape, mode="bilinear", antialias=True)
        return self._coloured(images, generator) if self.jitter else images

    def episodes(self, episodes: Episodes, generator: torch.Generator, done: float = 1.0) -> Episodes:
        """Change every image of every task, when so much of the training is done."""
        size = self.size_at(done)
        return episodes.map_inputs(lambda x: self(x.flatten(0, 1), generator, size).unflatten(0, x.shape[:2]))

    def shrunk(self, episodes: Episodes, done: float) -> Episodes:
        """Shrink every image to the size that `growth` asks for when so much of the training is done."""
        size = self.size_at(done)
        if size is None:
            return episodes

        def shrink(x: Tensor) -> Tensor:
            small: Tensor = F.interpolate(x.flatten(0, 1), size, mode="bilinear", antialias=True)
            return small.unflatten(0, x.shape[:2])  # type: ignore[no-any-return]

        return episodes.map_inputs(shrink)

    def size_at(self, done: float) -> int | None:
        """Return the size of images when so much of the training is done; None is the full size."""
        return self.growth[0] if self.growth is not None and done < self.growth[1] else None

    def _moved(self, images: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = images.shape
        device = images.device
        down, right = torch.randint(2 * self.padding + 1, (2, n, 1), generator=generator, device=device)
        rows, columns = (torch.arange(side, device=device).expand(n, side) for side in (height, width))
        if self.flip:
            mirrored = torch.rand(n, 1, generator=generator, device=device) < 0.5
            columns = torch.where(mirrored, width - 1 - columns, columns)
        padded = F.pad(images, [self.padding] * 4)
        image = torch.arange(n, device=device)[:, None, None]
        # indexing puts the channels last, which is how convolutions like them
        return padded[image, :, (rows + down)[:, :, None], (columns + right)[:, None, :]].movedim(-1, 1)

    def _stretched(
        self, images: Tensor, scale: tuple[float, float], shape: tuple[int, ...], generator: torch.Generator
    ) -> Tensor:
        n, channels = images.shape[:2]
        area, ratio, down, right, side = torch.rand(5, n, generator=generator, device=images.device)
        area = scale[0] + (scale[1] - scale[0]) * area
        root = torch.exp((ratio - 0.5) * math.log(4 / 3))  # of the ratio of width to height
        root = root.clamp(area.sqrt(), area.rsqrt())  # a large share fits into the image only if it is nearly square
        width, height = area.sqrt() * root, area.sqrt() / root
        zero = torch.zeros_like(width)
        mirrored = torch.where(side < 0.5, -width, width) if self.flip else width
        across = torch.stack([mirrored, zero, (1 - width) * (2 * right - 1)], -1)
        along = torch.stack([zero, height, (1 - height) * (2 * down - 1)], -1)
        grid = F.affine_grid(torch.stack([across, along], 1), [n, channels, *shape], align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)

    def _coloured(self, images: Tensor, generator: torch.Generator) -> Tensor:
        n, channels = images.shape[:2]
        draws = torch.rand(2, 3, n, 1, 1, 1, generator=generator, device=images.device)
        order = draws[0].argsort(0)  # 0 brightness, 1 contrast, 2 saturation
        factors = 1 + self.jitter * (2 * draws[1] - 1)
        luma = torch.tensor(LUMA if channels == 3 else (1 / channels,) * channels, device=images.device)
        for kind, factor in zip(order, factors):
            grey = (images * luma.view(-1, 1, 1)).sum(1, keepdim=True)
            other = torch.where(kind == 2, grey, torch.where(kind == 1, grey.mean((-2, -1), keepdim=True), 0))
            images = torch.lerp(other.expand_as(images), images, factor).clamp(0, 1)
        return images
