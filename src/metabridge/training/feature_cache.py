"""A disk cache of the features that pretrained networks compute, by the content of the images and of the network.

Entries are safetensors files in the subfolder `features` of the cache folder. The oldest ones are deleted when all
entries together take more than `MAX_BYTES`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from metabridge.datasets.image_cache import cache_folder
from metabridge.errors import InputError
from metabridge.files import make_folder, read_regular_file, write_atomically
from metabridge.learners.method import Method
from metabridge.models.network import Network, Params

MAX_BYTES = 2 * 2**30
MIN_PARAMETERS = 1_000_000  # features of smaller networks take no longer to compute than to read

log = logging.getLogger("metabridge")


def caches_features(method: Method, net: Network) -> bool:
    """Return whether the features of a network are worth storing: it is large, and nothing trains it.

    >>> from metabridge.learners import method
    >>> from metabridge.models import conv4, resnet12
    >>> caches_features(method("frozen"), resnet12()), caches_features(method("mtl"), resnet12())
    (True, False)
    """
    return not method.trains and net.num_feature_parameters >= MIN_PARAMETERS


def cached_features(
    net: Network,
    params: Params,
    dtype: torch.dtype | None,
    key: object,
    images: Iterable[Tensor],
    compute: Callable[[], Tensor],
) -> Tensor:
    """Return the features of images from the cache, or compute and store them.

    Args:
        net: The network.
        params: Parameters of the network, by name.
        dtype: Data type in which the network computes.
        key: Everything else that the features depend on, such as test-time augmentation. Its `repr` is used.
        images: The images, in batches.
        compute: Function that computes the features.

    Returns:
        The features, on the device of the parameters.
    """
    folder = cache_folder() / "features"
    file = folder / f"{_fingerprint(net, params, dtype, key, images)}.safetensors"
    features = _read(file)
    if features is None:
        features = compute()
        _write(folder, file, features)
    return features.to(params["head.weight"].device)


def _fingerprint(net: Network, params: Params, dtype: torch.dtype | None, key: object, images: Iterable[Tensor]) -> str:
    """Return a hash of the network, its weights, the images and the key."""
    digest = hashlib.blake2b(digest_size=20)
    buffers = dict(net.named_buffers())
    for name, tensor in sorted({**params, **buffers}.items()):
        if not name.startswith("head"):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            digest.update(_bytes(tensor))
    recipe = json.dumps(net.recipe, sort_keys=True, default=repr) if net.recipe is not None else repr(net.features)
    digest.update(f"{recipe} {dtype} {key!r} {torch.__version__};".encode())
    for batch in images:
        digest.update(f"{tuple(batch.shape)};".encode())
        digest.update(_bytes(batch))
    return digest.hexdigest()


def _read(file: Path) -> Tensor | None:
    """Return the features in a file; None if there is no such file, or it is damaged."""
    from safetensors import safe_open
    from safetensors.torch import load

    with contextlib.suppress(Exception):  # readers of damaged files raise many types of exceptions
        content = read_regular_file(file)
        features = load(content)["features"]
        with safe_open(file, "pt") as header:
            if header.metadata()["digest"] == _digest(features):
                os.utime(file)  # the least recently used entries are deleted first
                return features
    return None


def _write(folder: Path, file: Path, features: Tensor) -> None:
    """Store features, and delete the oldest entries if all take too much space. A full disk is no error."""
    from safetensors.torch import save

    features = features.detach().cpu().contiguous()
    if features.nbytes > MAX_BYTES:
        return
    try:
        make_folder(folder)
        write_atomically(file, save({"features": features}, {"digest": _digest(features)}), follow=False)
    except (InputError, OSError) as error:
        log.warning("The features are not cached: %s", error)
        return
    with contextlib.suppress(OSError):  # another process may delete entries at the same time
        entries = sorted(folder.glob("*.safetensors"), key=lambda entry: entry.stat().st_mtime, reverse=True)
        total = 0
        for entry in entries:
            total += entry.stat().st_size
            if total > MAX_BYTES:
                entry.unlink()


def _digest(features: Tensor) -> str:
    return hashlib.blake2b(_bytes(features), digest_size=16).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    """Return the values of a tensor as bytes."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
