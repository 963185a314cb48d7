"""Outer gradients of a group of tasks, summed: one task by itself, or many under `vmap`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from metabridge.autodiff import inner_product
from metabridge.episodes import Episodes
from metabridge.learners.method import Method
from metabridge.learners.outer_gradients import Leaves, Task, task_gradient
from metabridge.learners.parameters import adapted_params, solver_params, starting_heads, targets, trainable
from metabridge.models.batch_norm import normalises_each_set
from metabridge.models.network import Network, Params, apply_features, apply_head

log = logging.getLogger("metabridge")
R = TypeVar("R")


def summed_gradient(
    method: Method,
    net: Network,
    params: Params,
    episodes: Episodes,
    *,
    flat: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Params]:
    """Return the sums over tasks of the outer loss and of its gradient.

    A group of one task runs without `vmap`, which costs a CPU time and memory.
    """
    if method.adapts == "all":
        return _through_all_layers(method, net, params, episodes, flat, dtype)
    return _through_features(method, net, params, episodes, flat, dtype)


def _through_all_layers(
    method: Method, net: Network, params: Params, episodes: Episodes, flat: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Params]:
    leaves = Leaves(_detached(adapted_params(method, net, params)), _detached(solver_params(params)))
    fixed = {name: value.detach() for name, value in params.items() if name not in leaves.start}

    def gradient(*task: Tensor) -> tuple[Leaves, Tensor]:
        def apply(moved: Params, x: Tensor) -> Tensor:
            params = fixed | moved
            return apply_head(params, apply_features(net, params, x, dtype))

        return task_gradient(method, apply, leaves, Task(*task), flat=flat)

    slopes, loss = over_tasks(gradient, _task(episodes))
    sums = {name: value.sum(0) for name, value in (slopes.start | slopes.solver_params).items()}
    return loss.sum(), {name: sums[name] for name in trainable(method, net, params)}


def _through_features(
    method: Method, net: Network, params: Params, episodes: Episodes, flat: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Params]:
    """The body sees each point once; only heads and features are under the task's inner solve."""
    names = trainable(method, net, params)
    weights = _detached(params)
    with torch.enable_grad():
        for name in names:
            weights[name].requires_grad_()
        support, query = features_of(net, weights, episodes, dtype)
        heads = starting_heads(method, weights, episodes)

    def gradient(start: Params, *task: Tensor) -> tuple[Leaves, Tensor]:
        leaves = Leaves(start, own, support_x=task[0], query_x=task[2])
        return task_gradient(method, apply_head, leaves, Task(*task), flat=flat)

    own = _detached(solver_params(params))
    labels = [targets(method, episodes, y) for y in (episodes.support_y, episodes.query_y)]
    slopes, loss = over_tasks(gradient, (_detached(heads), support.detach(), labels[0], query.detach(), labels[1]))
    # The pull-back into the body: features and heads are linear in what reaches them from the tasks.
    outputs = [support, query]
    cotangents: list[Tensor] = [slopes.support_x, slopes.query_x]  # type: ignore[list-item]
    for name, value in heads.items():
        if value.requires_grad:
            outputs.append(value)
            cotangents.append(slopes.start[name])
    body = [name for name in names if name not in own]
    with torch.enable_grad():
        product = inner_product(outputs, cotangents)
    pulled = torch.autograd.grad(product, [weights[name] for name in body], materialize_grads=True) if body else ()
    gradients = dict(zip(body, pulled)) | {name: value.sum(0) for name, value in slopes.solver_params.items()}
    return loss.sum(), {name: gradients[name] for name in names}


def features_of(
    net: Network, params: Params, episodes: Episodes, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the features of every task's support and query points, (tasks, points, dimension).

    A net that normalises each set sees them apart. Any other sees the points of all tasks in one
    batch: in training its batch norm estimates from all of them (A §5.2), at test it makes no difference.
    """

    def body(x: Tensor) -> Tensor:
        return apply_features(net, params, x, dtype)

    sets = (episodes.support_x, episodes.query_x) if episodes.is_split else (episodes.support_x,)
    if normalises_each_set(net):
        apart = [over_tasks(body, (x,)) for x in sets]
        return apart[0], apart[-1]
    x = torch.cat(sets, dim=1)
    joint = body(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return (joint[:, : sets[0].shape[1]], joint[:, sets[0].shape[1] :]) if episodes.is_split else (joint, joint)


def over_tasks(function: Callable[..., R], arguments: tuple[object, ...]) -> R:
    """Map a function of one task over the leading task axis of its arguments."""
    if len(tree_leaves(arguments)[0]) == 1:
        return _one_by_one(function, arguments)
    try:
        return vmap(function, randomness="different")(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        results = _one_by_one(function, arguments)  # which raises what has nothing to do with vmap
        _warn_of_loop(str(error).strip().partition("\n")[0])
        return results


def _one_by_one(function: Callable[..., R], arguments: tuple[object, ...]) -> R:
    tasks = len(tree_leaves(arguments)[0])
    each = [function(*tree_map(itemgetter(task), arguments)) for task in range(tasks)]
    if tasks == 1:
        return tree_map(lambda tensor: tensor[None], each[0])  # type: ignore[no-any-return]
    return tree_map(lambda *parts: torch.stack(parts), *each)  # type: ignore[no-any-return]


@functools.cache
def _warn_of_loop(reason: str) -> None:
    log.warning("PyTorch cannot vectorise this network, so its tasks run one after the other: %s", reason)


def _task(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return episodes.support_x, episodes.support_y, episodes.query_x, episodes.query_y


def _detached(params: Params) -> Params:
    return {name: value.detach() for name, value in params.items()}
