"""Networks of cells: a supernet, and the network of one architecture (Wang et al. 2022, §6.1).

Both use the same module, in which a mask selects the operators. All candidates of a search therefore share the weights
of the supernet, and the supernet under the mask of an architecture computes the same as the network of that
architecture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.errors import InputError, check_positive
from metabridge.models.architecture import EDGES, NODES, OPERATORS, ActiveOperators, Architecture, EdgeSets, edges_of
from metabridge.models.batch_norm import BatchNorm, Statistics, group_count
from metabridge.models.drop_path import DropPath
from metabridge.models.network import Network, records_recipe, seeded
from metabridge.models.triton_support import can_fuse

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
    """Build a network of cells in which every edge adds up all its active operators.

    With group norm every image is normalized separately, so that per-image gradients are defined (Wang et al. 2022,
    app. E).

    Args:
        active: The operators of every edge. `mask` can deactivate some of them later.
        cells: Number of cells, at least 3. Reduction cells are at a third and at two thirds of the depth.
        channels: Channels of the first cells. A reduction cell doubles them.
        image_channels: Channels of the images.
        size: Height and width of the images in pixels.
        outputs: Outputs of the head.
        norm: "group" or "batch".
        statistics: Statistics of the batch norms, see `BatchNorm`.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If an option is out of range.

    >>> net = supernet(ActiveOperators.full(), channels=4)
    >>> net.head
    Linear(in_features=48, out_features=5, bias=True)
    """
    return _build(active, cells, channels, image_channels, size, outputs, norm, statistics, 0.0, seed)


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
    """Build the network of one architecture, for training.

    Args:
        architecture: The architecture, or the mapping that `Architecture.from_dict` takes.
        cells: Number of cells, at least 3. Reduction cells are at a third and at two thirds of the depth.
        channels: Channels of the first cells. A reduction cell doubles them.
        image_channels: Channels of the images.
        size: Height and width of the images in pixels.
        outputs: Outputs of the head.
        norm: "batch" or "group".
        statistics: Statistics of the batch norms, see `BatchNorm`.
        drop_rate: Probability that training drops the output of an operator: 0.2 for mini-ImageNet and 0.1 for
            tiered-ImageNet (Wang et al. 2022, app. E).
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If an option is out of range.

    >>> from metabridge.nas import random_architecture
    >>> net = cell_network(random_architecture(torch.Generator().manual_seed(0)), channels=4, outputs=7)
    >>> net(torch.zeros(2, 3, 84, 84)).shape
    torch.Size([2, 7])
    """
    if not isinstance(architecture, Architecture):
        architecture = Architecture.from_dict(architecture)
    active = architecture.active_operators
    return _build(active, cells, channels, image_channels, size, outputs, norm, statistics, drop_rate, seed)


def mask(net: Network, active: ActiveOperators) -> None:
    """Deactivate all operators of a supernet except `active`.

    Args:
        net: The supernet, which is changed in place.
        active: The operators that stay active. The supernet must have been built with all of them.

    Raises:
        InputError: If `net` is not a network of cells, or lacks one of the operators.

    >>> net = supernet(ActiveOperators.full(), channels=4)
    >>> mask(net, ActiveOperators.full().without(("normal", 0, "skip")))
    """
    if not isinstance(net.features, Cells):
        raise InputError("net is not a network of cells, so it cannot be masked. Use metabridge.models.cells.supernet.")
    missing = set(active) - set(net.features.available)
    if missing:
        cell, edge, operator = min(missing)
        raise InputError(
            f"the supernet was built without {operator!r} on edge {edge} of the {cell} cell. Build another supernet."
        )
    net.features.active = active


class Cells(nn.Module):
    """A stem, the cells, and global average pooling; the features have three times the channels of the last cell.

    If each map is normalized separately, its mean is the same for all images. With group norm the means are nearly the
    same, so another norm and a ReLU come before the pooling, as in the public code of Wang et al. 2022.
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
        self.available = self.active = active
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
        """Return the features of images, of shape (points, dimension)."""
        if self.training and self.kind == "batch" and can_fuse(x, self.channels):
            from metabridge.models.fused_cells import features

            return features(self, x)
        before = last = self.stem(x)
        for cell, active in self.cells_with_operators():
            before, last = last, cell(before, last, active)
        return self.end(last).mean((-2, -1))  # type: ignore[no-any-return]

    def cells_with_operators(self) -> Iterator[tuple[Cell, EdgeSets]]:
        """Yield each cell with the active operators of its edges."""
        for cell in cast(Iterable[Cell], self.cells):
            yield cell, self.active.reduction if cell.reduction else self.active.normal


class Cell(nn.Module):
    """Three nodes that read the outputs of the two previous cells.

    If `halved` is true, the previous cell is a reduction cell. The output of the cell before it is then halved to the
    same size.
    """

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
            modules = {name: _OPERATORS[name](channels, stride, norm) for name in OPERATORS if name in operators}
            self.edges.append(nn.ModuleDict(modules))
        self.drop = DropPath(drop_rate) if drop_rate else nn.Identity()

    def forward(self, before: Tensor, last: Tensor, active: EdgeSets) -> Tensor:
        """Return the concatenation of the nodes."""
        states = [self.before(before), self.last(last)]
        for node in range(NODES):
            terms = [self._term(operator, states[source]) for operator, source in self.operators_into(node, active)]
            states.append(functools.reduce(torch.add, terms))
        return torch.cat(states[2:], 1)

    def operators_into(self, node: int, active: EdgeSets) -> Iterator[tuple[nn.Module, int]]:
        """Yield the active operators on the edges into a node, each with its source."""
        for edge in edges_of(node):
            for name, operator in cast(nn.ModuleDict, self.edges[edge]).items():
                if name in active[edge]:
                    yield operator, EDGES[edge][1]

    def _term(self, operator: nn.Module, x: Tensor) -> Tensor:
        """Return the output of an operator after drop path, which does not apply to identities."""
        return x if isinstance(operator, nn.Identity) else self.drop(operator(x))


class Halving(nn.Module):
    """Halve the sides of maps with 1×1 convolutions: half of the channels from even pixels, half from odd pixels."""

    def __init__(self, inputs: int, outputs: int, norm: MakeNorm) -> None:
        super().__init__()
        self.even = _convolution(inputs, outputs // 2, 1, stride=2)
        self.odd = _convolution(inputs, outputs - outputs // 2, 1, stride=2)
        self.norm = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the maps after ReLU, halving and normalization."""
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[..., 1:, 1:]  # the last row and column are used if a side is odd
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))  # type: ignore[no-any-return]

    def joint_weight(self) -> Tensor:
        """Return one weight for both convolutions, whose input has the odd pixels as further channels."""
        return torch.block_diag(self.even.weight.flatten(1), self.odd.weight.flatten(1))[..., None, None]  # type: ignore[no-any-return]


class MeanPool(nn.AvgPool2d):
    """The mean of the pixels in each 3×3 window.

    On a GPU, PyTorch up to 2.13 assigns gradients to wrong pixels if the input is channels-last and windows are padded,
    so the input is made contiguous first.
    """

    def __init__(self, stride: int) -> None:
        super().__init__(3, stride, padding=1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the means of the windows."""
        return super().forward(x.contiguous() if x.is_cuda else x)


def _max_pool(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    return nn.Sequential(nn.MaxPool2d(3, stride, padding=1), norm(channels))


def _mean_pool(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    return nn.Sequential(MeanPool(stride), norm(channels))


def _skip(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    return nn.Identity() if stride == 1 else Halving(channels, channels, norm)


def _factorized(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    across, down = _convolution(channels, channels, (1, 5), stride), _convolution(channels, channels, (5, 1))
    return nn.Sequential(nn.ReLU(), across, down, norm(channels))


def _separable(channels: int, stride: int, norm: MakeNorm, dilation: int = 1) -> nn.Sequential:
    """A depthwise 3×3 convolution and a 1×1 convolution."""
    depthwise = _convolution(channels, channels, 3, stride, dilation, groups=channels)
    return nn.Sequential(nn.ReLU(), depthwise, _convolution(channels, channels, 1), norm(channels))


def _twice_separable(channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    return nn.Sequential(*_separable(channels, stride, norm), *_separable(channels, 1, norm))


def _pointwise(inputs: int, outputs: int, norm: MakeNorm) -> nn.Module:
    return nn.Sequential(nn.ReLU(), _convolution(inputs, outputs, 1), norm(outputs))


# conv_3x3 is separable too: one separable convolution, where sep_conv_3x3 has two. This is how the public code of
# MetaNAS, whose search space this is, defines it, and it gives the published 1.77 M parameters.
_OPERATORS: dict[str, Callable[[int, int, MakeNorm], nn.Module]] = {
    "max_pool_3x3": _max_pool,
    "avg_pool_3x3": _mean_pool,
    "skip": _skip,
    "conv_1x5_5x1": _factorized,
    "conv_3x3": _separable,
    "sep_conv_3x3": _twice_separable,
    "dil_conv_3x3": functools.partial(_separable, dilation=2),
}


def _convolution(
    inputs: int, outputs: int, size: int | tuple[int, int], stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Conv2d:
    """A convolution without bias that keeps the sides, or halves them with stride 2."""
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


def _build(
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
        raise InputError(f"cells is {cells}, but must be at least 3: one normal and two reduction cells.")
    with seeded(seed):
        features = Cells(active, cells, channels, image_channels, norm, statistics, drop_rate)
        head = nn.Linear(features.dimension, outputs)
        nn.init.kaiming_normal_(head.weight, nonlinearity="relu")
        nn.init.zeros_(head.bias)
    return Network(features, head)
