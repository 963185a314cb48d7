"""Reject networks with too many tensors or values before the memory that exceeds the limit is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from metabridge.errors import InputError

MAX_VALUES = 2**30  # 4 GiB in float32
MAX_TENSORS = 2**14
_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
_INITIALIZERS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_})


class SizeLimit(TorchFunctionMode):
    """Context manager that raises an `InputError` when too many tensors, or too many values in them, are created.

    It counts the tensors that are created from a shape, such as weights of layers and example inputs. On the meta
    device, where tensors need no memory, layers skip their initialization inside the context, because PyTorch's
    initialization on the meta device imports modules that load slowly.

    Args:
        values: Maximum number of values in all tensors together.
        tensors: Maximum number of tensors.

    >>> with SizeLimit(values=100):
    ...     torch.nn.Linear(10, 10**9)
    Traceback (most recent call last):
    metabridge.errors.InputError: the network has more than 100 values in its tensors, which is too large to build.
    """

    def __init__(self, values: int = MAX_VALUES, tensors: int = MAX_TENSORS) -> None:
        super().__init__()
        self._limits = {"values in its tensors": values, "tensors": tensors}
        self._counts = dict.fromkeys(self._limits, 0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the tensor that the call creates, if any, and run the call if the counts are within the limits."""
        if func in _INITIALIZERS and args[0].is_meta:
            return args[0]
        if func in _FACTORIES and args:
            shape = args[0] if isinstance(args[0], list | tuple) else args
            if all(isinstance(size, int) for size in shape):
                self._count("values in its tensors", math.prod(shape))
                self._count("tensors", 1)
        return func(*args, **(kwargs or {}))

    def _count(self, quantity: str, count: int) -> None:
        self._counts[quantity] += count
        if self._counts[quantity] > self._limits[quantity]:
            limit = self._limits[quantity]
            raise InputError(f"the network has more than {limit} {quantity}, which is too large to build.")
