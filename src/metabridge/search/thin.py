"""Linear regions of a thin supernet without this operator or that (B §5.2), counted fast.

The thin network has one channel in its first cell, and is given random patches of a few pixels. What the missing
operator does not reach is taken from the pass of the whole supernet, signs of ReLUs included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from metabridge.models.cells import Cells, supernet
from metabridge.models.network import Network
from metabridge.search.proxies import Score
from metabridge.search.space import Alive, Choice
from metabridge.search.walk import Layer, Memory, Walker

PATCH = 3  # pixels of the sides of an input
WEIGHTS = -(2**62), 2**62  # of signs, from where to where


class _Signed(NamedTuple):
    """What layers made, and a number for the signs of their ReLUs at each input."""

    output: Tensor
    signs: Tensor | None


class ThinRegions:
    """How many linear regions of a thin supernet the inputs lie in, (inputs, 1, 3, 3), without some operator.

    Every sign has a random weight of 63 bits, and patterns are told apart by their sums: two that differ have the
    same sum once in 2⁶³ draws. Threads may ask for different operators.

    >>> thin = ThinRegions(Alive.full(), torch.rand(50, 1, 3, 3), seed=0)
    >>> thin.score(("normal", 0, "skip"))
    Score(value=50.0, trouble=None)
    """

    def __init__(self, alive: Alive, inputs: Tensor, seed: int) -> None:
        self.alive, self._inputs = alive, inputs
        self._generator = torch.Generator(inputs.device).manual_seed(seed)
        net = thin(alive, seed).to(inputs.device)
        self._walker = Walker(cast(Cells, net.features), self._run)
        self._whole = Memory()
        self._walker(inputs, alive, self._whole)

    def score(self, removal: Choice | None) -> Score:
        """The number of regions without an operator, or with all of them for None."""
        alive = self.alive if removal is None else self.alive.without(*removal)
        walk = self._walker(self._inputs, alive, Memory(self._whole))
        if not bool(walk.end.output.isfinite().all()):
            return Score(math.nan, "the network's outputs are NaN or infinite")
        signs = {id(step): step.signs for step in walk.steps if step.signs is not None}  # a step may serve twice
        return Score(float(len(torch.stack([*signs.values()]).sum(0).unique())))

    def _run(self, layers: Sequence[nn.Module]) -> Layer[_Signed]:
        return functools.partial(self._signed, layers)

    def _signed(self, layers: Sequence[nn.Module], x: Tensor) -> _Signed:
        signs = None
        for layer in layers:
            if isinstance(layer, nn.ReLU):
                assert signs is None  # as nowhere in a cell
                positive = (x > 0).flatten(1)
                weights = torch.randint(*WEIGHTS, positive.shape[1:], generator=self._generator, device=x.device)
                signs = torch.where(positive, weights, 0).sum(1)
            x = layer(x)
        return _Signed(x, signs)


def thin(alive: Alive, seed: int) -> Network:
    """The network that regions are counted in, of one channel in the first cell."""
    net = supernet(alive, cells=3, channels=1, image_channels=1, size=PATCH, norm="batch", seed=seed)
    for parent in list(net.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Conv2d):
                setattr(parent, name, _Dense(layer))
    return net.requires_grad_(False)


class _Dense(nn.Module):
    """A convolution of maps that are always of the same few pixels, as one matrix: much faster for many of them."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        self.matrix: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.matrix is None:
            pixels = torch.eye(x[0].numel(), device=x.device).view(-1, *x.shape[1:])
            self.matrix = self.layer(pixels)
        return (x.flatten(1) @ self.matrix.flatten(1)).view(len(x), *self.matrix.shape[1:])
