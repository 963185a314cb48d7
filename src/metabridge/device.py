"""Where to compute."""

from __future__ import annotations

import torch

from metabridge.errors import InputError


def as_device(device: torch.device | str) -> torch.device:
    """Return the device of a name, refusing what there is not.

    >>> as_device("gpu")
    Traceback (most recent call last):
    metabridge.errors.InputError: device is 'gpu', but must be a device of PyTorch. Use device='cuda' or device='cpu'.
    """
    try:
        found = torch.device(device)
        if found.type not in ("cpu", "cuda"):
            torch.ones(1, device=found).item()  # which tells whether one is there, and holds values
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        raise InputError(
            f"device is {device!r}, but must be a device of PyTorch. Use device='cuda' or device='cpu'."
        ) from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InputError(f"device is {str(found)!r}, but PyTorch finds no GPU here. Use device='cpu'.")
        if (found.index or 0) >= count:
            raise InputError(f"device is {str(found)!r}, but there are {count} GPUs. Use device='cuda:{count - 1}'.")
    return found
