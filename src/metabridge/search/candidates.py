"""Kernels of a supernet without this operator or that, exactly and fast.

- Θ = Σ_l J_l J_lᵀ over the layers l. Each layer adds its part as soon as the backward pass reaches it, for all
  images at once, so gradients are never stored.
- Operators on edges from the same source share what they begin with: one ReLU and one pooling of each kind.
- On a GPU several candidates go through the net side by side, as copies of the images with masks of their own:
  images do not mix, and what is masked has no gradient. This is recorded once as a CUDA graph, and replayed with
  other masks, weights and images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.errors import InputError
from metabridge.kernels.jacobian import patches
from metabridge.models.cells import Cells, mask
from metabridge.models.network import Network
from metabridge.search.proxies import Grams
from metabridge.search.space import EDGES, NODES, Alive, Choice, Edges, edges_of

SIDE_BY_SIDE = 8  # candidates in a pass on a GPU

Masks = dict[Choice, Tensor]  # what an operator's outputs are multiplied by, (images, 1, 1, 1)


class Candidates:
    """The kernels of what is left of a supernet with group norm, at images `x`. Gradients are of the summed outputs.

    Candidates go through the net `side_by_side` on a GPU, and one by one on a CPU, unless told otherwise.

    >>> from metabridge.models.cells import supernet
    >>> alive = Alive.full()
    >>> candidates = Candidates(supernet(alive, cells=3, channels=2, size=8), alive, torch.rand(4, 3, 8, 8))
    >>> [grams.ntk.shape for _, grams in candidates.grams([None, ("normal", 0, "skip")])]
    [torch.Size([4, 4]), torch.Size([4, 4])]
    """

    def __init__(self, net: Network, alive: Alive, x: Tensor, side_by_side: int | None = None) -> None:
        mask(net, alive)  # refuses what is no supernet, or lacks an operator
        if not all(isinstance(layer, nn.GroupNorm) for layer in net.modules() if "Norm" in type(layer).__name__):
            raise InputError("the supernet has batch norms, which mix images. Make it with norm='group'.")
        self.alive = alive
        self._copies = side_by_side or (SIDE_BY_SIDE if x.is_cuda else 1)
        self._sum = _Sum(x.new_zeros(self._copies, len(x), len(x)))
        self._net = _recording(net, self._sum)
        self._x = x.repeat(self._copies, 1, 1, 1).requires_grad_()
        ones = x.new_ones(len(self._x), 1, 1, 1)
        self._masks: Masks = {choice: ones.clone() for choice in alive.choices} if self._copies > 1 else {}
        cells = cast(Cells, self._net.features).cells
        for place, cell in enumerate(cells):
            cells[place] = _Shared(cell, self._masks)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: tuple[Tensor, Tensor]

    def load(self, net: Network, x: Tensor) -> None:
        """Take the weights of another supernet of the same form, and other images."""
        with torch.no_grad():
            self._x.copy_(x.repeat(self._copies, 1, 1, 1))
            for own, given in zip(self._net.parameters(), net.parameters()):
                own.copy_(given)

    def grams(self, removals: Sequence[Choice | None]) -> Iterator[tuple[Choice | None, Grams]]:
        """Yield Θ and K without each of the operators, or with all of them for None."""
        for start in range(0, len(removals), self._copies):
            chosen = removals[start : start + self._copies]
            ntk, nngp = self._masked(chosen) if self._masks else self._run(_without(self.alive, chosen[0]))
            for place, removal in enumerate(chosen):
                yield removal, Grams(ntk[place], nngp[place])

    def _masked(self, removals: Sequence[Choice | None]) -> tuple[Tensor, Tensor]:
        """Give each copy of the images a mask, and run all of them, on a GPU by replaying what was recorded."""
        images = len(self._x) // self._copies
        for choice, own in self._masks.items():
            own.fill_(1)
            for place, removal in enumerate(removals):
                if removal == choice:
                    own[place * images : (place + 1) * images] = 0
        if not self._x.is_cuda:
            return self._run(self.alive)
        if self._graph is None:
            self._graph = self._recorded()
        self._graph.replay()
        ntk, nngp = self._found
        return ntk.clone(), nngp.clone()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose their algorithms and make their handles before recording
                self._run(self.alive)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._found = self._run(self.alive)
        return graph

    def _run(self, alive: Alive) -> tuple[Tensor, Tensor]:
        """Θ and K, (copies, images, images): one pass forward, and one back from the summed outputs."""
        self._sum.total.zero_()
        head = self._net.head
        mask(self._net, alive)
        with torch.enable_grad():
            features = self._net.features(self._x)
        torch.autograd.grad(features, self._x, head.weight.sum(0).expand_as(features))
        rows = features.detach().unflatten(0, (self._copies, -1))
        nngp = head.out_features * (rows @ rows.mT + (head.bias is not None))
        return self._sum.total + nngp, nngp


class _Shared(nn.Module):
    """A cell whose operators share what they begin with, and are masked if there are masks."""

    def __init__(self, cell: nn.Module, masks: Masks) -> None:
        super().__init__()
        self.cell, self.masks = cell, masks
        self.reduction = bool(cell.reduction)

    def forward(self, before: Tensor, last: Tensor, alive: Edges) -> Tensor:
        cell: Any = self.cell
        states: list[Tensor] = [cell.before(before), cell.last(last)]
        begun: dict[tuple[int, type], Tensor] = {}
        for node in range(NODES):
            total: Tensor | None = None
            for edge in edges_of(node):
                source = EDGES[edge][1]
                for name, operator in cell.edges[edge].items():
                    if name in alive[edge]:
                        sent = self._masked(edge, name, _sent(operator, states[source], source, begun))
                        total = sent.clone() if total is None else total.add_(sent)
            assert total is not None  # a node without operators would not be alive
            states.append(total)
        for state in states:  # many layers take the gradient from here, and pools leave it with the channels last
            state.register_hook(Tensor.contiguous)
        return torch.cat(states[2:], 1)

    def _masked(self, edge: int, name: str, sent: Tensor) -> Tensor:
        mask = self.masks.get(("reduction" if self.reduction else "normal", edge, name))
        return sent if mask is None else sent * mask


def _without(alive: Alive, removal: Choice | None) -> Alive:
    return alive if removal is None else alive.without(*removal)


def _sent(operator: nn.Module, x: Tensor, source: int, begun: dict[tuple[int, type], Tensor]) -> Tensor:
    """What an operator makes of its source, of which the first step may have been taken for another one."""
    if not isinstance(operator, nn.Sequential):
        return operator(x)  # type: ignore[no-any-return]
    first = type(operator[0])
    if (source, first) not in begun:
        begun[source, first] = _begin(operator[0], x)
    y = begun[source, first]
    for layer in islice(operator, 1, None):
        y = layer(y)
    return y


def _begin(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.ReLU) or x.is_cuda:
        return layer(x)  # type: ignore[no-any-return]
    # PyTorch pools several times faster on a CPU where channels are last; its norms and convolutions do not
    return layer(x.contiguous(memory_format=torch.channels_last)).contiguous()  # type: ignore[no-any-return]


class _Sum:
    """Adds up J_l J_lᵀ over layers, for each of some groups of samples by itself: (groups, samples, samples)."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def add(self, gradients: Tensor) -> None:
        """Add a layer's part, from its gradients for every sample, (groups · samples, ...)."""
        rows = gradients.reshape(*self.total.shape[:2], -1)
        self.total.baddbmm_(rows, rows.mT)


def _recording(net: Network, into: _Sum) -> Network:
    """A copy of `net` whose convolutions and norms add their parts of Θ to a sum as gradients pass them."""
    net = copy.deepcopy(net).requires_grad_(False)
    for parent in list(net.features.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Conv2d | nn.GroupNorm):
                setattr(parent, name, _recorded(layer, into))
    return net


def _recorded(layer: nn.Conv2d | nn.GroupNorm, into: _Sum) -> nn.Module:
    if isinstance(layer, nn.Conv2d) and not layer.weight.is_cuda:
        if layer.stride == (2, 2) and (layer.kernel_size == (1, 1) or layer.dilation == (2, 2)):
            return _EvenPixels(layer, into)
        if layer.dilation == (2, 2):
            return _Dilated(layer, into)
    return _Recorded(layer, into)


class _Recorded(nn.Module):
    def __init__(self, layer: nn.Conv2d | nn.GroupNorm, into: _Sum) -> None:
        super().__init__()
        self.layer, self.into = layer, into

    def forward(self, x: Tensor) -> Tensor:
        function: Any = _Convolution if isinstance(self.layer, nn.Conv2d) else _GroupNorm
        return function.apply(x, self.layer, self.into)  # type: ignore[no-any-return]


class _EvenPixels(nn.Module):
    """A convolution that only sees pixels in even rows and columns, given those; 1×1, or 3×3 with dilation 2."""

    def __init__(self, layer: nn.Conv2d, into: _Sum) -> None:
        super().__init__()
        layer.stride, layer.dilation, layer.padding = (1, 1), (1, 1), (layer.kernel_size[0] // 2,) * 2
        self.inner = _Recorded(layer, into)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[..., ::2, ::2])  # type: ignore[no-any-return]


class _Dilated(nn.Module):
    """A 3×3 convolution with dilation 2 as one without, which is several times faster to go back through on a CPU.

    It does not mix even and odd rows or columns. So the four kinds of pixels stand side by side as smaller maps,
    with a column of zeros between them.
    """

    def __init__(self, layer: nn.Conv2d, into: _Sum) -> None:
        super().__init__()
        layer.dilation, layer.padding = (1, 1), (1, 1)
        self.inner = _Recorded(layer, into)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        x = F.pad(x, (0, width % 2, 0, height % 2)).unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
        kinds = F.pad(x.permute(0, 1, 2, 3, 5, 4), (0, 1))  # (images, channels, rows, odd row, odd column, columns + 1)
        y: Tensor = self.inner(kinds.flatten(3)).view_as(kinds)[..., :-1]
        return y.permute(0, 1, 2, 3, 5, 4).flatten(4).flatten(2, 3)[..., :height, :width]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Conv2d, into: _Sum) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.layer, ctx.into = layer, into
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer, slope = ctx.saved_tensors, ctx.layer, slopes[0].contiguous()
        if layer.kernel_size == layer.stride == (1, 1):
            ctx.into.add(slope.flatten(2) @ x.flatten(2).mT)
        elif layer.groups == 1 and x.is_cuda:
            ctx.into.add(slope.flatten(2) @ patches(layer, x)[:, 0].mT)
        else:  # one convolution whose groups are those of all samples
            samples = len(x)
            g, a = (side.reshape(1, -1, *side.shape[2:]) for side in (slope, x))
            weight = layer.weight.repeat(samples, 1, 1, 1)
            ctx.into.add(_pulled(layer, g, a, weight, samples * layer.groups, (False, True, False))[1])
        return _pulled(layer, slope, x, layer.weight, layer.groups, (True, False, False))[0], None, None


def _pulled(
    layer: nn.Conv2d, slope: Tensor, x: Tensor, weight: Tensor, groups: int, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a convolution's input, weight and bias, those that are wanted."""
    form = layer.stride, layer.padding, layer.dilation, False, (0, 0), groups
    return torch.ops.aten.convolution_backward(slope, x, weight, None, *form, wanted)  # type: ignore[no-any-return]


class _GroupNorm(torch.autograd.Function):
    """Group norm of one sample that has the groups of all, so that every sample has parameters of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.GroupNorm, into: _Sum) -> Tensor:
        samples, channels = x.shape[:2]
        x, weight, bias = x.contiguous(), layer.weight.repeat(samples), layer.bias.repeat(samples)
        ctx.form = 1, samples * channels, x.shape[2:].numel(), samples * layer.num_groups
        y, *moments = torch.ops.aten.native_group_norm(x, weight, bias, *ctx.form, layer.eps)
        ctx.save_for_backward(x, *moments, weight)
        ctx.into = into
        return y.view_as(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.aten.native_group_norm_backward(
            slopes[0].contiguous(), *ctx.saved_tensors, *ctx.form, (True, True, True)
        )
        samples, channels = slopes[0].shape[:2]
        ctx.into.add(torch.stack([part.view(samples, channels) for part in found[1:]], 1))
        return found[0].view_as(slopes[0]), None, None
