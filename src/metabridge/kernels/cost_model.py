"""Estimate the time and memory for computing a network's kernel, from a forward and backward pass of one sample."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from metabridge.kernels.jacobian import BATCHED_BACKWARD_PASSES, ParameterInfo, PerSampleGradients, gradients_at
from metabridge.kernels.layer_calls import LayerCall, per_sample_gradients
from metabridge.kernels.layer_overrides import on_cpu
from metabridge.models.network import Params


class NetworkProfile(NamedTuple):
    """Sizes and costs of a network's per-sample gradients.

    Args:
        parameters: Sizes and costs of the parameters whose gradients are computed.
        generic_names: Names of the parameters whose gradients cannot be computed layer by layer, but need `vmap` of
            `jacrev`.
        batched_backward: Whether one backward pass can compute the gradients of several outputs.
        gradients_per_sample: Number of gradients per sample: the number of outputs, or 1 if the outputs are summed.
        multiplications: Number of multiplications in a forward pass of one sample.
        graph_bytes: Bytes per sample that a forward pass saves for the backward pass.
        transient_bytes: Peak memory per sample of the forward and backward pass beyond `graph_bytes`, in bytes. It
            includes the gradients with respect to the outputs of all layers.
        workspace_bytes: Bytes per sample for computing the gradients of a layer, for the layer that needs the most.
        itemsize: Bytes per element.
    """

    parameters: tuple[ParameterInfo, ...]
    generic_names: frozenset[str]
    batched_backward: bool
    gradients_per_sample: int
    multiplications: int
    graph_bytes: int
    transient_bytes: int
    workspace_bytes: int
    itemsize: int


@contextlib.contextmanager
def record_saved_bytes(params: Params) -> Iterator[list[int]]:
    """Record the sizes of the tensors that forward passes save for the backward pass, excluding parameters.

    Yields:
        A list of sizes in bytes, which is filled when the context ends.
    """
    parameter_pointers = {value.data_ptr() for value in params.values()}
    bytes_by_pointer: dict[int, int] = {}
    saved_bytes: list[int] = []

    def pack(value: Tensor) -> Tensor:
        if value.data_ptr() not in parameter_pointers:
            bytes_by_pointer[value.data_ptr()] = max(value.nbytes, bytes_by_pointer.get(value.data_ptr(), 0))
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield saved_bytes
    saved_bytes.extend(bytes_by_pointer.values())


def profile_network(
    gradients: PerSampleGradients,
    y: Tensor,
    calls: list[LayerCall],
    two_samples: Tensor,
    cotangent: Tensor,
    exact_gradients: Mapping[str, Tensor | None],
    gradients_per_sample: int,
    graph_bytes: int,
) -> NetworkProfile:
    """Estimate the costs of a network for one sample, and find the parameters that need `vmap` of `jacrev`.

    A parameter needs `vmap` of `jacrev` in two cases. First, if its layer-by-layer gradient differs from the exact one,
    because it is also used outside its layer, or because its layer changes the batch size or the order of the samples.
    Second, if it belongs to an unsupported layer and the outputs depend on it: its exact gradient is not None, although
    it may be zero for this sample.

    Args:
        gradients: Computes the per-sample gradients.
        y: Outputs for one sample.
        calls: The layer calls in the forward pass of this sample.
        two_samples: A batch of two samples; the first is the sample with the outputs `y`.
        cotangent: Cotangent of `y`: the weights of the outputs in the sum whose gradients are compared.
        exact_gradients: Exact gradient (from autograd) of every parameter for this cotangent; None if the outputs do
            not depend on the parameter.
        gradients_per_sample: Number of gradients per sample: the number of outputs, or 1 if the outputs are summed.
        graph_bytes: Bytes that the forward pass has saved for the backward pass.

    Returns:
        The sizes and costs of the network.
    """
    names = [name for name in gradients.params if name in gradients.names]
    calls = _calls_with_parameters(calls, gradients.names)
    edges = [call.edge for call in calls]
    batched_backward = (
        bool(edges) and gradients_per_sample > 1 and not on_cpu(y) and _supports_batched_backward(edges, y)
    )
    calls_by_name: dict[str, list[LayerCall]] = {name: [] for name in names}
    for call in calls:
        for name in call.roles:
            calls_by_name[name].append(call)
    layer_gradients = _gradients_by_layer(gradients, two_samples, cotangent)
    used_gradients = {name: value for name in names if (value := exact_gradients[name]) is not None}
    comparisons = {
        name: (value, used_gradients.get(name, torch.zeros_like(value))) for name, value in layer_gradients.items()
    }
    generic_names = frozenset([*_find_mismatches(comparisons), *(used_gradients.keys() - layer_gradients.keys())])
    parameters = tuple(
        _parameter_info(name, gradients.params[name], calls_by_name[name], name in generic_names) for name in names
    )
    itemsize = y.element_size()
    pooled_bytes = sum(call.pooled[0].patches.nbytes + call.pooled[0].argmax.nbytes for call in calls if call.pooled)
    return NetworkProfile(
        parameters,
        generic_names,
        batched_backward,
        gradients_per_sample,
        sum(info.multiplications for info in parameters),
        graph_bytes + pooled_bytes,
        itemsize
        * max(_backward_elements(calls, gradients_per_sample, batched_backward), *map(_forward_elements, calls), 0),
        itemsize * max((call.workspace_elements(gradients_per_sample) for call in calls), default=0),
        itemsize,
    )


def _calls_with_parameters(calls: list[LayerCall], names: frozenset[str]) -> list[LayerCall]:
    """Return the calls that use at least one of the named parameters, without the roles of other parameters."""
    call_roles = [{name: role for name, role in call.roles.items() if name in names} for call in calls]
    return [call._replace(roles=roles) for call, roles in zip(calls, call_roles) if roles]


def _gradients_by_layer(gradients: PerSampleGradients, two_samples: Tensor, cotangent: Tensor) -> Params:
    """Return the layer-by-layer gradients for the first of two samples.

    Omit the parameters of layers whose input does not have one row per sample.
    """
    y, _, calls = gradients.trace(two_samples)
    calls = _calls_with_parameters(calls, gradients.names)
    result: Params = {}
    edges = [call.edge for call in calls]
    grads_of_calls = gradients_at(edges, y, cotangent.expand_as(y).unsqueeze(0), batched=False) if calls else []
    for call, grads in zip(calls, grads_of_calls):
        if grads is not None and len(call.input) == len(two_samples):
            for name, gradient in next(per_sample_gradients(call, grads, step=len(two_samples)))[1].items():
                first_gradient = gradient[0].reshape_as(gradients.params[name])
                result[name] = result[name] + first_gradient if name in result else first_gradient
    incomplete_names = {name for call in calls if len(call.input) != len(two_samples) for name in call.roles}
    return {name: value for name, value in result.items() if name not in incomplete_names}


def _supports_batched_backward(edges: list[GradientEdge], y: Tensor) -> bool:
    """Return whether one backward pass can compute the gradients of several outputs.

    It cannot if the network has an operation without a vmap rule.
    """
    try:
        gradients_at(edges, y, y.detach().unsqueeze(0), batched=True, retain_graph=True)
    except RuntimeError:
        return False
    return True


def _find_mismatches(comparisons: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Return the names of the pairs (value, exact) that differ by more than 0.1 % of the largest element of `exact`.

    All comparisons need only one device-to-host transfer.
    """
    if not comparisons:
        return []
    differences = torch.stack([(value - exact).abs().max() for value, exact in comparisons.values()])
    scales = torch.stack([exact.abs().max() for _, exact in comparisons.values()])
    return [name for name, is_close in zip(comparisons, (differences <= 1e-3 * scales).tolist()) if not is_close]


def _forward_elements(call: LayerCall) -> int:
    """Return the number of elements that a call's forward pass needs in addition to what the graph saves.

    For a `PooledConv`, these are its input, four tensors of the size of its output, and two copies each of the patches
    and of the feature maps before pooling; otherwise none.
    """
    if not call.pooled:
        return 0
    conv = call.pooled[0]
    feature_map_elements = len(conv.patches[0]) * conv.weight.shape[1]  # positions × channels before pooling
    return call.input.numel() + 4 * call.output.numel() + 2 * (conv.patches.numel() + feature_map_elements)


def _backward_elements(calls: list[LayerCall], gradients_per_sample: int, batched: bool) -> int:
    """Return the number of elements that the backward pass needs.

    These are the gradients with respect to the outputs of all calls, and the tensors that exist only while the backward
    pass goes through one call, for the call that needs the most.
    """
    gradient_elements = gradients_per_sample * sum(call.output.numel() for call in calls)
    # Tensors of the size of the call's output that exist at once. In a batched pass, these are the gradients with
    # respect to the output and the input of an operation, for every cotangent of the pass. In a pass of one cotangent,
    # there are two such gradients, and the estimate leaves room for two temporary tensors.
    copies = 2 * math.ceil(gradients_per_sample / BATCHED_BACKWARD_PASSES) if batched else 4
    return gradient_elements + max((call.input.numel() + copies * call.output.numel() for call in calls), default=0)


def _parameter_info(name: str, value: Tensor, calls: list[LayerCall], generic: bool) -> ParameterInfo:
    out_features = value.shape[0] if value.ndim else 1
    positions = [call.output.numel() // out_features for call in calls]
    multiplications = value.numel() * (sum(positions) or 1)  # without a layer call, assume one use of each element
    info = ParameterInfo(name, value.numel(), multiplications)
    if generic or len(calls) != 1 or value.ndim < 2 or not calls[0].is_linear:
        return info
    if getattr(calls[0].layer, "groups", 1) > 1:
        return info
    in_features = value.numel() // out_features
    return replace(info, in_features=in_features, out_features=out_features, positions=positions[0])
