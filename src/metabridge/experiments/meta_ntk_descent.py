"""Wide nets under full-batch gradient descent, as B's theorems have them.

The loss is ½‖F − Y‖² over the queries of all tasks (B eq. 23). The nets have the NTK parameterisation, in which
the paper's rate η₀/l is η₀ and its Φ̂ = JJᵀ/l is JJᵀ: the paper's parameters are ours divided by √l.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from metabridge.environments.regression_functions import Quadratic
from metabridge.episodes import Episodes
from metabridge.kernels import fully_connected_kernel
from metabridge.learners.engine import Engine
from metabridge.learners.method import Method
from metabridge.learners.parameters import adapted_params, starting_heads, trainable
from metabridge.models.network import Network, Params, apply_features, apply_head
from metabridge.solvers import Problem

DEPTH = 3
KERNEL = fully_connected_kernel(depth=DEPTH)
TASKS = Quadratic(shots=4, queries=4)


def initialisations(widths: Sequence[int], count: int, seed: int) -> dict[int, list[int]]:
    """Return the seeds of the nets of every width, no two the same.

    >>> initialisations((8, 16), 2, seed=0)
    {8: [0, 1], 16: [2, 3]}
    """
    first = seed * len(widths) * count
    return {
        width: list(range(first + place * count, first + (place + 1) * count)) for place, width in enumerate(widths)
    }


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    """½‖prediction − target‖², summed over points (B eq. 23)."""
    return (prediction - target).square().sum() / 2


def sample(tasks: int, seed: int) -> Episodes:
    """Draw tasks whose labels have zero mean and unit variance over all of them."""
    drawn = TASKS.sample(tasks, torch.Generator().manual_seed(seed))
    labels = torch.cat([drawn.support_y, drawn.query_y], 1)
    centre, spread = labels.mean(), labels.std()
    return replace(drawn, support_y=(drawn.support_y - centre) / spread, query_y=(drawn.query_y - centre) / spread)


class Step(NamedTuple):
    """One step of gradient descent: the loss it started from, and how long it was."""

    loss: float
    length: float


def descend(engine: Engine, params: Params, episodes: Episodes, rate: float, steps: int) -> Iterator[Step]:
    """Take steps θ ← θ − η∇L on the loss of all tasks together, in place, and yield each when it is taken."""
    rate *= len(episodes)  # the engine's gradient is of the mean over tasks
    for _ in range(steps):
        loss, gradients = engine(params, episodes)
        with torch.no_grad():
            for name, slope in gradients.items():
                params[name].sub_(rate * slope)
        size = torch.stack([slope.square().sum() for slope in gradients.values()]).sum().sqrt()
        yield Step(len(episodes) * float(loss), rate * float(size))


def meta_ntk(method: Method, net: Network, params: Params, episodes: Episodes) -> Tensor:
    """Φ̂ = JJᵀ by its definition: J is the gradient of every task's adapted outputs, through the inner loop (B eq. 4).

    It is taken in all that the method trains, so for MTL in the body and a head for each task.
    """
    episodes = episodes if method.split else episodes.without_split()
    leaves = {name: params[name].detach().requires_grad_() for name in trainable(method, net, params)}
    rows = []
    for task in range(len(episodes)):
        for output in _adapted_outputs(method, net, params | leaves, episodes[task]):
            slopes = torch.autograd.grad(output, list(leaves.values()), retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([slope.flatten() for slope in slopes]))
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.mT


def _adapted_outputs(method: Method, net: Network, params: Params, task: Episodes) -> Tensor:
    """The outputs for the queries of one task, as a function of the parameters before adaptation."""
    heads = starting_heads(method, params, task)
    start = params | {name: value[0] for name, value in heads.items()}

    def apply(moved: Params, x: Tensor) -> Tensor:
        return apply_head(start | moved, apply_features(net, start | moved, x))

    moved: Params = {}
    if method.inner is not None:
        problem = Problem(apply, method.loss, task.support_x[0], task.support_y[0])
        moved = method.inner.solve(problem, adapted_params(method, net, start), {}, exact=True)
    return apply(moved, task.query_x[0]).flatten()
