"""Per-sample gradients of a network's outputs, computed layer by layer.

- Linear layers and convolutions compute y = Wa at positions p. The gradient of output o for sample i with respect to W
  is Σ_p g_iop a_ipᵀ, where g is the gradient of the output with respect to y. Since the output for a sample does not
  depend on other samples, one backward pass per output computes g for the whole batch, without computing gradients of
  the weights. On a GPU, one pass computes g for many outputs.
- The parameters of a normalization layer are expanded to one copy per sample, so autograd returns one gradient per
  sample.
- If a network begins with a convolution, a normalization layer and max pooling, these three are computed as one
  operation, whose per-sample gradients are cheaper (see `layer_overrides`).
- The gradients with respect to the parameters of other layers are computed by `vmap` of `jacrev`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import jacrev, vmap

from metabridge.errors import InputError
from metabridge.kernels.layer_calls import (
    LayerCall,
    conv_windows,
    input_patches,
    per_sample_gradients,
    stack_output_gradients,
)
from metabridge.kernels.layer_overrides import (
    NORMS,
    ForwardOverride,
    apply_norm,
    max_pool,
    on_cpu,
    override_forward,
    pool_settings,
    pooled_conv,
)
from metabridge.models.batch_norm import BatchNorm
from metabridge.models.functional_call import shallow_copy
from metabridge.models.network import Params, call_with_params
from metabridge.threads import stream_over_threads

MATMUL_LAYERS = (nn.Linear, nn.Conv2d)
BATCHED_BACKWARD_PASSES = 2  # number of backward passes for all outputs, if a pass can compute several outputs (GPU)
GATHER_COST = 3  # cost of a multiplication with a gathered patch, relative to one in a matrix product
CPU_CACHE_BYTES = 2**21  # a layer's gradients are computed in blocks of this size, which stay in the cache of a CPU


@dataclass(frozen=True)
class ParameterInfo:
    """Size and cost of one parameter of a network.

    The last three fields are 0 unless the gradient is Σ_p g_p a_pᵀ for a single call of the layer.

    Args:
        name: Name of the parameter.
        size: Number of elements.
        multiplications: Number of multiplications by the parameter in a forward pass of one sample.
        in_features: Length of the input vectors a_p.
        out_features: Length of the vectors g_p, the gradients with respect to the layer's output.
        positions: Number of positions p.
    """

    name: str
    size: int
    multiplications: int
    in_features: int = 0
    out_features: int = 0
    positions: int = 0


# Parameter name -> a (samples, in_features, positions) and g (samples, outputs, out_features, positions)
Factors = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class JacobianRows:
    """Rows of the Jacobian: the gradients of the network outputs for some samples.

    Args:
        materialized: Gradients with respect to some parameters, concatenated: (samples, outputs, elements).
        factors: Factors a and g of the gradients with respect to all other parameters, by parameter name.
    """

    materialized: Tensor
    factors: Factors


@dataclass(frozen=True)
class _Tracer:
    """Records the layer calls of a forward pass in forward hooks and in overridden forward methods.

    Args:
        leaves: Parameters of the network as leaves of the autograd graph.
        names_by_role: For each layer, the parameter name of each role ("weight" or "bias").
        names: Names of the parameters whose gradients are computed.
        calls: The recorded calls.
    """

    leaves: Params
    names_by_role: dict[nn.Module, dict[str, str]]
    names: frozenset[str]
    calls: list[LayerCall] = field(default_factory=list)

    def record(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Record a call of a linear layer or convolution (a forward hook)."""
        if inputs:
            roles = {name: role for role, name in self.names_by_role[layer].items() if name in self.names}
            self.calls.append(LayerCall(layer, roles, inputs[0].detach(), output, get_gradient_edge(output)))

    def run_norm(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Apply a normalization layer with one copy of its parameters per sample, and record the copies."""
        copies = self._expand_params(layer, len(x))
        for role, name in self.names_by_role[layer].items():
            if name in self.names:
                edge = get_gradient_edge(copies[role])
                self.calls.append(LayerCall(layer, {name: "copies"}, x.detach(), copies[role], edge))
        return apply_norm(layer, x, copies)

    def run_conv_norm_pool(self, layers: nn.Sequential, x: Tensor) -> Tensor:
        """Apply layers that begin with convolution, normalization and max pooling.

        If `x` needs no gradient, these three layers are computed as one operation.
        """
        all_layers: list[Any] = list(layers)
        convolution, norm, *rest = all_layers
        if x.requires_grad or x.ndim != 4:
            for layer in all_layers:
                x = layer(x)
            return x
        conv_copies, norm_copies = self._expand_params(convolution, len(x)), self._expand_params(norm, len(x))
        pool = next(layer for layer in rest if isinstance(layer, nn.MaxPool2d))
        pooled = pooled_conv(pool, conv_windows(convolution, x), norm, conv_copies, norm_copies)
        copies = {self.names_by_role[convolution][role]: value for role, value in conv_copies.items()}
        copies |= {self.names_by_role[norm][role]: value for role, value in norm_copies.items()}
        params = {name: value for name, value in copies.items() if name in self.names}
        y = pooled.maxima.requires_grad_().clone()  # an in-place ReLU must not change a leaf
        roles = dict.fromkeys(params, "copies")
        self.calls.append(LayerCall(convolution, roles, x, y, get_gradient_edge(y), (pooled, params)))
        del rest[rest.index(pool)]  # only the first occurrence: the layer may be used twice
        for layer in rest:
            y = layer(y)
        return y

    def _expand_params(self, layer: nn.Module, samples: int) -> Params:
        """Return one copy of the layer's parameters per sample, by role."""
        values = {role: self.leaves[name] for role, name in self.names_by_role[layer].items()}
        return {role: value.expand(samples, *value.shape) for role, value in values.items()}


def _names_by_role(layer: nn.Module, names_by_id: dict[int, str]) -> dict[str, str]:
    """Return the parameter names of a layer's weight and bias, or an empty dict if they are the same tensor."""
    result = {
        role: names_by_id[id(value)]
        for role, value in layer.named_parameters(recurse=False, remove_duplicate=False)
        if role in ("weight", "bias")
    }
    return result if len({*result.values()}) == len(result) else {}


def _begins_with_conv_norm_pool(layers: nn.Sequential) -> bool:
    """Return whether layers begin with convolution, normalization and max pooling that can be run as one operation.

    A ReLU may precede the pooling, since ReLU and max pooling commute.
    """
    at_least_four: list[Any] = [*layers, None, None, None, None]
    convolution, norm, after_norm, after_relu = at_least_four[:4]
    pool = after_relu if type(after_norm) is nn.ReLU else after_norm
    return bool(
        type(convolution) is nn.Conv2d
        and convolution.groups == 1
        and type(norm) in (BatchNorm, nn.BatchNorm2d, nn.GroupNorm)
        and type(pool) is nn.MaxPool2d
        and not pool.return_indices
        # With smaller strides, gathering the selected patches costs more than multiplying all patches.
        and math.prod(pool_settings(pool)[1]) >= GATHER_COST
        and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    )


@dataclass(frozen=True)
class PerSampleGradients:
    """Computes the per-sample gradients of a network's outputs.

    Args:
        net: The network.
        params: Parameters to use in place of the network's.
        names: Names of the parameters whose gradients are computed.
        sum_outputs: Whether to compute the gradients of the sum of the outputs.
        generic_names: Names of the parameters that need `vmap` of `jacrev`.
        batched_backward: Whether one backward pass can compute the gradients of several outputs.
    """

    net: nn.Module
    params: Params
    names: frozenset[str]
    sum_outputs: bool
    generic_names: frozenset[str] = field(default_factory=frozenset)
    batched_backward: bool = False

    def trace(self, x: Tensor) -> tuple[Tensor, Params, list[LayerCall]]:
        """Run the network and return its outputs, its parameters as autograd leaves, and the layer calls."""
        leaves = {name: value.detach().requires_grad_(name in self.names) for name, value in self.params.items()}
        names_by_id = {id(value): name for name, value in self.net.named_parameters()}
        modules = list(self.net.modules())
        supported = (*MATMUL_LAYERS, *NORMS)
        names_by_role = {layer: _names_by_role(layer, names_by_id) for layer in modules if type(layer) in supported}
        traced_names = self.names - self.generic_names
        layers = [layer for layer, roles in names_by_role.items() if traced_names.intersection(roles.values())]
        tracer = _Tracer(leaves, names_by_role, traced_names)
        overrides: dict[nn.Module, ForwardOverride] = {
            layer: tracer.run_norm for layer in layers if isinstance(layer, NORMS)
        }
        for layer in modules:
            if type(layer) is nn.MaxPool2d and not layer.return_indices:
                overrides[layer] = max_pool
            elif (
                type(layer) is nn.Sequential and _begins_with_conv_norm_pool(layer) and {*list(layer)[:2]} <= {*layers}
            ):
                overrides[layer] = tracer.run_conv_norm_pool
        hooks = [layer.register_forward_hook(tracer.record) for layer in layers if layer not in overrides]
        try:
            with torch.enable_grad(), override_forward(overrides):
                y = call_with_params(self.net, leaves, x.clone())  # the network may change its input
        finally:
            for hook in hooks:
                hook.remove()
        return y, leaves, tracer.calls

    def rows(
        self,
        x: Tensor,
        materialized: Sequence[ParameterInfo],
        factored: Sequence[ParameterInfo],
        gradients_per_sample: int,
        chunk: int,
        workspace_bytes: int,
        threads: int = 1,
    ) -> JacobianRows:
        """Return the gradients for all samples.

        Args:
            x: The samples.
            materialized: Parameters whose gradients are stored as full tensors.
            factored: Parameters whose gradients are stored as the factors a and g.
            gradients_per_sample: Number of outputs, or 1 if the outputs are summed.
            chunk: Number of samples per forward and backward pass.
            workspace_bytes: Memory for computing the gradients of a layer on a GPU, in bytes.
            threads: Number of CPU threads that run forward and backward passes.
        """
        shape = len(x), gradients_per_sample
        result = JacobianRows(
            x.new_zeros(*shape, sum(info.size for info in materialized)),
            {
                info.name: (
                    x.new_zeros(len(x), info.in_features, info.positions),
                    x.new_zeros(*shape, info.out_features, info.positions),
                )
                for info in factored
            },
        )
        offsets = itertools.accumulate((info.size for info in materialized), initial=0)
        columns = {info.name: slice(*bounds) for info, bounds in zip(materialized, itertools.pairwise(offsets))}
        chunks = [slice(start, start + chunk) for start in range(0, len(x), chunk)]
        threads = min(threads, len(chunks))

        def fill(thread_chunks: Sequence[slice]) -> Iterator[None]:
            gradients = self if threads == 1 else replace(self, net=shallow_copy(self.net))
            for samples in thread_chunks:
                factors = {name: (a[samples], g[samples]) for name, (a, g) in result.factors.items()}
                chunk_rows = JacobianRows(result.materialized[samples], factors)
                gradients._fill(chunk_rows, x[samples], columns, workspace_bytes)
                yield

        for _ in fill(chunks) if threads == 1 else stream_over_threads(fill, chunks, threads):
            pass
        return result

    def _fill(self, rows: JacobianRows, x: Tensor, columns: dict[str, slice], workspace_bytes: int) -> None:
        """Write the gradients for the samples `x` into `rows`.

        `columns` are the columns of `rows.materialized` that belong to each parameter.
        """
        if self.names - self.generic_names:
            y, _, calls = self.trace(x)
            cotangents = torch.ones_like(y).unsqueeze(0)
            if not self.sum_outputs:
                cotangents = torch.eye(y.shape[1], dtype=y.dtype, device=y.device).unsqueeze(1).repeat(1, len(y), 1)
            for call in calls:
                if len(call.input) != len(x):
                    raise InputError(
                        f"{call.layer} received {len(call.input)} rows for a batch of {len(x)} samples, but one row "
                        "per sample when the network was profiled. Use a network whose layers process every sample."
                    )
            grads_of_calls = gradients_at([call.edge for call in calls], y, cotangents, self.batched_backward)
            for call in reversed(calls):  # the last calls usually have the smallest gradients; free these first
                grads = grads_of_calls.pop()
                if grads is not None:
                    _store(rows, call, grads, columns, workspace_bytes)
        for name, gradient in self._generic_gradients(x).items():
            rows.materialized[..., columns[name]] = gradient.reshape(*rows.materialized.shape[:2], -1)

    def _generic_gradients(self, x: Tensor) -> Params:
        """Return the gradients with respect to the parameters in `generic_names`, by `vmap` of `jacrev`."""
        if not self.generic_names:
            return {}
        fixed = {name: value.detach() for name, value in self.params.items() if name not in self.generic_names}

        def outputs(params: Params, sample: Tensor) -> Tensor:
            y: Tensor = call_with_params(self.net, fixed | params, sample.unsqueeze(0).clone())[0]
            return y.sum(0, keepdim=True) if self.sum_outputs else y

        params = {name: self.params[name].detach() for name in sorted(self.generic_names)}
        try:
            return vmap(jacrev(outputs), (None, 0))(params, x)  # type: ignore[no-any-return]
        except RuntimeError:  # an operation without a vmap rule
            gradients = [jacrev(outputs, chunk_size=1)(params, sample) for sample in x]
            return {name: torch.stack([gradient[name] for gradient in gradients]) for name in params}


def gradients_at(
    edges: Sequence[GradientEdge], y: Tensor, cotangents: Tensor, batched: bool, retain_graph: bool = False
) -> list[tuple[Tensor, ...] | None]:
    """Return the gradients at some edges of the autograd graph for every cotangent.

    If batched, the cotangents are split into `BATCHED_BACKWARD_PASSES` passes instead of one, since a single pass is
    hardly faster but needs more memory: cuDNN uses several times the memory of a convolution's gradients.

    Args:
        edges: The edges.
        y: Outputs of the network.
        cotangents: Cotangents of `y`, stacked along the first dimension.
        batched: Whether one pass processes several cotangents.
        retain_graph: Whether to keep the graph for further passes.

    Returns:
        For each edge, the gradient for each cotangent, or None if the outputs do not depend on the edge.
    """
    chunks = cotangents.chunk(BATCHED_BACKWARD_PASSES if batched else len(cotangents))
    backward = _batched_backward if batched else _single_backward
    passes = [backward(edges, y, chunk, retain_graph or chunk is not chunks[-1]) for chunk in chunks]
    return [None if None in grads else tuple(itertools.chain(*grads)) for grads in zip(*passes)]


def _single_backward(
    edges: Sequence[GradientEdge], y: Tensor, cotangents: Tensor, retain_graph: bool
) -> list[tuple[Tensor, ...] | None]:
    grads = torch.autograd.grad(y, edges, cotangents[0], retain_graph, allow_unused=True)
    return [None if grad is None else (grad,) for grad in grads]


def _batched_backward(
    edges: Sequence[GradientEdge], y: Tensor, cotangents: Tensor, retain_graph: bool
) -> list[tuple[Tensor, ...] | None]:
    is_used: list[bool] = []

    def backward(cotangent: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(y, edges, cotangent, retain_graph, allow_unused=True)
        is_used.extend(grad is not None for grad in grads)
        return tuple(grad for grad in grads if grad is not None)

    used_grads = iter(vmap(backward)(cotangents))
    return [next(used_grads).unbind() if used else None for used in is_used]


def _store(
    rows: JacobianRows, call: LayerCall, grads: Sequence[Tensor], columns: dict[str, slice], workspace_bytes: int
) -> None:
    """Store the gradients of a call in the rows.

    If the gradient of the weight is factored, store its factors. Add all other gradients to the materialized rows.
    """
    weight_name = next((name for name in call.roles if name in rows.factors), None)
    if weight_name is not None:
        a, g = rows.factors[weight_name]
        a.copy_(input_patches(call.layer, call.input)[:, 0])  # grouped convolutions are never factored
        g.copy_(stack_output_gradients(call, grads))
        call = call._replace(roles={name: role for name, role in call.roles.items() if name != weight_name})
    if not call.roles:
        return
    needed_bytes, available_bytes = call.output.element_size() * call.workspace_elements(len(grads)), workspace_bytes
    if on_cpu(call.input):
        needed_bytes, available_bytes = len(grads) * grads[0].nbytes, CPU_CACHE_BYTES
    step = max(1, len(call.input) // max(1, -(-needed_bytes // available_bytes)))
    for samples, gradients in per_sample_gradients(call, grads, step):
        for name, gradient in gradients.items():
            rows.materialized[samples, :, columns[name]] += gradient.flatten(2)
