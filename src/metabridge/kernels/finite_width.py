"""The MetaNTK of a finite network by its definition, and full-batch gradient descent, to compare with infinite width.

The loss is ½‖F − Y‖² over the queries of all tasks (Wang et al. 2022, eq. 23). This module uses the NTK
parameterization: at width l, the parameters of the paper are these parameters divided by √l, its learning rate is η₀/l
for the learning rate η₀ here, and its kernel is Φ̂ = JJᵀ/l for JJᵀ here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.learners.engine import Engine
from metabridge.learners.method import Method
from metabridge.learners.parameters import adapted_params, initial_heads, trained_names
from metabridge.models.network import Network, Params, apply_features, apply_head
from metabridge.solvers import Problem


def squared_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Return ½‖prediction − target‖², summed over queries (Wang et al. 2022, eq. 23)."""
    return (prediction - target).square().sum() / 2


class DescentStep(NamedTuple):
    """One step of gradient descent.

    Args:
        loss: The loss before the step.
        length: The Euclidean length of the step in parameter space.
    """

    loss: float
    length: float


def gradient_descent(
    engine: Engine, params: Params, episodes: Episodes, lr: float, steps: int
) -> Iterator[DescentStep]:
    """Take full-batch steps θ ← θ − η∇L in place, where L is the sum over tasks, and yield a record of each step.

    Args:
        engine: The engine that computes the gradient of the method.
        params: The parameters, which are updated in place.
        episodes: The tasks.
        lr: Learning rate η.
        steps: Number of steps.

    Yields:
        The loss before each step, and the length of the step.
    """
    lr *= len(episodes)  # the engine returns the gradient of the mean over tasks
    for _ in range(steps):
        loss, gradients = engine(params, episodes)
        with torch.no_grad():
            for name, grad in gradients.items():
                params[name].sub_(lr * grad)
        norm = torch.stack([grad.square().sum() for grad in gradients.values()]).sum().sqrt()
        yield DescentStep(len(episodes) * float(loss), lr * float(norm))


def empirical_meta_ntk(method: Method, net: Network, params: Params, episodes: Episodes) -> Tensor:
    """Return Φ̂ = JJᵀ, with the Jacobian J of the adapted outputs through the inner loop (Wang et al. 2022, eq. 4).

    Args:
        method: The method. J is with respect to all parameters that it trains; for MTL, the body and one head per task.
        net: The network.
        params: Its parameters.
        episodes: The tasks.

    Returns:
        The kernel between all query outputs, in the order of the tasks.
    """
    episodes = episodes if method.split else episodes.without_split()
    leaves = {name: params[name].detach().requires_grad_() for name in trained_names(method, net, params)}
    rows = []
    for index in range(len(episodes)):
        for output in _adapted_outputs(method, net, params | leaves, episodes[index]):
            grads = torch.autograd.grad(output, list(leaves.values()), retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.mT


def _adapted_outputs(method: Method, net: Network, params: Params, task: Episodes) -> Tensor:
    """Return the query outputs of one task as a function of the parameters before adaptation."""
    heads = initial_heads(method, params, task)
    start = params | {name: value[0] for name, value in heads.items()}

    def apply(adapted: Params, x: Tensor) -> Tensor:
        return apply_head(start | adapted, apply_features(net, start | adapted, x))

    adapted: Params = {}
    if method.inner is not None:
        problem = Problem(apply, method.loss, task.support_x[0], task.support_y[0])
        adapted = method.inner.solve(problem, adapted_params(method, net, start), {}, exact=True)
    return apply(adapted, task.query_x[0]).flatten()
