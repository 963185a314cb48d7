"""Operations whose second derivative PyTorch lacks or gets wrong, computed in a form that has the right one."""

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
_users = 0  # of the plain form of attention, over all threads


@contextlib.contextmanager
def second_derivatives(*, weight_norm: bool) -> Iterator[None]:
    """Let what is computed inside be differentiated twice, with weight normalisation if the network has it."""
    with _plain_attention(), _PlainWeightNorm() if weight_norm else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` use its plain form; its fused kernels have no second derivative.

    PyTorch has one setting for the whole process, so the last thread that leaves puts it back. Attention that other
    threads compute meanwhile is rounded differently.
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
    """While it is on, weight normalisation is g v / ‖v‖ as written; its fused kernel has a wrong second derivative."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the one function."""
        if func is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))
