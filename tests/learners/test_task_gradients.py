"""Networks whose batch norm sees the points of all tasks in one batch while they are trained."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cases import CLASSES, WAYS, clusters, flattened, relative
from metabridge import Engine, method, parameters
from metabridge.learners.task_gradients import compute_features
from metabridge.models import Network, conv4, estimate_statistics
from metabridge.models.network import apply_head
from metabridge.solvers import Problem, RidgeSolver, task_loss

SHAPE = (1, 16, 16)
METHODS = ("mtl", "rfs", "nal", "r2d2", "metaoptnet", "anil", "fo-anil")


def running_net() -> Network:
    return conv4(1, 16, WAYS, filters=4, statistics="running").double().train()


@pytest.mark.parametrize("name", METHODS)
def test_every_mode_gives_the_same_gradient_of_the_joint_batch(name):
    chosen, net, episodes = method(name), running_net(), clusters(SHAPE)
    params = parameters(chosen, net, classes=CLASSES)
    results = [Engine(chosen, net, mode=mode)(params, episodes) for mode in ("loop", "workers", "vectorised")]
    for result in results[1:]:
        assert relative(flattened(result.gradients), flattened(results[0].gradients)) < 1e-10
        assert float(result.loss) == pytest.approx(float(results[0].loss), rel=1e-12)
    one_by_one = [Engine(chosen, net)(params, episodes[task]).gradients for task in range(len(episodes))]
    apart = sum(flattened(gradients) for gradients in one_by_one) / len(episodes)
    assert relative(apart, flattened(results[0].gradients)) > 1e-3  # the tasks do meet in the batch norm


@pytest.mark.parametrize("name", ["mtl", "rfs"])
def test_multi_task_gradients_are_those_of_one_cross_entropy_over_the_joint_batch(name):
    chosen, net, episodes = method(name), running_net(), clusters(SHAPE)
    params = parameters(chosen, net, classes=CLASSES)
    whole = episodes.without_split()
    rows = {part: params[f"heads.{part}"] for part in ("weight", "bias")}
    body = {key.removeprefix("features."): value for key, value in params.items() if key.startswith("features.")}
    features = torch.func.functional_call(net.features, body, (whole.support_x.flatten(0, 1),))
    scores = F.linear(features, rows["weight"], rows["bias"]).unflatten(0, whole.support_y.shape)
    classes = whole.classes
    loss = 0.0
    for task in range(len(whole)):
        if name == "mtl":  # among the task's own classes
            loss = loss + F.cross_entropy(scores[task][:, classes[task]], whole.support_y[task])
        else:  # among all classes
            loss = loss + F.cross_entropy(scores[task], classes[task][whole.support_y[task]])
    trained = [key for key, value in params.items() if value.requires_grad]
    expected = torch.autograd.grad(loss / len(whole), [params[key] for key in trained])
    result = Engine(chosen, net)(params, episodes)
    assert float(result.loss) == pytest.approx(loss.item() / len(whole), rel=1e-12)
    assert relative(flattened(result.gradients), flattened(dict(zip(trained, expected)))) < 1e-10


@pytest.mark.parametrize("name", ["mtl", "rfs", "r2d2", "anil"])
def test_the_gradient_of_the_joint_batch_matches_finite_differences(name):
    chosen, net, episodes = method(name), running_net(), clusters(SHAPE)
    params = parameters(chosen, net, classes=CLASSES)
    engine = Engine(chosen, net, mode="vectorised")
    gradients = engine(params, episodes).gradients
    generator = torch.Generator().manual_seed(1)
    random = {key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key, value in gradients.items()}
    for direction in (gradients, random):
        size, step = flattened(direction).norm(), 2e-7  # short enough to meet no kink of a rectifier
        unit = {key: value / size for key, value in direction.items()}
        ahead, behind = (
            float(engine({k: v.detach() + sign * step * unit.get(k, 0) for k, v in params.items()}, episodes).loss)
            for sign in (1, -1)
        )
        found = float(flattened(gradients) @ flattened(unit))
        assert found == pytest.approx((ahead - behind) / (2 * step), rel=1e-6, abs=1e-7)


def test_in_evaluation_the_features_of_tasks_are_those_of_image_by_image():
    net, episodes = running_net(), clusters(SHAPE)
    params = parameters(method("mtl"), net, classes=CLASSES)
    estimate_statistics(net.features, [clusters(SHAPE, seed=1).support_x.flatten(0, 1)])
    net.eval()
    with torch.no_grad():
        for found, images in zip(compute_features(net, params, episodes), (episodes.support_x, episodes.query_x)):
            alone = torch.stack([torch.cat([net.features(image[None]) for image in task]) for task in images])
            assert torch.allclose(found, alone, atol=1e-12)
        joint = compute_features(net.train(), params, episodes)[0]
    assert not torch.allclose(joint, alone[:, : joint.shape[1]], atol=1e-2)  # in training they do depend on each other


@pytest.mark.parametrize("penalty", [1e-3, 1e-6])
def test_the_ridge_of_r2d2_is_right_in_float32_though_points_are_the_same(penalty):
    generator = torch.Generator().manual_seed(0)
    x, y = 5 * torch.randn(5, 64, generator=generator), torch.randn(5, 3, generator=generator)
    x[1] = x[0]
    queries = torch.randn(9, 64, generator=generator)

    def predicted(dtype):
        problem = Problem(apply_head, task_loss, x.to(dtype), y.to(dtype))
        start, solver = {"head.weight": torch.zeros(3, 64, dtype=dtype)}, RidgeSolver(penalty)
        return apply_head(
            solver.solve(problem, start, solver.solver_params(start), exact=True), queries.to(dtype)
        ).double()

    torch.testing.assert_close(predicted(torch.float32), predicted(torch.float64), rtol=1e-3, atol=1e-4)
