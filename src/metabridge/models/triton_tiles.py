"""Tile sizes and launch grids of the Triton kernels, and the statistics and sums that several layers need.

Feature maps are channels-last. A kernel sees n maps as a matrix of shape (n · height · width, channels).
"""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.models import fused_triton_kernels as kernels

# The fastest of the values that were tried on an H200, which has 132 multiprocessors.
TILE = 2048  # elements of a tile
WINDOW_TILE = 1024  # elements of a tile whose rows are windows
STAGES = 4  # pipeline stages of a loop that sums over rows
PROGRAMS = 528  # programs between which a sum over all rows is divided


def channels_last(x: Tensor) -> Tensor:
    """Return x in the channels-last format."""
    return x.contiguous(memory_format=torch.channels_last)


def empty_map(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor in channels-last format."""
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


def matrix_shape(x: Tensor) -> tuple[int, int]:
    """Return the numbers of rows and columns of the matrix as which a kernel sees x."""
    return x.numel() // x.shape[1], x.shape[1]


def tile_shape(channels: int, elements: int = TILE) -> dict[str, int]:
    """Return the numbers of rows (BR) and columns (BC) of a tile; BC divides the number of channels."""
    columns = min(64, channels & -channels)
    return {"BR": elements // columns, "BC": columns}


def launch_grid(rows: int, channels: int, tile: dict[str, int]) -> tuple[int]:
    """Return the launch grid of a kernel with one program per tile."""
    return (ceil_div(rows, tile["BR"]) * (channels // tile["BC"]),)


def row_chunks(rows: int, channels: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """Return the number of rows in a chunk, which one program sums, and the number of chunks."""
    tile = tile_shape(channels)
    target = max(1, programs // (channels // tile["BC"]))
    chunk = ceil_div(ceil_div(rows, target), tile["BR"]) * tile["BR"]
    return chunk, ceil_div(rows, chunk)


def norm_rows(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the matrix that the kernels call `norm`: mean, 1/√(variance + eps), weight and bias of every channel."""
    rows, c = matrix_shape(x)
    tile, chunk, count = tile_shape(c), *row_chunks(rows, c)
    partial = x.new_empty(2, count, c, dtype=torch.float32)
    norm = x.new_empty(4, c, dtype=torch.float32)
    kernels.chunk_moments[c // tile["BC"], count](x, partial, rows, chunk, c, **tile, STAGES=STAGES)
    kernels.merge_moments[(c // 8,)](
        partial, weight, bias, norm, rows, chunk, count, c, eps, PARTS=next_power_of_two(count), BC=8
    )
    return norm


def sum_parts(partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sum `partial` (sums, chunks, channels) over the chunks, and return the result in float32 and in `dtype`."""
    sums, count, c = partial.shape
    total, rounded = partial.new_empty(sums, c), partial.new_empty(sums, c, dtype=dtype)
    kernels.sum_parts[c // 8, sums](partial, total, rounded, count, c, PARTS=next_power_of_two(count), BC=8)
    return total, rounded


def ceil_div(number: int, divisor: int) -> int:
    """Return `number` / `divisor`, rounded up."""
    return -(-number // divisor)


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
