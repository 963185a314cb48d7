"""Fully connected networks."""

from __future__ import annotations

from typing import Literal

from torch import nn

from metabridge.errors import InputError, check_count
from metabridge.models.network import Network, seeded, stores_build_arguments

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


@stores_build_arguments
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
    """Build a fully connected network on flattened inputs. The defaults are MAML's for sinusoid regression.

    Args:
        inputs: Number of elements of a flattened input.
        outputs: Number of outputs of the head.
        width: Number of units per hidden layer.
        depth: Number of hidden layers.
        activation: Activation function after every hidden layer.
        bias: Whether all linear layers have biases.
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
        in_features = inputs
        for _ in range(depth):
            layers += [nn.Linear(in_features, width, bias=bias), activation_layer(activation)]
            in_features = width
        return Network(nn.Sequential(*layers), nn.Linear(width, outputs, bias=bias))
