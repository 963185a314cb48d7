"""Twice differentiable forms of operations whose second derivative PyTorch lacks or computes wrongly."""

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
_MATH_SELECTION = contextlib.ExitStack()  # selects the math backend while open; closing restores the earlier choice
_num_active_threads = 0  # number of threads inside _math_attention


@contextlib.contextmanager
def second_derivatives(*, weight_norm: bool) -> Iterator[None]:
    """Make attention twice differentiable inside the context, and weight normalization too if `weight_norm` is true.

    Args:
        weight_norm: Whether the network uses PyTorch's fused weight normalization.
    """
    with _math_attention(), _UnfusedWeightNorm() if weight_norm else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _math_attention() -> Iterator[None]:
    """Select the math backend of `scaled_dot_product_attention`, since fused kernels have no second derivative.

    The selection applies to all threads, and the last thread that leaves the context undoes it. Until then, attention
    in other threads uses the math backend too, which rounds differently.
    """
    global _num_active_threads
    with _LOCK:
        if _num_active_threads == 0:
            _MATH_SELECTION.enter_context(sdpa_kernel(SDPBackend.MATH))
        _num_active_threads += 1
    try:
        yield
    finally:
        with _LOCK:
            _num_active_threads -= 1
            if _num_active_threads == 0:
                _MATH_SELECTION.close()


class _UnfusedWeightNorm(TorchFunctionMode):
    """Replace PyTorch's fused weight normalization, whose second derivative is wrong, inside the context.

    Weight normalization stores a magnitude g and a vector v instead of a weight. Here the weight is computed from them
    with differentiable operations, as g · v / ‖v‖.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or `_weight_norm` instead of the fused kernel."""
        if func is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))
