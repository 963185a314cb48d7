from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from cases import UNUSUAL_FEATURES, unusual_episodes, unusual_net
from metabridge import InputError
from metabridge.models import conv4, mlp
from metabridge.models.functional_call import bind_params, shallow_copy


def changed_params(module):
    return {name: 1.1 * value.detach() + 0.1 for name, value in module.named_parameters()}


# functional_call does not restore a layer under two names, and a test below checks this case
@pytest.mark.parametrize("name", [name for name in UNUSUAL_FEATURES if name != "a layer under two names"])
def test_a_bound_copy_computes_the_same_as_functional_call(name):
    features, x = unusual_net(name).features, unusual_episodes(name).support_x[0]
    params = changed_params(features)
    result = bind_params(features, params, copy_buffers=True)(x)
    assert torch.equal(result, functional_call(features, params, (x,)))


@pytest.mark.parametrize("name", UNUSUAL_FEATURES)
def test_binding_does_not_change_the_module(name):
    features, x = unusual_net(name).features, unusual_episodes(name).support_x[0]
    before = {key: (value, value.clone()) for key, value in features.state_dict(keep_vars=True).items()}
    bind_params(features, changed_params(features), copy_buffers=True)(x)
    after = features.state_dict(keep_vars=True)
    assert all(after[key] is value and torch.equal(value, copy) for key, (value, copy) in before.items())


def test_parameters_of_a_layer_with_two_names_are_replaced_under_both():
    features, x = unusual_net("a layer under two names").features, torch.randn(3, 4, dtype=torch.float64)
    params = changed_params(features)
    assert sorted(params) == ["first.bias", "first.weight"]
    once = torch.tanh(x @ params["first.weight"].T + params["first.bias"])
    expected = torch.tanh(once @ params["first.weight"].T + params["first.bias"])
    torch.testing.assert_close(bind_params(features, params)(x), expected)


def test_parameters_in_lists_methods_and_closures_are_replaced():
    class WithReferences(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.layer = nn.Parameter(torch.rand(3)), nn.Linear(3, 3)
            self.container = [{"weight": self.weight}, (self.layer,)]
            self.method = self.layer.forward
            self.closure = lambda x: x * self.weight
            self.part = partial(F.linear, weight=self.layer.weight, bias=self.layer.bias)
            self.container.append(self.container)  # it contains itself

        def forward(self, x):
            return self.closure(self.method(x)) * self.container[0]["weight"] + self.container[1][0](x) + self.part(x)

    module, x = WithReferences(), torch.randn(2, 3)
    params = changed_params(module)
    layer = x @ params["layer.weight"].T + params["layer.bias"]
    torch.testing.assert_close(bind_params(module, params)(x), layer * params["weight"] ** 2 + 2 * layer)


def test_a_bound_copy_shares_objects_that_contain_no_replaced_parameter():
    module = mlp(2, 2)
    module.lock, module.cache = threading.Lock(), {"a": torch.ones(1)}
    copy = bind_params(module, {})
    assert copy is not module
    assert copy.lock is module.lock
    assert copy.cache is module.cache
    assert copy.head.weight is module.head.weight


def test_buffers_are_shared_unless_copy_buffers_is_true():
    net = conv4(1, 16, filters=4, statistics="running")
    name, buffer = next(iter(net.named_buffers()))
    assert dict(bind_params(net, {}).named_buffers())[name] is buffer
    copy = dict(bind_params(net, {}, copy_buffers=True).named_buffers())[name]
    assert copy is not buffer
    assert torch.equal(copy, buffer)


def test_a_torchscript_module_raises_an_input_error():
    with pytest.raises(InputError, match="TorchScript module, whose parameters cannot be replaced"):
        bind_params(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), {})


def test_a_closure_with_an_empty_cell_is_not_changed():
    def read():
        return defined_later

    layer = nn.Linear(2, 1, bias=False)
    layer.read = read
    assert bind_params(layer, {"weight": torch.ones(1, 2)})(torch.ones(1, 2)).item() == 2
    defined_later = 1
    assert layer.read() == defined_later


def test_hooks_of_a_shallow_copy_are_not_shared():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    calls: list[torch.nn.Module] = []
    hooked, other = shallow_copy(net), shallow_copy(net)
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        getattr(hooked[0], register)(lambda layer, *_: calls.append(layer))
    for module in (net, other, hooked):
        module(torch.ones(1, 2)).sum().backward()
    assert calls == [hooked[0]] * 3
