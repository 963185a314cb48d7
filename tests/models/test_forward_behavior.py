from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import Attention, ChangingBuffers
from metabridge import InputError
from metabridge.models import DropPath, conv4, resnet12
from metabridge.models.forward_behavior import observe


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x, self.training)


RANDOM_MODULES = {
    "dropout": (nn.Dropout(0.3), (2, 3)),
    "functional dropout": (Function(lambda x, training: F.dropout(x, 0.3, training)), (2, 3)),
    "alpha dropout": (nn.FeatureAlphaDropout(0.3), (2, 3)),
    "dropout of attention": (Attention(dropout=0.3), (2, 3, 2)),
    "dropout of multi-head attention": (nn.TransformerEncoderLayer(2, 1, 3, dropout=0.3), (2, 3, 2)),
    "dropout between layers of an LSTM": (nn.LSTM(2, 3, num_layers=2, dropout=0.3), (2, 3, 2)),
    "RReLU": (nn.RReLU(), (2, 3)),
    "noise": (Function(lambda x, training: x + torch.randn_like(x) if training else x), (2, 3)),
    "drop path": (DropPath(0.3), (2, 3, 4, 4)),
    "drop block": (resnet12(3, 16, drop_rate=0.1, widths=(2, 2, 2, 2)).features, (2, 3, 16, 16)),
}


@pytest.mark.parametrize("name", RANDOM_MODULES)
def test_random_numbers_are_observed_in_training_and_not_in_evaluation(name):
    module, shape = RANDOM_MODULES[name]
    x, state = torch.randn(shape), torch.get_rng_state()
    assert observe(module.train(), x).is_random
    assert not observe(module.eval(), x).is_random
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_at_rate_zero_and_layers_without_dropout_are_not_random():
    for module in (nn.Dropout(0.0), Attention(), nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0), nn.LSTM(2, 3, 2)):
        assert not observe(module.train(), torch.randn(2, 3, 2)).is_random
    assert not observe(conv4(1, 16, filters=4).features, torch.randn(2, 1, 16, 16)).is_random


def test_weight_norm_and_changed_buffers_are_observed():
    weight_normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    x = torch.randn(3, 4)
    assert observe(weight_normed, x).uses_weight_norm
    assert not observe(nn.Linear(4, 5), x).uses_weight_norm
    layer = ChangingBuffers()
    assert observe(layer, x).changes_buffers
    assert not layer.mean.any()  # observe calls a copy
    assert not observe(layer.eval(), x).changes_buffers
    assert not observe(
        conv4(1, 16, filters=4, statistics="running").features, torch.randn(2, 1, 16, 16)
    ).changes_buffers


def test_observing_does_not_import_the_compiler_and_works_for_compiled_modules():
    script = """
import sys, torch
from metabridge.models.forward_behavior import observe
net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)), torch.ones(3, 4)
print(observe(net, x).is_random, "torch._dynamo" in sys.modules)
compiled = torch.compile(net, backend="eager")
print(observe(compiled, x).is_random, observe(compiled.eval(), x).is_random)
"""
    process = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], capture_output=True, text=True)
    assert (process.stdout.split(), process.stderr) == (["True", "False", "True", "False"], "")


def test_a_parameter_that_cannot_be_replaced_raises_an_input_error():
    class Holder:
        def __init__(self, weight):
            self.weight = weight

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.holder = Holder(self.weight)

        def forward(self, x):
            return x * self.holder.weight

    with pytest.raises(InputError, match="reads its parameter 'weight' through an object"):
        observe(Hidden(), torch.randn(2, 3))


def test_a_forward_pass_that_changes_an_unregistered_tensor_or_a_parameter_raises_an_input_error():
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.means = {"all": [torch.zeros(3)]}

        def forward(self, x):
            if self.training:
                self.means["all"][0].lerp_(x.mean(0), 0.1)
            return x - self.means["all"][0]

    with pytest.raises(InputError, match=r"not one of its buffers.*register_buffer"):
        observe(Centered(), torch.randn(2, 3))
    assert not observe(Centered().eval(), torch.randn(2, 3)).changes_buffers
    embedding = nn.Embedding(5, 3, max_norm=0.1)
    with pytest.raises(InputError, match=r"changes its parameter 'weight'.*max_norm"):
        observe(embedding, torch.tensor([1, 2]))
