"""Gradients and vector-Jacobian products of functions whose arguments are pytrees of tensors, nested to any depth.

Inside a `torch.func` transform such as `vmap`, the functions call `torch.func`. Elsewhere they call `torch.autograd`,
which returns the same numbers with less overhead: for small networks on a CPU, the wrappers of `torch.func` take much
of the time of a second-order step.
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
    """Return the gradient and the value of a scalar `function` at `argument`, a pytree of tensors.

    >>> grad_and_value(lambda p: (p["x"] ** 3).sum(), {"x": torch.tensor([2.0])})
    ({'x': tensor([12.])}, tensor(8.))
    """
    if inside_transform():
        return torch.func.grad_and_value(function)(argument)
    vjp_function, value = _autograd_vjp(function, (argument,), retain_graph=False)
    return vjp_function(None)[0], value


def grad(function: Callable[[T], Tensor], argument: T) -> T:
    """Return the gradient of a scalar `function` at `argument`, a pytree of tensors."""
    return grad_and_value(function, argument)[0]


def vjp(function: Callable[..., Any], *arguments: Any) -> Callable[[Any], Any]:
    """Return the vector-Jacobian product of `function` at `arguments`, as a function of the cotangent of its value.

    The returned function maps the cotangent of the value to a tuple of cotangents, one for each argument.

    >>> vjp(lambda x, y: x * y, torch.tensor(2.0), torch.tensor(5.0))(torch.tensor(1.0))
    (tensor(5.), tensor(2.))
    """
    if inside_transform():
        return torch.func.vjp(function, *arguments)[1]
    return _autograd_vjp(function, arguments, retain_graph=True)[0]


def inner_product(values: list[Tensor], cotangents: list[Tensor]) -> Tensor:
    """Return ⟨values, cotangents⟩. Its gradient is the vector-Jacobian product of `values` with the cotangents.

    If the cotangents are passed to `torch.autograd.grad` as `grad_outputs` instead, PyTorch imports SymPy, which is
    slow.
    """
    return torch.stack([(value * cotangent).sum() for value, cotangent in zip(values, cotangents)]).sum()


def _autograd_vjp(
    function: Callable[..., Any], arguments: tuple[Any, ...], retain_graph: bool
) -> tuple[Callable[[Any], Any], Any]:
    """Return the vector-Jacobian product and the value of `function` at `arguments`.

    For a scalar value, the product accepts None as the cotangent 1. If `retain_graph` is false, the product can be
    called only once.
    """
    leaves, spec = tree_flatten(arguments)
    # If an argument requires a gradient, an outer derivative is being computed: do not detach the argument from it.
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
                scalar, inputs, create_graph=nested, retain_graph=retain_graph or nested, materialize_grads=True
            )
        return tree_unflatten(grads, spec)

    return vjp_function, value if nested else _detached(value)


def _detached(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([leaf.detach() for leaf in leaves], spec)
