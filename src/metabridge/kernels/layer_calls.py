"""Layer calls in a forward pass, and per-sample gradients with respect to the parameters of the layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from metabridge.kernels.layer_overrides import PooledConv, on_cpu
from metabridge.models.network import Params


class LayerCall(NamedTuple):
    """A layer call in a forward pass, and the tensor whose gradient determines the layer's parameter gradients.

    The tensor is the output of a linear layer or convolution, a parameter of a normalization layer expanded to one copy
    per sample, or the output of a `PooledConv`.

    Args:
        layer: The layer.
        roles: Role of each parameter, by parameter name: "weight" or "bias" of a linear layer or convolution, or
            "copies" if the parameter is expanded to one copy per sample.
        input: The input of the layer.
        output: The tensor whose gradient determines the gradients of the layer's parameters.
        edge: The edge of the autograd graph that receives the gradient of `output`.
        pooled: If `output` is the output of a `PooledConv`, which holds max-pooled feature maps: that object and, by
            parameter name, the expanded parameters whose gradients are computed. Otherwise None.
    """

    layer: nn.Module
    roles: dict[str, str]
    input: Tensor
    output: Tensor
    edge: GradientEdge
    pooled: tuple[PooledConv, Params] | None = None

    @property
    def is_linear(self) -> bool:
        """Whether `output` is the output of a linear layer or convolution."""
        return "copies" not in self.roles.values()

    def workspace_elements(self, gradients_per_sample: int) -> int:
        """Return the number of elements in memory while the gradients of this call's parameters are computed.

        These are the gradients with respect to the output, the input patches and the results.
        """
        output_elements = gradients_per_sample * self.output.numel()
        if self.pooled:
            conv = self.pooled[0]
            elements = output_elements + 2 * gradients_per_sample * conv.weight.numel()
            selected_elements = conv.argmax.numel() * conv.patches.shape[2]  # the patches that attain the maxima
            return elements if on_cpu(self.input) else elements + selected_elements
        if not self.is_linear:
            return 2 * output_elements
        layer: Any = self.layer
        weight: Tensor = layer.weight
        channels = len(weight)
        patch_elements = weight.numel() // channels * self.output.numel() * int(getattr(layer, "groups", 1)) // channels
        result_elements = gradients_per_sample * len(self.input) * weight.numel()
        return output_elements + self.input.numel() + patch_elements + 2 * result_elements


def per_sample_gradients(call: LayerCall, output_grads: Sequence[Tensor], step: int) -> Iterator[tuple[slice, Params]]:
    """Yield the gradients with respect to the parameters of a call, for successive slices of the samples.

    Args:
        call: The call.
        output_grads: For each network output, its gradient with respect to the call's output.
        step: Number of samples in a slice. For a `PooledConv`, there is one slice of all samples, and `step` is the
            number of samples that are processed at a time on a GPU.

    Yields:
        A slice of samples, and their gradients (samples, outputs, ...) by parameter name.
    """
    if call.pooled is not None:
        conv, params = call.pooled
        yield slice(None), dict(zip(params, conv.vjp(output_grads, list(params.values()), step)))
        return
    for start in range(0, len(call.input), step):
        samples = slice(start, start + step)
        yield samples, _gradients_of_samples(call, output_grads, samples)


def _gradients_of_samples(call: LayerCall, output_grads: Sequence[Tensor], samples: slice) -> Params:
    stacked_grads = stack_output_gradients(call, [grad[samples] for grad in output_grads])
    param_grads: Params = {}
    for name, role in call.roles.items():
        if role == "weight":
            groups = getattr(call.layer, "groups", 1)
            # All outputs in one product: (samples, groups, outputs · channels, positions).
            grouped_grads = stacked_grads.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)
            product = _weight_gradient(call.layer, call.input[samples], grouped_grads, output_grads[0].shape[2:])
            param_grads[name] = product.unflatten(2, (len(output_grads), -1)).transpose(1, 2)
        else:
            param_grads[name] = stacked_grads.sum(-1) if role == "bias" else stacked_grads
    return param_grads


def stack_output_gradients(call: LayerCall, output_grads: Sequence[Tensor]) -> Tensor:
    """Stack the gradients of all network outputs with respect to the call's output.

    The result is (samples, outputs, channels, positions) for linear layers and convolutions, and
    (samples, outputs, ...) for other layers.
    """
    grads = [_flatten_positions(call.layer, grad) for grad in output_grads] if call.is_linear else list(output_grads)
    return torch.stack(grads, 1)


def input_patches(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the vectors that a linear layer or convolution multiplies by its weight.

    For a convolution, these are the unfolded input windows (as in `F.unfold`), a copy that repeats overlapping pixels.

    Args:
        layer: An `nn.Linear` or `nn.Conv2d`.
        x: The layer's input.

    Returns:
        The patches, (samples, groups, in_features, positions).
    """
    if not isinstance(layer, nn.Conv2d):
        return _flatten_positions(layer, x).unsqueeze(1)
    windows = conv_windows(layer, x)
    return windows.reshape(len(x), layer.groups, -1, math.prod(windows.shape[4:]))


def conv_windows(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return a view of the input windows of a convolution, (samples, channels, *window_size, *output_size)."""
    x = _pad(layer, x)
    for axis, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation), 2):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x.permute(0, 1, 4, 5, 2, 3)


def _weight_gradient(layer: nn.Module, x: Tensor, g: Tensor, output_size: Sequence[int]) -> Tensor:
    """Return Σ_p g_p a_pᵀ, (samples, groups, channels, in_features), for g (samples, groups, channels, positions).

    Here, g_p is the gradient with respect to the layer's output at position p, and a_p the patch of `x` there.
    On a CPU, the gradients of a convolution are computed by another convolution in which every sample is a group, since
    that needs no copy of the patches.
    """
    if not isinstance(layer, nn.Conv2d) or not on_cpu(x):
        return g @ input_patches(layer, x).mT
    samples, groups, channels, _ = g.shape
    padded, g = _pad(layer, x), g.reshape(1, -1, *output_size)
    weight_shape = samples * groups * channels, *layer.weight.shape[1:]
    padded = padded.reshape(1, -1, *padded.shape[2:])
    gradient: Tensor = conv2d_weight(padded, weight_shape, g, layer.stride, 0, layer.dilation, samples * groups)
    return gradient.reshape(samples, groups, channels, -1)


def _pad(layer: nn.Conv2d, x: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def _flatten_positions(layer: nn.Module, value: Tensor) -> Tensor:
    """Return the input or output of a linear layer or convolution as (samples, channels, positions)."""
    if isinstance(layer, nn.Linear):
        return value.reshape(len(value), -1, value.shape[-1]).mT
    return value.flatten(2)
