"""Estimates of the time and memory that a network's kernel needs, from a forward and backward pass of one sample."""

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
        parameters: Sizes and costs of the parameters whose gradients are computed.
        generic_names: Names of the parameters that need `vmap` of `jacrev`.
        batched_backward: Whether a backward pass can compute gradients of several outputs.
        outputs: Number of gradients per sample, 1 for the sum of the outputs.
        multiplications: Number of multiplications in a forward pass of one sample.
        graph_bytes: Bytes per sample that a forward pass saves for the backward pass.
        pass_bytes: Peak of the other bytes per sample in forward and backward pass, including gradients at all layers.
        workspace_bytes: Bytes per sample for computing the gradients of the layer with the largest workspace.
        itemsize: Bytes per number.
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
    """Record the bytes of the tensors, other than parameters, that forward passes in this context save for backward.

    The list is filled when the context ends.
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
    cotangent: Tensor,
    exact_gradients: Mapping[str, Tensor | None],
    outputs: int,
    graph_bytes: int,
) -> NetworkProfile:
    """Estimate the costs of a network at one sample, and find the parameters that need `vmap` of `jacrev`.

    These are the parameters whose layer-by-layer gradients differ from the exact ones, because a parameter is also used
    outside its layer, or its layer processes samples in another number or order. Parameters of layers that are not
    supported need it too, even if their gradient is zero at this sample, unless the outputs do not depend on them (the
    exact gradient is None).

    Args:
        gradients: The gradients to be computed.
        y: Outputs for one sample.
        calls: The layer calls in the forward pass of this sample.
        pair: Two samples, the first of which has the outputs `y`.
        cotangent: Cotangent of `y`.
        exact_gradients: Exact gradient of every parameter for this cotangent.
        outputs: Number of gradients per sample.
        graph_bytes: Bytes that the forward pass has saved for the backward pass.

    Returns:
        The sizes and costs of the network.
    """
    names = [name for name in gradients.params if name in gradients.names]
    calls = _with_parameters(calls, gradients.names)
    edges = [call.edge for call in calls]
    batched_backward = bool(edges) and outputs > 1 and not on_cpu(y) and _supports_batched_backward(edges, y)
    calls_by_name: dict[str, list[LayerCall]] = {name: [] for name in names}
    for call in calls:
        for name in call.roles:
            calls_by_name[name].append(call)
    layer_gradients = _gradients_by_layer(gradients, pair, cotangent)
    exact = {name: value for name in names if (value := exact_gradients[name]) is not None}
    comparisons = {name: (value, exact.get(name, torch.zeros_like(value))) for name, value in layer_gradients.items()}
    generic_names = frozenset([*_mismatched(comparisons), *(exact.keys() - layer_gradients.keys())])
    parameters = tuple(
        _parameter_info(name, gradients.params[name], calls_by_name[name], name in generic_names) for name in names
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
        itemsize * max((call.workspace_numbers(outputs) for call in calls), default=0),
        itemsize,
    )


def _with_parameters(calls: list[LayerCall], names: frozenset[str]) -> list[LayerCall]:
    """Return the calls of layers with some of the named parameters, with the roles of only these parameters."""
    call_roles = [{name: role for name, role in call.roles.items() if name in names} for call in calls]
    return [call._replace(roles=roles) for call, roles in zip(calls, call_roles) if roles]


def _gradients_by_layer(gradients: PerSampleGradients, pair: Tensor, cotangent: Tensor) -> Params:
    """Return the layer-by-layer gradients for the first of two samples.

    Parameters of which a layer call does not receive two rows are left out.
    """
    y, _, calls = gradients.trace(pair)
    calls = _with_parameters(calls, gradients.names)
    result: Params = {}
    edges = [call.edge for call in calls]
    grads_of_calls = gradients_at(edges, y, cotangent.expand_as(y).unsqueeze(0), batched=False) if calls else []
    for call, grads in zip(calls, grads_of_calls):
        if grads is not None and len(call.input) == len(pair):
            for name, gradient in next(per_sample_gradients(call, grads, step=len(pair)))[1].items():
                first_gradient = gradient[0].reshape_as(gradients.params[name])
                result[name] = result[name] + first_gradient if name in result else first_gradient
    incomplete = {name for call in calls if len(call.input) != len(pair) for name in call.roles}
    return {name: value for name, value in result.items() if name not in incomplete}


def _supports_batched_backward(edges: list[GradientEdge], y: Tensor) -> bool:
    """Return whether a backward pass can compute gradients of several outputs; some operations have no vmap rule."""
    try:
        gradients_at(edges, y, y.detach().unsqueeze(0), batched=True, retain_graph=True)
    except RuntimeError:
        return False
    return True


def _mismatched(comparisons: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Return the names of pairs of tensors that differ, with a single transfer from the device."""
    if not comparisons:
        return []
    differences = torch.stack([(value - exact).abs().max() for value, exact in comparisons.values()])
    scales = torch.stack([exact.abs().max() for _, exact in comparisons.values()])
    return [name for name, is_close in zip(comparisons, (differences <= 1e-3 * scales).tolist()) if not is_close]


def _forward_numbers(call: LayerCall) -> int:
    """Return how many numbers a `PooledConv` holds in its forward pass: feature maps, patches and centered patches.

    Other calls hold nothing else than what the graph saves, so the result is 0 for them.
    """
    if not call.pooled:
        return 0
    conv = call.pooled[0]
    map_numbers = len(conv.patches[0]) * conv.weight.shape[1]
    return call.input.numel() + 4 * call.output.numel() + 2 * (conv.patches.numel() + map_numbers)


def _backward_numbers(calls: list[LayerCall], outputs: int, batched: bool) -> int:
    """Return how many numbers the backward pass holds: gradients at all calls, and feature maps at the largest call."""
    gradient_numbers = outputs * sum(call.output.numel() for call in calls)
    copies = 2 * math.ceil(outputs / GPU_BACKWARD_PASSES) if batched else 4
    return gradient_numbers + max((call.input.numel() + copies * call.output.numel() for call in calls), default=0)


def _parameter_info(name: str, value: Tensor, calls: list[LayerCall], generic: bool) -> ParameterInfo:
    out_features = value.shape[0] if value.ndim else 1
    positions = [call.output.numel() // out_features for call in calls]
    info = ParameterInfo(name, value.numel(), value.numel() * (sum(positions) or 1))
    if generic or len(calls) != 1 or value.ndim < 2 or not calls[0].is_linear:
        return info
    if getattr(calls[0].layer, "groups", 1) > 1:
        return info
    in_features = value.numel() // out_features
    return replace(info, in_features=in_features, out_features=out_features, positions=positions[0])
