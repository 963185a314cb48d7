"""The support set that a classifier keeps, so that images can be added and predictions can name similar images."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SupportSet:
    """The images of a support set, in the order in which they were passed.

    Args:
        labels: Their labels, (n,).
        digests: A hash of the pixels of each decoded image, int64 (n,).
        names: The path of each image; empty for images that are not files.
        features: The features of the images, (n, d). None before they are computed.
        images: The decoded images, uint8 (n, channels, size, size). None if fitting needs only the features.
    """

    labels: NDArray[Any]
    digests: NDArray[np.int64]
    names: tuple[str, ...]
    features: Tensor | None = None
    images: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def classes(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the sorted classes, and the index of the class of each image."""
        classes, indices = np.unique(self.labels, return_inverse=True)
        return classes, indices.astype(np.int64)

    def canonical_order(self) -> tuple[Tensor, Tensor]:
        """Return the order of the images by class and pixels, and the class indices in this order.

        Fitting in this order makes the result independent of the order in which images are passed.
        """
        indices = self.classes()[1]
        order = np.lexsort((self.digests, indices))
        return torch.from_numpy(order), torch.from_numpy(indices[order])

    def to(self, device: torch.device) -> SupportSet:
        """Return the support set with its features on a device."""
        return replace(self, features=None if self.features is None else self.features.to(device))

    def add(self, other: SupportSet) -> SupportSet:
        """Return the support set with the images of another one added at the end."""
        features = images = None
        if self.features is not None and other.features is not None:
            features = torch.cat([self.features, other.features])
        if self.images is not None and other.images is not None:
            images = np.concatenate([self.images, other.images])
        return SupportSet(
            np.concatenate([self.labels, other.labels]),
            np.concatenate([self.digests, other.digests]),
            self.names + other.names,
            features,
            images,
        )


def pixel_digests(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return a hash of the pixels of each image, int64 (n,).

    >>> first, again, other = pixel_digests(np.array([[0, 1], [0, 1], [2, 3]], dtype=np.uint8))
    >>> bool(first == again), bool(first == other)
    (True, False)
    """
    digests = [hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images]
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)
