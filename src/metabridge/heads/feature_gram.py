"""Linear algebra with the features of many small tasks at once, in blocks that fit in a CPU's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from metabridge.errors import InputError
from metabridge.threads import map_over_threads

MAX_SCORE_ERROR = 1e-5  # the largest rounding error of a score that float32 products may cause
_EIGENVALUE_PRECISION = 1e-9  # eigenvalues of a Gram matrix below this fraction of the largest are rounding errors


def center(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features (tasks, n, d) minus their mean, and the mean (tasks, 1, d), in float64.

    Raise an InputError if a mean is NaN or infinite.
    """
    mean = x.mean(-2, keepdim=True, dtype=torch.float64)
    check_finite("features", mean)
    return x - mean, mean


def principal_axes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates (tasks, n, d) of centered features along their principal axes, and the axes as columns."""
    axes = torch.linalg.eigh(x.mT @ x).eigenvectors
    return x @ axes, axes


def dual_axes(gram: Tensor, features_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the coordinates (tasks, n, n) of centered features along their principal axes, from their Gram matrix.

    Args:
        gram: The Gram matrices, (tasks, n, n).
        features_of: A function that returns the centered features of the tasks that a mask selects. It is called for
            the tasks whose smallest singular values cannot be computed from the Gram matrix.

    Returns:
        The coordinates, and matrices `lift` (tasks, n, n): the weight with coordinates v is Σ_i a_i x_i, where
        a = lift·v and x_i are the centered features.
    """
    values, vectors = torch.linalg.eigh(gram)
    singular_values = values.clamp_min(0).sqrt()
    # The smallest eigenvalue of centered features is 0, so the second smallest decides.
    unresolved = values[:, :2].amax(-1) < _EIGENVALUE_PRECISION * values[:, -1]
    if unresolved.any():
        left_vectors, exact_values, _ = torch.linalg.svd(features_of(unresolved), full_matrices=False)
        vectors[unresolved], singular_values[unresolved] = left_vectors, exact_values
    singular_values = singular_values[..., None, :]
    rounding = torch.where(unresolved, 1e-13, 1e-7)[:, None, None]  # relative errors after `svd` and after `eigh`
    nonzero = singular_values > rounding * singular_values.amax(-1, keepdim=True)
    coordinates = vectors * torch.where(nonzero, singular_values, 0)
    return coordinates, vectors * torch.where(nonzero, 1 / singular_values, 0)


def centered_axes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coordinates of the centered features along their principal axes, the matrices `lift`, and the mean.

    If n < d, `lift` is as in `dual_axes`. Otherwise the weight with coordinates v is lift·v.
    """
    centered, mean = center(x)
    if x.shape[-2] < x.shape[-1]:
        return *dual_axes(centered @ centered.mT, centered.__getitem__), mean
    return *principal_axes(centered), mean


def centered_axes_with_bias(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the vectors (x − mean, 0) into a component along (mean, 1) and an orthogonal part.

    Returns:
        The coordinates of the orthogonal part along its principal axes; matrices `lift`, as in `dual_axes` if n ≤ d,
        and otherwise such that the weight with coordinates v is lift·v; the components along (mean, 1); and the mean.
    """
    centered, mean = center(x)
    direction = normalize(pad(mean, (0, 1), value=1.0), dim=-1)
    along = centered @ direction[..., :-1].mT

    def orthogonal(tasks: Tensor | slice) -> Tensor:
        return pad(centered[tasks], (0, 1)) - along[tasks] * direction[tasks]

    if x.shape[-2] <= x.shape[-1]:
        axes = dual_axes(centered @ centered.mT - along @ along.mT, orthogonal)
    else:
        axes = principal_axes(orthogonal(slice(None)))
    return *axes, along[..., 0], mean


def gram_matrix(x: Tensor, sensitivity: float) -> tuple[Tensor, Tensor | None]:
    """Return the Gram matrix of the features as float64, and the mean that was subtracted from them, or None.

    Features in float32 on a CPU are multiplied in float32, and not centered, if the rounding errors change scores by
    less than `MAX_SCORE_ERROR` and the matrix product precision is "highest". Other features are first centered, in
    float64.

    Args:
        x: The features, (tasks, n, d).
        sensitivity: The change of a score for an error of 1 in an entry of the matrix.
    """
    if x.dtype == torch.float32 and not x.is_cuda and torch.get_float32_matmul_precision() == "highest":
        gram = (x @ x.mT).double()
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).max()
        if trace * torch.finfo(x.dtype).eps * sensitivity < MAX_SCORE_ERROR:  # false for NaN
            return gram, None

    def centered_gram(x: Tensor) -> tuple[Tensor, Tensor]:
        centered, mean = center(x)
        return centered @ centered.mT, mean

    gram, mean = in_blocks(centered_gram, x)
    return gram, mean


def combine(coefficient: Tensor, x: Tensor, origin: Tensor | None) -> Tensor:
    """Return Σ_n coefficient_n (x_n − origin), (tasks, outputs, d), in the features' dtype.

    The sum is computed in float64 if there is an origin, and otherwise in the features' dtype.
    """
    if origin is None:
        return coefficient.to(x.dtype) @ x
    (weight,) = in_blocks(lambda x, origin, a: ((a @ (x - origin)).to(x.dtype),), x, origin, coefficient)
    return weight


def combine_with_mean(
    coefficient: Tensor, x: Tensor, coordinates: Tensor, mean: Tensor, mean_coefficient: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return Σ_n coefficient_n x_n + mean_coefficient · mean, for coefficients that sum to 0.

    It is computed in the features' dtype if its rounding errors are small, otherwise in float64.

    Args:
        coefficient: The coefficients, (tasks, outputs, n).
        x: The features, (tasks, n, d).
        coordinates: Coordinates of the centered features, from which the rounding errors are estimated.
        mean: The mean of the features, (tasks, 1, d).
        mean_coefficient: The coefficient of the mean, (tasks, outputs), or None for 0.

    Returns:
        The weights (tasks, outputs, d), and the mean in the dtype of the computation.
    """
    coefficient = coefficient - coefficient.mean(-1, keepdim=True)  # remove rounding errors of the sum
    squared_length = coordinates.square().sum(-1).amax(-1) + mean[:, 0].square().sum(-1)
    error = torch.finfo(x.dtype).eps * (squared_length * coefficient.abs().sum(-1).amax(-1)).max()
    if error < MAX_SCORE_ERROR:
        if mean_coefficient is not None:
            coefficient = coefficient + mean_coefficient[..., None] / x.shape[-2]
        return combine(coefficient, x, None), mean.to(x.dtype)
    weight = combine(coefficient, x, mean)
    return weight if mean_coefficient is None else weight + mean_coefficient[..., None] * mean, mean


def in_blocks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function to all tasks; on a CPU, to blocks of tasks, each in one thread.

    Operations on matrices this small do not profit from several threads.
    """
    threads, count = torch.get_num_threads(), _block_count(tensors[0])
    if count == 1:
        return function(*tensors)
    count = min(len(tensors[0]), -(-count // threads) * threads)
    blocks = [tensor.tensor_split(count) for tensor in tensors]
    return tuple(torch.cat(results) for results in zip(*map_over_threads(function, *blocks)))


def _block_count(tensor: Tensor) -> int:
    """Return the number of blocks of tasks such that a block in float64 fits in a CPU's cache; 1 on a GPU."""
    return 1 if tensor.is_cuda else min(len(tensor), -(-tensor.numel() // 500_000))


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise an InputError if a tensor contains NaN or infinite values."""
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise InputError(f"{name} contains NaN or infinite values. Check the data and the network that computes them.")
