"""Adaptation at test time, to one task or to many at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.heads import FittedHead, Head
from metabridge.learners.method import Method
from metabridge.learners.parameters import adapted_params, check_test_time, solver_params
from metabridge.learners.task_gradients import compute_features, map_over_tasks
from metabridge.models.forward_behavior import observe
from metabridge.models.network import Network, Params, apply_features, apply_head, body_params
from metabridge.solvers import Problem, Solver
from metabridge.threads import map_over_threads

_CHECKED: WeakSet[Network] = WeakSet()  # networks that can be applied with other parameters


@dataclass(frozen=True)
class Adapted:
    """A network adapted to one task, which can be called on new points.

    Args:
        net: The network.
        params: Its adapted parameters, by name.
        head: The test-time head that was fitted, if any, which replaces the network's head.

    >>> import metabridge as mb
    >>> anil, net = mb.method("anil"), mb.models.mlp(1, 1)
    >>> x = torch.linspace(-1, 1, 10)[:, None]
    >>> adapted = adapt(anil, net, mb.parameters(anil, net), x, x)
    >>> adapted(x[:3]).shape
    torch.Size([3, 1])
    """

    net: Network
    params: Params
    head: FittedHead | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs, (points, outputs), for points (points, ...): scores of the classes, or values."""
        features = apply_features(self.net, self.params, x)
        return apply_head(self.params, features) if self.head is None else self.head.scores(features[None])[0]


@torch.inference_mode(False)
def adapt(method: Method, net: Network, params: Params, x: Tensor, y: Tensor) -> Adapted:
    """Adapt to one task, as the method does at test time.

    Args:
        method: The method.
        net: The network.
        params: The method's parameters, from `parameters`.
        x: The support points, (points, ...).
        y: Their class labels, int64 (points,), or values, (points, outputs).

    Returns:
        The adapted network.

    Raises:
        InputError: If the parameters, the network and the points do not fit together.

    >>> import metabridge as mb
    >>> maml, net = mb.method("maml", steps=20, lr=0.1), mb.models.mlp(1, 1)
    >>> x = torch.linspace(-1, 1, 10)[:, None]
    >>> adapt(maml, net, mb.parameters(maml, net), x, x)(x).shape
    torch.Size([10, 1])
    """
    x, y = _without_inference_mode(x), _without_inference_mode(y)
    task = Episodes(x[None], y[None], x[None], y[None])
    check_test_time(method, net, params, task)
    weights = {name: _without_inference_mode(value.detach()) for name, value in params.items()}
    _check_network(net, weights, x)
    solver = _test_solver(method)
    if isinstance(solver, Head):
        with torch.no_grad():
            features = apply_features(net, weights, x)
        head = solver.fit(features[None], y[None], _count_outputs(task))
        # Contiguous as a saved head is when it is loaded, so that both give the same bits.
        return Adapted(net, weights, head._replace(weight=head.weight.contiguous(), bias=head.bias.contiguous()))
    return Adapted(net, _solve(method, solver, net, weights, x, y))


@torch.inference_mode(False)
def predict(
    method: Method, net: Network, params: Params, episodes: Episodes, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Adapt to the support set of every task and return the outputs for its queries.

    Args:
        method: The method.
        net: The network.
        params: The method's parameters, from `parameters`.
        episodes: The tasks.
        dtype: The data type of the computation of features, if only a head is adapted (default: that of the inputs).

    Returns:
        The outputs, (tasks, queries, outputs).

    Raises:
        InputError: If the parameters, the network and the episodes do not fit together.

    >>> import metabridge as mb
    >>> anil, net = mb.method("anil"), mb.models.mlp(1, 1)
    >>> predict(anil, net, mb.parameters(anil, net), mb.environments.Sinusoid().sample(3, torch.Generator())).shape
    torch.Size([3, 10, 1])
    """
    check_test_time(method, net, params, episodes)
    weights = {name: _without_inference_mode(value.detach()) for name, value in params.items()}
    episodes = episodes.map(_without_inference_mode)
    _check_network(net, weights, episodes.support_x[0])
    if adapts_head_only(method):
        with torch.no_grad():
            support, query = _map_over_device(lambda tasks: compute_features(net, weights, tasks, dtype), episodes)
        return predict_from_features(method, weights, replace(episodes, support_x=support, query_x=query))
    solver = _test_solver(method)
    assert not isinstance(solver, Head)

    def task_outputs(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        params = _solve(method, solver, net, weights, x, y)
        return apply_head(params, apply_features(net, params, query))

    def outputs(tasks: Episodes) -> tuple[Tensor]:
        return (map_over_tasks(task_outputs, (tasks.support_x, tasks.support_y, tasks.query_x)),)

    with torch.no_grad():
        return _map_over_device(outputs, episodes)[0]


def adapts_head_only(method: Method) -> bool:
    """Return whether adaptation at test time leaves the features as they are."""
    return method.adapts == "head" or isinstance(_test_solver(method), Head)


@torch.no_grad()
def predict_from_features(method: Method, params: Params, episodes: Episodes) -> Tensor:
    """Adapt the head of every task and return the outputs for its queries.

    Args:
        method: A method that adapts only the head at test time.
        params: The method's parameters.
        episodes: Tasks whose inputs are features, (tasks, points, features).

    Returns:
        The outputs, (tasks, queries, outputs).
    """
    solver = _test_solver(method)
    if isinstance(solver, Head):
        fitted = solver.fit(episodes.support_x, episodes.support_y, _count_outputs(episodes))
        return fitted.scores(episodes.query_x)
    head = {name: value for name, value in params.items() if name.startswith("head.")}

    def task_outputs(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        problem = Problem(apply_head, method.loss, x, y)
        return apply_head(solver.solve(problem, head, solver_params(params), exact=False), query)

    return map_over_tasks(task_outputs, (episodes.support_x, episodes.support_y, episodes.query_x))


def _map_over_device(function: Callable[[Episodes], tuple[Tensor, ...]], episodes: Episodes) -> tuple[Tensor, ...]:
    """Call `function` for all tasks at once on a GPU, and for each task on the cores of a CPU."""
    if episodes.device.type != "cpu":
        return function(episodes)
    tasks = [episodes[task] for task in range(len(episodes))]
    return tuple(torch.cat(parts) for parts in zip(*map_over_threads(function, tasks)))


def _check_network(net: Network, weights: Params, x: Tensor) -> None:
    """Raise an InputError if the network uses parameters that cannot be replaced; check each network once."""
    if net not in _CHECKED:
        observe(net.features, x, body_params(weights))
        _CHECKED.add(net)


def _without_inference_mode(tensor: Tensor) -> Tensor:
    """Return a tensor that can be differentiated, a copy if it was created in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _solve(method: Method, solver: Solver, net: Network, weights: Params, x: Tensor, y: Tensor) -> Params:
    """Return all parameters of the network after the inner solve on one support set."""
    body = {name: value for name, value in weights.items() if name.startswith("features.")}
    head = {name: value for name, value in weights.items() if name.startswith("head.")}
    if method.adapts == "head":
        problem = Problem(apply_head, method.loss, apply_features(net, body, x), y)
        zeros = {name: torch.zeros_like(value) for name, value in head.items()}  # a solved head may have no bias
        return body | zeros | solver.solve(problem, head, solver_params(weights), exact=False)
    network = body | head

    def apply(adapted: Params, x: Tensor) -> Tensor:
        params = network | adapted
        return apply_head(params, apply_features(net, params, x))

    problem = Problem(apply, method.loss, x, y)
    return network | solver.solve(problem, adapted_params(method, net, weights), solver_params(weights), exact=False)


def _test_solver(method: Method) -> Solver | Head:
    solver = method.inner if method.test is None else method.test
    assert solver is not None  # Method checks that there is one
    return solver


def _count_outputs(episodes: Episodes) -> int:
    if not episodes.is_classification:
        return episodes.support_y.shape[-1]
    return int(episodes.support_y.max()) + 1 if episodes.classes is None else episodes.classes.shape[1]
