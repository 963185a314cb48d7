"""Count the linear regions of the candidates of a search round in a thin supernet (Wang et al. 2022, sec. 5.2).

Each candidate is the supernet without one operator. The thin supernet has one channel in its first cell, and its inputs
are random image patches of a few pixels.

- On a CPU, candidates are run one by one. Layers that do not depend on the removed operator are run only once, for the
  whole supernet, and their outputs and signs of ReLU inputs are reused.
- On a GPU, launching such small operations takes longer than running them. Several candidates are therefore run in one
  forward pass. Each has its own copy of the patches, in which the output of the removed operator is masked.
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


class _OutputWithSigns(NamedTuple):
    """The output of some layers, and the weighted sum of the signs of their ReLU inputs for each sample of the batch.

    `sign_sum` is None if the layers have no ReLU. `is_active` tells for which samples the layers are part of the
    network; None stands for all samples.
    """

    output: Tensor
    sign_sum: Tensor | None
    is_active: Tensor | None = None


class LinearRegionCounter:
    """Counts the linear regions that contain at least one of the patches, in a thin supernet and in its candidates.

    Each sign has a random integer weight of 63 bits, and two activation patterns count as different if the weighted
    sums of their signs differ. The probability that two different patterns have the same sum is at most 2⁻⁶³.

    On a CPU, several threads may call `scores` of one counter at the same time.

    Args:
        active: Operators of the supernet.
        patches: Image patches of one channel (patches, 1, 3, 3).
        seed: Seed of the network weights and of the sign weights.
        candidates_per_pass: Number of candidates that share one forward pass; by default 64 on a GPU and 1 on a CPU.

    >>> counter = LinearRegionCounter(ActiveOperators.full(), torch.rand(50, 1, 3, 3), seed=0)
    >>> dict(counter.scores([("normal", 0, "skip")]))
    {('normal', 0, 'skip'): ProxyScore(value=50.0, failure=None)}
    """

    def __init__(
        self, active: ActiveOperators, patches: Tensor, seed: int, candidates_per_pass: int | None = None
    ) -> None:
        self.active, self._patches = active, patches
        self._candidates_per_pass = candidates_per_pass or (CANDIDATES_PER_PASS if patches.is_cuda else 1)
        self._generator = torch.Generator(patches.device).manual_seed(seed)
        self._is_active: dict[EdgeOperator, Tensor] = {}  # whether each sample is of a copy that has the operator
        net = thin_supernet(active, seed, len(patches)).to(patches.device)
        self._forward = CachedForward(cast(Cells, net.features), self._make_runner, self._mask_output)
        self._supernet_cache = ForwardCache()
        if self._candidates_per_pass == 1:
            self._forward(patches, active, self._supernet_cache)

    def scores(self, removals: Sequence[EdgeOperator | None]) -> Iterator[tuple[EdgeOperator | None, ProxyScore]]:
        """Yield each removal with the number of regions of the supernet without that operator.

        Args:
            removals: Operators to remove, one for each candidate; None stands for the whole supernet.

        Yields:
            The removal, and the number of regions or why it could not be counted.
        """
        for start in range(0, len(removals), self._candidates_per_pass):
            chunk = removals[start : start + self._candidates_per_pass]
            trace = self._run_one(chunk[0]) if self._candidates_per_pass == 1 else self._run_copies(chunk)
            yield from zip(chunk, _count_regions(trace, len(chunk)))

    def _run_one(self, removal: EdgeOperator | None) -> ForwardTrace[_OutputWithSigns]:
        return self._forward(self._patches, self.active.without(removal), ForwardCache(self._supernet_cache))

    def _run_copies(self, removals: Sequence[EdgeOperator | None]) -> ForwardTrace[_OutputWithSigns]:
        """Run one copy of the patches for each removal, with the removed operator masked in its copy."""
        operators = [removal for removal in removals if removal is not None]
        is_active = torch.tensor([[removal != operator for removal in removals] for operator in operators])
        self._is_active = dict(zip(operators, is_active.to(self._patches.device).repeat(1, len(self._patches))))
        copies = self._patches.repeat_interleave(len(removals), 0)  # the copies of a patch are adjacent
        return self._forward(copies, self.active, ForwardCache())

    def _make_runner(self, layers: Sequence[nn.Module]) -> LayerRunner[_OutputWithSigns]:
        return functools.partial(self._run_layers, layers)

    def _run_layers(self, layers: Sequence[nn.Module], x: Tensor) -> _OutputWithSigns:
        sign_sum = None
        for layer in layers:
            if isinstance(layer, nn.ReLU):
                assert sign_sum is None, "more than one ReLU in layers that are run together"
                is_positive = (x > 0).flatten(1)
                shape = is_positive.shape[1:]
                weights = torch.randint(*SIGN_WEIGHTS, shape, generator=self._generator, device=x.device)
                sign_sum = torch.where(is_positive, weights, 0).sum(1)
            x = layer(x)
        return _OutputWithSigns(x, sign_sum)

    def _mask_output(
        self, operator: EdgeOperator, runner: LayerRunner[_OutputWithSigns]
    ) -> LayerRunner[_OutputWithSigns]:
        """Return a runner that sets the output of an operator to zero in the copies without the operator."""

        def run(x: Tensor) -> _OutputWithSigns:
            result, is_active = runner(x), self._is_active.get(operator)
            if is_active is None:
                return result
            masked_output = torch.where(is_active.view(-1, 1, 1, 1), result.output, 0)
            return _OutputWithSigns(masked_output, result.sign_sum, is_active)

        return run


def _count_regions(trace: ForwardTrace[_OutputWithSigns], copies: int) -> list[ProxyScore]:
    """Return the number of different sign sums in each copy of the patches."""
    sums = _total_sign_sums(trace).view(-1, copies).sort(0).values
    counts = 1 + (sums.diff(dim=0) != 0).sum(0)
    finite = trace.end.output.isfinite().flatten(1).all(1).view(-1, copies).all(0)
    return [
        ProxyScore(float(count)) if is_finite else ProxyScore(math.nan, NOT_FINITE)
        for count, is_finite in zip(counts.tolist(), finite.tolist())
    ]


def _total_sign_sums(trace: ForwardTrace[_OutputWithSigns]) -> Tensor:
    """Return the total of the sign sums of all ReLUs for each sample, without the ReLUs removed from its network."""
    results = {id(result): (result.sign_sum, result.is_active) for result in trace.results}
    for cell in trace.cells:
        consumers: dict[FirstStep[_OutputWithSigns], list[_OutputWithSigns]] = {}
        for first_step, result in itertools.chain(*cell.operators):
            consumers.setdefault(first_step, []).append(result)
        for first_step, results_of_consumers in consumers.items():
            if len(results_of_consumers) == 1:  # if its only consumer is removed, a ReLU is not part of the network
                first_result = cell.first_steps[first_step]
                results[id(first_result)] = first_result.sign_sum, results_of_consumers[0].is_active
    return torch.stack(
        [
            sign_sum if is_active is None else sign_sum * is_active
            for sign_sum, is_active in results.values()
            if sign_sum is not None
        ]
    ).sum(0)


def thin_supernet(active: ActiveOperators, seed: int, patch_count: int) -> Network:
    """Return the supernet in which regions are counted: three cells, with one channel in the first.

    A batch may have several copies of `patch_count` patches, with the copies of each patch adjacent. Batch norm
    normalizes each copy separately.
    """
    net = supernet(active, cells=3, channels=1, image_channels=1, size=PATCH_SIZE, norm="batch", seed=seed)
    replace_layers(net, nn.Conv2d, _MatrixConvolution)
    replace_layers(net, BatchNorm, lambda layer: _BatchNormPerCopy(layer, patch_count))
    return net.requires_grad_(False)


class _MatrixConvolution(nn.Module):
    """A convolution that is computed as one matrix product, which is much faster for many small feature maps."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        self.matrix: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.matrix is None:  # computed at the first call, as all inputs have the same height and width
            unit_maps = torch.eye(x[0].numel(), device=x.device).view(-1, *x.shape[1:])
            self.matrix = self.layer(unit_maps)
        return (x.flatten(1) @ self.matrix.flatten(1)).view(len(x), *self.matrix.shape[1:])


class _BatchNormPerCopy(nn.Module):
    """A batch norm with separate statistics for each copy of the patches."""

    def __init__(self, layer: BatchNorm, patch_count: int) -> None:
        super().__init__()
        self.eps, self.patch_count = layer.eps, patch_count

    def forward(self, x: Tensor) -> Tensor:
        copies_as_channels = x.reshape(self.patch_count, -1, *x.shape[2:])
        return F.batch_norm(copies_as_channels, None, None, training=True, eps=self.eps).view_as(x)
