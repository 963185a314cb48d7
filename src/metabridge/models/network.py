"""`Network`, which consists of `features` (any module) and a linear `head`, and functions that call it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metabridge.autodiff import inside_transform
from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError, check_count, describe
from metabridge.models import task_folding
from metabridge.models.batch_norm import BatchNorm, Statistics, group_count, replace_batch_norm, replace_layers
from metabridge.models.functional_call import bind_params

Params = dict[str, Tensor]
P = ParamSpec("P")


class Network(nn.Module):
    """A network that consists of a feature extractor φ_θ and a linear head.

    `features` must compute the features of each input independently of the other inputs of the batch, except in batch
    norms. Otherwise the results depend on the mode of the `Engine`, such as "loop" or "vectorized", because methods
    that adapt only the head may compute the features of several tasks in one batch.

    Args:
        features: Module that maps n inputs to features of shape (n, dimension).
        head: Linear layer that maps features to outputs.

    Raises:
        InputError: If `features` contains batch norms of PyTorch.

    >>> net = Network(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 5))
    >>> net(torch.randn(3, 4)).shape
    torch.Size([3, 5])
    >>> net
    Network(85 parameters, 5 outputs)
    """

    recipe: dict[str, object] | None = None  # name and options of the builder; None if no builder built it
    decode_options: DecodeOptions | None = None  # how image files become inputs; None if training determines it

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in features.modules()):
            raise InputError(
                "features contains PyTorch batch norms, whose second-order gradients are wrong under vmap. "
                "Use Network.around(features, example, outputs, statistics=...), which replaces them in a copy."
            )
        self.features, self.head = features, head

    def __repr__(self) -> str:
        model = "" if self.recipe is None else f"{self.recipe['model']}, "
        count = sum(value.numel() for value in self.parameters())
        return f"{type(self).__name__}({model}{count:,} parameters, {self.head.out_features} outputs)"

    @classmethod
    def around(
        cls, features: nn.Module, example: Tensor, outputs: int, *, statistics: Statistics = "batch", seed: int = 0
    ) -> Network:
        """Build a network from a copy of any module and a new head.

        In the copy, `BatchNorm` layers replace PyTorch's batch norms. Shared parameters stay shared, and parameters
        with `requires_grad=False` stay frozen. The head gets the dtype and the device of the features.

        Args:
            features: Module that maps n inputs to features of shape (n, dimension).
            example: A batch of inputs, on which `features` is called to determine the dimension.
            outputs: Number of outputs of the head.
            statistics: Statistics of the batch norms, see `BatchNorm`.
            seed: Seed of the head's initial weights.

        Returns:
            The network.

        Raises:
            InputError: If `features` fails on the example, or does not return features of shape (n, dimension).

        >>> Network.around(nn.Flatten(), torch.zeros(2, 3, 4, 4), outputs=5).head
        Linear(in_features=48, out_features=5, bias=True)
        """
        features = replace_batch_norm(features, statistics)
        try:
            with seeded(seed), torch.no_grad():  # seeded, because dropout draws random numbers
                result = features(example)
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"features cannot process the example, {describe(example)} on {example.device} ({error}). "
                "Pass an example with the shape, dtype and device that features expects."
            ) from error
        description = describe(result) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        if not isinstance(result, Tensor) or result.ndim != 2 or len(result) != len(example):
            raise InputError(
                f"features maps an example of shape {tuple(example.shape)} to {description}, "
                f"but must return a tensor of shape ({len(example)}, dimension). "
                "Add nn.Flatten() or global pooling at its end."
            )
        with seeded(seed):
            head = nn.Linear(result.shape[1], outputs)
        return cls(features, head.to(result.device, result.dtype if result.is_floating_point() else None))

    @property
    def num_feature_parameters(self) -> int:
        """Number of elements of all parameters of `features`.

        >>> Network(nn.Linear(4, 8), nn.Linear(8, 5)).num_feature_parameters
        40
        """
        return sum(value.numel() for value in self.features.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs of the network.

        Args:
            x: Batch of inputs.

        Returns:
            Outputs of shape (n, outputs) for n inputs.
        """
        return self.head(self.features(x))  # type: ignore[no-any-return]


def frozen_names(net: nn.Module) -> frozenset[str]:
    """Return the names of the parameters with `requires_grad=False`, which methods neither train nor adapt.

    >>> net = Network(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 5))
    >>> sorted(frozen_names(net))
    ['features.bias', 'features.weight']
    """
    return frozenset(name for name, value in net.named_parameters() if not value.requires_grad)


def call_with_params(module: nn.Module, params: Params, x: Tensor) -> Any:
    """Return `module(x)`, with the tensors in `params` in place of the module's parameters of the same names.

    If several layers share a parameter, `params` contains only its first name, and the parameter is replaced in all
    layers. All its names are passed to `torch.func.functional_call`, which otherwise leaves the new parameters in the
    module if a layer has two names. Hooks of the layers run. Threads must not share the module, because it is changed
    during the call.
    """
    names_by_id: dict[int, list[str]] = {}
    for path, layer in module.named_modules():
        for name, value in layer._parameters.items():
            if value is not None:
                names_by_id.setdefault(id(value), []).append(f"{path}.{name}" if path else name)
    aliases = {alias: params[name] for name, *rest in names_by_id.values() if name in params for alias in rest}
    return functional_call(module, params | aliases, (x,), tie_weights=False)


def body_params(params: Params) -> Params:
    """Return the parameters of `features`, without "features." at the start of their names."""
    prefix = "features."
    return {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}


def apply_features(net: Network, params: Params, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the features φ_θ(x) with the parameters θ in `params`.

    They are computed in `dtype` (default: the dtypes of x and the parameters) and returned in the dtype of x. If x
    contains integers, such as indices of an embedding, x is not cast, and the features are returned in the dtype of the
    head. The buffers of `net` do not change, even in training mode.
    """
    body = body_params(params)
    result_dtype = x.dtype if x.is_floating_point() else net.head.weight.dtype
    # convolution and pooling layers are faster in channels-last format on a CPU, and on a GPU in low precision
    low_precision = dtype is not None and dtype != result_dtype
    if x.ndim == 4 and not inside_transform() and (low_precision or x.device.type == "cpu"):
        x = x.to(memory_format=torch.channels_last)
    if low_precision:
        x = x.to(dtype) if x.is_floating_point() else x
        body = _cast_params(net.features, body, dtype)
    with task_folding.Folding() if inside_transform() and task_folding.is_faster(x) else contextlib.nullcontext():
        return bind_params(net.features, body, copy_buffers=net.training)(x).to(result_dtype)  # type: ignore[no-any-return]


@torch.no_grad()
def update_buffers(net: Network, params: Params, x: Tensor) -> None:
    """Change the buffers of `net` in the same way as a forward pass on `x` with the parameters `params`."""
    features = bind_params(net.features, body_params(params))
    features(x.clone())  # the forward pass may change its input
    new_buffers = dict(features.named_buffers())
    for name, buffer in net.features.named_buffers():
        if new_buffers[name] is not buffer:  # the layer replaced the buffer instead of changing it in place
            buffer.copy_(new_buffers[name])


def _cast_params(features: nn.Module, params: Params, dtype: torch.dtype | None) -> Params:
    if inside_transform() or not params:  # transforms such as `vmap` do not support `_Cast`
        # batch norms compute in float32 and do not need their parameters in low precision
        norm_paths = [path for path, layer in features.named_modules() if isinstance(layer, BatchNorm)]
        norm_params = {f"{path}.{name}" for path in norm_paths for name in ("weight", "bias")}
        return {name: value if name in norm_params else value.to(dtype) for name, value in params.items()}
    results: Params = {}
    for requires_grad in (True, False):  # if one input of `_Cast` requires gradients, all its outputs do
        group = {name: value for name, value in params.items() if value.requires_grad == requires_grad}
        if group:
            results |= zip(group, _Cast.apply(dtype, *group.values()))
    return results


class _Cast(torch.autograd.Function):
    """Cast many tensors, and their gradients, in a few kernels instead of one per tensor."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        return _cast(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the gradients must be differentiable
            return None, *(grad.to(ctx.dtype) for grad in grads)
        return None, *_cast(grads, ctx.dtype)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    formats = [torch.channels_last if tensor.ndim == 4 else torch.preserve_format for tensor in tensors]
    results = tuple(
        torch.empty_like(tensor, dtype=dtype, memory_format=memory_format)
        for tensor, memory_format in zip(tensors, formats)
    )
    torch._foreach_copy_(results, tensors)
    return results


def apply_head(params: Params, features: Tensor) -> Tensor:
    """Return the outputs of the head for `features`, with the parameters "head.weight" and, if present, "head.bias"."""
    return F.linear(features, params["head.weight"], params.get("head.bias"))


def stores_build_arguments(build: Callable[P, Network]) -> Callable[P, Network]:
    """Decorate a builder so that it stores its name and arguments in the `recipe` of the network.

    `models.build(**net.recipe)` builds the network again.
    """

    @functools.wraps(build)
    def builder(*args: P.args, **options: P.kwargs) -> Network:
        net = build(*args, **options)
        bound = inspect.signature(build).bind(*args, **options)
        bound.apply_defaults()
        arguments = bound.arguments.items()
        plain_arguments = {name: _as_plain(value) for name, value in arguments}
        # a builder may store what it used in place of arguments that are None
        net.recipe = {"model": build.__name__, **plain_arguments, **(net.recipe or {})}
        return net

    return builder


def _as_plain(value: Any) -> Any:
    """Convert an argument to a value that JSON can store."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random generator of the CPU inside the context, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also seed those of all GPUs, permanently
        yield


def with_group_norm(net: nn.Module, groups: int = 16) -> nn.Module:
    """Return a copy of `net` in which group norms with the same weights and biases replace the batch norms.

    The copy computes a different function: it normalizes each input separately, over groups of channels.

    Args:
        net: Any module, which is not changed.
        groups: Maximum number of groups. Each layer gets the largest divisor of its number of channels up to `groups`.

    Returns:
        The copy.

    Raises:
        InputError: If `groups` is not a positive integer.

    >>> with_group_norm(nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24)))[1].num_groups
    12
    """
    check_count("groups", groups)
    net = copy.deepcopy(net)
    if isinstance(net, Network):
        net.recipe = None  # the builder would build batch norms
    replace_layers(net, BatchNorm | nn.modules.batchnorm._BatchNorm, lambda layer: _group_norm(layer, groups))
    return net


def _group_norm(layer: BatchNorm | nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.channels if isinstance(layer, BatchNorm) else layer.num_features
    norm = nn.GroupNorm(group_count(channels, groups), channels, eps=layer.eps)
    norm.weight, norm.bias = layer.weight, layer.bias  # type: ignore[assignment]
    norm.affine = layer.weight is not None
    return norm.train(layer.training)
