"""NNGP kernel and NTK of infinitely wide networks, in closed form: the architectures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from metabridge.errors import InputError
from metabridge.kernels.activations import Activation, activation_layers
from metabridge.kernels.analytic_kernel import MEMORY, AnalyticKernel
from metabridge.kernels.conv_layers import AveragePool, Conv, Flatten, GlobalAveragePool
from metabridge.kernels.layers import Dense, Layer, LayerNorm, Residual


def fully_connected_kernel(
    depth: int,
    activation: str | Activation = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    *,
    memory: int = MEMORY,
) -> AnalyticKernel:
    """Return the kernels of a fully connected net of `depth` layers of weights, depth − 1 of them hidden.

    The variances are σ_w² and σ_b² of every layer, the readout too; the default is He's for ReLU. Activations are
    relu, leaky-relu, erf, gelu, sine, cosine and identity, or an instance with settings of its own.

    >>> import torch
    >>> fully_connected_kernel(depth=2).ntk(torch.eye(2))
    tensor([[2.0000, 0.3183],
            [0.3183, 2.0000]])
    """
    _check_depth(depth)
    dense = Dense(weight_variance, bias_variance)
    hidden: tuple[Layer, ...] = (*activation_layers(activation), dense)
    return AnalyticKernel((dense, *hidden * (depth - 1)), memory)


def residual_kernel(
    depth: int,
    *,
    layer_norm: bool = False,
    activation: str | Activation = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    memory: int = MEMORY,
) -> AnalyticKernel:
    """Return the kernels of a residual net of `depth` layers of weights (A cor. 1.1).

    h¹ = W¹x, hˡ = hˡ⁻¹ + Wˡφ(hˡ⁻¹) for 1 < l < L, f = W^L φ(h^{L−1}), with A's NTK parameterisation and biases where
    they have variance. So Σˡ = Σˡ⁻¹ + σ_w² E[φφ] + σ_b² and Θˡ = Θˡ⁻¹ + σ_w² E[φ'φ']Θˡ⁻¹ + σ_w² E[φφ] + σ_b²: with
    ReLU and σ_w² = 2 both double per layer, the factor e^L of A app. B.6 up to its base. With `layer_norm`, hˡ is
    normalised after each addition, and h¹ as well: Σˡ has ones in its diagonal, and Θˡ grows as l, as it does without
    residual connections.

    >>> import torch
    >>> residual_kernel(depth=3).nngp(torch.eye(2)).diagonal()
    tensor([2., 2.])
    >>> residual_kernel(depth=30, layer_norm=True).nngp(torch.eye(2)).diagonal()
    tensor([1., 1.])
    """
    _check_depth(depth)
    dense, between = Dense(weight_variance, bias_variance), activation_layers(activation)
    norm = (LayerNorm(),) if layer_norm else ()
    if depth == 1:
        return AnalyticKernel((dense,), memory)
    blocks = (Residual((*between, dense)), *norm) * (depth - 2)
    return AnalyticKernel((dense, *norm, *blocks, *between, dense), memory)


def convolutional_kernel(layers: Sequence[Layer], *, memory: int = MEMORY) -> AnalyticKernel:
    """Return the kernels of a stack of layers on images.

    Without pooling a pair of images costs one covariance per pixel. With pooling it costs one for each pair of pixels,
    up to the last pooling layer.

    >>> import torch
    >>> from metabridge.kernels import Conv, Dense, Flatten, ReLU
    >>> kernel = convolutional_kernel([Conv(3), ReLU(), Conv(3, stride=2), ReLU(), Flatten(), Dense()])
    >>> kernel.ntk(torch.ones(1, 3, 8, 8))
    tensor([[4.4491]])
    """
    kernel = AnalyticKernel(tuple(layers), memory)
    if not kernel.space:
        raise InputError("a convolutional kernel needs a Flatten or GlobalAveragePool before its readout.")
    return kernel


def conv4_kernel(
    pooling: Literal["flatten", "global"] = "flatten",
    *,
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    memory: int = MEMORY,
) -> AnalyticKernel:
    """Return the kernels of conv4 with average pooling: max pooling, which conv4 has, has no closed form.

    Four blocks of 3×3 convolution with padding 1, ReLU and 2×2 average pooling, no batch norm; then all pixels that are
    left, or their mean, and a dense readout. Images may have any size from 16×16 pixels.

    >>> import torch
    >>> conv4_kernel().nngp(torch.ones(1, 1, 16, 16))
    tensor([[0.2551]])
    """
    if pooling not in ("flatten", "global"):
        raise InputError(f"pooling is '{pooling}', but must be 'flatten' or 'global'.")
    convolution = Conv(3, padding=1, weight_variance=weight_variance, bias_variance=bias_variance)
    block: tuple[Layer, ...] = (convolution, *activation_layers("relu"), AveragePool(2))
    end = Flatten() if pooling == "flatten" else GlobalAveragePool()
    return convolutional_kernel((*block * 4, end, Dense(weight_variance, bias_variance)), memory=memory)


def _check_depth(depth: int) -> None:
    if depth < 1:
        raise InputError(f"depth is {depth}, but a network has at least one layer: depth=1 is linear.")
