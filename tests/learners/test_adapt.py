from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from cases import CLASSES, METHODS, NETS, WAYS, clusters, small_conv4, smooth_mlp, unusual_episodes, unusual_net
from metabridge import Engine, Episodes, InputError, adapt, method, parameters, predict
from metabridge.environments import Sinusoid
from metabridge.heads import SVM, NearestCentroid, RidgeClassifier
from metabridge.learners import PRESETS
from metabridge.learners.task_gradients import compute_features
from metabridge.models import Network, conv4, mlp, resnet12

THREADS = 8


@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_predictions_for_many_tasks_equal_those_for_single_tasks(name, net_name):
    case = NETS[net_name]
    learner, net, episodes = case.method(name), case.make(), clusters(case.shape)
    params = parameters(learner, net, classes=CLASSES)
    batched = predict(learner, net, params, episodes)
    for task in range(len(episodes)):
        single = adapt(learner, net, params, episodes.support_x[task], episodes.support_y[task])
        assert torch.allclose(batched[task], single(episodes.query_x[task]), atol=1e-8)


def test_adaptation_lowers_the_support_loss():
    net, episodes = smooth_mlp(), clusters((4,))
    for name in ("maml", "anil", "imaml", "nal"):
        learner = method(name, steps=50, lr=0.05)
        params = parameters(learner, net)
        x, y = episodes.support_x[0], episodes.support_y[0]
        adapted = adapt(learner, net, params, x, y)
        assert learner.loss(adapted(x), y) < learner.loss(net(x), y) - 0.05


def test_the_representation_of_an_adapted_network_is_short():
    net, episodes = mlp(4, 3), clusters((4,), tasks=1).to(dtype=torch.float32)
    x, y = episodes.support_x[0], episodes.support_y[0]
    anil, with_svm = method("anil"), method("anil", test_solver="svm")
    assert repr(adapt(anil, net, parameters(anil, net), x, y)) == "Adapted(anil, mlp)"
    adapted = adapt(with_svm, net, parameters(with_svm, net), x, y)
    assert repr(adapted) == "Adapted(adapts='head', mlp, with a test-time head)"


@pytest.mark.parametrize(
    ("net", "shape", "option"),
    [
        (conv4(channels=3, size=28), (1, 28, 28), "channels=3"),
        (resnet12(channels=3, size=28, widths=(4, 4, 4, 4)), (1, 28, 28), "channels=3"),
        (mlp(9, 2), (1, 4, 4), "inputs=9"),
    ],
)
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_inputs_of_another_shape_raise_an_error_that_names_the_shape_and_the_network_option(name, net, shape, option):
    learner, x = method(name), torch.rand(4, *shape)
    labels = torch.tensor([0, 1, 0, 1])
    episodes = Episodes(x[None], labels[None], x[None], labels[None])
    sentence = rf"Inputs have shape {re.escape(str(shape))}, but the network was built with {option}"
    with pytest.raises(InputError, match=sentence):
        adapt(learner, net, parameters(learner, net), x, labels)
    with pytest.raises(InputError, match=sentence):
        predict(learner, net, parameters(learner, net), episodes)


def test_adapting_the_head_does_not_change_the_body():
    net, episodes = smooth_mlp(), clusters((4,))
    params = parameters(METHODS["anil"], net)
    adapted = adapt(METHODS["anil"], net, params, episodes.support_x[0], episodes.support_y[0]).params
    assert torch.equal(adapted["features.1.weight"], params["features.1.weight"])
    assert not torch.equal(adapted["head.weight"], params["head.weight"])


def test_a_solved_head_does_not_depend_on_the_initial_head():
    net, episodes = smooth_mlp(), clusters((4,))
    x, y = episodes.support_x[0], episodes.support_y[0]
    learner = method("r2d2")
    params = parameters(learner, net)
    other = {name: value + 1 if name.startswith("head.") else value for name, value in params.items()}
    assert torch.equal(adapt(learner, net, params, x, y)(x), adapt(learner, net, other, x, y)(x))


@pytest.mark.parametrize("head", [SVM(loss="hinge"), SVM(), RidgeClassifier(), NearestCentroid()])
def test_predictions_with_a_test_time_head_equal_the_scores_of_the_fitted_head(head):
    net, episodes = smooth_mlp(), clusters((4,))
    learner = method("mtl", test_solver=head)
    params = parameters(learner, net, classes=CLASSES)
    with torch.no_grad():
        support, query = compute_features(net, params, episodes)
    expected = head.fit(support, episodes.support_y, 3).scores(query)
    assert torch.allclose(predict(learner, net, params, episodes), expected, atol=1e-9)


def test_test_time_heads_accept_any_number_of_classes_and_learned_heads_at_most_their_outputs():
    net = mlp(4, 2).double()
    episodes = clusters((4,))
    mtl = method("mtl")
    assert predict(mtl, net, parameters(mtl, net, classes=6), episodes).shape[-1] == 3
    with pytest.raises(InputError, match="A label is 2, but the head has 2 outputs"):
        predict(method("maml"), net, parameters(method("maml"), net), episodes)


def test_regression_works_with_every_method_that_supports_it():
    episodes = Sinusoid().sample(3, torch.Generator().manual_seed(0))
    net = mlp(1, 1)
    for name in ("maml", "anil", "imaml", "r2d2", "nal"):
        learner = method(name)
        assert predict(learner, net, parameters(learner, net), episodes).shape == (3, 10, 1)


class WaitForAll(nn.Module):
    """A layer in which every thread waits until all threads are in a forward pass."""

    barrier: threading.Barrier | None = None

    def forward(self, x):
        if self.barrier is not None:
            self.barrier.wait(timeout=60)
        return x


def adapt_and_predict(name, net, params, episodes):
    learner = method(name)
    adapted = adapt(learner, net, params, episodes.support_x[0], episodes.support_y[0])
    return [adapted(episodes.query_x[0]), predict(learner, net, params, episodes)]


@pytest.mark.parametrize("name", PRESETS)
def test_threads_in_the_same_forward_pass_of_one_network_do_not_interfere(name, monkeypatch):
    net = Network(
        nn.Sequential(nn.Linear(4, 6), WaitForAll(), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, WAYS)
    )
    net, episodes = net.double(), [clusters((4,), tasks=1, seed=seed) for seed in range(THREADS)]
    params = parameters(method(name), net, classes=CLASSES)
    scaled_params = [{n: (1 + thread / 10) * v.detach() for n, v in params.items()} for thread in range(THREADS)]
    arguments = [(name, net, *pair) for pair in zip(scaled_params, episodes)]
    expected = [adapt_and_predict(*args) for args in arguments]
    monkeypatch.setattr(WaitForAll, "barrier", threading.Barrier(THREADS))
    with ThreadPoolExecutor(THREADS) as pool:
        actual = list(pool.map(lambda args: adapt_and_predict(*args), arguments))
    for actual_outputs, expected_outputs in zip(actual, expected):
        assert all(map(torch.equal, actual_outputs, expected_outputs))


@pytest.mark.parametrize("make_net", [smooth_mlp, small_conv4])
def test_eight_threads_compute_the_same_bits_as_one(make_net):
    net = make_net()
    shape = (4,) if make_net is smooth_mlp else (1, 16, 16)
    arguments = [
        (name, net, parameters(method(name), net, classes=CLASSES), clusters(shape, tasks=2, seed=seed))
        for seed in range(2)
        for name in PRESETS
    ]
    expected = [adapt_and_predict(*args) for args in arguments]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # switch threads so often that races would show
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            actual = list(pool.map(lambda args: adapt_and_predict(*args), arguments * 3))
    finally:
        sys.setswitchinterval(interval)
    for actual_outputs, expected_outputs in zip(actual, expected * 3):
        assert all(map(torch.equal, actual_outputs, expected_outputs))


def test_the_network_can_be_called_while_it_is_applied_with_other_parameters():
    net, episodes = smooth_mlp(), clusters((4,), tasks=1)
    params = {name: 2 * value.detach() for name, value in net.named_parameters()}
    x, called, outputs = episodes.support_x[0], threading.Event(), []
    expected = net(x)

    def call_in_another_thread(*_):
        if not called.is_set():  # the forward pass in the other thread runs this hook too
            called.set()
            outputs.append(pool.submit(net, x).result())

    net.features[1].register_forward_hook(call_in_another_thread)
    with ThreadPoolExecutor(1) as pool:
        adapt(method("maml"), net, params, x, episodes.support_y[0])
    assert torch.equal(outputs[0], expected)


@pytest.mark.parametrize("name", ["maml", "imaml", "anil", "mtl", "r2d2"])
def test_adaptation_works_in_inference_mode(name):
    learner, net, episodes = METHODS[name], smooth_mlp(), clusters((4,))
    expected = predict(learner, net, parameters(learner, net, classes=CLASSES), episodes)
    with torch.inference_mode():
        params, inference_episodes = parameters(learner, net, classes=CLASSES), episodes.clone()
        actual = predict(learner, net, params, inference_episodes)
        adapted = adapt(learner, net, params, inference_episodes.support_x[0], inference_episodes.support_y[0])
        single = adapted(inference_episodes.query_x[0])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(single, expected[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["transformer", "multi-head attention", "attention"])
def test_adaptation_of_attention_is_the_same_in_training_and_evaluation_mode(name, training):
    """In evaluation mode, PyTorch has a fast path for attention."""
    learner, net, episodes = METHODS["maml"], unusual_net(name), unusual_episodes(name)
    params = parameters(learner, net)
    expected = predict(learner, net.train(), params, episodes)
    torch.testing.assert_close(predict(learner, net.train(training), params, episodes), expected)
    with torch.inference_mode():
        torch.testing.assert_close(predict(learner, net, params, episodes), expected)
    gradients = Engine(learner, net)(params, episodes).gradients
    assert all(value.isfinite().all() for value in gradients.values())


def test_a_network_with_buffers_created_in_inference_mode_adapts_like_any_other():
    images = clusters((1, 16, 16)).map_inputs(torch.Tensor.float)
    with torch.inference_mode():
        net = conv4(1, 16, WAYS, filters=4, statistics="running").eval()
        params = parameters(method("maml"), net)
        actual = predict(method("maml"), net, params, images)
    net = conv4(1, 16, WAYS, filters=4, statistics="running").eval()
    expected = predict(method("maml"), net, parameters(method("maml"), net), images)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["maml", "anil", "mtl"])
def test_a_network_that_cannot_be_called_with_other_parameters_raises_an_error(name):
    class Holder:
        """An object that is not a module, so that PyTorch does not find the layer in it."""

        def __init__(self, layer):
            self.layer = layer

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 5).double()
            self.holder = Holder(self.layer)

        def forward(self, x):
            return self.holder.layer(x)

    net, episodes = Network(Hidden(), nn.Linear(5, WAYS).double()).eval(), clusters((4,))
    params = parameters(method(name), net, classes=CLASSES)
    with pytest.raises(InputError, match=r"reads its parameter 'layer\.weight' through an object"):
        predict(method(name), net, params, episodes)
    with pytest.raises(InputError, match=r"reads its parameter 'layer\.weight' through an object"):
        adapt(method(name), net, params, episodes.support_x[0], episodes.support_y[0])


def test_a_method_that_adapts_nothing_in_training_adapts_the_whole_network_at_test_time():
    learner, net = method("nal", steps=3, lr=0.1), smooth_mlp()
    params = parameters(learner, net)
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    adapted = adapt(learner, net, params, x, y)
    assert all(not torch.equal(adapted.params[name], params[name]) for name in params)
    expected = adapt(method("maml", steps=3, lr=0.1), net, params, x, y)
    for name, value in expected.params.items():
        torch.testing.assert_close(adapted.params[name], value)
    task = Episodes(x[None], y[None], x[None], y[None])
    torch.testing.assert_close(predict(learner, net, params, task)[0], adapted(x))
