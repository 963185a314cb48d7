"""Plain forms of operations whose second derivative PyTorch lacks or computes wrongly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_LOCK = Lock()
_ATTENTION = contextlib.ExitStack()
_users = 0  # threads inside _plain_attention


@contextlib.contextmanager
def second_derivatives(*, weight_norm: bool) -> Iterator[None]:
    """Make attention twice differentiable inside the context, and weight normalization too if `weight_norm` is true.

    Args:
        weight_norm: Whether the network uses PyTorch's fused weight normalization.
    """
    with _plain_attention(), _PlainWeightNorm() if weight_norm else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Make `scaled_dot_product_attention` use its plain form, since its fused kernels have no second derivative.

    PyTorch has one setting for the whole process, which the last thread that leaves the context restores. Attention
    that other threads compute meanwhile is rounded differently.
    """
    global _users
    with _LOCK:
        if _users == 0:
            _ATTENTION.enter_context(sdpa_kernel(SDPBackend.MATH))
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                _ATTENTION.close()


class _PlainWeightNorm(TorchFunctionMode):
    """Compute weight normalization as g v / ‖v‖, since the second derivative of its fused kernel is wrong."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the fused function."""
        if func is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))
