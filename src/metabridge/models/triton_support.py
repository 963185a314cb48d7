"""When Triton's kernels serve. Triton, which not every PyTorch comes with, takes a while to import."""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.autodiff import inside_transform

CHANNELS = 16  # a map's channels must be a multiple of it


def fusible(x: Tensor, channels: int) -> bool:
    """Whether `fused` serves: for gradients in low precision on a GPU, outside all transforms."""
    low = x.dtype in (torch.bfloat16, torch.float16) and torch.is_grad_enabled() and not inside_transform()
    return low and not torch.compiler.is_compiling() and _served(x, channels)


def fusible_tasks(x: Tensor) -> bool:
    """Whether `fused_tasks` serves, for a map of many tasks."""
    low = x.dtype in (torch.bfloat16, torch.float32) and x.ndim == 4
    return low and _served(x, x.shape[1])


def _served(x: Tensor, channels: int) -> bool:
    if not x.is_cuda or channels % CHANNELS or x.get_device() != torch.cuda.current_device():
        return False
    from metabridge.models import fused_triton_kernels

    return fused_triton_kernels.AVAILABLE
