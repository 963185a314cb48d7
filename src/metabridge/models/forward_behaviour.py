"""What a network does in a forward pass, found out by watching one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from metabridge.errors import InputError
from metabridge.models.functional_call import bind_params, unregistered


class Behaviour(NamedTuple):
    """What matters for the way in which gradients are computed."""

    random: bool  # whether it draws random numbers: dropout of any kind, noise
    weight_norm: bool  # whether it uses PyTorch's fused weight normalisation
    changes_buffers: bool  # whether it changes its buffers, such as running averages


def observe(module: nn.Module, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Behaviour:
    """Watch `module(x)` in the mode, training or evaluation, that the module is in.

    Neither the module nor the state of random generators is changed.

    >>> observe(nn.Dropout(0.5), torch.ones(2, 3)).random, observe(nn.Dropout(0.5).eval(), torch.ones(2, 3)).random
    (True, False)
    """
    names = {id(value): name for name, value in module.named_parameters()}
    given = dict(module.named_parameters()) if params is None else params
    copies = {name: value.detach().clone() for name, value in given.items()}
    own = bind_params(module, copies, copy_buffers=True)
    before = _buffers(own)
    others = [(tensor, tensor._version) for tensor in unregistered(own) if not tensor.is_inference()]
    kind = _WatchCompiled if "torch._dynamo" in sys.modules else _Watch
    with torch.no_grad(), kind(names) as watch:
        own(x.clone())  # which it may change
    if changed := [name for name, value in copies.items() if value._version > 0]:
        raise InputError(
            f"features changes its parameter {changed[0]!r} in a forward pass, so tasks would not start alike. Do so "
            "after training steps instead, and use nn.Embedding without max_norm."
        )
    if any(tensor._version > version for tensor, version in others):
        raise InputError(
            "features changes a tensor in a forward pass that is not one of its buffers, so tasks would not start "
            "alike and a saved run would lose it. Make it one with register_buffer."
        )
    after = _buffers(own)
    moved = any(after[name] is not value or value._version > 0 for name, value in before.items())
    return Behaviour(watch.random, watch.weight_norm, moved)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers())


class _Watch(TorchDispatchMode):
    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.random = self.weight_norm = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or PyTorch imports its compiler for this mode, which takes a second and 80 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = tree_leaves((args, kwargs))
        for value in values:
            if isinstance(value, Tensor) and id(value) in self.names:
                raise InputError(
                    f"features reads its parameter {self.names[id(value)]!r} through an object that metabridge cannot "
                    "replace it in. Read it as an attribute of a module, such as self.weight."
                )
        if func.overloadpacket is torch.ops.aten._weight_norm_interface:
            self.weight_norm = True
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        # Some of these draw only in training, or at a rate that is not zero: whether they did, the generator knows.
        given = [value for value in values if isinstance(value, torch.Generator)]
        generators = given or [torch.default_generator, *torch.cuda.default_generators]
        before = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        for generator, state in zip(generators, before):
            if not generator.get_state().equal(state):
                self.random = True
                generator.set_state(state)
        return result


class _WatchCompiled(_Watch):
    """The same where modules may be compiled: the compiler leaves it out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = _Watch.__torch_dispatch__
