"""Adaptation at test time: to one task, or to many at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.heads import FittedHead, Head
from metabridge.learners.method import Method
from metabridge.learners.parameters import adapted_params, check_test, solver_params
from metabridge.learners.task_gradients import features_of, over_tasks
from metabridge.models.forward_behaviour import observe
from metabridge.models.network import Network, Params, apply_features, apply_head, body_params
from metabridge.solvers import Problem, Solver
from metabridge.threads import map_over_threads

_SEEN: WeakSet[Network] = WeakSet()  # networks that adaptation has looked at


@dataclass(frozen=True)
class Adapted:
    """A network adapted to one task; call it on new points."""

    net: Network
    params: Params
    head: FittedHead | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs for points (points, ...): scores of the classes, or values."""
        features = apply_features(self.net, self.params, x)
        return apply_head(self.params, features) if self.head is None else self.head.scores(features[None])[0]


@torch.inference_mode(False)
def adapt(method: Method, net: Network, params: Params, x: Tensor, y: Tensor) -> Adapted:
    """Adapt to one task's support points `x` and targets `y`, as `method` does at test time.

    >>> from metabridge.learners.method import method
    >>> from metabridge.learners.parameters import parameters
    >>> from metabridge.models import mlp
    >>> maml, net = method("maml", steps=20, lr=0.1), mlp(1, 1)
    >>> x = torch.linspace(-1, 1, 10)[:, None]
    >>> adapt(maml, net, parameters(maml, net), x, x)(x).shape
    torch.Size([10, 1])
    """
    x, y = _differentiable(x), _differentiable(y)
    task = Episodes(x[None], y[None], x[None], y[None])
    check_test(method, net, params, task)
    weights = {name: _differentiable(value.detach()) for name, value in params.items()}
    _look_at(net, weights, x)
    solver = _at_test(method)
    if isinstance(solver, Head):
        with torch.no_grad():
            features = apply_features(net, weights, x)
        head = solver.fit(features[None], y[None], _outputs(task))
        # in the layout that a saved head is read back in, so that both give the same bits
        return Adapted(net, weights, head._replace(weight=head.weight.contiguous(), bias=head.bias.contiguous()))
    return Adapted(net, _adapted(method, solver, net, weights, x, y))


@torch.inference_mode(False)
def predict(
    method: Method, net: Network, params: Params, episodes: Episodes, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Adapt to every task's support set and return the outputs for its queries, (tasks, queries, outputs).

    `dtype` is what features are computed in, where only a head is solved on them.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners.method import method
    >>> from metabridge.learners.parameters import parameters
    >>> from metabridge.models import mlp
    >>> anil, net = method("anil"), mlp(1, 1)
    >>> predict(anil, net, parameters(anil, net), Sinusoid().sample(3, torch.Generator())).shape
    torch.Size([3, 10, 1])
    """
    check_test(method, net, params, episodes)
    weights = {name: _differentiable(value.detach()) for name, value in params.items()}
    episodes = episodes.map(_differentiable)
    _look_at(net, weights, episodes.support_x[0])
    if adapts_head_alone(method):
        with torch.no_grad():
            sets = _over_machine(lambda share: features_of(net, weights, share, dtype), episodes)
        return predict_from_features(method, weights, replace(episodes, support_x=sets[0], query_x=sets[1]))
    solver = _at_test(method)
    assert not isinstance(solver, Head)

    def one(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        params = _adapted(method, solver, net, weights, x, y)
        return apply_head(params, apply_features(net, params, query))

    def outputs(share: Episodes) -> tuple[Tensor]:
        return (over_tasks(one, (share.support_x, share.support_y, share.query_x)),)

    with torch.no_grad():
        return _over_machine(outputs, episodes)[0]


def adapts_head_alone(method: Method) -> bool:
    """Whether adaptation at test time leaves the features as they are."""
    return method.adapts == "head" or isinstance(_at_test(method), Head)


@torch.no_grad()
def predict_from_features(method: Method, params: Params, episodes: Episodes) -> Tensor:
    """Solve the head of every task, whose inputs are features already, and return its outputs for the queries."""
    solver = _at_test(method)
    if isinstance(solver, Head):
        return solver.fit(episodes.support_x, episodes.support_y, _outputs(episodes)).scores(episodes.query_x)
    head = {name: value for name, value in params.items() if name.startswith("head.")}

    def one(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        problem = Problem(apply_head, method.loss, x, y)
        return apply_head(solver.solve(problem, head, solver_params(params), exact=False), query)

    return over_tasks(one, (episodes.support_x, episodes.support_y, episodes.query_x))


def _over_machine(function: Callable[[Episodes], tuple[Tensor, ...]], episodes: Episodes) -> tuple[Tensor, ...]:
    """Call `function` on all tasks at once on a GPU, and task by task on every core of a CPU."""
    if episodes.device.type != "cpu":
        return function(episodes)
    tasks = [episodes[task] for task in range(len(episodes))]
    return tuple(torch.cat(parts) for parts in zip(*map_over_threads(function, tasks)))


def _look_at(net: Network, weights: Params, x: Tensor) -> None:
    """Refuse a network that reads parameters of its own where others cannot be put in their place, once for each."""
    if net not in _SEEN:
        observe(net.features, x, body_params(weights))
        _SEEN.add(net)


def _differentiable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be differentiated, also of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _adapted(method: Method, solver: Solver, net: Network, weights: Params, x: Tensor, y: Tensor) -> Params:
    body = {name: value for name, value in weights.items() if name.startswith("features.")}
    head = {name: value for name, value in weights.items() if name.startswith("head.")}
    if method.adapts == "head":
        problem = Problem(apply_head, method.loss, apply_features(net, body, x), y)
        no_bias = {name: torch.zeros_like(value) for name, value in head.items()}  # where the head is solved without
        return body | no_bias | solver.solve(problem, head, solver_params(weights), exact=False)
    network = body | head

    def apply(moved: Params, x: Tensor) -> Tensor:
        params = network | moved
        return apply_head(params, apply_features(net, params, x))

    problem = Problem(apply, method.loss, x, y)
    return network | solver.solve(problem, adapted_params(method, net, weights), solver_params(weights), exact=False)


def _at_test(method: Method) -> Solver | Head:
    solver = method.inner if method.test is None else method.test
    assert solver is not None  # a method without either cannot be made
    return solver


def _outputs(episodes: Episodes) -> int:
    if not episodes.is_classification:
        return episodes.support_y.shape[-1]
    return int(episodes.support_y.max()) + 1 if episodes.classes is None else episodes.classes.shape[1]
