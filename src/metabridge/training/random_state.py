"""The states of PyTorch's global random generators that belong to one training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import RLock

import torch
from torch import Tensor


class GlobalRandomState:
    """Keep the states of the global random generators for one training, apart from those of the caller.

    Layers such as dropout draw from the global generators. Inside `active()` these have the training's states; outside
    they have the caller's. Only one training at a time can be active, since all threads share the generators.
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
        """Set the global generators to the training's states, and restore the caller's states at the end."""
        with self._LOCK:
            callers_states = self._swap(self.states)
            try:
                yield
            finally:
                self.states = self._swap(callers_states)

    def _swap(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Set the states of the generators and return those before."""
        before = {name: generator.get_state() for name, generator in self._generators.items()}
        for name, generator in self._generators.items():
            generator.set_state(states[name])
        return before
