"""NNGP kernel and NTK of an infinitely wide network, computed in tiles.

Covariances are computed in double precision even for float32 inputs: the kernel of ReLU depends on the arc cosine of a
correlation, and in single precision, arccos has only about three correct digits near 1. Results have the dtype of the
inputs. The kernels are not differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from metabridge.errors import InputError, describe
from metabridge.kernels.conv_layers import AveragePool, Flatten, GlobalAveragePool, SpatialLayer, same_pixel_covariances
from metabridge.kernels.layers import Dense, KernelState, Layer, Residual

DEFAULT_MEMORY = 2**30  # bytes
_TENSORS_PER_TILE = 8  # maximum number of tensors of a tile's size in memory while the tile is computed
_CPU_CACHE_ELEMENTS = 2**18  # number of elements of the largest tile that stays in a CPU's cache between operations


@dataclass(frozen=True, repr=False)
class AnalyticKernel:
    """NTK and NNGP kernel of the infinitely wide network with the given layers.

    Points are vectors (n, features). If the layers contain a `Flatten` or a `GlobalAveragePool`, points are images
    (n, channels, height, width). Inner products of inputs are divided by the number of features or channels.

    Args:
        layers: The layers. The last one must be `Dense`, the readout.
        memory: Maximum number of bytes used in addition to inputs and results. The matrices are computed in tiles that
            fit in this memory.

    Raises:
        InputError: If the layers are not in a valid order.

    Example:
        >>> import torch
        >>> from metabridge.kernels import AnalyticKernel, Dense, Erf
        >>> kernel = AnalyticKernel((Dense(1.0), Erf(), Dense(1.0, bias_variance=0.1)))
        >>> kernel.ntk(torch.eye(2, dtype=torch.float64))
        tensor([[0.8009, 0.1000],
                [0.1000, 0.8009]], dtype=torch.float64)
    """

    layers: tuple[Layer, ...]
    memory: int = DEFAULT_MEMORY

    def __repr__(self) -> str:
        return f"AnalyticKernel({len(self.layers)} layers)"

    def __post_init__(self) -> None:
        if not self.layers or not isinstance(self.layers[-1], Dense):
            raise InputError(
                "layers does not end with Dense, but the last layer must be Dense, the linear readout of the network. "
                "Add a Dense layer at the end."
            )
        flatten_indices = [i for i, layer in enumerate(self.layers) if isinstance(layer, Flatten | GlobalAveragePool)]
        spatial_indices = [
            i
            for i, layer in enumerate(self.layers)
            if any(isinstance(nested, SpatialLayer) for nested in _all_layers([layer]))
        ]
        if len(flatten_indices) > 1 or (
            spatial_indices and (not flatten_indices or spatial_indices[-1] > flatten_indices[0])
        ):
            raise InputError(
                "convolution and pooling layers must be followed by exactly one Flatten or GlobalAveragePool."
            )

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the NTK.

        Args:
            x: The n row points, float32 or float64.
            z: The m column points; `x` if None.

        Returns:
            Θ(x, z), (n, m).

        Raises:
            InputError: If points have the wrong shape or dtype or are not finite, if `x` and `z` do not match, if the
                kernel is zero or overflows, or if `memory` is too small for one pair of points.
        """
        return self.both(x, z)[0]

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the NNGP kernel.

        Args:
            x: The n row points, float32 or float64.
            z: The m column points; `x` if None.

        Returns:
            K(x, z), (n, m).

        Raises:
            InputError: If points have the wrong shape or dtype or are not finite, if `x` and `z` do not match, if the
                kernel is zero or overflows, or if `memory` is too small for one pair of points.
        """
        (cov,) = self._compute(x, z, num_matrices=1)
        return cov

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the NTK and the NNGP kernel at the cost of the NTK.

        Args:
            x: The n row points, float32 or float64.
            z: The m column points; `x` if None.

        Returns:
            Θ(x, z) and K(x, z), each (n, m).

        Raises:
            InputError: If points have the wrong shape or dtype or are not finite, if `x` and `z` do not match, if the
                kernel is zero or overflows, or if `memory` is too small for one pair of points.
        """
        cov, ntk = self._compute(x, z, num_matrices=2)
        return ntk, cov

    @torch.no_grad()
    def _compute(self, x: Tensor, z: Tensor | None, num_matrices: Literal[1, 2]) -> list[Tensor]:
        """Return [K] if `num_matrices` is 1, and [K, Θ] if it is 2."""
        if z is not None:
            _check_match(x, z)
            self._check_points(z, "z")
        self._check_points(x, "x")
        max_pairs = self._max_pairs_per_tile(x)
        row_variances = self._record_variances(x, max_pairs, "x")
        column_variances = row_variances if z is None else self._record_variances(z, max_pairs, "z")
        columns = x if z is None else z
        matrices = [x.new_empty(len(x), len(columns)) for _ in range(num_matrices)]
        for i, j in _tiles(len(x), None if z is None else len(z), max_pairs):
            variances = iter([(row[i], column[j]) for row, column in zip(row_variances, column_variances)])
            cov = _inner_products(x[i].double(), columns[j].double(), self.pixel_dims)
            ntk = torch.zeros_like(cov) if num_matrices == 2 else None
            state = KernelState(cov, ntk, self.pixel_dims, _RecordedVariances(variances))
            self._propagate(state)
            for matrix, tile in zip(matrices, (state.cov, state.ntk)):
                assert tile is not None
                if z is None and i == j:
                    tile = tile.triu() + tile.triu(1).mT
                elif z is None:
                    matrix[j, i] = tile.mT
                matrix[i, j] = tile
        return matrices

    def _record_variances(self, x: Tensor, max_pairs: int, name: str) -> list[Tensor]:
        """Return the variances of all points at every layer that calls `KernelState.get_variances`.

        They are computed from the kernels of each point with itself. Raise InputError if one of these kernels is zero
        or overflows.

        Args:
            x: The points.
            max_pairs: Maximum number of pairs of points in a tile.
            name: Name of the points in error messages.
        """
        blocks, diagonals = [], []
        for i in _spans(len(x), max_pairs):
            recorder = _VarianceRecorder([])
            cov = _squared_norms(x[i].double(), self.pixel_dims)
            state = KernelState(cov, torch.zeros_like(cov), self.pixel_dims, recorder)
            self._propagate(state)
            blocks.append(recorder.variances)
            assert state.ntk is not None
            diagonals.append(torch.stack((state.cov, state.ntk)))
        if diagonals:
            self._check_diagonal(torch.cat(diagonals, 1).to(x.dtype), name)
        return [torch.cat(block) for block in zip(*blocks)]

    def _propagate(self, state: KernelState) -> None:
        """Apply all layers. After the last pooling layer, keep only the covariances of pixels at the same position."""
        for index, layer in enumerate(self.layers):
            if state.pixel_dims == 4 and not _has_pooling(self.layers[index:]):
                state.map(same_pixel_covariances)
                state.pixel_dims = 2
            layer.propagate(state)

    @property
    def pixel_dims(self) -> Literal[0, 2, 4]:
        """Number of pixel dimensions of the covariances: 0 for vectors, 2 for images, 4 for images with pooling."""
        if _has_pooling(self.layers):
            return 4
        return 2 if any(isinstance(layer, Flatten) for layer in self.layers) else 0

    def _max_pairs_per_tile(self, x: Tensor) -> int:
        """Return the maximum number of pairs of points in a tile."""
        elements_per_pair = 1
        if self.pixel_dims:
            height, width = x.shape[2:]
            areas = [height * width]
            for layer in _all_layers(self.layers):
                if isinstance(layer, SpatialLayer):
                    areas.append(layer.padded_length(height) * layer.padded_length(width))
                    height, width = layer.output_length(height), layer.output_length(width)
                    if height < 1 or width < 1:
                        raise InputError(
                            f"images of {x.shape[2]}×{x.shape[3]} pixels are too small: no pixels are left after "
                            f"{layer}. Use larger images or fewer layers."
                        )
            elements_per_pair = max(areas) ** (self.pixel_dims // 2)
        bytes_per_pair = 8 * _TENSORS_PER_TILE * elements_per_pair
        pairs = self.memory // bytes_per_pair
        if not pairs:
            raise InputError(
                f"memory is {self.memory} bytes, but one pair of points of shape {tuple(x.shape[1:])} needs"
                f" {bytes_per_pair} bytes. Increase memory, or use smaller images or no pooling."
            )
        return pairs if x.is_cuda else min(pairs, max(1, _CPU_CACHE_ELEMENTS // elements_per_pair))

    def _check_points(self, x: Tensor, name: str) -> None:
        if x.dtype not in (torch.float32, torch.float64):
            raise InputError(f"{name} is {describe(x)}, but must be float32 or float64. Use {name}.double().")
        if self.pixel_dims and (x.ndim != 4 or 0 in x.shape[1:]):
            raise InputError(f"{name} is {describe(x)}, but must be images: (points, channels, height, width).")
        if not self.pixel_dims and (x.ndim != 2 or x.shape[1] == 0):
            raise InputError(
                f"{name} is {describe(x)}, but must be vectors: (points, features). Use {name}.flatten(1) for images."
            )
        invalid = ~x.flatten(1).isfinite().all(1)
        if invalid.any():
            raise InputError(f"{_row_list(invalid)} of {name}: NaN or infinite values. Fix or remove these points.")

    def _check_diagonal(self, diagonal: Tensor, name: str) -> None:
        """Raise InputError if K(x, x) of a point is 0, or K(x, x) or Θ(x, x) overflows.

        Args:
            diagonal: K(x, x) and Θ(x, x) of each point, (2, points).
            name: Name of the points in the error message.
        """
        zero = (diagonal[0] <= 0) | diagonal[0].isnan()
        if zero.any():
            raise InputError(
                f"{_row_list(zero)} of {name}: zero or almost zero, so the kernel vanishes and its matrix is singular."
                " Remove these points, or give the network a bias_variance."
            )
        infinite = ~diagonal.isfinite().all(0)
        if infinite.any():
            raise InputError(
                f"{_row_list(infinite)} of {name}: the kernel overflows {diagonal.dtype}. Use float64, inputs of"
                " smaller scale, fewer layers or layer normalization."
            )


@dataclass
class _VarianceRecorder:
    """Records and returns the variances of points, from the covariances of each point with itself."""

    variances: list[Tensor]

    def __call__(self, state: KernelState) -> tuple[Tensor, Tensor]:
        if state.pixel_dims == 4:
            variance = same_pixel_covariances(state.cov).clone()
            self.variances.append(variance)
            return variance[:, :, :, None, None], variance[:, None, None]
        self.variances.append(state.cov.clone())
        return self.variances[-1], self.variances[-1]


@dataclass
class _RecordedVariances:
    """Returns the recorded variances of the points of a tile, in the order in which they were recorded."""

    variances: Iterator[tuple[Tensor, Tensor]]

    def __call__(self, state: KernelState) -> tuple[Tensor, Tensor]:
        left, right = next(self.variances)
        if state.pixel_dims == 4:
            return left[:, None, :, :, None, None], right[None, :, None, None]
        return left[:, None], right[None]


def _inner_products(x: Tensor, z: Tensor, pixel_dims: int) -> Tensor:
    """Return the inner products of the row and column points, divided by the number of features or channels.

    For images, return the inner products of their pixels, in the layout of `KernelState.cov`.
    """
    if pixel_dims == 4:
        pixels = torch.einsum("nca,mcb->nmab", x.flatten(2), z.flatten(2))
        return pixels.reshape(len(x), len(z), *x.shape[2:], *z.shape[2:]).div_(x.shape[1])
    if pixel_dims == 2:
        return torch.einsum("nchw,mchw->nmhw", x, z).contiguous().div_(x.shape[1])
    return (x @ z.mT).div_(x.shape[1])


def _squared_norms(x: Tensor, pixel_dims: int) -> Tensor:
    """Return the diagonal of `_inner_products(x, x, pixel_dims)`: the inner products of each point with itself."""
    if pixel_dims == 4:
        pixels = torch.einsum("nca,ncb->nab", x.flatten(2), x.flatten(2))
        return pixels.reshape(len(x), *x.shape[2:], *x.shape[2:]).div_(x.shape[1])
    return x.square().mean(1)


def _has_pooling(layers: Sequence[Layer]) -> bool:
    return any(isinstance(layer, AveragePool | GlobalAveragePool) for layer in _all_layers(layers))


def _all_layers(layers: Sequence[Layer]) -> Iterator[Layer]:
    """Yield the layers, and after each `Residual` the layers of its branch."""
    for layer in layers:
        yield layer
        if isinstance(layer, Residual):
            yield from _all_layers(layer.layers)


def _tiles(rows: int, columns: int | None, max_pairs: int) -> Iterator[tuple[slice, slice]]:
    """Yield the row and column slices of tiles with at most `max_pairs` entries.

    If `columns` is None, the matrix is symmetric, and only the tiles of the upper triangle are yielded.
    """
    square_size = math.isqrt(max_pairs)
    if columns is None:
        spans = list(_spans(rows, square_size))
        yield from ((i, j) for index, i in enumerate(spans) for j in spans[index:])
    else:
        height = max(min(rows, square_size), 1)
        width = max(min(columns, max_pairs // height), 1)
        height = max(min(rows, max_pairs // width), 1)
        yield from ((i, j) for i in _spans(rows, height) for j in _spans(columns, width))


def _spans(length: int, maximum: int) -> Iterator[slice]:
    """Split range(length) into as few slices as possible, of nearly equal size and at most `maximum` entries each."""
    if length:
        step = math.ceil(length / math.ceil(length / maximum))
        yield from (slice(start, min(start + step, length)) for start in range(0, length, step))


def _check_match(x: Tensor, z: Tensor) -> None:
    if x.shape[1:] != z.shape[1:]:
        raise InputError(f"x is {describe(x)} and z is {describe(z)}, but their points must have the same shape.")
    if x.dtype != z.dtype:
        raise InputError(f"x is {describe(x)} and z is {describe(z)}, but must have the same dtype. Use z.to(x.dtype).")
    if x.device != z.device:
        raise InputError(f"x is on {x.device} and z on {z.device}. Use z.to(x.device).")


def _row_list(selected: Tensor) -> str:
    """Return the indices of at most five selected rows as text, such as "row 3" or "rows 1, 2"."""
    rows = selected.nonzero().flatten().tolist()
    listed = ", ".join(str(row) for row in rows[:5]) + (", …" if len(rows) > 5 else "")
    return f"row{'s' if len(rows) > 1 else ''} {listed}"
