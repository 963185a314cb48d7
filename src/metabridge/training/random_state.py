"""Separate states of PyTorch's global random generators for a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import RLock

import torch
from torch import Tensor


class GlobalRandomState:
    """The states of the global random generators that one trainer uses.

    Layers such as dropout draw from the global generators. Inside `active()`, the generators have the trainer's states;
    outside, they have the caller's. Only one trainer at a time can be active, since all threads share the generators.
    """

    _LOCK = RLock()

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generators = {"torch": torch.default_generator}
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators["cuda"] = torch.cuda.default_generators[index]
        self.states = {
            name: torch.Generator(generator.device).manual_seed(seed).get_state()
            for name, generator in self._generators.items()
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Set the global generators to the trainer's states, and restore the caller's states at the end."""
        with self._LOCK:
            caller_states = self._swap(self.states)
            try:
                yield
            finally:
                self.states = self._swap(caller_states)

    def _swap(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Set the states of the generators and return their previous states."""
        previous_states = {name: generator.get_state() for name, generator in self._generators.items()}
        for name, generator in self._generators.items():
            generator.set_state(states[name])
        return previous_states
