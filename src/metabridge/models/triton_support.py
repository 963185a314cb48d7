"""Decide whether the Triton kernels can be used. Triton is optional and slow to import, so it is imported late."""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.autodiff import inside_transform

CHANNELS = 16  # the number of channels of a map must be a multiple of this


def can_fuse(x: Tensor, channels: int) -> bool:
    """Return whether to use `fused_layers`: for gradients in low precision on a GPU, outside transforms."""
    low = x.dtype in (torch.bfloat16, torch.float16) and torch.is_grad_enabled() and not inside_transform()
    return low and not torch.compiler.is_compiling() and _device_supported(x, channels)


def can_fuse_tasks(x: Tensor) -> bool:
    """Return whether to use `fused_tasks` for a map of many tasks."""
    supported = x.dtype in (torch.bfloat16, torch.float32) and x.ndim == 4
    return supported and _device_supported(x, x.shape[1])


def _device_supported(x: Tensor, channels: int) -> bool:
    if not x.is_cuda or channels % CHANNELS or x.get_device() != torch.cuda.current_device():
        return False
    from metabridge.models import fused_triton_kernels

    return fused_triton_kernels.AVAILABLE
