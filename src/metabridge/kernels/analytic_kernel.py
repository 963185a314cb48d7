"""NNGP kernel and NTK of a stack of infinitely wide layers, tile by tile.

Whatever precision the inputs have, covariances are computed in double precision: an angle is the arc cosine of a
correlation, and next to 1 single precision would leave of it three digits. Results have the inputs' precision.
Nothing here is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from metabridge.errors import InputError, describe
from metabridge.kernels.conv_layers import AveragePool, Flatten, GlobalAveragePool, Spatial, same_pixels
from metabridge.kernels.layers import Dense, KernelState, Layer, Residual

MEMORY = 2**30
_COPIES = 8  # of a tile, at most, that its computation holds at a time
_CACHED = 2**18  # numbers of a tile that stay in a processor's cache between one operation and the next


@dataclass(frozen=True)
class AnalyticKernel:
    """The kernels of a network given by its layers, the last of them `Dense`.

    Points are vectors, (n, features), or images, (n, channels, height, width), if there is a `Flatten` or a
    `GlobalAveragePool` among the layers. Inner products of inputs are means over features or channels. The pairs are
    computed in tiles that take no more than `memory` bytes beside inputs and results.

    >>> from metabridge.kernels import Erf
    >>> kernel = AnalyticKernel((Dense(1.0), Erf(), Dense(1.0, bias_variance=0.1)))
    >>> kernel.ntk(torch.eye(2, dtype=torch.float64))
    tensor([[0.8009, 0.1000],
            [0.1000, 0.8009]], dtype=torch.float64)
    """

    layers: tuple[Layer, ...]
    memory: int = MEMORY

    def __post_init__(self) -> None:
        if not self.layers or not isinstance(self.layers[-1], Dense):
            raise InputError("the last layer must be Dense: K is the kernel of the readout.")
        ends = [index for index, layer in enumerate(self.layers) if isinstance(layer, Flatten | GlobalAveragePool)]
        spatial = [
            i for i, layer in enumerate(self.layers) if any(isinstance(own, Spatial) for own in _within([layer]))
        ]
        if len(ends) > 1 or (spatial and (not ends or spatial[-1] > ends[0])):
            raise InputError("convolution and pooling must be followed by one Flatten or GlobalAveragePool.")

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return Θ between the points x and z, (n, m)."""
        return self.both(x, z)[0]

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return K between the points x and z, (n, m)."""
        (cov,) = self._compute(x, z, results=1)
        return cov

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Θ and K between the points x and z, each (n, m)."""
        cov, ntk = self._compute(x, z, results=2)
        return ntk, cov

    @torch.no_grad()
    def _compute(self, x: Tensor, z: Tensor | None, results: int) -> list[Tensor]:
        """Return K and, for two results, Θ."""
        if z is not None:
            _check_match(x, z)
            self._check(z, "z")
        self._check(x, "x")
        pairs = self._pairs_at_once(x)
        left = self._variances(x, pairs, "x")
        right = left if z is None else self._variances(z, pairs, "z")
        columns = x if z is None else z
        out = [x.new_empty(len(x), len(columns)) for _ in range(results)]
        for i, j in _tiles(len(x), None if z is None else len(z), pairs):
            variances = iter([(p[i], q[j]) for p, q in zip(left, right)])
            cov = _inner(x[i].double(), columns[j].double(), self.space)
            state = KernelState(cov, torch.zeros_like(cov) if results == 2 else None, self.space, _Between(variances))
            self._propagate(state)
            for whole, tile in zip(out, (state.cov, state.ntk)):
                assert tile is not None
                if z is None and i == j:
                    tile = tile.triu() + tile.triu(1).mT
                elif z is None:
                    whole[j, i] = tile.mT
                whole[i, j] = tile
        return out

    def _variances(self, x: Tensor, pairs: int, name: str) -> list[Tensor]:
        """Return the variances of the pre-activations of each point before each layer that asks for them."""
        blocks, ends = [], []
        for i in _spans(len(x), pairs):
            alone = _Alone([])
            cov = _squares(x[i].double(), self.space)
            state = KernelState(cov, torch.zeros_like(cov), self.space, alone)
            self._propagate(state)
            blocks.append(alone.variances)
            assert state.ntk is not None
            ends.append(torch.stack((state.cov, state.ntk)))
        if ends:
            self._check_diagonal(torch.cat(ends, 1).to(x.dtype), name)
        return [torch.cat(block) for block in zip(*blocks)]

    def _propagate(self, state: KernelState) -> None:
        for index, layer in enumerate(self.layers):
            if state.space == 4 and not _pools(self.layers[index:]):
                state.map(same_pixels)
                state.space = 2
            layer.propagate(state)

    @property
    def space(self) -> Literal[0, 2, 4]:
        """Return 0 for vectors, 2 for images whose pixels meet only themselves, 4 for those where each meets each."""
        if _pools(self.layers):
            return 4
        return 2 if any(isinstance(layer, Flatten) for layer in self.layers) else 0

    def _pairs_at_once(self, x: Tensor) -> int:
        """Return how many pairs of points a tile may have."""
        numbers = 1
        if self.space:
            height, width = x.shape[2:]
            spans = [height * width]
            for layer in _within(self.layers):
                if isinstance(layer, Spatial):
                    spans.append(layer.span(height) * layer.span(width))
                    height, width = layer.length(height), layer.length(width)
                    if height < 1 or width < 1:
                        raise InputError(
                            f"images of {x.shape[2]}×{x.shape[3]} pixels are too small: nothing is left after {layer}."
                        )
            numbers = max(spans) ** (self.space // 2)
        pairs = self.memory // (8 * _COPIES * numbers)
        if not pairs:
            raise InputError(
                f"memory is {self.memory} bytes, but one pair of points of shape {tuple(x.shape[1:])} needs"
                f" {8 * _COPIES * numbers}. Give more, or use smaller images or no pooling."
            )
        return pairs if x.is_cuda else min(pairs, max(1, _CACHED // numbers))

    def _check(self, x: Tensor, name: str) -> None:
        if x.dtype not in (torch.float32, torch.float64):
            raise InputError(f"{name} is {describe(x)}, but must be float32 or float64. Use {name}.double().")
        if self.space and (x.ndim != 4 or 0 in x.shape[1:]):
            raise InputError(f"{name} is {describe(x)}, but must be images: (points, channels, height, width).")
        if not self.space and (x.ndim != 2 or x.shape[1] == 0):
            raise InputError(
                f"{name} is {describe(x)}, but must be vectors: (points, features). Use {name}.flatten(1) for images."
            )
        bad = ~x.flatten(1).isfinite().all(1)
        if bad.any():
            raise InputError(f"{_rows(bad)} of {name} holding NaN or infinity cannot be used. Leave out or mend.")

    def _check_diagonal(self, diagonal: Tensor, name: str) -> None:
        """Refuse points without a kernel: those that all weights map to 0, and those whose values overflow."""
        zero = (diagonal[0] <= 0) | diagonal[0].isnan()
        if zero.any():
            raise InputError(
                f"{_rows(zero)} of {name}: zero, or next to it, where the kernel vanishes and its matrix is singular."
                " Leave such points out, or give the network a bias_variance."
            )
        infinite = ~diagonal.isfinite().all(0)
        if infinite.any():
            raise InputError(
                f"{_rows(infinite)} of {name}: the kernel is beyond {diagonal.dtype}. Use float64, inputs of smaller"
                " scale, fewer layers or layer normalisation."
            )


@dataclass
class _Alone:
    """Takes the variances of points from their covariance with themselves, and keeps them."""

    variances: list[Tensor]

    def __call__(self, state: KernelState) -> tuple[Tensor, Tensor]:
        if state.space == 4:
            variance = same_pixels(state.cov).clone()
            self.variances.append(variance)
            return variance[:, :, :, None, None], variance[:, None, None]
        self.variances.append(state.cov.clone())
        return self.variances[-1], self.variances[-1]


@dataclass
class _Between:
    """Hands out the variances of the rows and columns of a tile, in the order in which they were kept."""

    variances: Iterator[tuple[Tensor, Tensor]]

    def __call__(self, state: KernelState) -> tuple[Tensor, Tensor]:
        left, right = next(self.variances)
        if state.space == 4:
            return left[:, None, :, :, None, None], right[None, :, None, None]
        return left[:, None], right[None]


def _inner(x: Tensor, z: Tensor, space: int) -> Tensor:
    """Return the covariances of the inputs of each row with each column."""
    if space == 4:
        pixels = torch.einsum("nca,mcb->nmab", x.flatten(2), z.flatten(2))
        return pixels.reshape(len(x), len(z), *x.shape[2:], *z.shape[2:]).div_(x.shape[1])
    if space == 2:
        return torch.einsum("nchw,mchw->nmhw", x, z).contiguous().div_(x.shape[1])
    return (x @ z.mT).div_(x.shape[1])


def _squares(x: Tensor, space: int) -> Tensor:
    """Return the covariances of the inputs of each point with itself."""
    if space == 4:
        pixels = torch.einsum("nca,ncb->nab", x.flatten(2), x.flatten(2))
        return pixels.reshape(len(x), *x.shape[2:], *x.shape[2:]).div_(x.shape[1])
    return x.square().mean(1)


def _pools(layers: Sequence[Layer]) -> bool:
    return any(isinstance(layer, AveragePool | GlobalAveragePool) for layer in _within(layers))


def _within(layers: Sequence[Layer]) -> Iterator[Layer]:
    """Give the layers, and those of residual branches after the branch itself."""
    for layer in layers:
        yield layer
        if isinstance(layer, Residual):
            yield from _within(layer.layers)


def _tiles(rows: int, columns: int | None, pairs: int) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix into tiles of at most `pairs` entries; without columns, only those that touch the upper half."""
    side = math.isqrt(pairs)
    if columns is None:
        spans = list(_spans(rows, side))
        yield from ((i, j) for index, i in enumerate(spans) for j in spans[index:])
    else:
        height = max(min(rows, side), 1)
        width = max(min(columns, pairs // height), 1)
        height = max(min(rows, pairs // width), 1)
        yield from ((i, j) for i in _spans(rows, height) for j in _spans(columns, width))


def _spans(length: int, most: int) -> Iterator[slice]:
    """Cut a length into as few spans as do, of nearly equal size."""
    if length:
        step = math.ceil(length / math.ceil(length / most))
        yield from (slice(start, min(start + step, length)) for start in range(0, length, step))


def _check_match(x: Tensor, z: Tensor) -> None:
    if x.shape[1:] != z.shape[1:]:
        raise InputError(f"x is {describe(x)} and z is {describe(z)}, but their points must have the same shape.")
    if x.dtype != z.dtype:
        raise InputError(f"x is {describe(x)} and z is {describe(z)}, but must have one dtype. Use z.to(x.dtype).")
    if x.device != z.device:
        raise InputError(f"x is on {x.device} and z on {z.device}. Use z.to(x.device).")


def _rows(bad: Tensor) -> str:
    rows = bad.nonzero().flatten().tolist()
    shown = ", ".join(str(row) for row in rows[:5]) + (", …" if len(rows) > 5 else "")
    return f"row{'s' if len(rows) > 1 else ''} {shown}"
