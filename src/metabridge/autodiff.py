"""Derivatives of functions of parameter trees, at any depth of nesting.

Under a `torch.func` transform such as `vmap` these are `torch.func`'s own. Elsewhere they are built
on `torch.autograd`, which gives the same numbers without the wrappers, whose cost a second-order step
of a small net on a CPU feels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

T = TypeVar("T")


def transforming() -> bool:
    """Whether a `torch.func` transform is running in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def grad_and_value(function: Callable[[T], Tensor], argument: T) -> tuple[T, Tensor]:
    """Return the gradient of a scalar `function` at `argument`, a tree of tensors, and its value there.

    >>> grad_and_value(lambda p: (p["x"] ** 3).sum(), {"x": torch.tensor([2.0])})
    ({'x': tensor([12.])}, tensor(8.))
    """
    if transforming():
        return torch.func.grad_and_value(function)(argument)
    pull, value = _pull(function, (argument,), keep=False)
    return pull(None)[0], value


def grad(function: Callable[[T], Tensor], argument: T) -> T:
    """Return the gradient of a scalar `function` at `argument`, a tree of tensors."""
    return grad_and_value(function, argument)[0]


def vjp(function: Callable[..., Any], *arguments: Any) -> Callable[[Any], Any]:
    """Return the pull-back of `function` at `arguments`: from a cotangent of its value to one of each argument.

    >>> vjp(lambda x, y: x * y, torch.tensor(2.0), torch.tensor(5.0))(torch.tensor(1.0))
    (tensor(5.), tensor(2.))
    """
    if transforming():
        return torch.func.vjp(function, *arguments)[1]
    return _pull(function, arguments, keep=True)[0]


def paired(values: list[Tensor], cotangents: list[Tensor]) -> Tensor:
    """⟨values, cotangents⟩, whose gradient is the pull-back of the cotangents.

    Handed to `torch.autograd.grad` as they are, cotangents make it import a symbolic algebra system.
    """
    return torch.stack([(value * cotangent).sum() for value, cotangent in zip(values, cotangents)]).sum()


def _pull(function: Callable[..., Any], arguments: tuple[Any, ...], keep: bool) -> tuple[Callable[[Any], Any], Any]:
    leaves, spec = tree_flatten(arguments)
    # An argument that needs a gradient already belongs to a derivative further out: keep what it is made of.
    nested = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    with torch.enable_grad():
        inputs = [leaf.view_as(leaf) if nested else leaf.detach() for leaf in leaves]
        for leaf in inputs:
            if not leaf.requires_grad:
                leaf.requires_grad_()
        value = function(*tree_unflatten(inputs, spec))

    def pull(cotangent: Any) -> Any:
        with torch.enable_grad():
            scalar = value if cotangent is None else paired(tree_flatten(value)[0], tree_flatten(cotangent)[0])
            slopes = torch.autograd.grad(
                scalar, inputs, create_graph=nested, retain_graph=keep or nested, materialize_grads=True
            )
        return tree_unflatten(slopes, spec)

    return pull, value if nested else _detached(value)


def _detached(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([leaf.detach() for leaf in leaves], spec)
