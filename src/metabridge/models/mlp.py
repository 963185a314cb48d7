"""Fully connected networks."""

from __future__ import annotations

from typing import Literal

from torch import nn

from metabridge.errors import InputError, check_count
from metabridge.models.network import Network, records_recipe, seeded

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
    "linear": nn.Identity,
}


def activation_layer(name: str) -> nn.Module:
    """Return the layer of an activation function; raise an `InputError` if the name is unknown.

    >>> activation_layer("tanh")
    Tanh()
    """
    if name not in ACTIVATIONS:
        raise InputError(f"activation is {name!r}, but must be one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]()


@records_recipe
def mlp(
    inputs: int,
    outputs: int,
    *,
    width: int = 40,
    depth: int = 2,
    activation: Literal["relu", "tanh", "softplus", "sigmoid", "linear"] = "relu",
    bias: bool = True,
    seed: int = 0,
) -> Network:
    """Build a fully connected network on flattened inputs. The defaults are those of MAML's sinusoid regression.

    Args:
        inputs: Values per point.
        outputs: Outputs of the head.
        width: Units per hidden layer.
        depth: Number of hidden layers.
        activation: Activation function after every hidden layer.
        bias: Whether the layers have biases.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If an option is out of range.

    >>> mlp(784, 5, width=64).head
    Linear(in_features=64, out_features=5, bias=True)
    """
    check_count("depth", depth)
    check_count("width", width)
    layers: list[nn.Module] = [nn.Flatten()]
    with seeded(seed):
        for layer in range(depth):
            layers += [nn.Linear(inputs if layer == 0 else width, width, bias=bias), activation_layer(activation)]
        return Network(nn.Sequential(*layers), nn.Linear(width, outputs, bias=bias))
