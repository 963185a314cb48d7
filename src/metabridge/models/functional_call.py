"""Call a module with other parameters, without changing the module.

`torch.func.functional_call` replaces the parameters in the module during the call. Threads that share a module would
therefore compute with each other's parameters. `bind_params` and `shallow_copy` instead copy the tree of modules, but
not their tensors. This is as fast as `torch.func.functional_call`.
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
Replacements = dict[int, Any]  # from the id of a replaced object to the new object

# Objects of these types are not searched for parameters or other tensors.
UNSEARCHED_TYPES = frozenset({int, float, bool, str, bytes, type(None), set, torch.dtype, torch.device, torch.Size})
CONTAINER_TYPES = frozenset({dict, OrderedDict, list, tuple})
# the attributes of a module in which PyTorch stores its parameters, buffers and submodules
REGISTRIES = ("_parameters", "_buffers", "_modules")


def bind_params(module: M, params: Mapping[str, Tensor], *, copy_buffers: bool = False) -> M:
    """Return a copy of `module` with other parameters; the copy and `module` share all other tensors.

    A parameter is replaced under all its names and in all attributes that refer to it, directly or through
    dictionaries, lists, tuples, closures, bound methods and partial functions. Sets, attributes of objects that are not
    modules, and subclasses of these types (except OrderedDict) are not searched.

    Args:
        module: The module, which is not changed.
        params: The new parameters by name. Names that are not in `module` are ignored.
        copy_buffers: Whether to copy the buffers, so that the copy can change them without changing `module`. Buffers
            that were created in inference mode are always copied.

    Returns:
        The copy.

    Raises:
        InputError: If `module` contains a TorchScript module.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> bind_params(layer, {"weight": torch.ones(1, 2)})(torch.tensor([[3.0, 4.0]]))
    tensor([[7.]])
    """
    copies: list[tuple[nn.Module, nn.Module]] = []
    replacements: Replacements = {}
    _collect_replacements(module, "", params, copy_buffers, replacements, copies)
    for old, copy in copies:
        state = vars(old).copy()
        for name, value in state.items():
            value_type = type(value)
            is_empty = value_type in CONTAINER_TYPES and not value
            if not (value_type in UNSEARCHED_TYPES or is_empty or name in REGISTRIES):
                state[name] = _replace_inside(value, replacements)
        for name in REGISTRIES:  # new dictionaries, because a forward pass may write to them
            state[name] = {key: replacements.get(id(entry), entry) for key, entry in state[name].items()}
        object.__setattr__(copy, "__dict__", state)
    return replacements[id(module)]  # type: ignore[no-any-return]


def shallow_copy(net: M) -> M:
    """Return a copy of `net` that shares its tensors.

    Hooks that are registered on the copy do not affect `net`. Buffers that were created in inference mode are cloned.

    Args:
        net: The module, which is not changed.

    Returns:
        The copy.

    Raises:
        InputError: If `net` contains a TorchScript module.
    """
    copy = bind_params(net, {})
    for module in copy.modules():
        hooks = {name: value.copy() for name, value in vars(module).items() if "_hooks" in name}
        vars(module).update(hooks)
    return copy


def _collect_replacements(
    module: nn.Module,
    prefix: str,
    params: Mapping[str, Tensor],
    copy_buffers: bool,
    replacements: Replacements,
    copies: list[tuple[nn.Module, nn.Module]],
) -> None:
    """Append (submodule, uninitialized copy) pairs to `copies`, and record all replacements in `replacements`."""
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            "the network contains a TorchScript module, whose parameters cannot be replaced. Use the Python module "
            "from which it was compiled."
        )
    replacements[id(module)] = copy = object.__new__(type(module))
    copies.append((module, copy))
    for name, value in module._parameters.items():
        if value is not None and prefix + name in params:
            replacements[id(value)] = params[prefix + name]
    for buffer in module._buffers.values():
        # autograd cannot use a tensor that was created in inference mode
        if buffer is not None and (copy_buffers or buffer.is_inference()) and id(buffer) not in replacements:
            replacements[id(buffer)] = buffer.clone()
    for name, child in module._modules.items():
        if child is not None and id(child) not in replacements:
            _collect_replacements(child, f"{prefix}{name}.", params, copy_buffers, replacements, copies)


def _replace_inside(value: Any, replacements: Replacements) -> Any:
    """Return the replacement of `value`, a copy of `value` if it refers to a replaced object, or else `value`."""
    if type(value) in UNSEARCHED_TYPES:
        return value
    if id(value) in replacements:
        return replacements[id(value)]
    contents = _contents(value)
    if UNSEARCHED_TYPES.issuperset(map(type, contents)):
        return value
    replacements[id(value)] = value  # in case it contains itself
    new_contents = [_replace_inside(content, replacements) for content in contents]
    del replacements[id(value)]  # another object may get the same id later
    if all(content is new_content for content, new_content in zip(contents, new_contents)):
        return value
    if isinstance(value, FunctionType):
        cells = tuple(map(CellType, new_contents))
        function = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        return function
    if isinstance(value, MethodType):
        return MethodType(*new_contents)
    if isinstance(value, partial):
        function, *arguments = new_contents
        args, keyword_args = arguments[: len(value.args)], arguments[len(value.args) :]
        return partial(function, *args, **dict(zip(value.keywords, keyword_args)))
    return type(value)(zip(value, new_contents)) if isinstance(value, dict) else type(value)(new_contents)


def unregistered_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes of the module and its submodules, except parameters and buffers.

    Dictionaries, lists, tuples, closures, bound methods and partial functions are searched, but not sets, attributes of
    objects that are not modules, or subclasses of these types (except OrderedDict).

    Args:
        module: The module.

    Returns:
        The tensors, each once.

    >>> layer = nn.Linear(2, 1)
    >>> layer.centers = [torch.zeros(2), layer.weight]
    >>> unregistered_tensors(layer)
    [tensor([0., 0.])]
    """
    submodules = list(module.modules())
    registries = [registry for submodule in submodules for registry in (submodule._parameters, submodule._buffers)]
    registered = [tensor for registry in registries for tensor in registry.values()]
    seen = {id(value) for value in (*registered, *submodules)}
    remaining = [value for submodule in submodules for name, value in vars(submodule).items() if name not in REGISTRIES]
    tensors = []
    while remaining:
        value = remaining.pop()
        if id(value) not in seen:
            seen.add(id(value))
            tensors += [value] if isinstance(value, Tensor) else []
            remaining += _contents(value)
    return tensors


def _contents(value: Any) -> list[Any]:
    """Return the objects that `value` contains or refers to.

    These are the items of a list or tuple, the values of a dictionary, or the objects that a closure, bound method or
    partial refers to; otherwise [].
    """
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
        except ValueError:  # a cell of the closure is empty
            return []
    return []
