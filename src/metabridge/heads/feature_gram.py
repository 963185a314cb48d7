"""Linear algebra of many small sets of points at once, in blocks that stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from metabridge.errors import InputError
from metabridge.threads import map_over_threads

ROUNDING = 1e-5  # the largest rounding error of a score, relative to 1, that float32 products may cause
_RESOLVED = 1e-9  # eigenvalues of a Gram matrix below this share of the largest are lost in its rounding errors


def center(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points (tasks, n, d) minus their mean, and the mean (tasks, 1, d), in float64."""
    mean = x.mean(-2, keepdim=True, dtype=torch.float64)
    check_finite("features", mean)
    return x - mean, mean


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates (tasks, n, d) of points along orthogonal axes, and the axes as columns."""
    vectors = torch.linalg.eigh(points.mT @ points).eigenvectors
    return points @ vectors, vectors


def dual_axes(gram: Tensor, points: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the coordinates (tasks, n, n) of centered points along orthogonal axes, from their Gram matrix.

    Args:
        gram: The Gram matrices, (tasks, n, n).
        points: A function that returns the points of the tasks that a mask selects. It is called for the tasks whose
            Gram matrix does not resolve their smallest extents.

    Returns:
        The coordinates, and the matrix that lifts weights: the weight with coordinates v is Σ_n a_n · point_n, a =
        lift·v.
    """
    values, vectors = torch.linalg.eigh(gram)
    root = values.clamp_min(0).sqrt()
    unresolved = values[:, :2].amax(-1) < _RESOLVED * values[:, -1]  # the smallest of centered points is always 0
    if unresolved.any():
        vectors[unresolved], root[unresolved], _ = torch.linalg.svd(points(unresolved), full_matrices=False)
    root = root[..., None, :]
    nonzero = root > torch.where(unresolved, 1e-13, 1e-7)[:, None, None] * root.amax(-1, keepdim=True)
    return vectors * torch.where(nonzero, root, 0), vectors * torch.where(nonzero, 1 / root, 0)


def centered_axes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return coordinates of the centered points, the matrix that lifts weights from them, and the mean."""
    points, mean = center(x)
    if x.shape[-2] < x.shape[-1]:
        return *dual_axes(points @ points.mT, points.__getitem__), mean
    return *principal_axes(points), mean


def centered_axes_with_bias(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the points (x − mean, 0) into a part orthogonal to (mean, 1) and a part along it.

    Returns:
        Coordinates of the orthogonal part, the matrix that lifts weights from them, the part along, and the mean.
    """
    points, mean = center(x)
    direction = normalize(pad(mean, (0, 1), value=1.0), dim=-1)
    along = points @ direction[..., :-1].mT

    def orthogonal(tasks: Tensor | slice) -> Tensor:
        return pad(points[tasks], (0, 1)) - along[tasks] * direction[tasks]

    if x.shape[-2] <= x.shape[-1]:
        axes = dual_axes(points @ points.mT - along @ along.mT, orthogonal)
    else:
        axes = principal_axes(orthogonal(slice(None)))
    return *axes, along[..., 0], mean


def gram_matrix(x: Tensor, sensitivity: float) -> tuple[Tensor, Tensor | None]:
    """Return the Gram matrix of the points in float64, and the origin (tasks, 1, d) that they are measured from.

    Where float32 products of the points change scores by less than `ROUNDING`, they are used and the origin is None.
    Otherwise the points are centered first, in float64.

    Args:
        x: The points, (tasks, n, d).
        sensitivity: By how much an error of 1 in the matrix changes scores.
    """
    if x.dtype == torch.float32 and not x.is_cuda and torch.get_float32_matmul_precision() == "highest":
        gram = (x @ x.mT).double()
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).max()
        if trace * torch.finfo(x.dtype).eps * sensitivity < ROUNDING:  # false for NaN
            return gram, None

    def centered(x: Tensor) -> tuple[Tensor, Tensor]:
        points, mean = center(x)
        return points @ points.mT, mean

    gram, mean = in_blocks(centered, x)
    return gram, mean


def combine(coefficient: Tensor, x: Tensor, origin: Tensor | None) -> Tensor:
    """Return Σ_n coefficient_n (x_n − origin), (tasks, outputs, d), in the features' dtype.

    With an origin it is computed in float64, without one in that dtype.
    """
    if origin is None:
        return coefficient.to(x.dtype) @ x
    (weight,) = in_blocks(lambda x, origin, a: ((a @ (x - origin)).to(x.dtype),), x, origin, coefficient)
    return weight


def combine_with_mean(
    coefficient: Tensor, x: Tensor, coordinates: Tensor, mean: Tensor, mean_coefficient: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combine points with coefficients that sum to 0, and their mean with `mean_coefficient`.

    It is computed in the points' dtype if its rounding errors are small, otherwise in float64.

    Returns:
        The combination, and the mean in the dtype that was used.
    """
    coefficient = coefficient - coefficient.mean(-1, keepdim=True)  # 0 but for rounding errors
    squared_length = coordinates.square().sum(-1).amax(-1) + mean[:, 0].square().sum(-1)
    error = torch.finfo(x.dtype).eps * (squared_length * coefficient.abs().sum(-1).amax(-1)).max()
    if error < ROUNDING:
        if mean_coefficient is not None:
            coefficient = coefficient + mean_coefficient[..., None] / x.shape[-2]
        return combine(coefficient, x, None), mean.to(x.dtype)
    weight = combine(coefficient, x, mean)
    return weight if mean_coefficient is None else weight + mean_coefficient[..., None] * mean, mean


def in_blocks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function to all tasks; on a CPU in blocks of tasks, each with one thread.

    Matrices this small gain nothing from several threads.
    """
    threads, count = torch.get_num_threads(), _block_count(tensors[0])
    if count == 1:
        return function(*tensors)
    count = min(len(tensors[0]), -(-count // threads) * threads)
    blocks = [tensor.tensor_split(count) for tensor in tensors]
    return tuple(torch.cat(parts) for parts in zip(*map_over_threads(function, *blocks)))


def _block_count(tensor: Tensor) -> int:
    """Return the number of blocks of tasks with which one block, in float64, stays in a CPU's cache."""
    return 1 if tensor.is_cuda else min(len(tensor), -(-tensor.numel() // 500_000))


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise an InputError if a tensor holds NaN or infinite values."""
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise InputError(f"{name} holds NaN or infinite values. Check the network or the data they came from.")
