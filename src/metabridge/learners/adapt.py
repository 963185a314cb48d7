"""Test-time adaptation to one task, or to each task of a batch separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.heads import FittedHead, Head
from metabridge.learners.method import Method, method_name
from metabridge.learners.parameters import (
    check_channels,
    check_test_time,
    network_name,
    params_at_test_time,
    solver_params,
)
from metabridge.learners.task_gradients import compute_features, map_over_tasks
from metabridge.models.forward_behavior import observe
from metabridge.models.network import Network, Params, apply_features, apply_head, body_params
from metabridge.solvers import Problem, Solver
from metabridge.threads import map_over_threads

_CHECKED_NETWORKS: WeakSet[Network] = WeakSet()  # networks that `_check_network` accepted


@dataclass(frozen=True, repr=False)
class Adapted:
    """A network adapted to one task, which can be called on new inputs.

    Args:
        net: The network that was adapted.
        params: The parameters of the network after adaptation, by name.
        head: The fitted test-time head, which replaces the network's head. None if the method has none.
        method: The method that adapted the network. None if it is unknown, as for a classifier read from a file.

    >>> import torch
    >>> import metabridge as mb
    >>> anil, net = mb.method("anil"), mb.models.mlp(1, 1)
    >>> x = torch.linspace(-1, 1, 10)[:, None]
    >>> adapted = mb.adapt(anil, net, mb.parameters(anil, net), x, x)
    >>> adapted, adapted(x[:3]).shape
    (Adapted(anil, mlp), torch.Size([3, 1]))
    """

    net: Network
    params: Params
    head: FittedHead | None = None
    method: Method | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs for new inputs.

        Args:
            x: Inputs (examples, ...).

        Returns:
            Scores of the classes, or predicted values for regression, (examples, outputs).
        """
        return self.outputs(self.features(x))

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Return the features of inputs.

        Args:
            x: Inputs (examples, ...).

        Returns:
            The features, (examples, dimension).
        """
        return apply_features(self.net, self.params, x)

    @torch.no_grad()
    def outputs(self, features: Tensor) -> Tensor:
        """Return the outputs for features.

        Args:
            features: The features of inputs, (examples, dimension).

        Returns:
            Scores of the classes, or predicted values for regression, (examples, outputs).
        """
        return apply_head(self.params, features) if self.head is None else self.head.scores(features[None])[0]

    def __repr__(self) -> str:
        head = "" if self.head is None else ", with a test-time head"
        method = "" if self.method is None else f"{method_name(self.method)}, "
        return f"Adapted({method}{network_name(self.net)}{head})"


@torch.inference_mode(False)
def adapt(method: Method, net: Network, params: Params, x: Tensor, y: Tensor) -> Adapted:
    """Adapt a network to one task, as the method does at test time.

    Args:
        method: The few-shot learning method.
        net: The network that is adapted.
        params: The method's parameters, from `parameters`.
        x: The inputs of the support set, (examples, ...).
        y: The class labels of the support set, int64 (examples,), or its regression targets, (examples, outputs).

    Returns:
        The adapted network.

    Raises:
        InputError: If the parameters, the network and the inputs do not match.

    >>> import torch
    >>> import metabridge as mb
    >>> maml, net = mb.method("maml", steps=20, lr=0.1), mb.models.mlp(1, 1)
    >>> x = torch.linspace(-1, 1, 10)[:, None]
    >>> mb.adapt(maml, net, mb.parameters(maml, net), x, x)(x).shape
    torch.Size([10, 1])
    """
    x, y = _clone_inference_tensor(x), _clone_inference_tensor(y)
    check_adaptation(method, net, params, x, y)
    params = {name: _clone_inference_tensor(value.detach()) for name, value in params.items()}
    if can_predict_from_features(method):
        with torch.no_grad():
            features = apply_features(net, params, x)
        return adapt_to_features(method, net, params, features, y)
    solver = _test_time_solver(method)
    assert not isinstance(solver, Head)
    return Adapted(net, _solve(method, solver, net, params, x, y), method=method)


def check_adaptation(method: Method, net: Network, params: Params, x: Tensor, y: Tensor) -> None:
    """Raise an InputError if `adapt` cannot adapt the network to inputs and targets like these.

    Args:
        method: The few-shot learning method.
        net: The network that is adapted.
        params: The method's parameters.
        x: Inputs of a support set, (examples, ...).
        y: Their targets.
    """
    check_test_time(method, net, params, Episodes(x[None], y[None], x[None], y[None]))
    check_channels(net, x.shape[1:])
    _check_network(net, params, x)


@torch.inference_mode(False)
def adapt_to_features(method: Method, net: Network, params: Params, features: Tensor, y: Tensor) -> Adapted:
    """Adapt only the head of a network, as `adapt` does, given the features of the support set.

    Args:
        method: A method for which `can_predict_from_features` is true.
        net: The network that is adapted.
        params: The method's parameters, from `parameters`.
        features: The features of the support set, (examples, dimension).
        y: The targets of the support set.

    Returns:
        The adapted network.

    >>> import torch
    >>> import metabridge as mb
    >>> mtl, net = mb.method("mtl"), mb.models.mlp(1, 2)
    >>> params, x, y = mb.parameters(mtl, net, classes=2), torch.rand(10, 1), torch.arange(10) % 2
    >>> adapted = adapt_to_features(mtl, net, params, mb.Model(mtl, net, params).features(x), y)
    >>> torch.equal(adapted(x), mb.adapt(mtl, net, params, x, y)(x))
    True
    """
    features, y = _clone_inference_tensor(features), _clone_inference_tensor(y)
    solver = _test_time_solver(method)
    if isinstance(solver, Head):
        with torch.no_grad():
            outputs = _count_outputs(Episodes(features[None], y[None], features[None], y[None]))
            head = solver.fit(features[None], y[None], outputs)
        # A head loaded from a file is contiguous. Make this head contiguous too: otherwise its scores and those of
        # the loaded head could differ by rounding.
        head = head._replace(weight=head.weight.contiguous(), bias=head.bias.contiguous())
        return Adapted(net, params, head, method)
    body = {name: value for name, value in params.items() if name.startswith("features.")}
    initial_head = {name: value for name, value in params.items() if name.startswith("head.")}
    # The bias is 0 if the solver does not return one.
    zeros = {name: torch.zeros_like(value) for name, value in initial_head.items()}
    problem = Problem(apply_head, method.loss, features, y)
    adapted_head = solver.solve(problem, initial_head, solver_params(params), exact=False)
    return Adapted(net, body | zeros | adapted_head, method=method)


@torch.inference_mode(False)
def predict(
    method: Method, net: Network, params: Params, episodes: Episodes, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Adapt to the support set of every task and return the outputs for its queries.

    Args:
        method: The few-shot learning method.
        net: The network that is adapted.
        params: The method's parameters, from `parameters`.
        episodes: The tasks, with the support sets to adapt to and the queries to predict.
        dtype: Data type in which features are computed if only the head adapts; ignored otherwise (default: the dtype
            of the inputs).

    Returns:
        The outputs, (tasks, queries, outputs).

    Raises:
        InputError: If the parameters, the network and the episodes do not match.

    >>> import torch
    >>> import metabridge as mb
    >>> anil, net = mb.method("anil"), mb.models.mlp(1, 1)
    >>> tasks = mb.environments.Sinusoid().sample(3, torch.Generator())
    >>> mb.predict(anil, net, mb.parameters(anil, net), tasks).shape
    torch.Size([3, 10, 1])
    """
    check_test_time(method, net, params, episodes)
    check_channels(net, episodes.support_x.shape[2:])
    params = {name: _clone_inference_tensor(value.detach()) for name, value in params.items()}
    episodes = episodes.map(_clone_inference_tensor)
    _check_network(net, params, episodes.support_x[0])
    if can_predict_from_features(method):
        with torch.no_grad():
            support, query = _call_for_tasks(lambda tasks: compute_features(net, params, tasks, dtype), episodes)
        return predict_from_features(method, params, replace(episodes, support_x=support, query_x=query))
    solver = _test_time_solver(method)
    assert not isinstance(solver, Head)

    def predict_task(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        adapted = _solve(method, solver, net, params, x, y)
        return apply_head(adapted, apply_features(net, adapted, query))

    def predict_tasks(tasks: Episodes) -> tuple[Tensor]:
        return (map_over_tasks(predict_task, (tasks.support_x, tasks.support_y, tasks.query_x)),)

    with torch.no_grad():
        return _call_for_tasks(predict_tasks, episodes)[0]


def can_predict_from_features(method: Method) -> bool:
    """Return whether `predict` computes the features of all tasks first, and then calls `predict_from_features`.

    It does so if `adapts` is "head" or the method has a test-time head, but not if `adapts` is "none" and `test_solver`
    is a solver, which adapts the whole network.
    """
    return method.adapts == "head" or isinstance(_test_time_solver(method), Head)


@torch.no_grad()
def predict_from_features(method: Method, params: Params, episodes: Episodes) -> Tensor:
    """Adapt the head of every task and return the outputs for its queries.

    Args:
        method: A method for which `can_predict_from_features` is true.
        params: The method's parameters.
        episodes: Tasks whose inputs are features, (tasks, examples, features).

    Returns:
        The outputs, (tasks, queries, outputs).
    """
    solver = _test_time_solver(method)
    if isinstance(solver, Head):
        fitted = solver.fit(episodes.support_x, episodes.support_y, _count_outputs(episodes))
        return fitted.scores(episodes.query_x)
    head = {name: value for name, value in params.items() if name.startswith("head.")}

    def predict_task(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        problem = Problem(apply_head, method.loss, x, y)
        return apply_head(solver.solve(problem, head, solver_params(params), exact=False), query)

    return map_over_tasks(predict_task, (episodes.support_x, episodes.support_y, episodes.query_x))


def _call_for_tasks(function: Callable[[Episodes], tuple[Tensor, ...]], episodes: Episodes) -> tuple[Tensor, ...]:
    """Call `function` on all tasks at once on a GPU, and on each task separately, in several threads, on a CPU."""
    if episodes.device.type != "cpu":
        return function(episodes)
    tasks = [episodes[task] for task in range(len(episodes))]
    return tuple(torch.cat(results) for results in zip(*map_over_threads(function, tasks)))


def _check_network(net: Network, params: Params, x: Tensor) -> None:
    """Raise an InputError if the network cannot be called with other parameters, or changes them (see `observe`).

    After a network has passed the check, it is not checked again.
    """
    if net not in _CHECKED_NETWORKS:
        observe(net.features, x, body_params(params))
        _CHECKED_NETWORKS.add(net)


def _clone_inference_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that can be differentiated: a copy if `tensor` was created in inference mode, else itself."""
    return tensor.clone() if tensor.is_inference() else tensor


def _solve(method: Method, solver: Solver, net: Network, params: Params, x: Tensor, y: Tensor) -> Params:
    """Return all parameters of the network after adapting them to one support set."""
    body = {name: value for name, value in params.items() if name.startswith("features.")}
    head = {name: value for name, value in params.items() if name.startswith("head.")}
    initial = body | head

    def apply(adapted: Params, x: Tensor) -> Tensor:
        current = initial | adapted
        return apply_head(current, apply_features(net, current, x))

    problem = Problem(apply, method.loss, x, y)
    start = params_at_test_time(method, net, params)
    return initial | solver.solve(problem, start, solver_params(params), exact=False)


def _test_time_solver(method: Method) -> Solver | Head:
    solver = method.inner if method.test_solver is None else method.test_solver
    assert solver is not None  # checked by Method
    return solver


def _count_outputs(episodes: Episodes) -> int:
    if not episodes.is_classification:
        return episodes.support_y.shape[-1]
    return int(episodes.support_y.max()) + 1 if episodes.classes is None else episodes.classes.shape[1]
