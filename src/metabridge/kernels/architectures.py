"""Analytic kernels of common architectures: fully connected, residual and convolutional networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from metabridge.errors import InputError
from metabridge.kernels.activations import Activation, activation_layers
from metabridge.kernels.analytic_kernel import DEFAULT_MEMORY, AnalyticKernel
from metabridge.kernels.conv_layers import AveragePool, Conv, Flatten, GlobalAveragePool
from metabridge.kernels.layers import Dense, Layer, LayerNorm, Residual


def fully_connected_kernel(
    depth: int,
    activation: str | Activation = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    *,
    memory: int = DEFAULT_MEMORY,
) -> AnalyticKernel:
    """Return the kernels of an infinitely wide fully connected network.

    Args:
        depth: Number of layers with weights: depth − 1 hidden layers and the readout.
        activation: "relu", "leaky-relu", "erf", "gelu", "sin", "cos" or "identity", or an instance such as
            `ReLU(negative_slope=0.1)`.
        weight_variance: σ_w² of every layer, including the readout. The default is He initialization for ReLU.
        bias_variance: σ_b² of every layer, including the readout; 0 for layers without bias.
        memory: Maximum number of bytes used in addition to inputs and results.

    Returns:
        The kernels of the network.

    Raises:
        InputError: If the depth, the activation or a variance is invalid.

    Example:
        >>> import torch
        >>> from metabridge.kernels import fully_connected_kernel
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
    memory: int = DEFAULT_MEMORY,
) -> AnalyticKernel:
    """Return the kernels of an infinitely wide residual network (Wang et al. 2021, cor. 1.1).

    The network is h¹ = W¹x, hˡ = hˡ⁻¹ + Wˡφ(hˡ⁻¹) for 1 < l < L, f = W^L φ(h^{L−1}), in NTK parameterization, with
    biases if `bias_variance` is positive. Hence Σˡ = Σˡ⁻¹ + σ_w² E[φ(u)φ(v)] + σ_b² and
    Θˡ = Θˡ⁻¹ + σ_w² E[φ'(u)φ'(v)]Θˡ⁻¹ + σ_w² E[φ(u)φ(v)] + σ_b², where (u, v) ~ N(0, Σˡ⁻¹). With ReLU, σ_w² = 2 and
    σ_b² = 0, the diagonal of Σˡ doubles in every residual layer, and the diagonal of Θˡ more than doubles (Wang et al.
    2021, app. B.6, give this growth as e^L).

    Args:
        depth: Number of layers with weights, L.
        layer_norm: Whether to normalize h¹ and the sum hˡ of every residual layer, so that the diagonal of Σˡ is 1.
            With ReLU, σ_w² = 2 and σ_b² = 0, the diagonal of Θˡ then grows linearly in l, as in a network without
            residual connections.
        activation: Name or instance of an activation, as in `fully_connected_kernel`.
        weight_variance: σ_w² of every layer, including the readout.
        bias_variance: σ_b² of every layer, including the readout; 0 for layers without bias.
        memory: Maximum number of bytes used in addition to inputs and results.

    Returns:
        The kernels of the network.

    Raises:
        InputError: If the depth, the activation or a variance is invalid.

    Example:
        >>> import torch
        >>> from metabridge.kernels import residual_kernel
        >>> residual_kernel(depth=3).nngp(torch.eye(2)).diagonal()
        tensor([2., 2.])
        >>> residual_kernel(depth=30, layer_norm=True).nngp(torch.eye(2)).diagonal()
        tensor([1., 1.])
    """
    _check_depth(depth)
    dense, activations = Dense(weight_variance, bias_variance), activation_layers(activation)
    norm = (LayerNorm(),) if layer_norm else ()
    if depth == 1:
        return AnalyticKernel((dense,), memory)
    blocks = (Residual((*activations, dense)), *norm) * (depth - 2)
    return AnalyticKernel((dense, *norm, *blocks, *activations, dense), memory)


def convolutional_kernel(layers: Sequence[Layer], *, memory: int = DEFAULT_MEMORY) -> AnalyticKernel:
    """Return the kernels of the infinitely wide convolutional network with the given layers.

    A pair of images needs one covariance per pair of pixels up to the last pooling layer, and one covariance per pixel
    after it.

    Args:
        layers: The layers. One of them must be `Flatten` or `GlobalAveragePool`, and the last one `Dense`.
        memory: Maximum number of bytes used in addition to inputs and results.

    Returns:
        The kernels of the network.

    Raises:
        InputError: If the layers are not in a valid order.

    Example:
        >>> import torch
        >>> from metabridge.kernels import Conv, Dense, Flatten, ReLU, convolutional_kernel
        >>> kernel = convolutional_kernel([Conv(3), ReLU(), Conv(3, stride=2), ReLU(), Flatten(), Dense()])
        >>> kernel.ntk(torch.ones(1, 3, 8, 8))
        tensor([[4.4491]])
    """
    kernel = AnalyticKernel(tuple(layers), memory)
    if not kernel.pixel_dims:
        raise InputError(
            "layers has no Flatten or GlobalAveragePool, but a convolutional kernel needs a Flatten or "
            "GlobalAveragePool before its Dense layer."
        )
    return kernel


def conv4_kernel(
    pooling: Literal["flatten", "global"] = "flatten",
    *,
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    memory: int = DEFAULT_MEMORY,
) -> AnalyticKernel:
    """Return the kernels of an infinitely wide conv4 with average instead of max pooling, which has no closed form.

    The network has four blocks of 3×3 convolution with padding 1, ReLU and 2×2 average pooling, and a dense readout. It
    has no batch norm. Images must have at least 16×16 pixels.

    Args:
        pooling: How the feature maps of the last block enter the readout: "flatten" for all pixels, "global" for their
            mean.
        weight_variance: σ_w² of every layer, including the readout.
        bias_variance: σ_b² of every layer, including the readout; 0 for layers without bias.
        memory: Maximum number of bytes used in addition to inputs and results.

    Returns:
        The kernels of the network.

    Raises:
        InputError: If `pooling` or a variance is invalid.

    Example:
        >>> import torch
        >>> from metabridge.kernels import conv4_kernel
        >>> conv4_kernel().nngp(torch.ones(1, 1, 16, 16))
        tensor([[0.2551]])
    """
    if pooling not in ("flatten", "global"):
        raise InputError(f"pooling is '{pooling}', but must be 'flatten' or 'global'.")
    convolution = Conv(3, padding=1, weight_variance=weight_variance, bias_variance=bias_variance)
    block: tuple[Layer, ...] = (convolution, *activation_layers("relu"), AveragePool(2))
    readout_input = Flatten() if pooling == "flatten" else GlobalAveragePool()
    return convolutional_kernel((*block * 4, readout_input, Dense(weight_variance, bias_variance)), memory=memory)


def _check_depth(depth: int) -> None:
    if depth < 1:
        raise InputError(f"depth is {depth}, but must be at least 1. Use depth=1 for a linear network.")
