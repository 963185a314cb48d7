"""Observe what a network does in a forward pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from metabridge.errors import InputError
from metabridge.models.functional_call import bind_params, unregistered_tensors


class Behavior(NamedTuple):
    """Properties of a forward pass that affect how gradients must be computed."""

    is_random: bool  # whether it draws random numbers, for example for dropout or noise
    uses_weight_norm: bool  # whether it uses PyTorch's fused weight normalization, whose second derivatives are wrong
    changes_buffers: bool  # whether it changes its buffers, such as running averages


def observe(module: nn.Module, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Behavior:
    """Run `module(x)` in the current mode of the module (training or evaluation) and return its behavior.

    The module and the states of random generators do not change. If `params` is not None, it replaces the parameters.

    Raises:
        InputError: If the module changes a parameter or a tensor that is neither a parameter nor a buffer, or reads a
            parameter through an object in which `bind_params` cannot replace it, such as an attribute of an object that
            is not a module.

    >>> x = torch.ones(2, 3)
    >>> observe(nn.Dropout(0.5), x).is_random, observe(nn.Dropout(0.5).eval(), x).is_random
    (True, False)
    """
    names_by_id = {id(value): name for name, value in module.named_parameters()}
    params = dict(module.named_parameters()) if params is None else params
    copies = {name: value.detach().clone() for name, value in params.items()}
    copy = bind_params(module, copies, copy_buffers=True)
    buffers_before = _buffers(copy)
    unregistered_before = [
        (tensor, tensor._version) for tensor in unregistered_tensors(copy) if not tensor.is_inference()
    ]
    observer_class = _CompilerAwareObserver if "torch._dynamo" in sys.modules else _Observer
    with torch.no_grad(), observer_class(names_by_id) as observer:
        copy(x.clone())  # the forward pass may change its input
    if changed := [name for name, value in copies.items() if value._version > 0]:
        raise InputError(
            f"features changes its parameter {changed[0]!r} in a forward pass, so tasks would start from different "
            "parameters. Change it after training steps instead, and use nn.Embedding without max_norm."
        )
    if any(tensor._version > version for tensor, version in unregistered_before):
        raise InputError(
            "a forward pass of features changes a tensor that is not one of its buffers, so tasks would start from "
            "different states and a saved run would not include the tensor. Register it with register_buffer."
        )
    buffers_after = _buffers(copy)
    changes_buffers = any(
        buffers_after[name] is not buffer or buffer._version > 0 for name, buffer in buffers_before.items()
    )
    return Behavior(observer.is_random, observer.uses_weight_norm, changes_buffers)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers())


class _Observer(TorchDispatchMode):
    """Record random operations and weight normalization.

    Raise an error if an operation reads one of the original parameters instead of its replacement. `names_by_id` maps
    the id of each original parameter to its name.
    """

    def __init__(self, names_by_id: Mapping[int, str]) -> None:
        super().__init__()
        self.names_by_id = names_by_id
        self.is_random = self.uses_weight_norm = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False; otherwise PyTorch imports its compiler for this mode, which takes a second and 80 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = tree_leaves((args, kwargs))
        for value in values:
            if isinstance(value, Tensor) and id(value) in self.names_by_id:
                name = self.names_by_id[id(value)]
                raise InputError(
                    f"features reads its parameter {name!r} through an object in which it cannot be "
                    "replaced. Read it as an attribute of a module, such as self.weight."
                )
        if func.overloadpacket is torch.ops.aten._weight_norm_interface:
            self.uses_weight_norm = True
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        # Some operations with this tag draw random numbers only in training or at a nonzero rate, so compare the states
        # of the generators.
        generator_args = [value for value in values if isinstance(value, torch.Generator)]
        generators = generator_args or [torch.default_generator, *torch.cuda.default_generators]
        states_before = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        for generator, state in zip(generators, states_before):
            if not generator.get_state().equal(state):
                self.is_random = True
                generator.set_state(state)
        return result


class _CompilerAwareObserver(_Observer):
    """The observer to use when PyTorch's compiler is loaded; the compiler skips the code of the observer itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    # PyTorch disables the compiler only for methods that the class itself defines.
    __torch_dispatch__ = _Observer.__torch_dispatch__
