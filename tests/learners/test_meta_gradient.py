"""The meta-gradient of every method in every mode, compared with finite differences of its objective."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases import (
    CLASSES,
    CONVERGED_PROXIMAL,
    METHODS,
    NETS,
    UNUSUAL_FEATURES,
    clusters,
    flattened,
    relative_error,
    smooth_mlp,
    unusual_episodes,
    unusual_net,
)
from metabridge.episodes import Episodes
from metabridge.learners import Engine, MetaGradient, Method, adapt, method, parameters
from metabridge.models import Network, mlp
from metabridge.models.network import Params, apply_features, apply_head
from metabridge.solvers import Proximal, task_loss

# the options `mode` and `flat` of the engines
ENGINE_OPTIONS = [("loop", False), ("loop", True), ("vectorized", False), ("vectorized", True), ("workers", False)]


def compute(learner: Method, net: Network, params: Params, episodes: Episodes, mode: str = "loop", flat: bool = False):
    return Engine(learner, net, mode=mode, flat=flat)(params, episodes)


def objective(learner: Method, net: Network, params: Params, episodes: Episodes) -> Callable[[Params], Tensor]:
    """Return a function whose gradient at `params` is, by definition, the outer gradient of the method.

    Its argument `weights` has the keys of `params` and shifted values. `params` itself is constant.
    """
    tasks = [(episodes if learner.split else episodes.without_split())[i] for i in range(len(episodes))]

    def mean_loss(loss: Callable[[Episodes, Params], Tensor], task_params: list[Params]) -> Tensor:
        return torch.stack([loss(task, weights) for task, weights in zip(tasks, task_params)]).mean()

    def loss_at(weights: Params, x: Tensor, y: Tensor) -> Tensor:
        return learner.loss(apply_head(weights, apply_features(net, weights, x)), y)

    def query_loss(task: Episodes, weights: Params) -> Tensor:
        return loss_at(weights, task.query_x[0], task.query_y[0])

    def adapt_to_task(task: Episodes, weights: Params) -> Params:
        return adapt(learner, net, weights, task.support_x[0], task.support_y[0]).params

    def adapt_first_order(task: Episodes, weights: Params) -> Params:
        """Adapt `weights` with the support features and inner gradients at `params`, which are constants."""
        body = {name: value for name, value in weights.items() if name.startswith("features.")}
        if learner.training_head == "solved":
            return adapt_to_task(task, params | {n: v for n, v in weights.items() if n.startswith("solver.")}) | body
        result = body.copy()
        for name, value in adapt_to_task(task, params).items():
            if learner.adapts == "all" or name.startswith("head."):
                rate_name = f"rates.{name}"
                # with constant inner gradients, the sum of all steps is proportional to the learned rate
                relative_rate = weights[rate_name] / params[rate_name] if rate_name in params else 1.0
                result[name] = weights[name] - relative_rate * (params[name] - value)
        return result

    if learner.outer == "first-order":
        return lambda weights: mean_loss(query_loss, [adapt_first_order(task, weights) for task in tasks])
    if learner.outer == "displacement":  # the envelope min ℓ(θ') + λ/2‖θ' − θ‖² over θ' has the gradient λ(θ − θ')

        def envelope(task: Episodes, weights: Params) -> Tensor:
            minimum = adapt_to_task(task, weights)
            squared_distance = sum((minimum[name] - weights[name]).square().sum() for name in minimum)
            support_loss = loss_at(minimum, task.support_x[0], task.support_y[0])
            return support_loss + learner.inner.strength / 2 * squared_distance

        return lambda weights: mean_loss(envelope, [weights] * len(tasks))
    return lambda weights: compute(learner, net, weights, episodes).loss


@torch.no_grad()
def directional_derivative(
    function: Callable[[Params], Tensor], params: Params, direction: Params, step: float = 1e-5
) -> float:
    def value_after_shift(sign: float) -> float:
        return float(function({n: v.detach() + sign * step * direction.get(n, 0.0) for n, v in params.items()}))

    return (value_after_shift(1) - value_after_shift(-1)) / (2 * step)


@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_meta_gradient_matches_finite_differences_in_every_mode(name, net_name):
    case = NETS[net_name]
    learner, net, episodes = case.method(name), case.make(), clusters(case.shape)
    if name == "reptile":  # one step of Reptile is the gradient of lr × the support loss
        learner = method("reptile", steps=1, lr=0.1)
    params = parameters(learner, net, classes=CLASSES)
    results = {options: compute(learner, net, params, episodes, *options) for options in ENGINE_OPTIONS}
    reference = flattened(results["loop", False].gradients)
    for options, result in results.items():
        assert relative_error(flattened(result.gradients), reference) < 1e-9, options
        assert float(result.loss) == pytest.approx(float(results["loop", False].loss), rel=1e-12)

    if name == "reptile":
        unsplit = episodes.without_split()
        nal = method("nal")
        function = lambda p: 0.1 * compute(nal, net, p, unsplit).loss  # noqa: E731
    else:
        function = objective(learner, net, params, episodes)
    gradients = results["loop", False].gradients
    generator = torch.Generator().manual_seed(1)
    directions = [gradients] + [
        {n: torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in gradients.items()} for _ in range(3)
    ]
    for direction in directions:
        norm = flattened(direction).norm()
        unit = {n: v / norm for n, v in direction.items()}
        expected = directional_derivative(function, params, unit, case.step)
        actual = float(flattened(gradients) @ flattened(unit))
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-7 * float(reference.norm()))


@pytest.mark.parametrize("net_name", UNUSUAL_FEATURES)
@pytest.mark.parametrize("name", METHODS)
def test_modes_agree_on_unusual_networks_and_exact_gradients_match_finite_differences(name, net_name):
    learner, net, episodes = METHODS[name], unusual_net(net_name), unusual_episodes(net_name)
    has_converged_solver = isinstance(learner.inner, Proximal) and learner.inner is CONVERGED_PROXIMAL
    if has_converged_solver:  # it is slow, and the test above covers it
        learner = replace(learner, inner=Proximal(steps=3, lr=0.1, cg_steps=2))
    params = parameters(learner, net, classes=CLASSES)

    def result(mode: str = "loop", params: Params = params) -> MetaGradient:
        return compute(learner, deepcopy(net), params, episodes, mode)  # a forward pass may change the buffers

    reference = result()
    gradients = flattened(reference.gradients)
    for mode in ("workers", "vectorized"):
        other = result(mode)
        assert relative_error(flattened(other.gradients), gradients) < 1e-10, mode
        assert float(other.loss) == pytest.approx(float(reference.loss), rel=1e-12)
    if learner.outer in ("first-order", "displacement") or has_converged_solver:
        return
    generator = torch.Generator().manual_seed(1)
    direction = {
        n: v + torch.randn(v.shape, generator=generator, dtype=v.dtype) * gradients.norm() / v.numel() ** 0.5
        for n, v in reference.gradients.items()
    }
    norm = flattened(direction).norm()
    unit = {n: v / norm for n, v in direction.items()}
    expected = directional_derivative(lambda p: result(params=p).loss, params, unit)
    assert float(gradients @ flattened(unit)) == pytest.approx(expected, rel=1e-6, abs=1e-7 * float(gradients.norm()))


def test_burer_monteiro_gradient_matches_finite_differences():
    net = mlp(4, 1, width=3, depth=1, activation="linear", bias=False).double()
    learner = method("burer-monteiro")
    params = parameters(learner, net, classes=3)
    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.square().sum(-1, keepdim=True)
    episodes = Episodes(x[:, :4], y[:, :4], x[:, 4:], y[:, 4:], classes=torch.arange(3)[:, None])
    body, heads = params["features.1.weight"].T, params["heads.weight"].T
    loss = sum(task_loss(x[i] @ body @ heads[:, i : i + 1], y[i]) for i in range(3)) / 3
    loss = loss + (body.T @ body - heads @ heads.T).square().sum() / 8  # Yüksel et al. 2023, eq. 12
    expected = torch.autograd.grad(loss, [params["features.1.weight"], params["heads.weight"]])
    for mode, flat in ENGINE_OPTIONS:
        result = compute(learner, net, params, episodes, mode, flat)
        assert float(result.loss) == pytest.approx(loss.item(), rel=1e-12)
        assert relative_error(result.gradients["features.1.weight"], expected[0]) < 1e-9
        assert relative_error(result.gradients["heads.weight"], expected[1]) < 1e-9


def test_reptile_gradient_is_the_displacement_of_several_steps():
    net, episodes = smooth_mlp(), clusters((4,), tasks=1)
    learner = METHODS["reptile"]
    params = parameters(learner, net)
    unsplit = episodes.without_split()
    shifted = adapt(learner, net, params, unsplit.support_x[0], unsplit.support_y[0]).params
    expected = {name: params[name].detach() - shifted[name] for name in shifted}
    assert relative_error(flattened(compute(learner, net, params, episodes).gradients), flattened(expected)) < 1e-12


def test_first_order_gradient_differs_from_the_exact_one():
    net, episodes = smooth_mlp(), clusters((4,))
    exact, first_order = (METHODS[name] for name in ("maml", "fo-maml"))
    params = parameters(exact, net)
    gradients = [flattened(compute(m, net, params, episodes).gradients) for m in (exact, first_order)]
    assert relative_error(gradients[1], gradients[0]) > 1e-2


def test_imaml_on_a_quadratic_equals_its_closed_form():
    """With the support loss ½θᵀAθ − bᵀθ and the query loss L, θ' = (A + λI)⁻¹(b + λθ) and dL/dθ = λ(A + λI)⁻¹∇L(θ').

    θ is the head of a linear network, up to a constant the support loss is its squared error, and λ is the strength.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 12, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(1, 12, 1, generator=generator, dtype=torch.float64)
    episodes = Episodes(x[:, :6], y[:, :6], x[:, 6:], y[:, 6:])
    net = mlp(3, 1, width=3, depth=1, activation="linear", bias=False).double()
    strength = 0.7
    learner = Method("head", Proximal(strength=strength, steps=3000, lr=0.1, cg_steps=3), outer="implicit")
    params = parameters(learner, net)
    body, initial_head = params["features.1.weight"].detach(), params["head.weight"].detach()[0]
    support, query = x[0, :6] @ body.T, x[0, 6:] @ body.T
    A, b = support.T @ support / 6, support.T @ y[0, :6, 0] / 6
    eye = torch.eye(3, dtype=torch.float64)
    adapted = torch.linalg.solve(A + strength * eye, b + strength * initial_head)
    query_grad = query.T @ (query @ adapted - y[0, 6:, 0]) / 6
    expected = strength * torch.linalg.solve(A + strength * eye, query_grad)
    result = compute(learner, net, params, episodes)
    assert float(result.loss) == pytest.approx(float((query @ adapted - y[0, 6:, 0]).square().mean() / 2), rel=1e-9)
    assert relative_error(result.gradients["head.weight"][0], expected) < 1e-9


def test_multi_task_gradients_with_shared_head_rows_equal_those_with_a_head_per_task():
    net, episodes = smooth_mlp(), clusters((4,))
    learner = METHODS["mtl"]
    params = parameters(learner, net, classes=CLASSES)
    unsplit = episodes.without_split()
    # the row of the head for each task and each way (index of a class in the task)
    heads = {(t, w): params["heads.weight"][c] for t, row in enumerate(unsplit.classes) for w, c in enumerate(row)}
    losses = []
    for task in range(len(unsplit)):
        features = apply_features(net, params, unsplit.support_x[task])
        outputs = [
            features @ heads[task, way] + params["heads.bias"][unsplit.classes[task, way]]
            for way in range(unsplit.classes.shape[1])
        ]
        losses.append(task_loss(torch.stack(outputs, dim=-1), unsplit.support_y[task]))
    names = ["features.1.weight", "heads.weight", "heads.bias"]
    expected = torch.autograd.grad(sum(losses) / len(losses), [params[name] for name in names])
    result = compute(learner, net, params, episodes, "vectorized")
    for name, value in zip(names, expected):
        assert relative_error(result.gradients[name], value) < 1e-12


def test_rfs_is_one_classifier_over_all_training_classes():
    net, episodes = smooth_mlp(), clusters((4,), tasks=1)
    learner = METHODS["rfs"]
    params = parameters(learner, net, classes=CLASSES)
    unsplit = episodes.without_split()
    logits = apply_features(net, params, unsplit.support_x[0]) @ params["heads.weight"].T + params["heads.bias"]
    expected = task_loss(logits, unsplit.classes[0][unsplit.support_y[0]])
    assert float(compute(learner, net, params, episodes).loss) == pytest.approx(expected.item(), rel=1e-12)


def test_the_initial_head_is_trained_only_if_the_training_head_is_learned():
    net = smooth_mlp()
    for name in ("anil-frozen", "r2d2", "metaoptnet", "mtl"):
        params = parameters(METHODS[name], net, classes=CLASSES)
        gradients = compute(METHODS[name], net, params, clusters((4,))).gradients
        assert not params["head.weight"].requires_grad
        assert "head.weight" not in gradients
        assert set(gradients) == {n for n, value in params.items() if value.requires_grad}


def test_the_gradient_of_a_custom_loss_matches_finite_differences():
    """The loss is the mean of log cosh of the errors, on regression tasks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 2, generator=generator, dtype=torch.float64)
    episodes = Episodes(x[:, :4], x[:, :4].sin(), x[:, 4:], x[:, 4:].sin())
    net = mlp(2, 2, width=5, activation="softplus").double()
    learner = method("maml", lr=0.1, loss=lambda prediction, target: torch.log(torch.cosh(prediction - target)).mean())
    params = parameters(learner, net)
    result = compute(learner, net, params, episodes, "vectorized")
    expected = directional_derivative(lambda p: compute(learner, net, p, episodes).loss, params, result.gradients)
    assert float(flattened(result.gradients).square().sum()) == pytest.approx(expected, rel=1e-6)


def test_gradients_with_bfloat16_features_are_close_to_those_in_full_precision():
    net, episodes = smooth_mlp().float(), clusters((4,)).to(dtype=torch.float32)
    for name in ("maml", "anil", "r2d2", "mtl"):
        params = parameters(METHODS[name], net, classes=CLASSES)
        full_precision = Engine(METHODS[name], net, mode="vectorized")(params, episodes)
        low_precision = Engine(METHODS[name], net, mode="vectorized", dtype=torch.bfloat16)(params, episodes)
        error = relative_error(flattened(low_precision.gradients), flattened(full_precision.gradients))
        assert 1e-5 < error < 0.05  # different, but only by rounding
        assert all(value.dtype == torch.float32 for value in low_precision.gradients.values())
