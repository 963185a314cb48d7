"""Networks of cells: supernets for architecture search, and networks of one architecture (Wang et al. 2022, §6.1).

In a supernet, every edge of a cell has several operators, some of which are active. The network of an architecture has
only the operators of the architecture. Both are built from `Cells`, which computes only the active operators. All
architectures of a search therefore share the weights of the supernet. If exactly the operators of an architecture are
active, the supernet computes the same function as the network of that architecture with the same weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.errors import InputError, check_count
from metabridge.models.architecture import (
    EDGES,
    NODES,
    OPERATORS,
    ActiveOperators,
    Architecture,
    OperatorSets,
    edges_into,
)
from metabridge.models.batch_norm import BatchNorm, Statistics, group_count
from metabridge.models.drop_path import DropPath, check_drop_rate
from metabridge.models.network import Network, seeded, stores_build_arguments
from metabridge.models.triton_support import can_fuse

Norm = Literal["batch", "group"]
MakeNorm = Callable[[int], nn.Module]  # builds a normalization layer for the given number of channels


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
    """Build a network of cells in which the outputs of all active operators on an edge are added up.

    With group norm every image is normalized separately, so that per-image gradients are defined (Wang et al. 2022,
    app. E).

    Args:
        active: The operators on every edge. `set_active_operators` can deactivate some of them later.
        cells: Number of cells, at least 3. The cells at a third and two thirds of the depth are reduction cells.
        channels: Number of channels of each node in the first cells. Every reduction cell doubles it.
        image_channels: Number of channels of the images.
        size: Height and width of the images in pixels. It is only checked: the network accepts images of any size.
        outputs: Number of outputs of the head.
        norm: "group" for group norms or "batch" for batch norms.
        statistics: Statistics of the batch norms. "batch" normalizes every batch by its own mean and variance, in
            training and in evaluation. "running" does the same in training, but uses fixed statistics in evaluation,
            which `estimate_statistics` measures on training images.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If an option is out of range.

    >>> net = supernet(ActiveOperators.full(), channels=4)
    >>> net.head
    Linear(in_features=48, out_features=5, bias=True)
    """
    return _build_network(active, cells, channels, image_channels, size, outputs, norm, statistics, 0.0, seed)


@stores_build_arguments
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
        architecture: An `Architecture`, or a mapping as for `Architecture.from_dict`.
        cells: Number of cells, at least 3. The cells at a third and two thirds of the depth are reduction cells.
        channels: Number of channels of each node in the first cells. Every reduction cell doubles it.
        image_channels: Number of channels of the images.
        size: Height and width of the images in pixels. It is only checked, and stored with the other arguments: the
            network accepts images of any size.
        outputs: Number of outputs of the head.
        norm: "batch" for batch norms or "group" for group norms.
        statistics: Statistics of the batch norms. "batch" normalizes every batch by its own mean and variance, in
            training and in evaluation. "running" does the same in training, but uses fixed statistics in evaluation,
            which `estimate_statistics` measures on training images.
        drop_rate: Drop-path probability of every operator in training, except skips of stride 1. Wang et al. (2022,
            app. E) use 0.2 for mini-ImageNet and 0.1 for tiered-ImageNet.
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
    return _build_network(active, cells, channels, image_channels, size, outputs, norm, statistics, drop_rate, seed)


def set_active_operators(net: Network, active: ActiveOperators) -> None:
    """Set the active operators of a supernet in place.

    Args:
        net: The supernet.
        active: The operators that are active from now on. The supernet must have been built with all of them.

    Raises:
        InputError: If `net` is not a network of cells, or was built without one of the operators.

    >>> net = supernet(ActiveOperators.full(), channels=4)
    >>> set_active_operators(net, ActiveOperators.full().without(("normal", 0, "skip")))
    """
    check_active_operators(net, active).active = active


def check_active_operators(net: Network, active: ActiveOperators) -> Cells:
    """Return the cells of a supernet if it was built with all operators in `active`.

    Args:
        net: The supernet, which is not changed.
        active: The operators with which it must have been built.

    Returns:
        The features of `net`.

    Raises:
        InputError: If `net` is not a network of cells, or was built without one of the operators.

    >>> len(check_active_operators(supernet(ActiveOperators.full(), channels=4), ActiveOperators.full()).cells)
    5
    """
    if not isinstance(net.features, Cells):
        raise InputError(
            "net is not a network of cells, so it has no operators to deactivate. Build it with `supernet` or "
            "`cell_network`."
        )
    missing = set(active) - set(net.features.available_operators)
    if missing:
        kind, edge, operator = min(missing)
        raise InputError(
            f"the supernet was built without {operator!r} on edge {edge} of the {kind} cell. Build another supernet."
        )
    return net.features


class Cells(nn.Module):
    """A stem, the cells, and global average pooling.

    The features are the pooled output of the last cell, which concatenates its three nodes. Without a ReLU, the spatial
    mean of group-normalized maps is almost the same for all images. Therefore, if `norm` is "group", a group norm and a
    ReLU precede the pooling, as in the public code of Wang et al. (2022).

    Args:
        active: The operators on every edge.
        cells: Number of cells.
        channels: Number of channels of each node in the first cells. Every reduction cell doubles it.
        image_channels: Number of channels of the images.
        norm: "group" for group norms or "batch" for batch norms.
        statistics: Statistics of the batch norms, see `supernet`.
        drop_rate: Drop-path probability of every operator in training, except skips of stride 1.

    Raises:
        InputError: If `norm` or `statistics` is not one of the values above, or `drop_rate` is not in [0, 1).
    """

    def __init__(
        self,
        active: ActiveOperators,
        cells: int,
        channels: int,
        image_channels: int,
        norm: Norm,
        statistics: Statistics,
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.available_operators = self.active = active
        self.norm, self.channels = norm, channels
        make_norm = _norm_builder(norm, statistics)
        stem_channels = NODES * channels
        self.stem = nn.Sequential(_convolution(image_channels, stem_channels, 3), make_norm(stem_channels))
        self.cells = nn.ModuleList()
        source_channels, after_reduction = (stem_channels, stem_channels), False
        for index in range(cells):
            reduction = index in (cells // 3, 2 * cells // 3)
            channels *= 2 if reduction else 1
            cell = Cell(active, source_channels, channels, reduction, after_reduction, make_norm, drop_rate)
            self.cells.append(cell)
            source_channels, after_reduction = (source_channels[1], NODES * channels), reduction
        self.dimension = source_channels[1]
        self.end = nn.Sequential(make_norm(self.dimension), nn.ReLU()) if norm == "group" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of n images, of shape (n, dimension)."""
        trains = self.norm == "batch" and can_fuse(x, self.channels) and all(layer.training for layer in self.modules())
        if trains:  # the fused layers normalize by the statistics of the batch, which frozen layers do not
            from metabridge.models.fused_cells import features

            return features(self, x)
        source_0 = source_1 = self.stem(x)
        for cell, active in self.cells_with_operators():
            source_0, source_1 = source_1, cell(source_0, source_1, active)
        return self.end(source_1).mean((-2, -1))  # type: ignore[no-any-return]

    def cells_with_operators(self) -> Iterator[tuple[Cell, OperatorSets]]:
        """Yield each cell with the active operators on its edges."""
        for cell in cast(Iterable[Cell], self.cells):
            yield cell, self.active.reduction if cell.reduction else self.active.normal


class Cell(nn.Module):
    """A cell of three nodes.

    Its inputs are the outputs of the two previous cells: source 1 is the output of the previous cell, and source 0 that
    of the cell before it. The modules `before` and `last` (these names are kept for compatibility with saved weights)
    process sources 0 and 1.

    Args:
        active: The operators on every edge.
        source_channels: Numbers of channels of sources 0 and 1.
        channels: Number of channels of each node.
        reduction: Whether the cell is a reduction cell, whose operators on sources 0 and 1 have stride 2.
        after_reduction: Whether the previous cell is a reduction cell. If so, the feature maps of source 0 are twice as
            high and wide as those of source 1, and are downsampled to the same size.
        make_norm: Function that builds a normalization layer for the given number of channels.
        drop_rate: Drop-path probability of every operator in training, except skips of stride 1.
    """

    def __init__(
        self,
        active: ActiveOperators,
        source_channels: tuple[int, int],
        channels: int,
        reduction: bool,
        after_reduction: bool,
        make_norm: MakeNorm,
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.before = (FactorizedReduce if after_reduction else _pointwise_conv)(
            source_channels[0], channels, make_norm
        )
        self.last = _pointwise_conv(source_channels[1], channels, make_norm)
        self.edges = nn.ModuleList()
        for (_, source), operators in zip(EDGES, active.reduction if reduction else active.normal):
            stride = 2 if reduction and source < 2 else 1
            names = [name for name in OPERATORS if name in operators]
            self.edges.append(nn.ModuleDict({name: _OPERATORS[name](channels, stride, make_norm) for name in names}))
        self.drop = DropPath(drop_rate) if drop_rate else nn.Identity()

    def forward(self, source_0: Tensor, source_1: Tensor, active: OperatorSets) -> Tensor:
        """Return the concatenation of the nodes."""
        sources = [self.before(source_0), self.last(source_1)]
        for node in range(NODES):
            terms = [self._term(operator, sources[source]) for operator, source in self.operators_into(node, active)]
            sources.append(functools.reduce(torch.add, terms))
        return torch.cat(sources[2:], 1)

    def operators_into(self, node: int, active: OperatorSets) -> Iterator[tuple[nn.Module, int]]:
        """Yield the active operators on the edges into a node, each with the index of its source."""
        for edge in edges_into(node):
            for name, operator in cast(nn.ModuleDict, self.edges[edge]).items():
                if name in active[edge]:
                    yield operator, EDGES[edge][1]

    def _term(self, operator: nn.Module, x: Tensor) -> Tensor:
        """Return the output of an operator after drop path, which does not apply to identity operators."""
        return x if isinstance(operator, nn.Identity) else self.drop(operator(x))


class FactorizedReduce(nn.Module):
    """Halve the height and width of feature maps with two 1×1 convolutions of stride 2, after a ReLU.

    Each convolution computes half of the output channels. One reads the pixels whose row and column are even, the other
    the pixels whose row and column are odd.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of output channels.
        make_norm: Function that builds a normalization layer for the given number of channels.

    >>> FactorizedReduce(4, 8, nn.BatchNorm2d)(torch.rand(2, 4, 7, 7)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.even = _convolution(in_channels, out_channels // 2, 1, stride=2)
        self.odd = _convolution(in_channels, out_channels - out_channels // 2, 1, stride=2)
        self.norm = make_norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps after the ReLU, the convolutions and the normalization."""
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[..., 1:, 1:]  # padded, so that odd(shifted) has the size of even(x)
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))  # type: ignore[no-any-return]

    def joint_weight(self) -> Tensor:
        """Return the weight of a single 1×1 convolution that computes `torch.cat([even(x), odd(shifted)], 1)`.

        Its input channels are first the channels of the even pixels, then the channels of the odd pixels.
        """
        return torch.block_diag(self.even.weight.flatten(1), self.odd.weight.flatten(1))[..., None, None]  # type: ignore[no-any-return]


class AvgPool(nn.AvgPool2d):
    """Average pooling over 3×3 windows with padding 1, which is excluded from the mean.

    On a GPU, PyTorch up to 2.13 assigns gradients to wrong pixels if the input is channels-last and windows are padded.
    Therefore the input is made contiguous on a GPU.

    Args:
        stride: Distance between windows in pixels.

    >>> AvgPool(stride=2)(torch.ones(1, 1, 4, 4))
    tensor([[[[1., 1.],
              [1., 1.]]]])
    """

    def __init__(self, stride: int) -> None:
        super().__init__(3, stride, padding=1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the pixels in each window."""
        return super().forward(x.contiguous() if x.is_cuda else x)


def _max_pool(channels: int, stride: int, make_norm: MakeNorm) -> nn.Module:
    return nn.Sequential(nn.MaxPool2d(3, stride, padding=1), make_norm(channels))


def _avg_pool(channels: int, stride: int, make_norm: MakeNorm) -> nn.Module:
    return nn.Sequential(AvgPool(stride), make_norm(channels))


def _skip(channels: int, stride: int, make_norm: MakeNorm) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduce(channels, channels, make_norm)


def _factorized_conv(channels: int, stride: int, make_norm: MakeNorm) -> nn.Module:
    horizontal, vertical = _convolution(channels, channels, (1, 5), stride), _convolution(channels, channels, (5, 1))
    return nn.Sequential(nn.ReLU(), horizontal, vertical, make_norm(channels))


def _separable_conv(channels: int, stride: int, make_norm: MakeNorm, dilation: int = 1) -> nn.Sequential:
    """Build ReLU, a separable convolution (a depthwise 3×3 convolution and a 1×1 convolution) and a norm."""
    depthwise = _convolution(channels, channels, 3, stride, dilation, groups=channels)
    return nn.Sequential(nn.ReLU(), depthwise, _convolution(channels, channels, 1), make_norm(channels))


def _two_separable_convs(channels: int, stride: int, make_norm: MakeNorm) -> nn.Module:
    return nn.Sequential(*_separable_conv(channels, stride, make_norm), *_separable_conv(channels, 1, make_norm))


def _pointwise_conv(in_channels: int, out_channels: int, make_norm: MakeNorm) -> nn.Module:
    return nn.Sequential(nn.ReLU(), _convolution(in_channels, out_channels, 1), make_norm(out_channels))


# conv_3x3 is one separable convolution, and sep_conv_3x3 is two: the search space is that of the method MetaNAS, whose
# public code defines these two operators in this way. With these definitions, the three published architectures for
# mini-ImageNet have on average the published 1.77 million parameters, within 3 %.
_OPERATORS: dict[str, Callable[[int, int, MakeNorm], nn.Module]] = {
    "max_pool_3x3": _max_pool,
    "avg_pool_3x3": _avg_pool,
    "skip": _skip,
    "conv_1x5_5x1": _factorized_conv,
    "conv_3x3": _separable_conv,
    "sep_conv_3x3": _two_separable_convs,
    "dil_conv_3x3": functools.partial(_separable_conv, dilation=2),
}


def _convolution(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int],
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> nn.Conv2d:
    """Build a convolution without bias that keeps the size of its input, or halves it (rounded up) with stride 2."""
    height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    padding = (dilation * (height // 2), dilation * (width // 2))
    layer = nn.Conv2d(in_channels, out_channels, (height, width), stride, padding, dilation, groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def _norm_builder(norm: Norm, statistics: Statistics) -> MakeNorm:
    builders: dict[str, MakeNorm] = {
        "batch": functools.partial(BatchNorm, statistics=statistics),
        "group": lambda channels: nn.GroupNorm(group_count(channels), channels),
    }
    if norm not in builders:
        raise InputError(f"norm is {norm!r}, but must be 'batch' or 'group'.")
    return builders[norm]


def _build_network(
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
    counts = {"cells": cells, "channels": channels, "image_channels": image_channels, "size": size, "outputs": outputs}
    for name, value in counts.items():
        check_count(name, value)
    check_drop_rate("drop_rate", drop_rate)
    if cells < 3:
        raise InputError(f"cells is {cells}, but must be at least 3: one normal and two reduction cells.")
    with seeded(seed):
        features = Cells(active, cells, channels, image_channels, norm, statistics, drop_rate)
        head = nn.Linear(features.dimension, outputs)
        nn.init.kaiming_normal_(head.weight, nonlinearity="relu")
        nn.init.zeros_(head.bias)
    return Network(features, head)
