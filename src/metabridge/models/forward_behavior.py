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

    random: bool  # whether it draws random numbers, for example for dropout or noise
    weight_norm: bool  # whether it uses PyTorch's fused weight normalization
    changes_buffers: bool  # whether it changes its buffers, such as running averages


def observe(module: nn.Module, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Behavior:
    """Run `module(x)` in the module's current mode (training or evaluation) and return what it did.

    The module and the states of random generators stay unchanged. `params` replace the module's parameters.

    Raises:
        InputError: If the module changes a parameter or an unregistered tensor, or reads a parameter through an object
            in which it cannot be replaced.

    >>> observe(nn.Dropout(0.5), torch.ones(2, 3)).random, observe(nn.Dropout(0.5).eval(), torch.ones(2, 3)).random
    (True, False)
    """
    names = {id(value): name for name, value in module.named_parameters()}
    originals = dict(module.named_parameters()) if params is None else params
    copies = {name: value.detach().clone() for name, value in originals.items()}
    copy = bind_params(module, copies, copy_buffers=True)
    before = _buffers(copy)
    others = [(tensor, tensor._version) for tensor in unregistered_tensors(copy) if not tensor.is_inference()]
    mode = _CompilerAwareObserver if "torch._dynamo" in sys.modules else _Observer
    with torch.no_grad(), mode(names) as observer:
        copy(x.clone())  # the forward pass may change its input
    if changed := [name for name, value in copies.items() if value._version > 0]:
        raise InputError(
            f"features changes its parameter {changed[0]!r} in a forward pass, so tasks would start from different "
            "parameters. Change it after training steps instead, and use nn.Embedding without max_norm."
        )
    if any(tensor._version > version for tensor, version in others):
        raise InputError(
            "features changes a tensor in a forward pass that is not one of its buffers, so tasks would start from "
            "different states and a saved run would not include it. Register it with register_buffer."
        )
    after = _buffers(copy)
    changes_buffers = any(after[name] is not value or value._version > 0 for name, value in before.items())
    return Behavior(observer.random, observer.weight_norm, changes_buffers)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers())


class _Observer(TorchDispatchMode):
    """Record which kinds of operations run."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.random = self.weight_norm = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False; otherwise PyTorch imports its compiler for this mode, which takes a second and 80 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = tree_leaves((args, kwargs))
        for value in values:
            if isinstance(value, Tensor) and id(value) in self.names:
                raise InputError(
                    f"features reads its parameter {self.names[id(value)]!r} through an object in which it cannot be "
                    "replaced. Read it as an attribute of a module, such as self.weight."
                )
        if func.overloadpacket is torch.ops.aten._weight_norm_interface:
            self.weight_norm = True
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        # Some of these operations draw numbers only in training or at a nonzero rate, so compare the generators'
        # states.
        arguments = [value for value in values if isinstance(value, torch.Generator)]
        generators = arguments or [torch.default_generator, *torch.cuda.default_generators]
        before = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        for generator, state in zip(generators, before):
            if not generator.get_state().equal(state):
                self.random = True
                generator.set_state(state)
        return result


class _CompilerAwareObserver(_Observer):
    """An observer for compiled modules, which the compiler skips."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = _Observer.__torch_dispatch__
