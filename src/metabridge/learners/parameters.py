"""The parameters of a method: those of the network and of the solver, and the head rows of training classes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.method import CLASS_ROW_HEADS, Method
from metabridge.models.network import Network, Params, frozen_names, seeded
from metabridge.solvers import IterativeSolver, Solver, task_loss

NOTHING_TO_TRAIN = (
    "method is frozen, which trains nothing. Evaluate or adapt the model without training it, or use another method, "
    "such as mtl."
)


def parameters(method: Method, net: Network, *, classes: int | None = None, seed: int = 0) -> Params:
    """Return all parameters of a method by name: leaf tensors, of which the trained ones require gradients.

    `features.*` and `head.*` are copies of the network's parameters. Methods with one head row per training class add
    `heads.*`; solvers with meta-learned settings add `rates.*` or `solver.*`. A parameter of the network with
    `requires_grad=False` is neither trained nor adapted.

    Args:
        method: The few-shot learning method.
        net: The network that it trains.
        classes: The number of training classes; needed by methods with one head row per training class.
        seed: The seed of the random initial values of the head rows of training classes.

    Returns:
        The tensors by name.

    Raises:
        InputError: If `classes` is missing, or the head shares parameters with the features.

    >>> import metabridge as mb
    >>> sorted(mb.parameters(mb.method("r2d2"), mb.models.mlp(4, 5, depth=1)))
    ['features.1.bias', 'features.1.weight', 'head.bias', 'head.weight', 'solver.log_penalty', 'solver.log_scale']
    """
    params = {name: value.detach().clone() for name, value in net.named_parameters()}
    tied = [name for name, _ in net.head.named_parameters() if f"head.{name}" not in params]
    if tied:
        raise InputError(
            f"head.{tied[0]} is also a parameter of the features, but each task needs a separate head. "
            f"Untie it: net.head.{tied[0]} = torch.nn.Parameter(net.head.{tied[0]}.detach().clone())."
        )
    if method.training_head in CLASS_ROW_HEADS:
        if classes is None or classes < 1:
            raise InputError(
                f"classes is {classes}, but training_head {method.training_head!r} has one row per training class. "
                "Pass classes=environment.classes."
            )
        with seeded(seed):
            rows = nn.Linear(net.head.in_features, classes, bias=net.head.bias is not None).to(net.head.weight)
        params |= {f"heads.{name}": value.detach() for name, value in rows.named_parameters()}
    if method.inner is not None:
        params |= method.inner.solver_params(adapted_params(method, net, params))
    for name in trained_names(method, net, params):
        params[name].requires_grad_()
    return params


def network_name(net: Network) -> str:
    """Return the model name of a network from `metabridge.models`, or the class name of any other network."""
    return type(net).__name__ if net.recipe is None else str(net.recipe["model"])


def adapted_params(method: Method, net: Network, params: Params) -> Params:
    """Return the parameters that the inner loop adapts, by name."""
    if method.adapts != "all":
        return {name: value for name, value in params.items() if name.startswith("head.")}
    return _unfrozen_params(net, params)


def params_at_test_time(method: Method, net: Network, params: Params) -> Params:
    """Return the parameters that a solver adapts at test time, by name.

    A method that adapts nothing in training, such as "nal", adapts the whole network at test time (Collins et al. 2022,
    §2).
    """
    return adapted_params(method, net, params) if method.adapts == "head" else _unfrozen_params(net, params)


def _unfrozen_params(net: Network, params: Params) -> Params:
    frozen = frozen_names(net)
    return {
        name: value for name, value in params.items() if name.startswith(("features.", "head.")) and name not in frozen
    }


def solver_params(params: Params) -> Params:
    """Return the meta-learned parameters of the solver, by name."""
    return {name: value for name, value in params.items() if name.startswith(("rates.", "solver."))}


def trained_names(method: Method, net: Network, params: Params) -> list[str]:
    """Return the names of the parameters that the outer loop trains."""
    if not method.trains:
        return []
    frozen, trains_head = frozen_names(net), method.training_head == "learned"
    return [name for name in params if name not in frozen and (trains_head or not name.startswith("head."))]


def initial_heads(method: Method, params: Params, episodes: Episodes) -> Params:
    """Return the initial head of every task, with a leading task axis.

    If the training head is "task-rows", a task's head consists of the rows of its classes (Wang et al. 2021, §5.2).
    """
    if method.training_head == "task-rows":
        assert episodes.classes is not None
        return {
            f"head.{name}": params[f"heads.{name}"][episodes.classes]
            for name in _names_without_prefix(params, "heads.")
        }
    prefix = "heads." if method.training_head == "all-rows" else "head."
    return {
        f"head.{name}": params[prefix + name].expand(len(episodes), *params[prefix + name].shape)
        for name in _names_without_prefix(params, prefix)
    }


def training_targets(method: Method, episodes: Episodes, targets: Tensor) -> Tensor:
    """Return the targets of the training head: if it is "all-rows", replace labels in a task by training classes."""
    if method.training_head != "all-rows" or not episodes.is_classification:
        return targets
    assert episodes.classes is not None
    return episodes.classes.gather(1, targets)


def check_training(
    method: Method, net: Network, params: Params, episodes: Episodes, *, dtype: torch.dtype | None = None
) -> None:
    """Raise an InputError if the method cannot train the network on the episodes, with features in `dtype`."""
    if not method.trains:
        raise InputError(NOTHING_TO_TRAIN)
    _check_common(method, net, params, episodes)
    _check_whole_numbers(episodes, dtype)
    _check_inputs(net, tuple(episodes.support_x.shape[2:]))
    if method.training_head not in CLASS_ROW_HEADS:
        return _check_targets(episodes, params["head.weight"].shape[0])
    rows = params.get("heads.weight")
    if rows is None:
        raise InputError("params has no 'heads.weight'. Create params with parameters(method, net, classes=...).")
    if episodes.classes is None:
        raise InputError(
            f"training_head is {method.training_head!r}, but episodes.classes is None. "
            "Create Episodes(..., classes=...) with the index of a head row for each output."
        )
    if method.training_head == "all-rows" and not episodes.is_classification and method.loss is task_loss:
        raise InputError(
            "training_head is 'all-rows', one classifier over all classes, but the targets are real-valued. Use "
            "training_head='task-rows', as method('mtl') has."
        )
    low, high = int(episodes.classes.min()), int(episodes.classes.max())
    if low < 0 or high >= len(rows):
        raise InputError(
            f"episodes.classes contains {low if low < 0 else high}, but there are {len(rows)} head rows. "
            "Create params with parameters(method, net, classes=environment.classes)."
        )
    return _check_targets(episodes, episodes.classes.shape[1])


def check_test_time(method: Method, net: Network, params: Params, episodes: Episodes) -> None:
    """Raise an InputError if the method cannot adapt the network to the episodes at test time."""
    _check_common(method, net, params, episodes)
    if method.test_solver is None or isinstance(method.test_solver, Solver):
        _check_targets(episodes, params["head.weight"].shape[0])


def _check_common(method: Method, net: Network, params: Params, episodes: Episodes) -> None:
    missing = [name for name, _ in net.named_parameters() if name not in params]
    if missing:
        raise InputError(
            f"params lacks {missing[0]!r}, which the network has. Create params with parameters(method, net)."
        )
    _check_frozen(method, net, params)
    if method.inner is not None and method.inner.needs_labels and not episodes.is_classification:
        raise InputError(
            f"{type(method.inner).__name__} needs class labels, but the targets are real-valued. Use method('r2d2')."
        )
    weight = params["head.weight"]
    if not episodes.support_x.is_floating_point():
        if net.recipe is not None:
            raise InputError(
                f"Inputs are {episodes.support_x.dtype}, but this network takes floating-point inputs. Convert "
                "them with .float()."
            )
    elif episodes.support_x.dtype != weight.dtype:
        raise InputError(
            f"Inputs are {episodes.support_x.dtype}, but the parameters are {weight.dtype}. "
            f"Use episodes.to(dtype={weight.dtype})."
        )
    if episodes.device != weight.device:
        raise InputError(
            f"The episodes are on {episodes.device}, but the parameters are on {weight.device}. "
            f"Use episodes.to({str(weight.device)!r})."
        )


def _check_whole_numbers(episodes: Episodes, dtype: torch.dtype | None) -> None:
    """Raise an InputError if inputs are integers that `dtype` rounds, since they may be indices."""
    if dtype is None or not episodes.support_x.is_floating_point():
        return
    for x in (episodes.support_x, episodes.query_x) if episodes.is_split else (episodes.support_x,):
        rounded = x.to(dtype).to(x.dtype) != x
        if rounded.any() and (x == x.round()).all():
            value = int(x[rounded][0])
            raise InputError(
                f"Inputs are integers such as {value}, which {dtype} rounds to "
                f"{int(torch.tensor(value).to(dtype))}. Pass indices as int64, or scale the inputs."
            )


def _check_frozen(method: Method, net: Network, params: Params) -> None:
    """Raise an InputError if parameters that the inner loop adapts have `requires_grad=False`."""
    solvers = [method.inner, method.test_solver]
    if not any(isinstance(solver, IterativeSolver) for solver in solvers):
        return
    if method.adapts != "head" and not params_at_test_time(method, net, params):
        raise InputError(
            "every parameter of the network has requires_grad=False, so nothing adapts. Unfreeze some of them."
        )
    if method.adapts == "head" and (frozen := sorted(name for name in frozen_names(net) if name.startswith("head."))):
        raise InputError(
            f"{frozen[0]!r} has requires_grad=False, but the method adapts the head. Use net.head.requires_grad_(), "
            "and training_head='frozen' in the method if the outer loop should not train it."
        )


def _check_inputs(net: Network, shape: tuple[int, ...]) -> None:
    """Raise an InputError if the network was built for inputs of another shape."""
    check_channels(net, shape)
    recipe = net.recipe or {}
    if recipe.get("model") == "conv4" and len(shape) == 3 and recipe["size"] != shape[1]:
        raise _wrong_shape(shape, "size", recipe["size"], shape[1])


def check_channels(net: Network, shape: tuple[int, ...]) -> None:
    """Raise an InputError if the network was built for another number of channels, or of inputs if it is an MLP."""
    recipe = net.recipe or {}
    if recipe.get("model") == "mlp":
        if recipe["inputs"] != math.prod(shape):
            raise _wrong_shape(shape, "inputs", recipe["inputs"], math.prod(shape))
        return
    option = "image_channels" if "image_channels" in recipe else "channels"
    if len(shape) == 3 and recipe.get(option, shape[0]) != shape[0]:
        raise _wrong_shape(shape, option, recipe[option], shape[0])


def _wrong_shape(shape: tuple[int, ...], option: str, value: object, needed: int) -> InputError:
    return InputError(
        f"Inputs have shape {tuple(shape)}, but the network was built with {option}={value}. "
        f"Use a network with {option}={needed}, or other inputs."
    )


def _check_targets(episodes: Episodes, outputs: int) -> None:
    if not episodes.is_classification:
        target_size = episodes.support_y.shape[-1]
        if target_size != outputs:
            raise InputError(
                f"Targets are vectors of length {target_size}, but the head has {outputs} outputs. "
                f"Build the network with outputs={target_size}."
            )
        return
    low = min(int(episodes.support_y.min()), int(episodes.query_y.min()))
    high = max(int(episodes.support_y.max()), int(episodes.query_y.max()))
    if low < 0 or high >= outputs:
        raise InputError(
            f"A label is {low if low < 0 else high}, but the head has {outputs} outputs (labels 0 to {outputs - 1}). "
            f"Build the network with outputs={high + 1}, or use tasks with {outputs} classes."
        )


def _names_without_prefix(params: Params, prefix: str) -> list[str]:
    """Return the names that start with a prefix, with the prefix removed."""
    return [name.removeprefix(prefix) for name in params if name.startswith(prefix)]
