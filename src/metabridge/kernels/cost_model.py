"""What the kernel of a network costs in time and memory, measured in a forward and backward pass of one sample."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from metabridge.kernels.jacobian import GPU_BACKWARD_PASSES, ParameterInfo, PerSampleGradients, gradients_at
from metabridge.kernels.layer_calls import LayerCall, per_sample_gradients
from metabridge.kernels.layer_overrides import on_cpu
from metabridge.models.network import Params


class NetworkProfile(NamedTuple):
    """Sizes and costs of a network's per-sample gradients.

    Args:
        parameters: Size and cost of every parameter whose gradient is computed.
        generic_names: Names of the parameters that need `vmap` of `jacrev`.
        batched_backward: Whether a backward pass can take several outputs.
        outputs: Number of gradients per sample, 1 for the sum of the outputs.
        multiplications: Multiplications in a forward pass.
        graph_bytes: Bytes that a forward pass saves for the backward pass.
        pass_bytes: Peak of the other bytes held in a forward and backward pass, including gradients at every layer.
        workspace_bytes: Bytes held while the gradients of the largest layer are computed.
        itemsize: Bytes of one number.
    """

    parameters: tuple[ParameterInfo, ...]
    generic_names: frozenset[str]
    batched_backward: bool
    outputs: int
    multiplications: int
    graph_bytes: int
    pass_bytes: int
    workspace_bytes: int
    itemsize: int


@contextlib.contextmanager
def record_saved_bytes(params: Params) -> Iterator[list[int]]:
    """Record the sizes of tensors other than parameters that forward passes inside the context save for backward.

    The list is filled at the end of the context.
    """
    parameter_pointers = {value.data_ptr() for value in params.values()}
    sizes: dict[int, int] = {}
    result: list[int] = []

    def pack(value: Tensor) -> Tensor:
        if value.data_ptr() not in parameter_pointers:
            sizes[value.data_ptr()] = max(value.nbytes, sizes.get(value.data_ptr(), 0))
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield result
    result.extend(sizes.values())


def profile_network(
    gradients: PerSampleGradients,
    y: Tensor,
    calls: list[LayerCall],
    pair: Tensor,
    seed: Tensor,
    exact: Mapping[str, Tensor | None],
    outputs: int,
    graph_bytes: int,
) -> NetworkProfile:
    """Measure every parameter at one sample, and find the parameters whose layer-by-layer gradients are not exact.

    Gradients differ from the exact ones if a parameter is also used in ways other than by its layer, or if its layer
    sees samples in another number or order. A parameter without a known layer is not exact either, even if its
    gradient is zero at this sample, unless the outputs do not depend on it (its exact gradient is None).

    Args:
        gradients: The gradients to be computed.
        y: Outputs for one sample.
        calls: The layer calls in its forward pass.
        pair: Two samples, the one of `y` first.
        seed: Cotangent of the first sample's outputs.
        exact: Exact gradient of every parameter for this cotangent.
        outputs: Number of gradients per sample.
        graph_bytes: Bytes that the forward pass has saved.
    """
    names = [name for name in gradients.params if name in gradients.names]
    calls = _with_parameters(calls, gradients.names)
    edges = [call.edge for call in calls]
    batched_backward = bool(edges) and outputs > 1 and not on_cpu(y) and _supports_batched_backward(edges, y)
    calls_of: dict[str, list[LayerCall]] = {name: [] for name in names}
    for call in calls:
        for name in call.roles:
            calls_of[name].append(call)
    by_layer = _gradients_by_layer(gradients, pair, seed)
    used = {name: value for name in names if (value := exact[name]) is not None}
    pairs = {
        name: (by_layer[name], used.get(name, torch.zeros_like(by_layer[name]))) for name in names if name in by_layer
    }
    generic_names = frozenset([*_mismatched(pairs), *(used.keys() - by_layer.keys())])
    parameters = tuple(
        _parameter_info(name, gradients.params[name], calls_of[name], name in generic_names) for name in names
    )
    itemsize = y.element_size()
    pooled_bytes = sum(call.pooled[0].patches.nbytes + call.pooled[0].argmax.nbytes for call in calls if call.pooled)
    return NetworkProfile(
        parameters,
        generic_names,
        batched_backward,
        outputs,
        sum(info.multiplications for info in parameters),
        graph_bytes + pooled_bytes,
        itemsize * max(_backward_numbers(calls, outputs, batched_backward), *map(_forward_numbers, calls), 0),
        itemsize * max((call.workspace(outputs) for call in calls), default=0),
        itemsize,
    )


def _with_parameters(calls: list[LayerCall], names: frozenset[str]) -> list[LayerCall]:
    """Return the calls that have some of the named parameters, with the roles of these alone."""
    roles_of_calls = [{name: role for name, role in call.roles.items() if name in names} for call in calls]
    return [call._replace(roles=roles) for call, roles in zip(calls, roles_of_calls) if roles]


def _gradients_by_layer(gradients: PerSampleGradients, pair: Tensor, seed: Tensor) -> Params:
    """Return the layer-by-layer gradients for the first of two samples, if a parameter's calls all see both."""
    y, _, calls = gradients.trace(pair)
    calls = _with_parameters(calls, gradients.names)
    result: Params = {}
    grads_of_calls = (
        gradients_at([call.edge for call in calls], y, seed.expand_as(y).unsqueeze(0), batched=False) if calls else []
    )
    for call, grads in zip(calls, grads_of_calls):
        if grads is not None and len(call.input) == len(pair):
            for name, gradient in next(per_sample_gradients(call, grads, step=len(pair)))[1].items():
                first = gradient[0].reshape_as(gradients.params[name])
                result[name] = result[name] + first if name in result else first
    incomplete = {name for call in calls if len(call.input) != len(pair) for name in call.roles}
    return {name: value for name, value in result.items() if name not in incomplete}


def _supports_batched_backward(edges: list[GradientEdge], y: Tensor) -> bool:
    """Return whether a backward pass can take several outputs; some operations have no rule for it."""
    try:
        gradients_at(edges, y, y.detach().unsqueeze(0), batched=True, retain_graph=True)
    except RuntimeError:
        return False
    return True


def _mismatched(pairs: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Return the names of pairs that differ, with a single transfer from the device."""
    if not pairs:
        return []
    differences = torch.stack([(value - exact).abs().max() for value, exact in pairs.values()])
    scales = torch.stack([exact.abs().max() for _, exact in pairs.values()])
    return [name for name, close in zip(pairs, (differences <= 1e-3 * scales).tolist()) if not close]


def _forward_numbers(call: LayerCall) -> int:
    """Return the count of numbers held while layers are computed together: maps, patches and centered patches."""
    if not call.pooled:
        return 0
    conv = call.pooled[0]
    maps = len(conv.patches[0]) * conv.weight.shape[1]
    return call.input.numel() + 4 * call.output.numel() + 2 * (conv.patches.numel() + maps)


def _backward_numbers(calls: list[LayerCall], outputs: int, batched: bool) -> int:
    """Return the count of numbers held in the backward pass: gradients at every call, and maps around the largest."""
    gradients = outputs * sum(call.output.numel() for call in calls)
    copies = 2 * math.ceil(outputs / GPU_BACKWARD_PASSES) if batched else 4
    return gradients + max((call.input.numel() + copies * call.output.numel() for call in calls), default=0)


def _parameter_info(name: str, value: Tensor, calls: list[LayerCall], generic: bool) -> ParameterInfo:
    rows = value.shape[0] if value.ndim else 1
    positions = [call.output.numel() // rows for call in calls]
    info = ParameterInfo(name, value.numel(), value.numel() * (sum(positions) or 1))
    if generic or len(calls) != 1 or value.ndim < 2 or not calls[0].is_linear:
        return info
    if getattr(calls[0].layer, "groups", 1) > 1:
        return info
    return replace(info, inputs=value.numel() // rows, outputs=rows, positions=positions[0])
