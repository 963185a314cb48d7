"""Count the linear regions of a thin supernet without each of some operators (Wang et al. 2022, sec. 5.2).

The thin supernet has one channel in its first cell, and its inputs are random patches of a few pixels.

- On a CPU, everything that does not depend on the removed operator is taken from one pass of the whole supernet,
  including the signs of the ReLU inputs.
- On a GPU, launching operations as small as these takes longer than running them. Several candidates therefore go
  through the network in one pass, as copies of the inputs with different masks.
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
from metabridge.nas.cached_forward import CachedForward, FirstStep, ForwardCache, ForwardTrace, LayerRunner
from metabridge.nas.proxies import NOT_FINITE, ProxyScore

PATCH_SIZE = 3  # pixels
SIGN_WEIGHTS = -(2**62), 2**62  # lower and upper end of the random integer weights
CANDIDATES_PER_PASS = 64  # on a GPU


class _SignedOutput(NamedTuple):
    """The output of some layers and a hash of the signs of their ReLU inputs, one number for each network input.

    `present` is true for the copies of the inputs in which the layers take part; None stands for all copies.
    """

    output: Tensor
    signs: Tensor | None
    present: Tensor | None = None


class LinearRegionCounter:
    """Counts the linear regions of a thin supernet that contain at least one of the inputs.

    Each sign has a random integer weight of 63 bits, and two activation patterns count as different if the weighted
    sums of their signs differ. The probability that two different patterns have the same sum is 2⁻⁶³.

    On a CPU, several threads may call `scores` of one counter at the same time.

    Args:
        active: Operators of the supernet.
        inputs: Patches of one channel (inputs, 1, 3, 3).
        seed: Seed of the network weights and of the sign weights.
        candidates_per_pass: Candidates that go through the network together; by default 64 on a GPU, 1 on a CPU.

    >>> counter = LinearRegionCounter(ActiveOperators.full(), torch.rand(50, 1, 3, 3), seed=0)
    >>> dict(counter.scores([("normal", 0, "skip")]))
    {('normal', 0, 'skip'): ProxyScore(value=50.0, failure=None)}
    """

    def __init__(
        self, active: ActiveOperators, inputs: Tensor, seed: int, candidates_per_pass: int | None = None
    ) -> None:
        self.active, self._inputs = active, inputs
        self._candidates_per_pass = candidates_per_pass or (CANDIDATES_PER_PASS if inputs.is_cuda else 1)
        self._generator = torch.Generator(inputs.device).manual_seed(seed)
        self._present: dict[EdgeOperator, Tensor] = {}
        net = thin_supernet(active, seed, len(inputs)).to(inputs.device)
        self._forward = CachedForward(cast(Cells, net.features), self._runner, self._masked)
        self._supernet_cache = ForwardCache()
        if self._candidates_per_pass == 1:
            self._forward(inputs, active, self._supernet_cache)

    def scores(self, removals: Sequence[EdgeOperator | None]) -> Iterator[tuple[EdgeOperator | None, ProxyScore]]:
        """Yield each removal with the number of regions without that operator, or with all operators for None."""
        for start in range(0, len(removals), self._candidates_per_pass):
            chunk = removals[start : start + self._candidates_per_pass]
            trace = self._run_one(chunk[0]) if self._candidates_per_pass == 1 else self._run_together(chunk)
            yield from zip(chunk, _count_regions(trace, len(chunk)))

    def _run_one(self, removal: EdgeOperator | None) -> ForwardTrace[_SignedOutput]:
        return self._forward(self._inputs, self.active.without(removal), ForwardCache(self._supernet_cache))

    def _run_together(self, removals: Sequence[EdgeOperator | None]) -> ForwardTrace[_SignedOutput]:
        """Run one copy of the inputs for each removal, with a mask that leaves out its operator."""
        operators = [removal for removal in removals if removal is not None]
        present = torch.tensor([[removal != operator for removal in removals] for operator in operators])
        self._present = dict(zip(operators, present.to(self._inputs.device).repeat(1, len(self._inputs))))
        copies = self._inputs.repeat_interleave(len(removals), 0)  # the copies of one input follow each other
        return self._forward(copies, self.active, ForwardCache())

    def _runner(self, layers: Sequence[nn.Module]) -> LayerRunner[_SignedOutput]:
        return functools.partial(self._run_layers, layers)

    def _run_layers(self, layers: Sequence[nn.Module], x: Tensor) -> _SignedOutput:
        signs = None
        for layer in layers:
            if isinstance(layer, nn.ReLU):
                assert signs is None  # no part of a cell has two ReLUs
                positive = (x > 0).flatten(1)
                weights = torch.randint(*SIGN_WEIGHTS, positive.shape[1:], generator=self._generator, device=x.device)
                signs = torch.where(positive, weights, 0).sum(1)
            x = layer(x)
        return _SignedOutput(x, signs)

    def _masked(self, operator: EdgeOperator, layer: LayerRunner[_SignedOutput]) -> LayerRunner[_SignedOutput]:
        """Return the layer of an operator with an output of zero for the copies that are without the operator."""

        def run(x: Tensor) -> _SignedOutput:
            result, present = layer(x), self._present.get(operator)
            if present is None:
                return result
            return _SignedOutput(torch.where(present.view(-1, 1, 1, 1), result.output, 0), result.signs, present)

        return run


def _count_regions(trace: ForwardTrace[_SignedOutput], copies: int) -> list[ProxyScore]:
    """Return the number of different sign sums for each of the copies of the inputs."""
    sums = _sum_signs(trace).view(-1, copies).sort(0).values
    counts = 1 + (sums.diff(dim=0) != 0).sum(0)
    finite = trace.end.output.isfinite().flatten(1).all(1).view(-1, copies).all(0)
    return [
        ProxyScore(float(count)) if is_finite else ProxyScore(math.nan, NOT_FINITE)
        for count, is_finite in zip(counts.tolist(), finite.tolist())
    ]


def _sum_signs(trace: ForwardTrace[_SignedOutput]) -> Tensor:
    """Add up the signs of a pass, each ReLU once, and only for the copies in which it takes part."""
    results = {id(result): (result.signs, result.present) for result in trace.results}
    for cell in trace.cells:
        readers: dict[FirstStep[_SignedOutput], list[_SignedOutput]] = {}
        for first_step, result in itertools.chain(*cell.operators):
            readers.setdefault(first_step, []).append(result)
        for first_step, (reader, *others) in readers.items():
            if not others:  # without its only reader, the ReLU is not part of the network
                first = cell.first_steps[first_step]
                results[id(first)] = first.signs, reader.present
    return torch.stack(
        [signs if present is None else signs * present for signs, present in results.values() if signs is not None]
    ).sum(0)


def thin_supernet(active: ActiveOperators, seed: int, inputs: int) -> Network:
    """Return the supernet in which regions are counted: three cells, one channel in the first.

    It takes any number of copies of `inputs` patches, the copies of one patch following each other. Batch norm
    normalizes every copy over its own `inputs` patches.
    """
    net = supernet(active, cells=3, channels=1, image_channels=1, size=PATCH_SIZE, norm="batch", seed=seed)
    replace_layers(net, nn.Conv2d, _MatrixConvolution)
    replace_layers(net, BatchNorm, lambda layer: _BatchNormPerCopy(layer, inputs))
    return net.requires_grad_(False)


class _MatrixConvolution(nn.Module):
    """A convolution of maps of few pixels as one matrix product, which is much faster for many small maps."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        self.matrix: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.matrix is None:  # computed from the first input, as all inputs have the same size
            unit_maps = torch.eye(x[0].numel(), device=x.device).view(-1, *x.shape[1:])
            self.matrix = self.layer(unit_maps)
        return (x.flatten(1) @ self.matrix.flatten(1)).view(len(x), *self.matrix.shape[1:])


class _BatchNormPerCopy(nn.Module):
    """A batch norm with separate statistics for each copy of the inputs."""

    def __init__(self, layer: BatchNorm, inputs: int) -> None:
        super().__init__()
        self.eps, self.inputs = layer.eps, inputs

    def forward(self, x: Tensor) -> Tensor:
        copies_as_channels = x.reshape(self.inputs, -1, *x.shape[2:])
        return F.batch_norm(copies_as_channels, None, None, training=True, eps=self.eps).view_as(x)
