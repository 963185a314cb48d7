"""What layers do while gradients are taken: the same as ever, in a way from which each sample's are found sooner.

A first convolution, the norm behind it and the max pooling behind that are for each sample one affine map of its
patches and a choice among them. Nothing before them moves, so their gradients need no more than the patches chosen:
the norm, whose own gradient would be one for every position, is left to the map's few weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from metabridge.models.batch_norm import BatchNorm
from metabridge.models.network import Params

StandIn = Callable[[Any, Tensor], Tensor]  # what a layer makes of its input

NORMS = (BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)


def cached(x: Tensor) -> bool:
    """Whether the device of `x` gains by small pieces that stay in its cache: a CPU. A GPU wants few launches."""
    return x.device.type == "cpu"


@contextlib.contextmanager
def standing_in(others: dict[nn.Module, StandIn]) -> Iterator[None]:
    """Let other functions of a layer and its input do what the layers do."""

    def bound(layer: nn.Module, function: StandIn) -> Callable[..., Tensor]:
        return lambda *inputs, **named: function(layer, *inputs, *named.values())

    own = {layer: vars(layer).get("forward") for layer in others}
    for layer, function in others.items():
        vars(layer)["forward"] = bound(layer, function)
    try:
        yield
    finally:
        for layer, forward in own.items():
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward


def window(layer: nn.MaxPool2d) -> list[list[int]]:
    """A pool's kernel size, stride, padding and dilation."""
    sides = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return [[side, side] if isinstance(side, int) else list(side) for side in sides]


def pooled(layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    """What a pool makes of `x`."""
    pool: Callable[..., Tensor] = torch.max_pool2d if x.ndim == 3 else _MaxPool.apply
    return pool(x, *window(layer), layer.ceil_mode)


class Picked(NamedTuple):
    """Max pooling of maps that are Va + v sample by sample: what it picks of which patches a, and V and v."""

    largest: Tensor  # (samples, channels, ...)
    places: Tensor  # (samples, channels, pooled positions)
    patches: Tensor  # (samples, positions, inputs)
    weight: Tensor
    bias: Tensor

    def pulled(self, slopes: Sequence[Tensor], params: Sequence[Tensor], step: int) -> list[Tensor]:
        """The gradients (samples, outputs, ...) of parameters of V and v, from what arrives at the largest values.

        That of V is the sum of the patches picked, each times what arrives. A GPU takes so many samples at a time.
        """
        if cached(self.patches):
            parts = [self._bag(*one) for one in zip(self.patches, self.places, *slopes)]  # one table stays in a cache
        else:
            parts = [self._product(slopes, slice(start, start + step)) for start in range(0, len(self.patches), step)]
        towards = torch.cat(parts, 1), torch.stack([slope.sum((2, 3)) for slope in slopes])

        def back(*towards: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad((self.weight, self.bias), params, towards)

        return [gradient.transpose(0, 1) for gradient in vmap(back)(*towards)]

    def _bag(self, table: Tensor, places: Tensor, *arriving: Tensor) -> Tensor:
        """The sums for one sample, (outputs, 1, channels, inputs)."""
        weights, many = torch.cat(arriving).flatten(1), places.repeat(len(arriving), 1)
        bag = F.embedding_bag(many, table, mode="sum", per_sample_weights=weights)
        return bag.view(len(arriving), 1, -1, bag.shape[1])

    def _product(self, slopes: Sequence[Tensor], place: slice) -> Tensor:
        """The sums for some samples, (outputs, samples, channels, inputs), by copies of the patches picked."""
        table = self.patches[place]
        first = torch.arange(len(table), dtype=torch.int, device=table.device).mul_(table.shape[1]).view(-1, 1, 1)
        chosen = F.embedding(self.places[place] + first, table.flatten(0, 1))
        arriving = torch.stack([slope[place].flatten(2) for slope in slopes], 2)
        return (arriving @ chosen).movedim(2, 0)


def picked(layer: nn.MaxPool2d, windows: Tensor, norm: Any, linear: Params, copies: Params) -> Picked:
    """What a pool picks of the normed maps of a convolution that sees `windows`.

    The patches' mean m is taken from them and added to the bias: W(a − m) + (Wm + b). What a group norm divides by
    is known from m and the covariance C, since the maps have the means Wm + b and the variances of W C Wᵀ. So V
    and v are functions of the parameters, given here as copies for each sample, and the maps are never normed.
    """
    weight, (table, m) = linear["weight"].flatten(2), _centred(windows)
    centre = (weight @ m).squeeze(-1) + linear.get("bias", 0.0)
    if isinstance(norm, nn.GroupNorm):
        lines = table.unflatten(1, windows.shape[4:])  # a product for each: a few long ones leave a GPU idle
        spread = (weight @ ((lines.mT @ lines).sum(1) / table.shape[1]) * weight).sum(-1)
        centres, spreads = (value.unflatten(1, (norm.num_groups, -1)) for value in (centre, spread))
        means = centres.mean(2, keepdim=True)
        variances = (spreads + (centres - means).square()).mean(2, keepdim=True)
        mean, variance = (value.expand_as(centres).flatten(1) for value in (means, variances))
    else:
        mean, variance = _fixed(norm)
    scale = copies["weight"] * torch.rsqrt(variance + norm.eps)
    shift = (centre - mean) * scale + copies.get("bias", 0.0)
    weight = weight * scale.unsqueeze(-1)
    if cached(table):
        maps = torch.baddbmm(shift.detach().unsqueeze(1), table, weight.detach().mT).mT
    else:
        maps = torch.baddbmm(shift.detach().unsqueeze(2), weight.detach(), table.mT)
    largest, places = _best(maps.unflatten(2, windows.shape[4:]), *window(layer), layer.ceil_mode)
    return Picked(largest, places.flatten(2).int(), table, weight, shift)


def _centred(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Patches less their mean, (samples, positions, inputs), and the mean, (samples, inputs, 1)."""
    if cached(windows):  # what lies side by side is copied before it is turned
        a = windows.flatten(1, 3).flatten(2)
        m = a.mean(-1, keepdim=True)
        return (a - m).mT.contiguous(), m
    m, turned = windows.mean((4, 5)), windows.permute(0, 4, 5, 1, 2, 3)
    table = torch.sub(turned, m[:, None, None], out=windows.new_empty(turned.shape))
    return table.flatten(3).flatten(1, 2), m.flatten(1).unsqueeze(2)


def _best(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    """The largest values in the windows, and where they are; on a CPU four times faster where channels are last."""
    if cached(x):
        x = x.contiguous(memory_format=torch.channels_last)
    y, places = torch.ops.aten.max_pool2d_with_indices(x, *window)
    return y.contiguous(), places.contiguous()


class _Back(torch.autograd.Function):
    """What a function makes of what arrives from several outputs, (outputs, samples, ...), at once under `vmap`."""

    @staticmethod
    def forward(pull: Callable[..., tuple[Tensor, ...]], g: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        return tuple(found.squeeze(0) for found in pull(g.unsqueeze(0), *kept))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], pull: Callable[..., Any], g: Tensor, *kept: Tensor) -> tuple[Any, ...]:
        found = pull(g.movedim(axes[1], 0), *kept)
        return found, (0,) * len(found)


class _MaxPool(torch.autograd.Function):
    """Max pooling that does not keep the maps themselves: only their shape is needed to pull a gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        y, places = _best(x, *window)
        ctx.save_for_backward(places)
        ctx.shape, ctx.count = x.shape, len(window)
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        def pull(g: Tensor, places: Tensor) -> tuple[Tensor]:
            to = g.new_zeros(len(g), *ctx.shape).flatten(3)
            to.scatter_add_(3, places.flatten(2).expand(len(g), -1, -1, -1), g.flatten(3))
            return (to.view(len(g), *ctx.shape),)

        (found,) = _Back.apply(pull, *slopes, *ctx.saved_tensors)
        return found, *(None,) * ctx.count


class _GroupNorm(torch.autograd.Function):
    """A group norm with a weight and a bias for each sample, in few passes over memory on the way back.

    With ĝ = Σ_p g_p x̂_p, which is the weight's gradient, and ḡ = Σ_p g_p, the bias's, that of x is
    σ⁻¹(wg − mean(wḡ) − x̂ mean(wĝ)), means being over a group: an affine function of g and x, channel by channel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, eps: float, weight: Tensor, bias: Tensor) -> Tensor:
        samples, channels = weight.shape
        sizes = 1, samples * channels, x[0, 0].numel(), samples * groups
        y, mean, scale = torch.native_group_norm(x.contiguous(), weight.flatten(), bias.flatten(), *sizes, eps)
        ctx.save_for_backward(x, weight, mean.view(samples, groups, 1), scale.view(samples, groups, 1))
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        def pull(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
            shape, w = g.shape, weight.view(*mean.shape[:2], -1)
            g, x, share = g.reshape(len(g), *w.shape, -1), x.reshape(*w.shape, -1), scale / (-x[0].numel() / w.shape[1])
            sums = torch.stack([torch.einsum("o...p,...p->o...", g, x), g.sum(-1)])
            towards_weight, towards_bias = sums
            towards_weight.addcmul_(mean, towards_bias, value=-1).mul_(scale)
            of_both = (w * sums).sum(-1, keepdim=True)
            of_x = of_both[0] * (share * scale)
            shift = (of_both[1] * share).addcmul_(of_x, mean, value=-1)
            of_g, of_x, shift = (value.unsqueeze(-1) for value in (w * scale, of_x, shift))
            towards_x = torch.addcmul(shift, of_x, x).addcmul_(of_g, g)
            return towards_x.view(shape), towards_weight.flatten(2), towards_bias.flatten(2)

        towards_x, towards_weight, towards_bias = _Back.apply(pull, *slopes, *ctx.saved_tensors)
        return towards_x, None, None, towards_weight, towards_bias


def normed(layer: Any, x: Tensor, copies: Params) -> Tensor:
    """What a norm makes of `x` with a weight and a bias for each sample."""
    if isinstance(layer, nn.GroupNorm) and len(copies) == 2 and not cached(x):
        return _GroupNorm.apply(x, layer.num_groups, layer.eps, *copies.values())  # type: ignore[no-any-return]
    if isinstance(layer, nn.GroupNorm):  # each sample has groups of its own
        flat = {role: value.flatten() for role, value in copies.items()}
        return F.group_norm(x.reshape(1, -1, *x.shape[2:]), len(x) * layer.num_groups, **flat, eps=layer.eps).view_as(x)
    if isinstance(layer, nn.LayerNorm):
        y = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        shape = len(x), *(1,) * (x.ndim - 1 - len(layer.normalized_shape)), *layer.normalized_shape
    else:
        y = F.batch_norm(x, *_fixed(layer), eps=layer.eps)
        shape = *x.shape[:2], *(1,) * (x.ndim - 2)
    y = y * copies["weight"].view(shape)
    return y + copies["bias"].view(shape) if "bias" in copies else y


def _fixed(layer: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of a batch norm in evaluation mode."""
    if isinstance(layer, BatchNorm):
        return layer.mean, layer.variance
    return layer.running_mean, layer.running_var
