"""Gradients and vector-Jacobian products of functions of parameter trees, which can be nested to any depth.

Inside a `torch.func` transform such as `vmap` they are those of `torch.func`. Elsewhere they use `torch.autograd`,
which gives the same numbers with less overhead: the wrappers of `torch.func` cost much of a second-order step of a
small network on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

T = TypeVar("T")


def inside_transform() -> bool:
    """Return whether a `torch.func` transform is running in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def grad_and_value(function: Callable[[T], Tensor], argument: T) -> tuple[T, Tensor]:
    """Return the gradient of a scalar `function` at `argument`, a tree of tensors, and the function's value.

    >>> grad_and_value(lambda p: (p["x"] ** 3).sum(), {"x": torch.tensor([2.0])})
    ({'x': tensor([12.])}, tensor(8.))
    """
    if inside_transform():
        return torch.func.grad_and_value(function)(argument)
    vjp_function, value = _autograd_vjp(function, (argument,), keep=False)
    return vjp_function(None)[0], value


def grad(function: Callable[[T], Tensor], argument: T) -> T:
    """Return the gradient of a scalar `function` at `argument`, a tree of tensors."""
    return grad_and_value(function, argument)[0]


def vjp(function: Callable[..., Any], *arguments: Any) -> Callable[[Any], Any]:
    """Return the vector-Jacobian product of `function` at `arguments`: it maps a cotangent to one per argument.

    >>> vjp(lambda x, y: x * y, torch.tensor(2.0), torch.tensor(5.0))(torch.tensor(1.0))
    (tensor(5.), tensor(2.))
    """
    if inside_transform():
        return torch.func.vjp(function, *arguments)[1]
    return _autograd_vjp(function, arguments, keep=True)[0]


def inner_product(values: list[Tensor], cotangents: list[Tensor]) -> Tensor:
    """Return ⟨values, cotangents⟩, whose gradient is the vector-Jacobian product of the cotangents.

    Cotangents that are passed to `torch.autograd.grad` directly make it import a symbolic algebra system.
    """
    return torch.stack([(value * cotangent).sum() for value, cotangent in zip(values, cotangents)]).sum()


def _autograd_vjp(
    function: Callable[..., Any], arguments: tuple[Any, ...], keep: bool
) -> tuple[Callable[[Any], Any], Any]:
    """Return the vector-Jacobian product, which can be called several times if `keep` is true, and the value."""
    leaves, spec = tree_flatten(arguments)
    # An argument that requires a gradient belongs to an outer derivative, so the graph behind it must stay.
    nested = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    with torch.enable_grad():
        inputs = [leaf.view_as(leaf) if nested else leaf.detach() for leaf in leaves]
        for leaf in inputs:
            if not leaf.requires_grad:
                leaf.requires_grad_()
        value = function(*tree_unflatten(inputs, spec))

    def vjp_function(cotangent: Any) -> Any:
        with torch.enable_grad():
            scalar = value if cotangent is None else inner_product(tree_flatten(value)[0], tree_flatten(cotangent)[0])
            grads = torch.autograd.grad(
                scalar, inputs, create_graph=nested, retain_graph=keep or nested, materialize_grads=True
            )
        return tree_unflatten(grads, spec)

    return vjp_function, value if nested else _detached(value)


def _detached(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([leaf.detach() for leaf in leaves], spec)
