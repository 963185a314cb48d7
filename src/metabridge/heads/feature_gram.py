"""Principal axes, Gram matrices and weighted sums of the features of many small tasks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from metabridge.errors import InputError
from metabridge.threads import map_over_threads

MAX_SCORE_ERROR = 1e-5  # largest rounding error of a score for which products are computed in float32
_MIN_EIGENVALUE_RATIO = 1e-9  # eigenvalues of a Gram matrix below this fraction of the largest are inaccurate
_MAX_BLOCK_ELEMENTS = 500_000  # largest number of elements of a block of tasks, 4 MB in float64


def center(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features (tasks, n, d) minus their mean, and the mean (tasks, 1, d), in float64.

    Raise an InputError if a mean is NaN or infinite.
    """
    mean = x.mean(-2, keepdim=True, dtype=torch.float64)
    check_finite("features", mean)
    return x - mean, mean


def principal_coordinates(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coordinates of the centered features along their principal axes.

    Args:
        x: The features, (tasks, n, d).

    Returns:
        The coordinates, (tasks, n, r); matrices T that convert a weight from these coordinates; and the mean of the
        features. For a weight with coordinates v, T v is the weight itself if n ≥ d. Otherwise it contains the dual
        coefficients a of the weight Σ_i a_i x_i, a sum over the centered features x_i.
    """
    centered, mean = center(x)
    if x.shape[-2] < x.shape[-1]:
        return *_coordinates_from_gram(centered @ centered.mT, centered.__getitem__), mean
    return *_coordinates_from_features(centered), mean


def principal_coordinates_with_bias(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the vectors (x − mean, 0) into their components along (mean, 1) and an orthogonal part.

    A model with a penalized bias treats the bias as the weight of a constant feature 1, so its features are
    (x, 1) = (x − mean, 0) + (mean, 1).

    Args:
        x: The features, (tasks, n, d).

    Returns:
        The coordinates of the orthogonal part along its principal axes, (tasks, n, r); matrices that convert a weight
        from these coordinates to its dual coefficients if n ≤ d, and to the weight itself otherwise; the components
        along (mean, 1), (tasks, n); and the mean of the features.
    """
    centered, mean = center(x)
    direction = normalize(pad(mean, (0, 1), value=1.0), dim=-1)
    mean_component = centered @ direction[..., :-1].mT

    def orthogonal_part(tasks: Tensor | slice) -> Tensor:
        return pad(centered[tasks], (0, 1)) - mean_component[tasks] * direction[tasks]

    if x.shape[-2] <= x.shape[-1]:
        gram = centered @ centered.mT - mean_component @ mean_component.mT
        coordinates, from_coordinates = _coordinates_from_gram(gram, orthogonal_part)
    else:
        coordinates, from_coordinates = _coordinates_from_features(orthogonal_part(slice(None)))
    return coordinates, from_coordinates, mean_component[..., 0], mean


def _coordinates_from_features(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates (tasks, n, d) of centered features along their principal axes, and the axes as columns."""
    axes = torch.linalg.eigh(x.mT @ x).eigenvectors
    return x @ axes, axes


def _coordinates_from_gram(gram: Tensor, centered_features: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the coordinates (tasks, n, n) of centered features along their principal axes, from their Gram matrix.

    Args:
        gram: The Gram matrices, (tasks, n, n).
        centered_features: A function that returns the centered features of the tasks that a mask selects. It is called
            for the tasks whose smallest singular values cannot be computed accurately from the Gram matrix.

    Returns:
        The coordinates, and matrices T (tasks, n, n) that convert coordinates to dual coefficients: the weight with
        coordinates v is Σ_i a_i x_i for a = T v and the centered features x_i.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(gram)
    singular_values = eigenvalues.clamp_min(0).sqrt()
    # Centering makes the smallest eigenvalue 0, so compare the second smallest.
    needs_svd = eigenvalues[:, :2].amax(-1) < _MIN_EIGENVALUE_RATIO * eigenvalues[:, -1]
    if needs_svd.any():
        left_vectors, svd_values, _ = torch.linalg.svd(centered_features(needs_svd), full_matrices=False)
        eigenvectors[needs_svd], singular_values[needs_svd] = left_vectors, svd_values
    singular_values = singular_values[..., None, :]
    # Rounding errors of singular values, from the SVD or from the square root of the Gram matrix's eigenvalues.
    relative_error = torch.where(needs_svd, 1e-13, 1e-7)[:, None, None]
    is_nonzero = singular_values > relative_error * singular_values.amax(-1, keepdim=True)
    coordinates = eigenvectors * torch.where(is_nonzero, singular_values, 0)
    return coordinates, eigenvectors * torch.where(is_nonzero, 1 / singular_values, 0)


def gram_matrix(x: Tensor, sensitivity: float) -> tuple[Tensor, Tensor | None]:
    """Return the Gram matrix of the features in float64, and the subtracted mean, or None if none was subtracted.

    The product is computed in float32, without centering, for float32 features on a CPU if PyTorch's
    `float32_matmul_precision` is "highest" and the estimated rounding errors of the scores are below `MAX_SCORE_ERROR`.
    Otherwise the features are centered and multiplied in float64.

    Args:
        x: The features, (tasks, n, d).
        sensitivity: The derivative of a score with respect to an entry of the Gram matrix.
    """
    if x.dtype == torch.float32 and not x.is_cuda and torch.get_float32_matmul_precision() == "highest":
        gram = (x @ x.mT).double()
        max_trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).max()
        if max_trace * torch.finfo(x.dtype).eps * sensitivity < MAX_SCORE_ERROR:  # false for NaN
            return gram, None

    def centered_gram(x: Tensor) -> tuple[Tensor, Tensor]:
        centered, mean = center(x)
        return centered @ centered.mT, mean

    gram, mean = map_task_blocks(centered_gram, x)
    return gram, mean


def weighted_sum(coefficients: Tensor, x: Tensor, origin: Tensor | None) -> Tensor:
    """Return Σ_n coefficients_n (x_n − origin), (tasks, outputs, d), in the dtype of the features.

    If `origin` is None, it is 0, and the sum is computed in the dtype of the features. Otherwise it is computed in
    float64.
    """
    if origin is None:
        return coefficients.to(x.dtype) @ x
    (weight,) = map_task_blocks(lambda x, origin, a: ((a @ (x - origin)).to(x.dtype),), x, origin, coefficients)
    return weight


def weighted_sum_plus_mean(
    coefficients: Tensor, x: Tensor, coordinates: Tensor, mean: Tensor, mean_coefficient: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return Σ_n coefficients_n x_n + mean_coefficient · mean, for coefficients that sum to 0.

    The sum is computed in the dtype of the features if its rounding errors are small, and in float64 otherwise.

    Args:
        coefficients: The coefficients of the features, (tasks, outputs, n).
        x: The features, (tasks, n, d).
        coordinates: Coordinates of the centered features, used to estimate the rounding errors.
        mean: The mean of the features, (tasks, 1, d).
        mean_coefficient: The coefficient of the mean, (tasks, outputs) (default: 0).

    Returns:
        The weights, (tasks, outputs, d), and the mean in the dtype of the computation.
    """
    coefficients = coefficients - coefficients.mean(-1, keepdim=True)  # make the sum 0 despite rounding errors
    squared_length = coordinates.square().sum(-1).amax(-1) + mean[:, 0].square().sum(-1)
    error = torch.finfo(x.dtype).eps * (squared_length * coefficients.abs().sum(-1).amax(-1)).max()
    if error < MAX_SCORE_ERROR:
        if mean_coefficient is not None:
            coefficients = coefficients + mean_coefficient[..., None] / x.shape[-2]
        return weighted_sum(coefficients, x, None), mean.to(x.dtype)
    weight = weighted_sum(coefficients, x, mean)
    return weight if mean_coefficient is None else weight + mean_coefficient[..., None] * mean, mean


def map_task_blocks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function to all tasks at once on a GPU, and to blocks of tasks on a CPU, one block per thread at a time.

    Linear algebra on small matrices is not faster with several threads per operation.
    """
    threads, block_count = torch.get_num_threads(), _count_blocks(tensors[0])
    if block_count == 1:
        return function(*tensors)
    block_count = min(len(tensors[0]), -(-block_count // threads) * threads)
    blocks = [tensor.tensor_split(block_count) for tensor in tensors]
    return tuple(torch.cat(results) for results in zip(*map_over_threads(function, *blocks)))


def _count_blocks(tensor: Tensor) -> int:
    """Return the number of blocks of tasks such that each block fits in CPU cache; 1 on a GPU."""
    return 1 if tensor.is_cuda else min(len(tensor), -(-tensor.numel() // _MAX_BLOCK_ELEMENTS))


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise an InputError if a tensor contains NaN or infinite values."""
    if not all(extremum.isfinite() for extremum in tensor.aminmax()):
        raise InputError(f"{name} contains NaN or infinite values. Check the data and the network that computes them.")
