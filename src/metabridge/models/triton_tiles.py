"""How maps are cut into tiles for Triton's kernels, and what several of them need.

Maps are channels-last, and a kernel sees one as a matrix (points × height × width, channels).
"""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.models import fused_triton_kernels as kernels

# The sizes are chosen among those tried on an H200, whose 132 multiprocessors they suit.
TILE = 2048  # elements of a map that a program holds at a time
WINDOWS = 1024  # and elements of a pooled map
STAGES = 4  # tiles that a sum over rows reads ahead
PROGRAMS = 528  # that share a sum over all rows


def channels_last(x: Tensor) -> Tensor:
    """The same values, channels last."""
    return x.contiguous(memory_format=torch.channels_last)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A map without values yet."""
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


def matrix_shape(x: Tensor) -> tuple[int, int]:
    """Rows and columns of a map."""
    return x.numel() // x.shape[1], x.shape[1]


def tile(channels: int, elements: int = TILE) -> dict[str, int]:
    """Rows and columns of a tile; the columns divide the channels, so that no tile is partly empty."""
    columns = min(64, channels & -channels)
    return {"BR": elements // columns, "BC": columns}


def grid(rows: int, channels: int, own: dict[str, int]) -> tuple[int]:
    """The grid of a kernel in which every program has one tile."""
    return (parts(rows, own["BR"]) * (channels // own["BC"]),)


def chunks(rows: int, channels: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """How many rows one program adds up, and how many programs that makes."""
    own = tile(channels)
    wanted = max(1, programs // (channels // own["BC"]))
    chunk = parts(parts(rows, wanted), own["BR"]) * own["BR"]
    return chunk, parts(rows, chunk)


def statistics(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the rows mean, 1/deviation, weight and bias, which is all that a batch norm is."""
    rows, c = matrix_shape(x)
    own, chunk, count = tile(c), *chunks(rows, c)
    partial = x.new_empty(2, count, c, dtype=torch.float32)
    norm = x.new_empty(4, c, dtype=torch.float32)
    kernels.moments[c // own["BC"], count](x, partial, rows, chunk, c, **own, STAGES=STAGES)
    kernels.finish_moments[(c // 8,)](
        partial, weight, bias, norm, rows, chunk, count, c, eps, PARTS=power_of_two(count), BC=8
    )
    return norm


def added(partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sums of the parts, and the same in the `dtype` of the parameters whose gradients they are."""
    sums, count, c = partial.shape
    total, rounded = partial.new_empty(sums, c), partial.new_empty(sums, c, dtype=dtype)
    kernels.add[c // 8, sums](partial, total, rounded, count, c, PARTS=power_of_two(count), BC=8)
    return total, rounded


def parts(whole: int, size: int) -> int:
    """How many parts of a size make up the whole."""
    return -(-whole // size)


def power_of_two(least: int) -> int:
    """The smallest one that is not below."""
    return 1 << (least - 1).bit_length()
