"""Wide networks in the NTK parameterisation, whose training the kernels predict as the width grows."""

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
    """A fully connected net of `depth` layers whose weights are standard normal and scaled where they are used.

    x ↦ σ_w/√n · Wx + σ_b · b in each layer of n inputs (A app. A.3). The last layer's scale is in the features, so
    that their products are the NNGP kernel, and the head has no bias.

    >>> net = wide(4, width=8)
    >>> net(torch.ones(3, 4)).shape, net.head
    (torch.Size([3, 1]), Linear(in_features=8, out_features=1, bias=False))
    """
    if depth < 2:
        raise InputError(f"depth is {depth}, but a net with features has at least 2 layers.")
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
        return Network(nn.Sequential(*layers, _Times(math.sqrt(weight_variance / width))), head)


class _Scaled(nn.Module):
    """The scale is on the inputs: a plain linear layer is one whose empirical kernel needs no gradients formed."""

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


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x
