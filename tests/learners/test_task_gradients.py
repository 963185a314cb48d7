"""Networks whose batch norm computes its statistics over all tasks in training."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cases import CLASSES, WAYS, clusters, flattened, relative_error
from metabridge import Engine, method, parameters
from metabridge.learners.task_gradients import compute_features
from metabridge.models import Network, conv4, estimate_statistics

SHAPE = (1, 16, 16)
METHODS = ("mtl", "rfs", "nal", "r2d2", "metaoptnet", "anil", "fo-anil")


def conv4_with_running_statistics() -> Network:
    return conv4(1, 16, WAYS, filters=4, statistics="running").double().train()


@pytest.mark.parametrize("name", METHODS)
def test_all_modes_give_the_same_gradient_of_the_joint_batch(name):
    learner, net, episodes = method(name), conv4_with_running_statistics(), clusters(SHAPE)
    params = parameters(learner, net, classes=CLASSES)
    results = [Engine(learner, net, mode=mode)(params, episodes) for mode in ("loop", "workers", "vectorized")]
    for result in results[1:]:
        assert relative_error(flattened(result.gradients), flattened(results[0].gradients)) < 1e-10
        assert float(result.loss) == pytest.approx(float(results[0].loss), rel=1e-12)
    task_gradients = [Engine(learner, net)(params, episodes[task]).gradients for task in range(len(episodes))]
    mean = sum(flattened(gradients) for gradients in task_gradients) / len(episodes)
    assert relative_error(mean, flattened(results[0].gradients)) > 1e-3  # batch norm does mix the tasks


@pytest.mark.parametrize("name", ["mtl", "rfs"])
def test_multi_task_gradients_equal_the_gradient_of_one_cross_entropy_over_the_joint_batch(name):
    learner, net, episodes = method(name), conv4_with_running_statistics(), clusters(SHAPE)
    params = parameters(learner, net, classes=CLASSES)
    unsplit = episodes.without_split()
    rows = {key: params[f"heads.{key}"] for key in ("weight", "bias")}
    body = {key.removeprefix("features."): value for key, value in params.items() if key.startswith("features.")}
    features = torch.func.functional_call(net.features, body, (unsplit.support_x.flatten(0, 1),))
    scores = F.linear(features, rows["weight"], rows["bias"]).unflatten(0, unsplit.support_y.shape)
    classes = unsplit.classes
    loss = 0.0
    for task in range(len(unsplit)):
        if name == "mtl":  # among the classes of the task
            loss = loss + F.cross_entropy(scores[task][:, classes[task]], unsplit.support_y[task])
        else:  # among all classes
            loss = loss + F.cross_entropy(scores[task], classes[task][unsplit.support_y[task]])
    trained = [key for key, value in params.items() if value.requires_grad]
    expected = torch.autograd.grad(loss / len(unsplit), [params[key] for key in trained])
    result = Engine(learner, net)(params, episodes)
    assert float(result.loss) == pytest.approx(loss.item() / len(unsplit), rel=1e-12)
    assert relative_error(flattened(result.gradients), flattened(dict(zip(trained, expected)))) < 1e-10


@pytest.mark.parametrize("name", ["mtl", "rfs", "r2d2", "anil"])
def test_the_gradient_of_the_joint_batch_matches_finite_differences(name):
    learner, net, episodes = method(name), conv4_with_running_statistics(), clusters(SHAPE)
    params = parameters(learner, net, classes=CLASSES)
    engine = Engine(learner, net, mode="vectorized")
    gradients = engine(params, episodes).gradients
    generator = torch.Generator().manual_seed(1)
    noise = {key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key, value in gradients.items()}
    for direction in (gradients, noise):
        norm, step = flattened(direction).norm(), 2e-7  # a step so small that it crosses no kink
        unit = {key: value / norm for key, value in direction.items()}
        loss_after, loss_before = (
            float(engine({k: v.detach() + sign * step * unit.get(k, 0) for k, v in params.items()}, episodes).loss)
            for sign in (1, -1)
        )
        actual = float(flattened(gradients) @ flattened(unit))
        assert actual == pytest.approx((loss_after - loss_before) / (2 * step), rel=1e-6, abs=1e-7)


def test_in_evaluation_the_features_of_an_image_do_not_depend_on_others():
    net, episodes = conv4_with_running_statistics(), clusters(SHAPE)
    params = parameters(method("mtl"), net, classes=CLASSES)
    estimate_statistics(net.features, [clusters(SHAPE, seed=1).support_x.flatten(0, 1)])
    net.eval()
    with torch.no_grad():
        in_evaluation = compute_features(net, params, episodes)
        for features, images in zip(in_evaluation, (episodes.support_x, episodes.query_x)):
            single = torch.stack([torch.cat([net.features(image[None]) for image in task]) for task in images])
            assert torch.allclose(features, single, atol=1e-12)
        in_training = compute_features(net.train(), params, episodes)
    assert not torch.allclose(in_training[0], in_evaluation[0], atol=1e-2)  # in training, they do depend on others
