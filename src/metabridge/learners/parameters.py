"""The parameters a method trains: the network's, its persistent heads and its solver's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.method import ROWS, Method
from metabridge.models.network import Network, Params, frozen_names, seeded
from metabridge.solvers import IterativeSolver, Solver, task_loss


def parameters(method: Method, net: Network, *, classes: int | None = None, seed: int = 0) -> Params:
    """Return everything `method` needs, by name: leaf tensors, of which the trained ones require gradients.

    `features.*` and `head.*` are copies of the network's. Multi-task methods add `heads.*`, a row
    for each of `classes` training classes; solvers with learned settings add `rates.*` or `solver.*`.
    A parameter of the network with `requires_grad=False` is neither trained nor adapted.

    >>> from metabridge.learners.method import method
    >>> from metabridge.models import mlp
    >>> sorted(parameters(method("r2d2"), mlp(4, 5, depth=1)))
    ['features.1.bias', 'features.1.weight', 'head.bias', 'head.weight', 'solver.log_penalty', 'solver.log_scale']
    """
    params = {name: value.detach().clone() for name, value in net.named_parameters()}
    tied = [name for name, _ in net.head.named_parameters() if f"head.{name}" not in params]
    if tied:
        raise InputError(
            f"head.{tied[0]} is also a parameter of the features, but tasks need a head of their own. "
            f"Untie it: net.head.{tied[0]} = torch.nn.Parameter(net.head.{tied[0]}.detach().clone())."
        )
    if method.training_head in ROWS:
        if classes is None or classes < 1:
            raise InputError(
                f"classes is {classes}, but training_head {method.training_head!r} has a row for every training class. "
                "Give classes=environment.classes."
            )
        with seeded(seed):
            rows = nn.Linear(net.head.in_features, classes, bias=net.head.bias is not None).to(net.head.weight)
        params |= {f"heads.{name}": value.detach() for name, value in rows.named_parameters()}
    if method.inner is not None:
        params |= method.inner.solver_params(adapted_params(method, net, params))
    for name in trainable(method, net, params):
        params[name].requires_grad_()
    return params


def adapted_params(method: Method, net: Network, params: Params) -> Params:
    """Return the part of the parameters that the inner loop starts from."""
    if method.adapts != "all":
        return {name: value for name, value in params.items() if name.startswith("head.")}
    fixed = frozen_names(net)
    return {
        name: value for name, value in params.items() if name.startswith(("features.", "head.")) and name not in fixed
    }


def solver_params(params: Params) -> Params:
    """Return the solver's own learned parameters."""
    return {name: value for name, value in params.items() if name.startswith(("rates.", "solver."))}


def trainable(method: Method, net: Network, params: Params) -> list[str]:
    """Return the names of what the outer loop trains."""
    fixed, idle = frozen_names(net), method.training_head != "learned"
    return [name for name in params if name not in fixed and not (idle and name.startswith("head."))]


def starting_heads(method: Method, params: Params, episodes: Episodes) -> Params:
    """Return every task's initial head, with a leading task axis (A §5.2 for the rows)."""
    if method.training_head == "task-rows":
        assert episodes.classes is not None
        return {f"head.{name}": params[f"heads.{name}"][episodes.classes] for name in _parts(params, "heads.")}
    prefix = "heads." if method.training_head == "all-rows" else "head."
    return {
        f"head.{name}": params[prefix + name].expand(len(episodes), *params[prefix + name].shape)
        for name in _parts(params, prefix)
    }


def targets(method: Method, episodes: Episodes, labels: Tensor) -> Tensor:
    """Return labels as the head counts them: the task's own, or among all training classes."""
    if method.training_head != "all-rows" or not episodes.is_classification:
        return labels
    assert episodes.classes is not None
    return episodes.classes.gather(1, labels)


def check(
    method: Method, net: Network, params: Params, episodes: Episodes, *, dtype: torch.dtype | None = None
) -> None:
    """Raise a clear error if this method and network cannot train on the episodes, with features in `dtype`."""
    _check_common(method, net, params, episodes)
    _check_whole_numbers(episodes, dtype)
    _check_inputs(net, tuple(episodes.support_x.shape[2:]))
    if method.training_head not in ROWS:
        return _check_targets(episodes, params["head.weight"].shape[0])
    rows = params.get("heads.weight")
    if rows is None:
        raise InputError("params has no 'heads.weight'. Make params with parameters(method, net, classes=...).")
    if episodes.classes is None:
        raise InputError(
            f"training_head is {method.training_head!r}, but the episodes do not say which classes their outputs are. "
            "Give Episodes(..., classes=...), one row index for each output."
        )
    if method.training_head == "all-rows" and not episodes.is_classification and method.loss is task_loss:
        raise InputError(
            "training_head is 'all-rows', one classifier over all classes, but the targets are values. Use "
            "training_head='task-rows', as method('mtl') has."
        )
    low, high = int(episodes.classes.min()), int(episodes.classes.max())
    if low < 0 or high >= len(rows):
        raise InputError(
            f"episodes.classes holds {low if low < 0 else high}, but there are {len(rows)} head rows. "
            "Make params with parameters(method, net, classes=...) as many as the environment has."
        )
    return _check_targets(episodes, episodes.classes.shape[1])


def check_test(method: Method, net: Network, params: Params, episodes: Episodes) -> None:
    """Raise a clear error if this method and network cannot adapt to the episodes at test time."""
    _check_common(method, net, params, episodes)
    if method.test is None or isinstance(method.test, Solver):
        _check_targets(episodes, params["head.weight"].shape[0])


def _check_common(method: Method, net: Network, params: Params, episodes: Episodes) -> None:
    missing = [name for name, _ in net.named_parameters() if name not in params]
    if missing:
        raise InputError(
            f"params lacks {missing[0]!r}, which the network has. Make params with parameters(method, net)."
        )
    _check_frozen(method, net, params)
    if method.inner is not None and method.inner.needs_labels and not episodes.is_classification:
        raise InputError(
            f"{type(method.inner).__name__} needs class labels, but the targets are values. Use method('r2d2')."
        )
    like = params["head.weight"]
    if not episodes.support_x.is_floating_point():
        if net.recipe is not None:
            raise InputError(
                f"Inputs are {episodes.support_x.dtype}, but this network takes floating-point ones. Convert with "
                ".float()."
            )
    elif episodes.support_x.dtype != like.dtype:
        raise InputError(
            f"Inputs are {episodes.support_x.dtype}, but the parameters are {like.dtype}. "
            f"Use episodes.to(dtype={like.dtype})."
        )
    if episodes.device != like.device:
        raise InputError(
            f"The episodes are on {episodes.device}, but the parameters on {like.device}. Move one with .to(device)."
        )


def _check_whole_numbers(episodes: Episodes, dtype: torch.dtype | None) -> None:
    """Refuse whole numbers that `dtype` would round, since they may be indices."""
    if dtype is None or not episodes.support_x.is_floating_point():
        return
    for x in (episodes.support_x, episodes.query_x) if episodes.is_split else (episodes.support_x,):
        rounded = x.to(dtype).to(x.dtype) != x
        if rounded.any() and (x == x.round()).all():
            value = int(x[rounded][0])
            raise InputError(
                f"Inputs are whole numbers such as {value}, which {dtype} rounds to "
                f"{int(torch.tensor(value).to(dtype))}. Give indices as int64, or scale the inputs."
            )


def _check_frozen(method: Method, net: Network, params: Params) -> None:
    """Refuse a network in which what the inner loop would move has `requires_grad=False`."""
    solvers = [method.inner, method.test]
    if not any(isinstance(solver, IterativeSolver) for solver in solvers):
        return
    if method.adapts == "all" and not adapted_params(method, net, params):
        raise InputError("every parameter of the network has requires_grad=False, so nothing adapts. Unfreeze some.")
    if method.adapts != "all" and (fixed := sorted(name for name in frozen_names(net) if name.startswith("head."))):
        raise InputError(
            f"{fixed[0]!r} has requires_grad=False, but the method adapts the head. Use net.head.requires_grad_(), "
            "and training_head='frozen' in the method if the outer loop should not train it."
        )


def _check_inputs(net: Network, shape: tuple[int, ...]) -> None:
    """Refuse points of another shape than the network was made for, where it says so."""
    recipe = net.recipe or {}
    wanted = {
        "mlp": {"inputs": math.prod(shape)},
        "conv4": dict(zip(("channels", "size"), shape)),
    }
    for name, value in wanted.get(str(recipe.get("model")), {}).items():
        if recipe[name] != value:
            raise InputError(
                f"points are of shape {shape}, but the network was made with {name}={recipe[name]}. "
                f"Make it with {name}={value}."
            )


def _check_targets(episodes: Episodes, outputs: int) -> None:
    if not episodes.is_classification:
        values = episodes.support_y.shape[-1]
        if values != outputs:
            raise InputError(
                f"Targets have {values} values each, but the head has {outputs} outputs. "
                f"Make the network with outputs={values}."
            )
        return
    low = min(int(episodes.support_y.min()), int(episodes.query_y.min()))
    high = max(int(episodes.support_y.max()), int(episodes.query_y.max()))
    if low < 0 or high >= outputs:
        raise InputError(
            f"A label is {low if low < 0 else high}, but the head has {outputs} outputs (labels 0 to {outputs - 1}). "
            f"Make the network with outputs={high + 1}, or use tasks of {outputs} ways."
        )


def _parts(params: Params, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in params if name.startswith(prefix)]
