from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.func import functional_call

from metabridge.models import BUILDERS, Network, build, conv4, mlp, resnet12
from metabridge.models.network import apply_features

NETS = {
    "mlp": lambda: mlp(12, 3, width=7, depth=3, activation="tanh", bias=False, seed=4),
    "conv4": lambda: conv4(3, 20, 4, filters=6, statistics="running", seed=5),
    "resnet12": lambda: resnet12(3, 16, 2, widths=(4, 4, 8, 8), drop_rate=0.2, dropout=0.3, unit_norm=True, seed=6),
}


@pytest.mark.parametrize("name", NETS)
def test_a_recipe_that_went_through_json_makes_the_same_network_again(name):
    net = NETS[name]()
    again = build(**json.loads(json.dumps(net.recipe)))
    assert str(again) == str(net)
    assert again.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in again.state_dict().items())
    assert BUILDERS[name].__doc__  # the builder is still the one that is documented


def test_a_network_made_by_hand_has_no_recipe():
    assert Network(nn.Linear(2, 3), nn.Linear(3, 1)).recipe is None


def plainly(net: Network, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The features in bfloat16, each weight cast by itself."""
    body = {name: value.to(torch.bfloat16) for name, value in params.items()}
    return functional_call(net.features, body, (x.to(torch.bfloat16),)).float()


def through_one_cast(net: Network, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return apply_features(net, {f"features.{name}": value for name, value in params.items()}, x, torch.bfloat16)


@pytest.mark.parametrize("name", ["mlp", "conv4"])
def test_derivatives_through_the_joint_cast_are_those_of_plain_casts_to_second_order(name):
    net = NETS[name]()
    x = torch.randn(6, *((12,) if name == "mlp" else (3, 20, 20)), generator=torch.Generator().manual_seed(0))
    params = {key: value.detach().requires_grad_() for key, value in net.features.named_parameters()}

    def derivatives(features):
        value = features(net, params, x).square().mean()
        first = torch.autograd.grad(value, list(params.values()), create_graph=True)
        size = sum(slope.square().sum() for slope in first)
        return [value], first, torch.autograd.grad(size, list(params.values()), allow_unused=True)

    for ours, expected in zip(derivatives(through_one_cast), derivatives(plainly)):
        for mine, other in zip(ours, expected):
            assert (mine is None) == (other is None)
            if mine is not None:
                assert mine.dtype == torch.float32
                assert (mine - other).norm() <= 0.05 * other.norm() + 1e-6  # a bfloat16 has 8 bits


def test_features_without_parameters_can_be_computed_in_low_precision():
    net = Network(nn.Flatten(), nn.Linear(4, 2))
    x = torch.rand(3, 4)
    assert torch.equal(apply_features(net, {}, x, torch.bfloat16), x.to(torch.bfloat16).float())
