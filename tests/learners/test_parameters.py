"""Parameters with `requires_grad=False`, in every method."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cases import CLASSES, CONVERGED_PROXIMAL, METHODS, clusters, relative_error, smooth_mlp
from metabridge import InputError, fit, method
from metabridge.environments import Sinusoid
from metabridge.episodes import Episodes
from metabridge.learners import adapt, meta_gradient, parameters
from metabridge.learners.adapt import predict
from metabridge.learners.engine import Engine, Mode
from metabridge.models import Network, mlp
from metabridge.solvers import Proximal

FROZEN = ("features.1.weight", "features.3.bias")


def frozen_mlp() -> Network:
    net = smooth_mlp()
    for name in FROZEN:
        net.get_parameter(name).requires_grad_(False)
    return net


def mlp_with_buffers() -> Network:
    """Return the network of `frozen_mlp`, with buffers in place of its frozen parameters."""
    net = smooth_mlp()
    for name in FROZEN:
        layer_name, _, attribute = name.rpartition(".")
        layer, value = net.get_submodule(layer_name), net.get_parameter(name).detach()
        delattr(layer, attribute)
        layer.register_buffer(attribute, value)
    return net


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "workers") for name in METHODS), *((name, "vectorized") for name in ("maml", "anil", "imaml", "r2d2"))],
)
def test_frozen_parameters_are_constants_in_training_and_adaptation(name: str, mode: Mode) -> None:
    learner, episodes, nets = METHODS[name], clusters((4,), tasks=2), (frozen_mlp(), mlp_with_buffers())
    if learner.inner is CONVERGED_PROXIMAL:  # a less precise solution suffices
        learner = replace(learner, inner=Proximal(steps=4, lr=0.1, cg_steps=3))
    params = [parameters(learner, net, classes=CLASSES) for net in nets]
    assert params[0].keys() - params[1].keys() == {*FROZEN}  # frozen parameters have no learned rates
    assert not any(params[0][name].requires_grad for name in FROZEN)
    actual, expected = (Engine(learner, net, mode=mode)(values, episodes) for net, values in zip(nets, params))
    assert actual.gradients.keys() == expected.gradients.keys()
    for key, value in expected.gradients.items():
        assert value.norm() == actual.gradients[key].norm() == 0 or relative_error(actual.gradients[key], value) < 1e-9
    assert relative_error(*(predict(learner, net, values, episodes) for net, values in zip(nets, params))) < 1e-9
    x, y, query = episodes.support_x[0], episodes.support_y[0], episodes.query_x[0]
    adapted = [adapt(learner, net, values, x, y) for net, values in zip(nets, params)]
    assert relative_error(*(network(query) for network in adapted)) < 1e-9
    assert all(torch.equal(adapted[0].params[name], params[0][name]) for name in FROZEN)


@pytest.mark.parametrize("name", ["maml", "anil", "r2d2"])
def test_training_does_not_change_frozen_parameters(name: str) -> None:
    net = mlp(1, 1, width=8)
    net.features[1].requires_grad_(False)
    before = {key: value.detach().clone() for key, value in net.named_parameters()}
    run = fit(net, method(name), Sinusoid(), iterations=3, lr=0.01, weight_decay=0.1, batch_size=2, progress=False)
    for values in (run.params, dict(net.named_parameters())):
        unchanged = {key for key, value in before.items() if torch.equal(values[key], value)}
        # r2d2 solves its head on each support set and does not train it
        assert unchanged == {"features.1.weight", "features.1.bias"} | (
            {"head.weight", "head.bias"} if name == "r2d2" else set()
        )
    assert not net.features[1].weight.requires_grad


def test_a_frozen_head_does_not_adapt_when_all_layers_do() -> None:
    net, episodes = smooth_mlp(), clusters((4,))
    net.head.requires_grad_(False)
    learner = method("maml", lr=0.1)
    params = parameters(learner, net)
    adapted = adapt(learner, net, params, episodes.support_x[0], episodes.support_y[0]).params
    assert {name for name in params if torch.equal(adapted[name], params[name])} == {"head.weight", "head.bias"}
    assert not {"head.weight", "head.bias"} & Engine(learner, net)(params, episodes).gradients.keys()


def test_a_frozen_head_raises_an_error_if_only_the_head_adapts_and_is_ignored_if_it_is_solved() -> None:
    net, episodes = smooth_mlp(), clusters((4,))
    expected = Engine(method("r2d2"), net)(parameters(method("r2d2"), net), episodes)
    net.head.bias.requires_grad_(False)
    anil = method("anil")
    params = parameters(anil, net)
    for compute in (Engine(anil, net), partial(predict, anil, net)):
        with pytest.raises(InputError, match=r"'head.bias' has requires_grad=False.*training_head='frozen'"):
            compute(params, episodes)
    actual = Engine(method("r2d2"), net)(parameters(method("r2d2"), net), episodes)
    assert torch.equal(actual.loss, expected.loss)
    assert actual.gradients.keys() == expected.gradients.keys()


def test_a_completely_frozen_network_raises_an_error_unless_the_solver_has_parameters() -> None:
    net, episodes = smooth_mlp(), clusters((4,))
    net.requires_grad_(False)
    maml, r2d2 = method("maml"), method("r2d2")
    with pytest.raises(InputError, match="every parameter of the network has requires_grad=False"):
        Engine(maml, net)(parameters(maml, net), episodes)
    gradients = Engine(r2d2, net)(parameters(r2d2, net), episodes).gradients
    assert gradients.keys() == {"solver.log_penalty", "solver.log_scale"}
    with pytest.raises(InputError, match="there is nothing to train"):
        fit(net.float(), method("anil-frozen"), Sinusoid(), iterations=1, progress=False)


def test_a_method_that_trains_nothing_has_no_gradient_and_the_error_says_so():
    learner, net = method("frozen"), mlp(4, 3)
    params = parameters(learner, net)
    assert not any(value.requires_grad for value in params.values())
    tasks = Episodes(torch.rand(1, 3, 4), torch.arange(3)[None], torch.rand(1, 3, 4), torch.arange(3)[None])
    with pytest.raises(InputError, match="method is frozen, which trains nothing"):
        meta_gradient(learner, net, params, tasks)
