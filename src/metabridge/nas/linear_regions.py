"""Linear regions of a thin supernet without this operator or that (B §5.2), counted fast.

The thin network has one channel in its first cell, and is given random patches of a few pixels.

- On a CPU what the missing operator does not reach is taken from the pass of the whole supernet, signs included.
- On a GPU, which takes longer to be told of operations as small as these than to do them, many candidates go through
  the net side by side, as copies of the inputs with masks of their own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.models.architecture import ActiveOperators, EdgeOperator
from metabridge.models.batch_norm import BatchNorm, replace_layers
from metabridge.models.cells import Cells, supernet
from metabridge.models.network import Network
from metabridge.nas.cached_forward import Layer, Memory, Place, Walk, Walker
from metabridge.nas.proxies import NOT_FINITE, Score

PATCH = 3  # pixels of the sides of an input
WEIGHTS = -(2**62), 2**62  # of signs, from where to where
SIDE_BY_SIDE = 64  # candidates in a pass on a GPU


class _Signed(NamedTuple):
    """What layers made, a number for the signs of their ReLUs at each input, and which copies have them at all."""

    output: Tensor
    signs: Tensor | None
    present: Tensor | None = None


class ThinRegions:
    """How many linear regions of a thin supernet the inputs lie in, (inputs, 1, 3, 3), without some operator.

    Every sign has a random weight of 63 bits, and patterns are told apart by their sums: two that differ have the
    same sum once in 2⁶³ draws. Candidates go through the net `side_by_side` on a GPU, and one by one on a CPU, where
    threads may ask for different ones of them.

    >>> thin = ThinRegions(ActiveOperators.full(), torch.rand(50, 1, 3, 3), seed=0)
    >>> dict(thin.scores([("normal", 0, "skip")]))
    {('normal', 0, 'skip'): Score(value=50.0, trouble=None)}
    """

    def __init__(self, active: ActiveOperators, inputs: Tensor, seed: int, side_by_side: int | None = None) -> None:
        self.active, self._inputs = active, inputs
        self._copies = side_by_side or (SIDE_BY_SIDE if inputs.is_cuda else 1)
        self._generator = torch.Generator(inputs.device).manual_seed(seed)
        self._present: dict[EdgeOperator, Tensor] = {}
        net = thin(active, seed, len(inputs)).to(inputs.device)
        self._walker = Walker(cast(Cells, net.features), self._run, self._sent)
        self._whole = Memory()
        if self._copies == 1:
            self._walker(inputs, active, self._whole)

    def scores(self, removals: Sequence[EdgeOperator | None]) -> Iterator[tuple[EdgeOperator | None, Score]]:
        """Yield the number of regions without each of the operators, or with all of them for None."""
        for start in range(0, len(removals), self._copies):
            chosen = removals[start : start + self._copies]
            walk = self._alone(chosen[0]) if self._copies == 1 else self._together(chosen)
            yield from zip(chosen, _counted(walk, len(chosen)))

    def _alone(self, removal: EdgeOperator | None) -> Walk[_Signed]:
        active = self.active.without(removal)
        return self._walker(self._inputs, active, Memory(self._whole))

    def _together(self, removals: Sequence[EdgeOperator | None]) -> Walk[_Signed]:
        """Give each of some copies of the inputs a mask, and walk with all of them."""
        choices = [choice for choice in removals if choice is not None]
        present = torch.tensor([[removal != choice for removal in removals] for choice in choices])
        self._present = dict(zip(choices, present.to(self._inputs.device).repeat(1, len(self._inputs))))
        copies = self._inputs.repeat_interleave(len(removals), 0)  # those of an input stand together
        return self._walker(copies, self.active, Memory())

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

    def _sent(self, choice: EdgeOperator, layer: Layer[_Signed]) -> Layer[_Signed]:
        """What an operator sends, nothing where copies are without it."""

        def run(x: Tensor) -> _Signed:
            made, present = layer(x), self._present.get(choice)
            if present is None:
                return made
            return _Signed(torch.where(present.view(-1, 1, 1, 1), made.output, 0), made.signs, present)

        return run


def _counted(walk: Walk[_Signed], copies: int) -> list[Score]:
    """How many sums of signs there are in each of the copies."""
    sums = _signs(walk).view(-1, copies).sort(0).values
    counts = 1 + (sums.diff(dim=0) != 0).sum(0)
    finite = walk.end.output.isfinite().flatten(1).all(1).view(-1, copies).all(0)
    return [
        Score(float(count)) if told else Score(math.nan, NOT_FINITE)
        for count, told in zip(counts.tolist(), finite.tolist())
    ]


def _signs(walk: Walk[_Signed]) -> Tensor:
    """Add up the signs on a walk, each ReLU's once, where what it belongs to is present."""
    found = {id(step): (step.signs, step.present) for step in walk.steps}
    for cell in walk.cells:
        readers: dict[Place[_Signed], list[_Signed]] = {}
        for place, step in itertools.chain(*cell.arriving):
            readers.setdefault(place, []).append(step)
        for place, (reader, *others) in readers.items():
            if not others:  # so that without this operator there is no such ReLU
                found[id(cell.begun[place])] = cell.begun[place].signs, reader.present
    return torch.stack(
        [signs if present is None else signs * present for signs, present in found.values() if signs is not None]
    ).sum(0)


def thin(active: ActiveOperators, seed: int, inputs: int) -> Network:
    """The network that regions are counted in, of one channel in the first cell, for any number of copies of `inputs`.

    Copies of one input follow each other.
    """
    net = supernet(active, cells=3, channels=1, image_channels=1, size=PATCH, norm="batch", seed=seed)
    replace_layers(net, nn.Conv2d, _Dense)
    replace_layers(net, BatchNorm, lambda layer: _NormOfEach(layer, inputs))
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


class _NormOfEach(nn.Module):
    """A batch norm of each copy by itself: copies are channels of their own."""

    def __init__(self, layer: BatchNorm, inputs: int) -> None:
        super().__init__()
        self.eps, self.inputs = layer.eps, inputs

    def forward(self, x: Tensor) -> Tensor:
        apart = x.reshape(self.inputs, -1, *x.shape[2:])
        return F.batch_norm(apart, None, None, training=True, eps=self.eps).view_as(x)
