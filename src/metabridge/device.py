"""Parse and check PyTorch devices."""

from __future__ import annotations

import torch

from metabridge.errors import InputError


def as_device(device: torch.device | str) -> torch.device:
    """Return `device` as a `torch.device`; raise an `InputError` if PyTorch cannot compute on it.

    "auto" is the GPU if there is one, and otherwise the CPU.

    >>> as_device("gpu")
    Traceback (most recent call last):
    metabridge.errors.InputError: device is 'gpu', but must be a PyTorch device. Use device='cuda' or device='cpu'.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
        if parsed.type not in ("cpu", "cuda"):
            torch.ones(1, device=parsed).item()  # raises if the device does not exist or, like "meta", stores no values
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        raise InputError(
            f"device is {device!r}, but must be a PyTorch device. Use device='cuda' or device='cpu'."
        ) from error
    if parsed.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InputError(f"device is {str(parsed)!r}, but PyTorch finds no GPU. Use device='cpu'.")
        if (parsed.index or 0) >= count:
            last = f"cuda:{count - 1}"
            raise InputError(f"device is {str(parsed)!r}, but the last GPU is {last!r}. Use device={last!r}.")
    return parsed
