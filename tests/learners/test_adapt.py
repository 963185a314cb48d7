from __future__ import annotations

import pytest
import torch

from cases import CLASSES, METHODS, NETS, clusters, smooth_mlp
from metabridge import SVM, InputError, NearestCentroid, RidgeHead, Sinusoid, adapt, method, parameters, predict
from metabridge.learners.gradient import features_of
from metabridge.models import mlp


@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_predictions_for_many_tasks_equal_those_of_one_at_a_time(name, net_name):
    case = NETS[net_name]
    chosen, net, episodes = case.method(name), case.make(), clusters(case.shape)
    params = parameters(chosen, net, classes=CLASSES)
    together = predict(chosen, net, params, episodes)
    for task in range(len(episodes)):
        alone = adapt(chosen, net, params, episodes.support_x[task], episodes.support_y[task])
        assert torch.allclose(together[task], alone(episodes.query_x[task]), atol=1e-8)


def test_adaptation_lowers_the_support_loss():
    net, episodes = smooth_mlp(), clusters((4,))
    for name in ("maml", "anil", "imaml", "nal"):
        chosen = method(name, steps=50, lr=0.05)
        params = parameters(chosen, net)
        x, y = episodes.support_x[0], episodes.support_y[0]
        adapted = adapt(chosen, net, params, x, y)
        assert chosen.loss(adapted(x), y) < chosen.loss(net(x), y) - 0.05


def test_adaptation_of_the_head_leaves_the_body_alone():
    net, episodes = smooth_mlp(), clusters((4,))
    params = parameters(METHODS["anil"], net)
    adapted = adapt(METHODS["anil"], net, params, episodes.support_x[0], episodes.support_y[0]).params
    assert torch.equal(adapted["features.1.weight"], params["features.1.weight"])
    assert not torch.equal(adapted["head.weight"], params["head.weight"])


def test_a_solved_head_has_no_part_of_the_initial_one():
    net, episodes = smooth_mlp(), clusters((4,))
    x, y = episodes.support_x[0], episodes.support_y[0]
    chosen = method("r2d2")
    params = parameters(chosen, net)
    other = {name: value + 1 if name.startswith("head.") else value for name, value in params.items()}
    assert torch.equal(adapt(chosen, net, params, x, y)(x), adapt(chosen, net, other, x, y)(x))


@pytest.mark.parametrize("head", [SVM(loss="hinge"), SVM(), RidgeHead(), NearestCentroid()])
def test_any_head_can_be_solved_at_test_time(head):
    net, episodes = smooth_mlp(), clusters((4,))
    chosen = method("mtl", test=head)
    params = parameters(chosen, net, classes=CLASSES)
    with torch.no_grad():
        support, query = features_of(net, params, episodes)
    expected = head.fit(support, episodes.support_y, 3).scores(query)
    assert torch.allclose(predict(chosen, net, params, episodes), expected, atol=1e-9)


def test_tasks_of_more_ways_than_the_head_fit_a_head_that_is_solved_but_not_one_that_is_learned():
    net = mlp(4, 2).double()
    episodes = clusters((4,))
    rows = method("mtl")
    assert predict(rows, net, parameters(rows, net, classes=6), episodes).shape[-1] == 3
    with pytest.raises(InputError, match="A label is 2, but the head has 2 outputs"):
        predict(method("maml"), net, parameters(method("maml"), net), episodes)


def test_regression_works_for_every_method_that_can():
    episodes = Sinusoid().sample(3, torch.Generator().manual_seed(0))
    net = mlp(1, 1)
    for name in ("maml", "anil", "imaml", "r2d2", "nal"):
        chosen = method(name)
        assert predict(chosen, net, parameters(chosen, net), episodes).shape == (3, 10, 1)
