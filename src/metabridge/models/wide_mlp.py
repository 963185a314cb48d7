"""Wide networks in the neural tangent kernel (NTK) parameterization.

The kernels of infinitely wide networks predict how these networks train.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from metabridge.errors import InputError, check_count, check_not_negative, check_positive
from metabridge.models.mlp import activation_layer
from metabridge.models.network import Network, seeded, stores_build_arguments


@stores_build_arguments
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
    """Build a fully connected network in the NTK parameterization (Wang et al. 2021, app. A.3).

    A layer with n inputs computes σ_w/√n · Wx + σ_b · b. All weights and biases are initially standard normal. The
    factor σ_w/√n of the last layer is part of the features, so that inner products of features estimate the kernel of
    the neural network Gaussian process (NNGP). The head has no bias.

    Args:
        inputs: Number of elements of a flattened input.
        outputs: Number of outputs of the head.
        width: Number of units per hidden layer.
        depth: Number of layers with weights, including the head.
        activation: Activation function after every hidden layer.
        weight_variance: σ_w² of the formula above.
        bias_variance: σ_b² of the formula above. If it is 0, the layers have no biases.
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
        in_features = inputs
        for _ in range(depth - 1):
            layers += [_NtkLinear(in_features, width, weight_variance, bias_variance), activation_layer(activation)]
            in_features = width
        head = nn.Linear(width, outputs, bias=False)
        nn.init.normal_(head.weight)
        return Network(nn.Sequential(*layers, _Scale(math.sqrt(weight_variance / width))), head)


class _NtkLinear(nn.Module):
    """A linear layer in the NTK parameterization.

    It scales the inputs of an `nn.Linear` instead of the weight, because `EmpiricalKernel` computes the kernel of an
    `nn.Linear` without explicit per-sample gradients.
    """

    def __init__(self, in_features: int, out_features: int, weight_variance: float, bias_variance: float) -> None:
        super().__init__()
        self.scale, self.bias_scale = math.sqrt(weight_variance / in_features), math.sqrt(bias_variance)
        device = torch.get_default_device()
        self.linear = nn.utils.skip_init(nn.Linear, in_features, out_features, bias=False, device=device)
        nn.init.normal_(self.linear.weight)
        self.bias = nn.Parameter(torch.randn(out_features)) if bias_variance else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.scale * x)
        return y if self.bias is None else y + self.bias_scale * self.bias


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x
