"""Adapt a model to a support set, with the penalty and the temperature that fit its left-out images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metabridge.datasets.image_decoding import Unreadable
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError
from metabridge.heads import Head
from metabridge.inference.calibration import choose_penalty, fit_temperature
from metabridge.inference.image_input import check_readable, read_images
from metabridge.inference.left_out import LeftOut, predict_left_out
from metabridge.inference.support_set import SupportSet, pixel_digests
from metabridge.learners.adapt import Adapted, adapt, adapt_to_features, can_predict_from_features, check_adaptation
from metabridge.learners.method import Method
from metabridge.models.batch_norm import uses_batch_statistics
from metabridge.models.network import apply_features
from metabridge.training.evaluation import Model
from metabridge.training.feature_cache import cached_features, caches_features

CHUNK_SIZE = 256  # largest number of images per forward pass if the features of an image do not depend on other images


@dataclass(frozen=True, eq=False)
class SupportAdaptation:
    """A model adapted to a support set.

    Args:
        adapted: The adapted model; its method has the chosen penalty.
        support: The support set, with features.
        temperature: The number by which outputs are divided before the softmax.
    """

    adapted: Adapted
    support: SupportSet
    temperature: float


def adapt_to_support(model: Model, support: SupportSet, *, selects_penalty: bool) -> SupportAdaptation:
    """Adapt a model to a support set.

    Args:
        model: The model.
        support: The support set, from `read_support`.
        selects_penalty: Whether the penalty of the head may be changed (see `choose_penalty`).

    Returns:
        The adapted model, the support set and the temperature.

    Raises:
        InputError: If adaptation diverged.
    """
    method, net, params = model.method, model.net, model.params
    order, y = (tensor.to(model.device) for tensor in support.canonical_order())
    x = None if support.images is None else to_inputs(support.images, model.device)[order]
    temperature = 1.0
    if can_predict_from_features(method):
        features = _features(model, x) if x is not None else support.features[order]  # type: ignore[index]
        if selects_penalty:
            method = choose_penalty(method, params, features, y)
        adapted = adapt_to_features(method, net, params, features, y)
        _check_finite(adapted)
        temperature = fit_temperature(predict_left_out(method, params, features, y), calibrated=is_calibrated(method))
    else:
        assert x is not None
        adapted = adapt(method, net, params, x, y)
        _check_finite(adapted)
        features = adapted.features(x)
    return SupportAdaptation(adapted, replace(support, features=features[order.argsort()]), temperature)


def predict_left_out_support(model: Model, method: Method, support: SupportSet) -> LeftOut:
    """Return the outputs for support images that were left out when the head was fitted.

    Raises:
        InputError: If the method adapts the whole network.
    """
    if not can_predict_from_features(method) or support.features is None:
        raise InputError(
            "X is None, but support images can be left out only if a head is fitted on fixed features. Pass labeled "
            "images, or use head='logistic' (--head logistic)."
        )
    order, y = (tensor.to(model.device) for tensor in support.canonical_order())
    return predict_left_out(method, model.params, support.features[order], y)


def read_support(model: Model, decode_options: DecodeOptions, X: Any, labels: NDArray[Any]) -> SupportSet:
    """Decode support images, and compute their features unless this has to be done again when images are added.

    Raises:
        InputError: If an image cannot be read, the numbers of images and labels differ, or the model cannot be adapted.
    """
    names, digests, images, features = list[str](), [], [], []
    for chunk_names, chunk in image_chunks(X, decode_options, chunk_size(decode_options)):
        x = to_inputs(chunk, model.device)
        check_adaptation(model.method, model.net, model.params, x, torch.zeros(len(x)).long().to(model.device))
        names += chunk_names
        digests.append(pixel_digests(chunk))
        if _keeps_images(model):
            images.append(chunk)
        else:
            features.append(image_features(model, chunk))
    check_lengths(len(names), len(labels))
    return SupportSet(
        labels,
        np.concatenate(digests),
        tuple("" if name.startswith("X[") else name for name in names),
        torch.cat(features) if features else None,
        np.concatenate(images) if images else None,
    )


def image_chunks(
    X: Any, decode_options: DecodeOptions, size: int | None, unreadable: dict[int, tuple[str, str]] | None = None
) -> Iterator[tuple[list[str], NDArray[np.uint8]]]:
    """Decode images in chunks, so that at most one chunk and the images that are being decoded are in memory.

    Args:
        X: Images, see `metabridge.inference.image_input.read_images`.
        decode_options: The size, channels and preprocessing of the decoded images.
        size: Maximum number of images in a chunk. None: one chunk with all images.
        unreadable: If not None, images that cannot be read are added to this dictionary and skipped, as
            `position: (name, reason)`.

    Yields:
        The names and the decoded images of each chunk, uint8 (n, channels, size, size).

    Raises:
        InputError: If an image cannot be read and `unreadable` is None, or if no image can be read.
    """
    names, images, is_empty = list[str](), list[NDArray[np.uint8]](), True
    for index, (name, image) in enumerate(read_images(X, decode_options)):
        if unreadable is not None and isinstance(image, Unreadable):
            unreadable[index] = (name, image.reason)
            continue
        is_empty = False
        names.append(name)
        images.append(check_readable(name, image))
        if len(images) == size:
            yield names, np.stack(images)
            names, images = [], []
    if images:
        yield names, np.stack(images)
    if is_empty and unreadable:
        name, reason = next(iter(unreadable.values()))
        raise InputError(f"none of the {len(unreadable)} images can be read ({name}: {reason}). Fix or remove them.")


def to_inputs(images: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Return the inputs of the network for 8-bit images: the same images with values from 0 to 1, on the device.

    >>> to_inputs(np.full((1, 1, 1, 1), 51, dtype=np.uint8), torch.device("cpu")).item()
    0.20000000298023224
    """
    return torch.from_numpy(images).to(device).float() / 255


def image_features(model: Model, images: NDArray[np.uint8]) -> Tensor:
    """Return the features of 8-bit images if they do not depend on other images; large pretrained networks cache them.

    Args:
        model: A model that fits a head on fixed features.
        images: The decoded images, (n, channels, size, size).

    Returns:
        The features, (n, dimension).
    """

    def compute() -> Tensor:
        with torch.no_grad():
            return apply_features(model.net, model.params, to_inputs(images, model.device), model.dtype)

    if not caches_features(model.method, model.net):
        return compute()
    return cached_features(model.net, model.params, model.dtype, "images", [torch.from_numpy(images)], compute)


def chunk_size(decode_options: DecodeOptions) -> int:
    """Return the number of images per forward pass: fewer if they are large, so that activations fit into memory.

    >>> chunk_size(DecodeOptions(84, 3)), chunk_size(DecodeOptions(518, 3))
    (256, 16)
    """
    return min(CHUNK_SIZE, max(16, CHUNK_SIZE * 128**2 // decode_options.size**2))


def check_lengths(num_images: int, num_labels: int) -> None:
    """Raise an InputError if the numbers of images and labels differ."""
    if num_images != num_labels:
        raise InputError(f"X has {num_images} images, but y has {num_labels} labels. Pass one label per image.")


def is_calibrated(method: Method) -> bool:
    """Return whether the softmax of a method's outputs at test time estimates probabilities."""
    return not isinstance(method.test_solver, Head) or method.test_solver.calibrated


def _features(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return apply_features(model.net, model.params, x)


def _keeps_images(model: Model) -> bool:
    """Return whether the features of an image depend on the other images of the support set."""
    return not can_predict_from_features(model.method) or uses_batch_statistics(model.net)


def _check_finite(adapted: Adapted) -> None:
    head_tensors = () if adapted.head is None else (adapted.head.weight, adapted.head.bias)
    if not all(tensor.isfinite().all() for tensor in (*adapted.params.values(), *head_tensors)):
        raise InputError(
            "adaptation to these images diverged: the adapted weights are NaN or infinite. Use head='logistic' "
            "(--head logistic), or a run trained with a smaller inner learning rate."
        )
