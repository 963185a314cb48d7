"""Tile sizes and launch grids of the Triton kernels, and the statistics and sums that several layers need.

A kernel treats a channels-last tensor (n, channels, height, width) as a matrix (n · height · width, channels). Each
Triton program processes one rectangular part of the matrix, a tile, or several tiles one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.models import fused_triton_kernels as kernels

# the fastest of the values tried on an H200, which has 132 multiprocessors
TILE_ELEMENTS = 2048  # rows × columns of a tile
WINDOW_TILE_ELEMENTS = 1024  # the same in kernels that process pooling or convolution windows instead of single pixels
STAGES = 4  # Triton's `num_stages` of loops that sum over rows
SUM_PROGRAMS = 528  # number of programs among which a sum over all rows is divided


def channels_last(x: Tensor) -> Tensor:
    """Return x in the channels-last format."""
    return x.contiguous(memory_format=torch.channels_last)


def empty_channels_last(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor in channels-last format."""
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


def matrix_shape(x: Tensor) -> tuple[int, int]:
    """Return the number of rows and columns of x as a matrix."""
    return x.numel() // x.shape[1], x.shape[1]


def tile_shape(channels: int, elements: int = TILE_ELEMENTS) -> dict[str, int]:
    """Return the number of rows (BR) and columns (BC) of a tile of size `elements`; BC divides `channels`."""
    columns = min(64, channels & -channels)  # channels & -channels is the largest power of two that divides channels
    return {"BR": elements // columns, "BC": columns}


def launch_grid(rows: int, channels: int, tile: dict[str, int]) -> tuple[int]:
    """Return the launch grid of a kernel that runs one program per tile."""
    return (ceil_div(rows, tile["BR"]) * (channels // tile["BC"]),)


def row_chunks(rows: int, channels: int, programs: int = SUM_PROGRAMS) -> tuple[int, int]:
    """Divide a sum over all rows into chunks: return the number of rows per chunk and the number of chunks.

    At most `programs` Triton programs then run: one for each chunk of rows and each block of BC columns.
    """
    tile = tile_shape(channels)
    target_chunks = max(1, programs // (channels // tile["BC"]))
    chunk_size = ceil_div(ceil_div(rows, target_chunks), tile["BR"]) * tile["BR"]
    return chunk_size, ceil_div(rows, chunk_size)


def compute_norm_params(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the mean, rstd = 1/√(variance + eps), weight and bias of every channel, as a tensor of shape (4, c)."""
    rows, c = matrix_shape(x)
    tile, chunk_size, num_chunks = tile_shape(c), *row_chunks(rows, c)
    moments = x.new_empty(2, num_chunks, c, dtype=torch.float32)
    norm_params = x.new_empty(4, c, dtype=torch.float32)
    kernels.chunk_moments[c // tile["BC"], num_chunks](x, moments, rows, chunk_size, c, **tile, STAGES=STAGES)
    kernels.merge_moments[(c // 8,)](
        moments,
        weight,
        bias,
        norm_params,
        rows,
        chunk_size,
        num_chunks,
        c,
        eps,
        CHUNKS=next_power_of_two(num_chunks),
        BC=8,
    )
    return norm_params


def sum_chunks(chunk_sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Add up the chunks of `chunk_sums` (sums, chunks, channels); return the results in float32 and in `dtype`."""
    n_sums, num_chunks, c = chunk_sums.shape
    sums, rounded_sums = chunk_sums.new_empty(n_sums, c), chunk_sums.new_empty(n_sums, c, dtype=dtype)
    kernels.sum_chunks[c // 8, n_sums](
        chunk_sums, sums, rounded_sums, num_chunks, c, CHUNKS=next_power_of_two(num_chunks), BC=8
    )
    return sums, rounded_sums


def ceil_div(number: int, divisor: int) -> int:
    """Return `number` / `divisor`, rounded up."""
    return -(-number // divisor)


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
