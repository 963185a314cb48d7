"""The contract of a model: `features`, any module, followed by a linear `head`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metabridge.autodiff import inside_transform
from metabridge.errors import InputError, check_count, describe
from metabridge.models import task_folding
from metabridge.models.batch_norm import BatchNorm, Statistics, group_count, replace_batch_norm, replace_layers
from metabridge.models.functional_call import bind_params

Params = dict[str, Tensor]
P = ParamSpec("P")


class Network(nn.Module):
    """Features φ_θ(x) followed by a linear head w.

    Only batch norm may mix the points of a batch. Methods that adapt the head alone compute the features of one or of
    many tasks in a batch, so a module that mixes points in another way gives results that depend on the engine.

    >>> net = Network(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 5))
    >>> net(torch.randn(3, 4)).shape
    torch.Size([3, 5])
    """

    recipe: dict[str, object] | None = None  # which builder made it, with which options; None if made by hand

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in features.modules()):
            raise InputError(
                "features holds PyTorch batch norms, whose second-order gradients are wrong under vmap. "
                "Use Network.around(features, example, outputs, statistics=...), which replaces them in a copy."
            )
        self.features, self.head = features, head

    @classmethod
    def around(
        cls, features: nn.Module, example: Tensor, outputs: int, *, statistics: Statistics = "batch", seed: int = 0
    ) -> Network:
        """Put a new head on a copy of any module that maps `example` to (points, dimension).

        The head has the dtype and the device of the features. What the module shares stays shared in the copy, and
        parameters with `requires_grad=False` stay frozen: see `frozen`.

        >>> Network.around(nn.Flatten(), torch.zeros(2, 3, 4, 4), outputs=5).head
        Linear(in_features=48, out_features=5, bias=True)
        """
        features = replace_batch_norm(features, statistics)
        try:
            with seeded(seed), torch.no_grad():  # dropout draws
                result = features(example)
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"features cannot compute the example, {describe(example)} on {example.device} ({error}). "
                "Give an example of the shape, dtype and device that features takes."
            ) from error
        given = describe(result) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        if not isinstance(result, Tensor) or result.ndim != 2 or len(result) != len(example):
            raise InputError(
                f"features maps an example of shape {tuple(example.shape)} to {given}, but must give a tensor of shape "
                f"({len(example)}, dimension). Add nn.Flatten() or global pooling at its end."
            )
        with seeded(seed):
            head = nn.Linear(result.shape[1], outputs)
        return cls(features, head.to(result.device, result.dtype if result.is_floating_point() else None))

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs for `x`."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


def frozen_names(net: nn.Module) -> frozenset[str]:
    """Return the names of the parameters with `requires_grad=False`, which are neither trained nor adapted.

    >>> net = Network(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 5))
    >>> sorted(frozen_names(net))
    ['features.bias', 'features.weight']
    """
    return frozenset(name for name, value in net.named_parameters() if not value.requires_grad)


def call_with_params(module: nn.Module, params: Params, x: Tensor) -> Any:
    """Return `module(x)` with `params`, by name, in place of its own.

    A parameter that several layers share has one name here, the first, and is replaced in all of them.
    `torch.func.functional_call` does so too, but if one layer has two names, it leaves `params` in it after the call.
    The module is changed for the time of the call, which hooks on its layers need: threads must not share it.
    """
    slots: dict[int, list[str]] = {}
    for path, layer in module.named_modules():
        for name, value in layer._parameters.items():
            if value is not None:
                slots.setdefault(id(value), []).append(f"{path}.{name}" if path else name)
    shared = {other: params[name] for name, *others in slots.values() if name in params for other in others}
    return functional_call(module, params | shared, (x,), tie_weights=False)


def body_params(params: Params) -> Params:
    """Return the parameters of `features`, by their names in it."""
    prefix = "features."
    return {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}


def apply_features(net: Network, params: Params, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """φ_θ(x) with the `features.` part of `params`, computed in `dtype` and returned in x's own.

    Integers, such as indices of an embedding, are never cast; their features have the dtype of the head. In training
    a forward pass may change buffers, but leaves those of `net` as they are.
    """
    body = body_params(params)
    given = x.dtype if x.is_floating_point() else net.head.weight.dtype
    # PyTorch's convolutions and poolings are faster with the channels last on a CPU, and on a GPU in low precision
    low = dtype is not None and dtype != given
    if x.ndim == 4 and not inside_transform() and (low or x.device.type == "cpu"):
        x = x.to(memory_format=torch.channels_last)
    if low:
        x = x.to(dtype) if x.is_floating_point() else x
        body = _lowered(net.features, body, dtype)
    with task_folding.Folding() if inside_transform() and task_folding.serves(x) else contextlib.nullcontext():
        return bind_params(net.features, body, copy_buffers=net.training)(x).to(given)  # type: ignore[no-any-return]


@torch.no_grad()
def update_buffers(net: Network, params: Params, x: Tensor) -> None:
    """Change the buffers of `net` as a forward pass on `x` does in training."""
    features = bind_params(net.features, body_params(params))
    features(x.clone())  # which it may change
    moved = dict(features.named_buffers())
    for name, buffer in net.features.named_buffers():
        if moved[name] is not buffer:  # replaced by the layer rather than changed in place
            buffer.copy_(moved[name])


def _lowered(features: nn.Module, params: Params, dtype: torch.dtype | None) -> Params:
    if inside_transform() or not params:
        norms = [path for path, layer in features.named_modules() if isinstance(layer, BatchNorm)]
        own = {f"{path}.{name}" for path in norms for name in ("weight", "bias")}  # which a norm would raise again
        return {name: value if name in own else value.to(dtype) for name, value in params.items()}
    return dict(zip(params, _Cast.apply(dtype, *params.values())))


class _Cast(torch.autograd.Function):
    """Cast many tensors, and their gradients back, in a few kernels instead of one for each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        return _cast(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # second-order gradients go through the cast as well
            return None, *(slope.to(ctx.dtype) for slope in slopes)
        return None, *_cast(slopes, ctx.dtype)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    formats = [torch.channels_last if tensor.ndim == 4 else torch.preserve_format for tensor in tensors]
    cast = tuple(torch.empty_like(tensor, dtype=dtype, memory_format=form) for tensor, form in zip(tensors, formats))
    torch._foreach_copy_(cast, tensors)
    return cast


def apply_head(params: Params, features: Tensor) -> Tensor:
    """The head's outputs for features; a head without `head.bias` has none."""
    return F.linear(features, params["head.weight"], params.get("head.bias"))


def records_recipe(build: Callable[P, Network]) -> Callable[P, Network]:
    """Let a builder note on each network how it was made, so that a saved run can make it again."""

    @functools.wraps(build)
    def builder(*args: P.args, **options: P.kwargs) -> Network:
        net = build(*args, **options)
        given = inspect.signature(build).bind(*args, **options)
        given.apply_defaults()
        plain = {name: asdict(value) if is_dataclass(value) else value for name, value in given.arguments.items()}  # type: ignore[arg-type]
        net.recipe = {"model": build.__name__, **plain}
        return net

    return builder


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial weights from `seed`, leaving the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def with_group_norm(net: nn.Module, groups: int = 16) -> nn.Module:
    """Return a copy of `net` whose batch norms are group norms of min(groups, channels) groups, scales and shifts kept.

    It is another network: each sample is normalised by itself, over groups of channels. Where the channels
    are no multiple of that number, the groups are the largest number below it that divides them.

    >>> with_group_norm(nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24)))[1].num_groups
    12
    """
    check_count("groups", groups)
    net = copy.deepcopy(net)
    if isinstance(net, Network):
        net.recipe = None  # what would be built from it has batch norms
    replace_layers(net, BatchNorm | nn.modules.batchnorm._BatchNorm, lambda layer: _group_norm(layer, groups))
    return net


def _group_norm(layer: BatchNorm | nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.channels if isinstance(layer, BatchNorm) else layer.num_features
    norm = nn.GroupNorm(group_count(channels, groups), channels, eps=layer.eps)
    norm.weight, norm.bias = layer.weight, layer.bias  # type: ignore[assignment]
    norm.affine = layer.weight is not None
    return norm.train(layer.training)
