"""Wide networks in the NTK parameterisation. The infinite-width kernels predict their training."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from metabridge.errors import InputError, check_count, check_not_negative, check_positive
from metabridge.models.mlp import activation_layer
from metabridge.models.network import Network, records_recipe, seeded


@records_recipe
def wide(
    inputs: int,
    outputs: int = 1,
    *,
    width: int = 512,
    depth: int = 3,
    activation: Literal["relu", "tanh", "softplus", "sigmoid", "linear"] = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    seed: int = 0,
) -> Network:
    """Build a fully connected network in the NTK parameterisation (Wang et al. 2021, app. A.3).

    A layer with n inputs computes σ_w/√n · Wx + σ_b · b, and all weights are initially standard normal. The scale of
    the last layer is part of the features, so that their inner products give the NNGP kernel. The head has no bias.

    Args:
        inputs: Values per point.
        outputs: Outputs of the head.
        width: Units per hidden layer.
        depth: Number of layers with weights, including the head.
        activation: Activation function after every hidden layer.
        weight_variance: σ_w².
        bias_variance: σ_b².
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If an option is out of range.

    >>> net = wide(4, width=8)
    >>> net(torch.ones(3, 4)).shape, net.head
    (torch.Size([3, 1]), Linear(in_features=8, out_features=1, bias=False))
    """
    if depth < 2:
        raise InputError(f"depth is {depth}, but must be at least 2: one layer of features and the head.")
    check_count("width", width)
    check_positive("weight_variance", weight_variance)
    check_not_negative("bias_variance", bias_variance)
    layers: list[nn.Module] = [nn.Flatten()]
    with seeded(seed):
        for layer in range(depth - 1):
            layers += [_Scaled(inputs if layer == 0 else width, width, weight_variance, bias_variance)]
            layers += [activation_layer(activation)]
        head = nn.Linear(width, outputs, bias=False)
        nn.init.normal_(head.weight)
        return Network(nn.Sequential(*layers, _Multiply(math.sqrt(weight_variance / width))), head)


class _Scaled(nn.Module):
    """A linear layer that scales its inputs, so that its empirical kernel needs no explicit gradients."""

    def __init__(self, inputs: int, outputs: int, weight_variance: float, bias_variance: float) -> None:
        super().__init__()
        self.scale, self.shift = math.sqrt(weight_variance / inputs), math.sqrt(bias_variance)
        device = torch.get_default_device()
        self.linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, device=device)
        nn.init.normal_(self.linear.weight)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias_variance else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.scale * x)
        return y if self.bias is None else y + self.shift * self.bias


class _Multiply(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x
