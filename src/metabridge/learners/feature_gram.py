"""Linear algebra of many small sets of points at once, in blocks that stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metabridge.errors import InputError
from metabridge.threads import map_over_threads

ROUNDING = 1e-5  # The largest rounding error of a score, relative to 1, that float32 products may cause.
_RESOLVED = 1e-9  # An eigenvalue of a Gram matrix below this share of the largest one is lost in its rounding errors.


def centre(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points (tasks, n, d) minus their mean, and the mean (tasks, 1, d), in float64."""
    mean = x.mean(-2, keepdim=True, dtype=torch.float64)
    check_finite("features", mean)
    return x - mean, mean


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates (tasks, n, d) of points in orthogonal directions, and these, as columns."""
    vectors = torch.linalg.eigh(points.mT @ points).eigenvectors
    return points @ vectors, vectors


def dual_axes(gram: Tensor, points: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the coordinates (tasks, n, n) of centred points in orthogonal directions, from their Gram matrix.

    With them comes what lifts weights: the one with coordinates v is Σ_n a_n · point_n, a = lift·v. `points` returns
    the points of the tasks that a mask selects: those whose Gram matrix does not resolve their smallest extents.
    """
    values, vectors = torch.linalg.eigh(gram)
    root = values.clamp_min(0).sqrt()
    blurred = values[:, :2].amax(-1) < _RESOLVED * values[:, -1]  # the smallest of centred points is always 0
    if blurred.any():
        vectors[blurred], root[blurred], _ = torch.linalg.svd(points(blurred), full_matrices=False)
    root = root[..., None, :]
    real = root > torch.where(blurred, 1e-13, 1e-7)[:, None, None] * root.amax(-1, keepdim=True)
    return vectors * torch.where(real, root, 0), vectors * torch.where(real, 1 / root, 0)


def gram_matrix(x: Tensor, sensitivity: float) -> tuple[Tensor, Tensor | None]:
    """Return the Gram matrix of the points in float64, and the origin (tasks, 1, d) they are measured from.

    An error in the matrix changes scores by `sensitivity` times as much. Where float32 products of the points as they
    are cannot change a score by more than `ROUNDING`, these are used, and the origin is None. Otherwise the points are
    centred first, in float64.
    """
    if x.dtype == torch.float32 and not x.is_cuda and torch.get_float32_matmul_precision() == "highest":
        gram = (x @ x.mT).double()
        size = gram.diagonal(dim1=-2, dim2=-1).sum(-1).max()
        if size * torch.finfo(x.dtype).eps * sensitivity < ROUNDING:  # false for NaN
            return gram, None

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        points, mean = centre(x)
        return points @ points.mT, mean

    gram, mean = in_blocks(block, x)
    return gram, mean


def combine(coefficient: Tensor, x: Tensor, origin: Tensor | None) -> Tensor:
    """Return Σ_n coefficient_n (x_n − origin), (tasks, outputs, d), in the features' dtype.

    Without an origin it is computed in that dtype, otherwise in float64.
    """
    if origin is None:
        return coefficient.to(x.dtype) @ x
    (weight,) = in_blocks(lambda x, origin, a: ((a @ (x - origin)).to(x.dtype),), x, origin, coefficient)
    return weight


def in_blocks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function to all tasks, on a CPU in blocks with one thread each.

    Several threads on one block would only get in each other's way where matrices are this small.
    """
    threads, count = torch.get_num_threads(), _blocks(tensors[0])
    if count == 1:
        return function(*tensors)
    count = min(len(tensors[0]), -(-count // threads) * threads)
    blocks = [tensor.tensor_split(count) for tensor in tensors]
    return tuple(torch.cat(parts) for parts in zip(*map_over_threads(function, *blocks)))


def _blocks(tensor: Tensor) -> int:
    """Return into how many blocks of tasks a tensor has to be split for one, in float64, to stay in a CPU's cache."""
    return 1 if tensor.is_cuda else min(len(tensor), -(-tensor.numel() // 500_000))


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise if a tensor holds what is not a number."""
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise InputError(f"{name} holds values that are not finite. Check the network or the data they came from.")
