"""Stacks of searched cells: a supernet with all operators at once, and the network of one architecture (B §6.1).

The two are one module, of which a mask says what takes part. All candidates of a search therefore share the
supernet's weights, and what it computes under the mask of an architecture is what that architecture's network does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.errors import InputError, check_positive
from metabridge.models.architecture import EDGES, NODES, OPERATORS, ActiveOperators, Architecture, Edges, edges_of
from metabridge.models.batch_norm import BatchNorm, Statistics, group_count
from metabridge.models.drop_path import DropPath
from metabridge.models.network import Network, records_recipe, seeded
from metabridge.models.triton_support import fusible

Norm = Literal["batch", "group"]
MakeNorm = Callable[[int], nn.Module]  # from the number of channels


def supernet(
    active: ActiveOperators,
    *,
    cells: int = 5,
    channels: int = 48,
    image_channels: int = 3,
    size: int = 32,
    outputs: int = 5,
    norm: Norm = "group",
    statistics: Statistics = "batch",
    seed: int = 0,
) -> Network:
    """A stack of cells whose edges add up all their operators that are `active`; `mask` makes them fewer.

    With group norm every image is normalised by itself, and so has a gradient of its own (B app. E).

    >>> net = supernet(ActiveOperators.full(), channels=4)
    >>> net.head
    Linear(in_features=48, out_features=5, bias=True)
    """
    return _stacked(active, cells, channels, image_channels, size, outputs, norm, statistics, 0.0, seed)


@records_recipe
def cell_network(
    architecture: Architecture | Mapping[str, object],
    *,
    cells: int = 5,
    channels: int = 48,
    image_channels: int = 3,
    size: int = 84,
    outputs: int = 5,
    norm: Norm = "batch",
    statistics: Statistics = "running",
    drop_rate: float = 0.2,
    seed: int = 0,
) -> Network:
    """The network of an architecture, given as such or as its plain data, to be trained.

    Its first cells have `channels`, and a reduction cell at a third and at two thirds of the depth doubles them.
    In training an operator's output is dropped with the chance `drop_rate`, 0.2 for mini-ImageNet and 0.1 for
    tiered-ImageNet (B app. E).

    >>> from metabridge.nas import random_architecture
    >>> net = cell_network(random_architecture(torch.Generator().manual_seed(0)), channels=4, outputs=7)
    >>> net(torch.zeros(2, 3, 84, 84)).shape
    torch.Size([2, 7])
    """
    if not isinstance(architecture, Architecture):
        architecture = Architecture.from_dict(architecture)
    active = architecture.active_operators
    return _stacked(active, cells, channels, image_channels, size, outputs, norm, statistics, drop_rate, seed)


def mask(net: Network, active: ActiveOperators) -> None:
    """Let only what is `active` take part from now on, among the operators that the supernet was made with.

    >>> net = supernet(ActiveOperators.full(), channels=4)
    >>> mask(net, ActiveOperators.full().without(("normal", 0, "skip")))
    """
    if not isinstance(net.features, Cells):
        raise InputError("net is no stack of cells, so it cannot be masked. Use metabridge.models.cells.supernet.")
    missing = set(active) - set(net.features.made)
    if missing:
        cell, edge, operator = min(missing)
        raise InputError(f"the supernet was made without {operator!r} on edge {edge} of the {cell} cell. Make another.")
    net.features.active = active


class Cells(nn.Module):
    """A stem, the cells, and global average pooling: features of three times the last cell's channels.

    The mean of a map that was normalised by itself is the same for all images. With group norm, where that comes
    close, another norm and a rectifier stand before the pooling, as they do in the public code of B's search.
    """

    def __init__(
        self,
        active: ActiveOperators,
        cells: int,
        channels: int,
        image_channels: int,
        kind: Norm,
        statistics: Statistics,
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.made = self.active = active
        self.kind, self.channels = kind, channels
        norm = _norm(kind, statistics)
        width = NODES * channels
        self.stem = nn.Sequential(_convolution(image_channels, width, 3), norm(width))
        self.cells = nn.ModuleList()
        inputs, halved = (width, width), False
        for index in range(cells):
            reduction = index in (cells // 3, 2 * cells // 3)
            channels *= 2 if reduction else 1
            self.cells.append(Cell(active, inputs, channels, reduction, halved, norm, drop_rate))
            inputs, halved = (inputs[1], NODES * channels), reduction
        self.dimension = inputs[1]
        self.end = nn.Sequential(norm(self.dimension), nn.ReLU()) if kind == "group" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map images to features (points, dimension)."""
        if self.training and self.kind == "batch" and fusible(x, self.channels):
            from metabridge.models.fused_cells import features

            return features(self, x)
        before = last = self.stem(x)
        for cell, active in self.parts():
            before, last = last, cell(before, last, active)
        return self.end(last).mean((-2, -1))  # type: ignore[no-any-return]

    def parts(self) -> Iterator[tuple[Cell, Edges]]:
        """Go through the cells, each with what is active on its edges."""
        for cell in cast(Iterable[Cell], self.cells):
            yield cell, self.active.reduction if cell.reduction else self.active.normal


class Cell(nn.Module):
    """Three nodes on the outputs of the two cells before, of which the earlier is larger if the other `halved` it."""

    def __init__(
        self,
        active: ActiveOperators,
        inputs: tuple[int, int],
        channels: int,
        reduction: bool,
        halved: bool,
        norm: MakeNorm,
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.before = (Halving if halved else _pointwise)(inputs[0], channels, norm)
        self.last = _pointwise(inputs[1], channels, norm)
        self.edges = nn.ModuleList()
        for (_, source), operators in zip(EDGES, active.reduction if reduction else active.normal):
            stride = 2 if reduction and source < 2 else 1
            made = {name: _OPERATORS[name](channels, stride, norm) for name in OPERATORS if name in operators}
            self.edges.append(nn.ModuleDict(made))
        self.drop = DropPath(drop_rate) if drop_rate else nn.Identity()

    def forward(self, before: Tensor, last: Tensor, active: Edges) -> Tensor:
        """Return the nodes side by side."""
        states = [self.before(before), self.last(last)]
        for node in range(NODES):
            arriving = [self._sent(operator, states[source]) for operator, source in self.arriving(node, active)]
            states.append(functools.reduce(torch.add, arriving))
        return torch.cat(states[2:], 1)

    def arriving(self, node: int, active: Edges) -> Iterator[tuple[nn.Module, int]]:
        """Go through the operators that send to a node, each with the source that it sends from."""
        for edge in edges_of(node):
            for name, operator in cast(nn.ModuleDict, self.edges[edge]).items():
                if name in active[edge]:
                    yield operator, EDGES[edge][1]

    def _sent(self, operator: nn.Module, x: Tensor) -> Tensor:
        """What arrives through an operator; a plain skip is never dropped."""
        return x if isinstance(operator, nn.Identity) else self.drop(operator(x))


class Halving(nn.Module):
    """Halve the sides of maps by 1×1 convolutions: half of the channels from even pixels, half from odd ones."""

    def __init__(self, inputs: int, outputs: int, norm: MakeNorm) -> None:
        super().__init__()
        self.even = _convolution(inputs, outputs // 2, 1, stride=2)
        self.odd = _convolution(inputs, outputs - outputs // 2, 1, stride=2)
        self.norm = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Rectify maps, halve and normalise them."""
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[..., 1:, 1:]  # the last row and column matter where a side is odd
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))  # type: ignore[no-any-return]

    def both(self) -> Tensor:
        """Return the weight that does the same to even pixels and, as further channels, odd ones."""
        return torch.block_diag(self.even.weight.flatten(1), self.odd.weight.flatten(1))[..., None, None]  # type: ignore[no-any-return]


class MeanPool(nn.AvgPool2d):
    """The mean of the pixels in each window of 3×3.

    On a GPU, PyTorch up to 2.13 pulls gradients back to the wrong pixels where channels are last and windows padded.
    """

    def __init__(self, stride: int) -> None:
        super().__init__(3, stride, padding=1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        return super().forward(x.contiguous() if x.is_cuda else x)


def _max_pool(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    return nn.Sequential(nn.MaxPool2d(3, stride, padding=1), norm(channels))


def _mean_pool(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    return nn.Sequential(MeanPool(stride), norm(channels))


def _skip(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    return nn.Identity() if stride == 1 else Halving(channels, channels, norm)


def _factorised(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    across, down = _convolution(channels, channels, (1, 5), stride), _convolution(channels, channels, (5, 1))
    return nn.Sequential(nn.ReLU(), across, down, norm(channels))


def _separable(channels: int, stride: int, norm: MakeNorm, dilation: int = 1) -> nn.Sequential:
    """A 3×3 convolution of each channel by itself, and then one of 1×1."""
    depthwise = _convolution(channels, channels, 3, stride, dilation, groups=channels)
    return nn.Sequential(nn.ReLU(), depthwise, _convolution(channels, channels, 1), norm(channels))


def _twice_separable(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    return nn.Sequential(*_separable(channels, stride, norm), *_separable(channels, 1, norm))


def _pointwise(inputs: int, outputs: int, norm: MakeNorm) -> nn.Module:
    return nn.Sequential(nn.ReLU(), _convolution(inputs, outputs, 1), norm(outputs))


# Conv3×3 too is separable, once where SepConv3×3 is twice: so it is in the public code of MetaNAS, whose space
# this is, and only so have the published cells 1.77 M parameters.
_OPERATORS: dict[str, Callable[[int, int, MakeNorm], nn.Module]] = {
    "max_pool_3x3": _max_pool,
    "avg_pool_3x3": _mean_pool,
    "skip": _skip,
    "conv_1x5_5x1": _factorised,
    "conv_3x3": _separable,
    "sep_conv_3x3": _twice_separable,
    "dil_conv_3x3": functools.partial(_separable, dilation=2),
}


def _convolution(
    inputs: int, outputs: int, size: int | tuple[int, int], stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Conv2d:
    """A convolution that keeps the sides, or halves them with stride 2, and leaves the bias to the norm after it."""
    height, width = (size, size) if isinstance(size, int) else size
    padding = (dilation * (height // 2), dilation * (width // 2))
    layer = nn.Conv2d(inputs, outputs, (height, width), stride, padding, dilation, groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def _norm(kind: Norm, statistics: Statistics) -> MakeNorm:
    kinds: dict[str, MakeNorm] = {
        "batch": functools.partial(BatchNorm, statistics=statistics),
        "group": lambda channels: nn.GroupNorm(group_count(channels), channels),
    }
    if kind not in kinds:
        raise InputError(f"norm is {kind!r}, but must be 'batch' or 'group'.")
    return kinds[kind]


def _stacked(
    active: ActiveOperators,
    cells: int,
    channels: int,
    image_channels: int,
    size: int,
    outputs: int,
    norm: Norm,
    statistics: Statistics,
    drop_rate: float,
    seed: int,
) -> Network:
    for name, value in (("channels", channels), ("image_channels", image_channels), ("size", size)):
        check_positive(name, value)
    if cells < 3:
        raise InputError(f"cells is {cells}, but must be at least 3, for one normal and two reduction cells.")
    with seeded(seed):
        features = Cells(active, cells, channels, image_channels, norm, statistics, drop_rate)
        head = nn.Linear(features.dimension, outputs)
        nn.init.kaiming_normal_(head.weight, nonlinearity="relu")
        nn.init.zeros_(head.bias)
    return Network(features, head)
