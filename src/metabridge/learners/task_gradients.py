"""Outer gradients, summed over tasks. Several tasks are computed under `vmap`, a single task without it."""

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
from metabridge.learners.parameters import adapted_params, initial_heads, solver_params, trained_names, training_targets
from metabridge.models.batch_norm import uses_batch_statistics
from metabridge.models.network import Network, Params, apply_features, apply_head

log = logging.getLogger("metabridge")
Result = TypeVar("Result")


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

    A single task is computed without `vmap`, which would cost time and memory on a CPU. `flat` and `dtype` are the
    options of `Engine`: whether to store only the parameters after each inner step, and the data type of features.
    """
    if method.adapts == "all":
        return _sum_if_all_layers_adapt(method, net, params, episodes, flat, dtype)
    return _sum_from_features(method, net, params, episodes, flat, dtype)


def _sum_if_all_layers_adapt(
    method: Method, net: Network, params: Params, episodes: Episodes, flat: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Params]:
    """Return the sums if all layers adapt: inner solves apply the whole network."""
    leaves = Leaves(_detached(adapted_params(method, net, params)), _detached(solver_params(params)))
    constants = {name: value.detach() for name, value in params.items() if name not in leaves.initial_params}

    def gradient(*task: Tensor) -> tuple[Leaves, Tensor]:
        def apply(adapted: Params, x: Tensor) -> Tensor:
            params = constants | adapted
            return apply_head(params, apply_features(net, params, x, dtype))

        return task_gradient(method, apply, leaves, Task(*task), flat=flat)

    grads, loss = map_over_tasks(gradient, _task_tensors(episodes))
    sums = {name: value.sum(0) for name, value in (grads.initial_params | grads.solver_params).items()}
    return loss.sum(), {name: sums[name] for name in trained_names(method, net, params)}


def _sum_from_features(
    method: Method, net: Network, params: Params, episodes: Episodes, flat: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Params]:
    """Return the sums if at most the head adapts: apply the body once to each input, then solve on the features."""
    names = trained_names(method, net, params)
    weights = _detached(params)
    with torch.enable_grad():
        for name in names:
            weights[name].requires_grad_()
        support, query = compute_features(net, weights, episodes, dtype)
        heads = initial_heads(method, weights, episodes)
    solver_leaves = _detached(solver_params(params))

    def gradient(initial_head: Params, *task: Tensor) -> tuple[Leaves, Tensor]:
        leaves = Leaves(initial_head, solver_leaves, support_x=task[0], query_x=task[2])
        return task_gradient(method, apply_head, leaves, Task(*task), flat=flat)

    support_targets, query_targets = (
        training_targets(method, episodes, y) for y in (episodes.support_y, episodes.query_y)
    )
    tasks = (_detached(heads), support.detach(), support_targets, query.detach(), query_targets)
    grads, loss = map_over_tasks(gradient, tasks)
    # one backward pass propagates the gradients of all features and heads to the parameters
    outputs = [support, query]
    cotangents: list[Tensor] = [grads.support_x, grads.query_x]  # type: ignore[list-item]
    for name, value in heads.items():
        if value.requires_grad:
            outputs.append(value)
            cotangents.append(grads.initial_params[name])
    net_names = [name for name in names if name not in solver_leaves]
    net_leaves = [weights[name] for name in net_names]
    with torch.enable_grad():
        product = inner_product(outputs, cotangents)
    net_grads = torch.autograd.grad(product, net_leaves, materialize_grads=True) if net_names else ()
    gradients = dict(zip(net_names, net_grads)) | {name: value.sum(0) for name, value in grads.solver_params.items()}
    return loss.sum(), {name: gradients[name] for name in names}


def compute_features(
    net: Network, params: Params, episodes: Episodes, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the features of the support and query sets of all tasks, each (tasks, examples, dimension).

    A network with `BatchNorm(statistics="batch")` is applied to each support or query set separately, so that every set
    is normalized by its own statistics. Any other network is applied to the inputs of all tasks in one batch; in
    training, batch norm computes its statistics over this batch (Wang et al. 2021, §5.2).
    """

    def body(x: Tensor) -> Tensor:
        return apply_features(net, params, x, dtype)

    sets = (episodes.support_x, episodes.query_x) if episodes.is_split else (episodes.support_x,)
    if uses_batch_statistics(net):
        features = [map_over_tasks(body, (x,)) for x in sets]
        return features[0], features[-1]
    x = torch.cat(sets, dim=1)
    joint = body(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    support_size = sets[0].shape[1]
    return (joint[:, :support_size], joint[:, support_size:]) if episodes.is_split else (joint, joint)


def map_over_tasks(function: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    """Map a function of one task over the leading task axis of its arguments, with `vmap` if possible."""
    if len(tree_leaves(arguments)[0]) == 1:
        return _loop_over_tasks(function, arguments)
    try:
        return vmap(function, randomness="different")(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        results = _loop_over_tasks(function, arguments)  # raises the error again if vmap did not cause it
        _warn_about_loop(str(error).strip().partition("\n")[0])
        return results


def _loop_over_tasks(function: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    task_count = len(tree_leaves(arguments)[0])
    results = [function(*tree_map(itemgetter(task), arguments)) for task in range(task_count)]
    if task_count == 1:
        return tree_map(lambda tensor: tensor[None], results[0])  # type: ignore[no-any-return]
    return tree_map(lambda *tensors: torch.stack(tensors), *results)  # type: ignore[no-any-return]


@functools.cache
def _warn_about_loop(reason: str) -> None:
    log.warning("PyTorch cannot vectorize this network, so its tasks run one after the other: %s", reason)


def _task_tensors(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return episodes.support_x, episodes.support_y, episodes.query_x, episodes.query_y


def _detached(params: Params) -> Params:
    return {name: value.detach() for name, value in params.items()}
