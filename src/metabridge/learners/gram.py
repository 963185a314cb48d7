"""Linear algebra of many small sets of points at once, in blocks that stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from metabridge.errors import InputError


def eigenbasis(points: Tensor, centre: bool = False) -> tuple[Tensor, Tensor]:
    """Return coordinates (tasks, n, r) of the points, from their mean if `centre`, in orthogonal directions.

    With them comes what lifts weights back.

    The weight with coordinates v is Σ_n a_n · point_n, a = lift·v, where n < d (the representer theorem), and lift·v
    itself otherwise.
    """
    if points.shape[-2] >= points.shape[-1]:
        points = points - points.mean(-2, keepdim=True) if centre else points
        vectors = torch.linalg.eigh(points.mT @ points).eigenvectors
        return points @ vectors, vectors
    gram = points @ points.mT
    if centre:
        rows = gram - gram.mean(-1, keepdim=True)
        gram = rows - rows.mean(-2, keepdim=True)
    values, vectors = torch.linalg.eigh(gram)
    root = values.clamp_min(0).sqrt()[..., None, :]
    real = root > 1e-7 * root.amax(-1, keepdim=True)
    return vectors * torch.where(real, root, 0), vectors * torch.where(real, 1 / root, 0)


def gram_matrix(x: Tensor, rounding: float) -> Tensor:
    """Return xxᵀ in float64; of float32 products if their rounding errors are surely below `rounding`.

    The lengths on its diagonal are finite where the features are, which saves a pass over these.
    """
    if x.dtype == torch.float32 and not x.is_cuda and torch.get_float32_matmul_precision() == "highest":
        gram = (x @ x.mT).double()
        if gram.diagonal(dim1=-2, dim2=-1).sum(-1).max() * torch.finfo(x.dtype).eps < rounding:
            return gram
    blocks = map(Tensor.double, x.tensor_split(_blocks(x)))
    gram = torch.cat([block @ block.mT for block in blocks])
    check_finite("features", gram.diagonal(dim1=-2, dim2=-1))
    return gram


def in_blocks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function to all tasks, on a CPU in blocks with one thread each.

    Several threads on one block would only get in each other's way where matrices are this small.
    """
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    count = _blocks(tensors[0])
    if count == 1:
        return function(*tensors)

    def work(*block: Tensor) -> tuple[Tensor, ...]:
        torch.set_num_threads(1)
        with torch.set_grad_enabled(gradients):
            return function(*block)

    count = -(-count // threads) * threads
    try:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(work, *(tensor.tensor_split(count) for tensor in tensors)))
    finally:
        torch.set_num_threads(threads)
    return tuple(torch.cat(parts) for parts in zip(*results))


def _blocks(tensor: Tensor) -> int:
    """Return into how many blocks of tasks a tensor has to be split for one, in float64, to stay in a CPU's cache."""
    return 1 if tensor.is_cuda else min(len(tensor), -(-tensor.numel() // 500_000))


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise if a tensor holds what is not a number."""
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise InputError(f"{name} holds values that are not finite. Check the network or the data they came from.")
