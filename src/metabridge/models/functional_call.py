"""Call a module with other parameters, without changing the module.

`torch.func.functional_call` replaces the parameters in the module during the call, so that threads that share a module
would compute with each other's parameters. Here a copy of the module tree is called, which costs the same time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from metabridge.errors import InputError

M = TypeVar("M", bound=nn.Module)
Replacements = dict[int, Any]  # the new object for the id of each object that is replaced

CONSTANTS = frozenset({int, float, bool, str, bytes, type(None), set, torch.dtype, torch.device, torch.Size})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
REGISTERS = ("_parameters", "_buffers", "_modules")


def bind_params(module: M, params: Mapping[str, Tensor], *, copy_buffers: bool = False) -> M:
    """Return a copy of `module` with other parameters, which shares all other tensors with it.

    A parameter is replaced under all its names and in all attributes that refer to it, also in lists, closures and
    bound methods.

    Args:
        module: The module.
        params: The new parameters by name.
        copy_buffers: Whether the copy gets its own buffers, which it can change without changing those of `module`.

    Returns:
        The copy.

    Raises:
        InputError: If `module` contains a TorchScript module.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> bind_params(layer, {"weight": torch.ones(1, 2)})(torch.tensor([[3.0, 4.0]]))
    tensor([[7.]])
    """
    copies: list[tuple[nn.Module, nn.Module]] = []
    new: Replacements = {}
    _register(module, "", params, copy_buffers, new, copies)
    for old, copy in copies:
        state = vars(old).copy()
        for name, value in state.items():
            kind = type(value)
            if not (kind in CONSTANTS or (kind in CONTAINERS and not value) or name in REGISTERS):
                state[name] = _rebuilt(value, new)
        for name in REGISTERS:  # new dictionaries, because a forward pass may write to them
            state[name] = {key: new.get(id(entry), entry) for key, entry in state[name].items()}
        object.__setattr__(copy, "__dict__", state)
    return new[id(module)]  # type: ignore[no-any-return]


def shallow_copy(net: M) -> M:
    """Return a copy of the modules that shares their tensors, so that a thread can call it and register hooks."""
    copy = bind_params(net, {})
    for module in copy.modules():
        hooks = {name: value.copy() for name, value in vars(module).items() if "_hooks" in name}
        vars(module).update(hooks)
    return copy


def _register(
    module: nn.Module,
    prefix: str,
    params: Mapping[str, Tensor],
    copy_buffers: bool,
    new: Replacements,
    copies: list[tuple[nn.Module, nn.Module]],
) -> None:
    """Collect the replacements of the module, its parameters and its buffers, in the order of `named_parameters`."""
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            "the network contains a TorchScript module, whose parameters cannot be replaced. Use the Python module "
            "from which it was compiled."
        )
    new[id(module)] = copy = object.__new__(type(module))
    copies.append((module, copy))
    for name, value in module._parameters.items():
        if value is not None and prefix + name in params:
            new[id(value)] = params[prefix + name]
    for buffer in module._buffers.values():
        # a tensor from inference mode cannot be differentiated
        if buffer is not None and (copy_buffers or buffer.is_inference()) and id(buffer) not in new:
            new[id(buffer)] = buffer.clone()
    for name, child in module._modules.items():
        if child is not None and id(child) not in new:
            _register(child, f"{prefix}{name}.", params, copy_buffers, new, copies)


def _rebuilt(value: Any, new: Replacements) -> Any:
    """Return `value`, or a copy of it if it refers to a replaced object."""
    if type(value) in CONSTANTS:
        return value
    if id(value) in new:
        return new[id(value)]
    parts = _parts(value)
    if CONSTANTS.issuperset(map(type, parts)):
        return value
    new[id(value)] = value  # in case it contains itself
    rebuilt = [_rebuilt(part, new) for part in parts]
    del new[id(value)]  # another object may get the same id later
    if all(part is other for part, other in zip(parts, rebuilt)):
        return value
    if isinstance(value, FunctionType):
        cells = tuple(map(CellType, rebuilt))
        function = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        return function
    if isinstance(value, MethodType):
        return MethodType(*rebuilt)
    if isinstance(value, partial):
        function, *arguments = rebuilt
        args, keywords = arguments[: len(value.args)], arguments[len(value.args) :]
        return partial(function, *args, **dict(zip(value.keywords, keywords)))
    return type(value)(zip(value, rebuilt)) if isinstance(value, dict) else type(value)(rebuilt)


def unregistered_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes of the module and its layers that are neither parameters nor buffers.

    >>> layer = nn.Linear(2, 1)
    >>> layer.centers = [torch.zeros(2), layer.weight]
    >>> unregistered_tensors(layer)
    [tensor([0., 0.])]
    """
    layers = list(module.modules())
    registers = [register for layer in layers for register in (layer._parameters, layer._buffers)]
    registered = [tensor for register in registers for tensor in register.values()]
    seen = {id(value) for value in (*registered, *layers)}
    stack = [value for layer in layers for name, value in vars(layer).items() if name not in REGISTERS]
    tensors = []
    while stack:
        value = stack.pop()
        if id(value) not in seen:
            seen.add(id(value))
            tensors += [value] if isinstance(value, Tensor) else []
            stack += _parts(value)
    return tensors


def _parts(value: Any) -> list[Any]:
    """Return the objects to which a container, function, method or partial refers; none for other objects."""
    if type(value) in (dict, OrderedDict):
        return list(value.values())
    if type(value) in (list, tuple):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if type(value) is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        try:
            return [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # an empty cell
            return []
    return []
