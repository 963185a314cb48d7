"""Kernels of a supernet without this operator or that, exactly and fast.

- Θ = Σ_l J_l J_lᵀ over the layers l. Each layer adds its part as soon as the way back reaches it, for all images at
  once, so gradients are never stored. The way back is written out, in the quickest kernels that a device has for it.
- On a CPU what the missing operator does not reach is taken from the pass of the whole supernet.
- On a GPU several candidates go through the net side by side, as copies of the images with masks of their own:
  images do not mix, and what is masked has no gradient.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metabridge.errors import InputError
from metabridge.kernels.layer_calls import input_patches
from metabridge.models.architecture import ActiveOperators, EdgeOperator
from metabridge.models.cells import Cells, mask
from metabridge.models.network import Network
from metabridge.nas.cached_forward import CellWalk, Layer, Memory, Place, Walk, Walker
from metabridge.nas.proxies import Grams

SIDE_BY_SIDE = 8  # candidates in a pass on a GPU
AT_ONCE = 2**18  # entries of a sample's gradient that a GPU is given together
PIECES = 64  # that they are cut into, as a few small products of long rows would leave a GPU idle


class _Sum:
    """Adds up J_l J_lᵀ over layers, for each of some groups of samples by itself: (groups, samples, samples).

    Layers wait for others until there are `at_once` entries of a gradient.
    """

    def __init__(self, total: Tensor, at_once: int) -> None:
        self._total, self._at_once = total, at_once
        self._waiting: list[Tensor] = []

    def add(self, gradients: Tensor) -> None:
        """Add a layer's part, from its gradients for every sample, (groups · samples, ...)."""
        rows = gradients.reshape(*self._total.shape[:2], -1)
        if self._at_once == 1:
            self._total.baddbmm_(rows, rows.mT)
            return
        self._waiting.append(rows)
        if sum(rows.shape[2] for rows in self._waiting) >= self._at_once:
            self._flush()

    def total(self) -> Tensor:
        """The sum."""
        if self._waiting:
            self._flush()
        return self._total

    def _flush(self) -> None:
        rest = -sum(rows.shape[2] for rows in self._waiting) % PIECES
        rows = torch.cat([*self._waiting, self._total.new_zeros(*self._total.shape[:2], rest)], 2)
        self._waiting.clear()
        pieces = rows.unflatten(2, (PIECES, -1)).transpose(1, 2).contiguous()
        self._total += (pieces @ pieces.mT).sum(1)


class _Sent(NamedTuple):
    """What layers made, and the way back: from the slope there to that of their input, adding their parts of Θ."""

    output: Tensor
    back: Callable[[Tensor, _Sum], Tensor]


class Candidates:
    """The kernels of what is left of a supernet with group norm, at images `x`. Gradients are of the summed outputs.

    Candidates go through the net `side_by_side` on a GPU, fewer where memory ends, and one by one on a CPU, where
    threads may ask for different ones of them.

    >>> from metabridge.models.cells import supernet
    >>> active = ActiveOperators.full()
    >>> candidates = Candidates(supernet(active, cells=3, channels=2, size=8), active, torch.rand(4, 3, 8, 8))
    >>> [grams.ntk.shape for _, grams in candidates.grams([None, ("normal", 0, "skip")])]
    [torch.Size([4, 4]), torch.Size([4, 4])]
    """

    def __init__(self, net: Network, active: ActiveOperators, x: Tensor, side_by_side: int | None = None) -> None:
        mask(net, active)  # refuses what is no supernet, or lacks an operator
        if not all(isinstance(layer, nn.GroupNorm) for layer in net.modules() if "Norm" in type(layer).__name__):
            raise InputError("the supernet has batch norms, which mix images. Make it with norm='group'.")
        self.active, self._x, self._head = active, x.contiguous(), net.head
        self._copies = side_by_side or (SIDE_BY_SIDE if x.is_cuda else 1)
        self._apart = self._copies == 1
        self._masks: dict[EdgeOperator, Tensor] = {}
        self._walker = Walker(cast(Cells, net.features), _chain, self._sent)
        self._whole = Memory()
        if self._apart:
            with torch.no_grad():
                self._walker(self._x, active, self._whole)

    @torch.no_grad()
    def grams(self, removals: Sequence[EdgeOperator | None]) -> Iterator[tuple[EdgeOperator | None, Grams]]:
        """Yield Θ and K without each of the operators, or with all of them for None, on the CPU."""
        start = 0
        while start < len(removals):
            chosen = removals[start : start + self._copies]
            try:
                found = self._alone(chosen[0]) if self._apart else self._together(chosen)
            except torch.OutOfMemoryError:
                if len(chosen) == 1:
                    raise
                self._copies = len(chosen) // 2
                continue
            ntk, nngp = (gram.cpu() for gram in found)
            for place, removal in enumerate(chosen):
                yield removal, Grams(ntk[place], nngp[place])
            start += len(chosen)

    def _alone(self, removal: EdgeOperator | None) -> tuple[Tensor, Tensor]:
        active = self.active.without(removal)
        return self._run(self._x[None], self._walker(self._x, active, Memory(self._whole)))

    def _together(self, removals: Sequence[EdgeOperator | None]) -> tuple[Tensor, Tensor]:
        """Give each of some copies of the images a mask, and run all of them."""
        copies = self._x.expand(len(removals), *self._x.shape).contiguous()
        choices = [choice for choice in removals if choice is not None]
        without = torch.tensor([[removal == choice for removal in removals] for choice in choices]).to(self._x.device)
        self._masks = dict(zip(choices, without.repeat_interleave(len(self._x), -1)[..., None, None, None]))
        return self._run(copies, self._walker(copies.flatten(0, 1), self.active, Memory()))

    def _run(self, x: Tensor, walk: Walk[_Sent]) -> tuple[Tensor, Tensor]:
        """Θ and K of each copy of the images: the way back from the summed outputs."""
        parts = _Sum(x.new_zeros(len(x), x.shape[1], x.shape[1]), 1 if self._apart else AT_ONCE)
        maps = walk.end.output
        slope = (self._head.weight.sum(0) / maps[0, 0].numel()).view(-1, 1, 1).expand_as(maps)
        slopes: dict[int, Tensor] = {}  # of what the cells make, by place, and of what the stem makes at -1
        _accumulate(slopes, len(walk.cells) - 1, walk.end.back(slope, parts))
        for place in reversed(range(len(walk.cells))):
            before, last = _cell_back(walk.cells[place], slopes.pop(place), parts)
            _accumulate(slopes, max(place - 2, -1), before)
            _accumulate(slopes, place - 1, last)
        walk.stem.back(slopes[-1], parts)
        rows = maps.mean((-2, -1)).unflatten(0, x.shape[:2])
        nngp = self._head.out_features * (rows @ rows.mT + (self._head.bias is not None))
        return parts.total() + nngp, nngp

    def _sent(self, choice: EdgeOperator, layer: Layer[_Sent]) -> Layer[_Sent]:
        """What an operator sends, masked where copies are without it."""
        if self._apart:
            return layer

        def run(x: Tensor) -> _Sent:
            y, back = layer(x)
            without = self._masks.get(choice)
            if without is None:
                return _Sent(y, back)
            return _Sent(y.masked_fill(without, 0), lambda slope, into: back(slope.masked_fill(without, 0), into))

        return run


def _accumulate(slopes: dict[Any, Tensor], place: object, slope: Tensor) -> None:
    """Add to the slope of a place, which nobody else holds."""
    if place in slopes:
        slopes[place].add_(slope)
    else:
        slopes[place] = slope


def _cell_back(walk: CellWalk[_Sent], slope: Tensor, into: _Sum) -> list[Tensor]:
    """The slopes of a cell's two inputs."""
    begun: dict[Place[_Sent], Tensor] = {}
    inputs = []
    nodes = slope.chunk(len(walk.arriving), 1)
    for state in reversed(range(2 + len(nodes))):
        parts = [walk.begun[place].back(begun[place], into) for place in begun if place[0] == state]
        if state >= 2:
            whole = functools.reduce(torch.add, parts, nodes[state - 2]).contiguous()
            for place, sent in walk.arriving[state - 2]:
                _accumulate(begun, place, sent.back(whole, into))
        else:
            relu, rest = walk.entries[state]
            whole = functools.reduce(torch.add, parts) if parts else torch.zeros_like(rest.output)
            inputs.append(relu.back(rest.back(whole, into), into))
    return inputs[::-1]


def _chain(modules: Sequence[nn.Module]) -> Layer[_Sent]:
    return _chained([_layer(module) for module in modules])


def _chained(layers: Sequence[Layer[_Sent]]) -> Layer[_Sent]:
    """Layers one after the other."""

    def run(x: Tensor) -> _Sent:
        backs = []
        for layer in layers:
            x, back = layer(x)
            backs.append(back)

        def whole(slope: Tensor, into: _Sum) -> Tensor:
            for back in reversed(backs):
                slope = back(slope, into)
            return slope

        return _Sent(x, whole)

    return run


def _layer(module: Any) -> Layer[_Sent]:
    if isinstance(module, nn.Conv2d):
        return _convolution(module)
    if isinstance(module, nn.GroupNorm):
        return _group_norm(module)
    if isinstance(module, nn.MaxPool2d):
        return functools.partial(_max_pool, cast(int, module.stride))
    if isinstance(module, nn.AvgPool2d):
        return functools.partial(_average_pool, cast(int, module.stride))
    if isinstance(module, nn.ReLU):
        return _relu
    if isinstance(module, nn.Identity):
        return _same
    return _halving(module)


def _same(x: Tensor) -> _Sent:
    return _Sent(x, lambda slope, into: slope.clone())


def _relu(x: Tensor) -> _Sent:
    y = x.relu()
    return _Sent(y, lambda slope, into: torch.ops.aten.threshold_backward(slope, y, 0))


def _max_pool(stride: int, x: Tensor) -> _Sent:
    # PyTorch pools several times faster on a CPU where channels are last; its norms and convolutions do not
    layout = torch.contiguous_format if x.is_cuda else torch.channels_last
    form = [3, 3], [stride, stride], [1, 1], [1, 1], False
    x = x.contiguous(memory_format=layout)
    y, places = torch.ops.aten.max_pool2d_with_indices(x, *form)

    def back(slope: Tensor, into: _Sum) -> Tensor:
        slope = slope.contiguous(memory_format=layout)
        found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(slope, x, *form, places)
        return found.contiguous()

    return _Sent(y.contiguous(), back)


def _average_pool(stride: int, x: Tensor) -> _Sent:
    """Sums by a convolution, which is faster than pooling, over the number of pixels within the image."""
    channels, form = x.shape[1], ((stride, stride), (1, 1), (1, 1))
    box = x.new_ones(channels, 1, 3, 3)
    counts = _pushed(x.new_ones(1, 1, *x.shape[2:]), box[:1], form, 1)

    def back(slope: Tensor, into: _Sum) -> Tensor:
        return _pulled(slope / counts, x, box, form, channels, (True, False, False))[0]

    return _Sent(_pushed(x, box, form, channels) / counts, back)


def _halving(module: Any) -> Layer[_Sent]:
    """Half of the channels from even pixels and half from odd ones, of maps that are rectified."""
    halves = [
        _chained([functools.partial(_every_second, start), functools.partial(_pointwise, part)])
        for start, part in enumerate((module.even, module.odd))
    ]
    norm = _group_norm(module.norm)

    def run(x: Tensor) -> _Sent:
        (even, even_back), (odd, odd_back) = (half(x) for half in halves)
        y, norm_back = norm(torch.cat([even, odd], 1))

        def back(slope: Tensor, into: _Sum) -> Tensor:
            slopes = norm_back(slope, into).split([even.shape[1], odd.shape[1]], 1)
            return even_back(slopes[0], into) + odd_back(slopes[1], into)

        return _Sent(y, back)

    return run


def _every_second(start: int, x: Tensor) -> _Sent:
    """The pixels in even rows and columns, or from `start` 1 on the odd ones, and zeros where these end sooner."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (0, width % 2, 0, height % 2)) if start else x

    def back(slope: Tensor, into: _Sum) -> Tensor:
        found = torch.zeros_like(x)
        own = found[..., start::2, start::2]
        own.copy_(slope[..., : own.shape[-2], : own.shape[-1]])
        return found

    return _Sent(padded[..., start::2, start::2].contiguous(), back)


def _convolution(layer: nn.Conv2d) -> Layer[_Sent]:
    if layer.kernel_size == (1, 1):
        return functools.partial(_pointwise, layer)
    if layer.stride == layer.dilation == (2, 2):  # which meets pixels in even rows and columns alone
        layer = copy.copy(layer)
        layer.stride, layer.padding, layer.dilation = (1, 1), (1, 1), (1, 1)
        return _chained([functools.partial(_every_second, 0), _convolved(layer)])
    return _convolved(layer)


def _pointwise(layer: nn.Conv2d, x: Tensor) -> _Sent:
    """A 1×1 convolution of every pixel."""
    weight, rows = layer.weight.flatten(1).expand(len(x), -1, -1), x.flatten(2)

    def back(slope: Tensor, into: _Sum) -> Tensor:
        slope = slope.flatten(2)
        into.add(slope @ rows.mT)
        return torch.bmm(weight.mT, slope).view_as(x)

    return _Sent(torch.bmm(weight, rows).unflatten(2, x.shape[2:]), back)


def _convolved(layer: nn.Conv2d) -> Layer[_Sent]:
    """A convolution of all channels, or of each by itself, whose window has a middle."""
    form = layer.stride, layer.padding, layer.dilation
    weight, groups = layer.weight, layer.groups
    turned = (weight if groups > 1 else weight.transpose(0, 1)).flip(2, 3).contiguous().detach()

    def gradients(slope: Tensor, x: Tensor) -> Tensor:
        g, a = (side.view(1, -1, *side.shape[2:]) for side in (slope, x))
        if layer.dilation == (2, 2) and not x.is_cuda:  # of each channel by itself, for which a CPU goes forward faster
            apart = (2, 2), (2, 2), (1, 1)  # the gradient's entries, by two pixels
            return _pushed(a, g.transpose(0, 1), apart, a.shape[1])
        if groups == 1 and x.is_cuda:
            return slope.flatten(2) @ input_patches(layer, x)[:, 0].mT
        each = weight.new_empty(len(x) * len(weight), *weight.shape[1:])  # the groups of all samples in one convolution
        return _pulled(g, a, each, form, len(x) * groups, (False, True, False))[1]

    def run(x: Tensor) -> _Sent:
        def back(slope: Tensor, into: _Sum) -> Tensor:
            slope = slope.contiguous()
            into.add(gradients(slope, x))
            if layer.stride == (1, 1):  # then the way back is a convolution, and those go forward faster
                return _pushed(slope, turned, form, groups)
            return _pulled(slope, x, weight, form, groups, (True, False, False))[0]

        return _Sent(_pushed(x, weight, form, groups), back)

    return run


def _pushed(x: Tensor, weight: Tensor, form: tuple[Any, ...], groups: int) -> Tensor:
    """A convolution of some stride, padding and dilation."""
    return torch.ops.aten.convolution(x, weight, None, *form, False, (0, 0), groups)  # type: ignore[no-any-return]


def _pulled(
    slope: Tensor, x: Tensor, weight: Tensor, form: tuple[Any, ...], groups: int, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of its input, weight and bias, those that are wanted."""
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        slope, x, weight, None, *form, False, (0, 0), groups, wanted
    )


def _group_norm(layer: nn.GroupNorm) -> Layer[_Sent]:
    """Group norm of one sample that has the groups of all, so that every sample has parameters of its own."""

    @functools.cache
    def repeated(samples: int) -> tuple[Tensor, Tensor]:
        return layer.weight.repeat(samples), layer.bias.repeat(samples)

    def run(x: Tensor) -> _Sent:
        weight, bias = repeated(len(x))
        form = 1, len(weight), x.shape[2:].numel(), len(x) * layer.num_groups
        y, *moments = torch.ops.aten.native_group_norm(x, weight, bias, *form, layer.eps)

        def back(slope: Tensor, into: _Sum) -> Tensor:
            found = torch.ops.aten.native_group_norm_backward(
                slope.contiguous(), x, *moments, weight, *form, (True, True, True)
            )
            for part in found[1:]:
                into.add(part)
            return found[0].view_as(x)  # type: ignore[no-any-return]

        return _Sent(y.view_as(x), back)

    return run
