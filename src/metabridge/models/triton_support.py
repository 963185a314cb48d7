"""Decide whether to use the Triton kernels. Triton is optional and slow to import, so import it only when needed."""

from __future__ import annotations

import torch
from torch import Tensor

from metabridge.autodiff import inside_transform

CHANNEL_MULTIPLE = 16  # the kernels need a number of channels that is divisible by 16


def can_fuse(x: Tensor, channels: int) -> bool:
    """Return whether to use `fused_layers`: for gradients in low precision on a GPU, outside of `torch.func`.

    `x` is the input of the layers, and `channels` divides the numbers of channels of all their feature maps.
    """
    low_precision = x.dtype in (torch.bfloat16, torch.float16)
    needs_grad = torch.is_grad_enabled() and not inside_transform() and not torch.compiler.is_compiling()
    return low_precision and needs_grad and _kernels_can_process(x, channels)


def can_fuse_tasks(x: Tensor) -> bool:
    """Return whether to use `fused_tasks` for x, the feature maps of many tasks (folded into the channels)."""
    supported_map = x.dtype in (torch.bfloat16, torch.float32) and x.ndim == 4
    return supported_map and _kernels_can_process(x, x.shape[1])


def _kernels_can_process(x: Tensor, channels: int) -> bool:
    if not x.is_cuda or channels % CHANNEL_MULTIPLE or x.get_device() != torch.cuda.current_device():
        return False
    from metabridge.models import fused_triton_kernels

    return fused_triton_kernels.AVAILABLE
