"""Freezing: parameters that are neither trained nor adapted, and the layers that consist of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from metabridge.errors import InputError
from metabridge.models.batch_norm import BatchNorm, estimate_statistics, running_batch_norms
from metabridge.models.network import Network

MAX_NAMES = 12  # names in an error message


def freeze_parameters(net: nn.Module, prefixes: Sequence[str]) -> None:
    """Set `requires_grad=False` for all parameters whose names start with one of the prefixes.

    Args:
        net: The network, which is changed in place.
        prefixes: The first components of names: "features.1" stands for "features.1.weight", but not for
            "features.10.weight".

    Raises:
        InputError: If no name starts with a prefix.

    >>> from metabridge.models import conv4
    >>> from metabridge.models.network import frozen_names
    >>> net = conv4(1, 28)
    >>> freeze_parameters(net, ["features.0"])
    >>> sorted(frozen_names(net))
    ['features.0.0.weight', 'features.0.1.bias', 'features.0.1.weight']
    """
    for prefix in prefixes:
        values = [value for name, value in net.named_parameters(remove_duplicate=False) if has_prefix(name, [prefix])]
        if not values:
            names = _nearest_names(net, prefix)
            listed = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
            raise InputError(f"freeze is {prefix!r}, but the network has no such part. Use one of {listed}.")
        for value in values:
            value.requires_grad_(False)


def has_prefix(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether the first components of a name are one of the prefixes.

    >>> has_prefix("features.1.weight", ["features.1"]), has_prefix("features.10.weight", ["features.1"])
    (True, False)
    """
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _nearest_names(net: nn.Module, prefix: str) -> list[str]:
    """Return the names inside the innermost existing module of `prefix`, one for each child with parameters."""
    parents = [name for name, _ in net.named_modules() if name and has_prefix(prefix, [name])]
    parent = max(parents, key=len, default="features")
    start = f"{parent}."
    names = [name for name, _ in net.named_parameters(remove_duplicate=False) if name.startswith(start)]
    return list(dict.fromkeys(start + name.removeprefix(start).partition(".")[0] for name in names))


def frozen_modules(net: Network) -> list[nn.Module]:
    """Return the modules of `features` that have parameters, all of which are frozen, and the modules inside them.

    >>> from metabridge.models import mlp
    >>> net = mlp(4, 5, depth=1)
    >>> freeze_parameters(net, ["features"])
    >>> net.features in frozen_modules(net)
    True
    """
    frozen: dict[nn.Module, None] = {}
    for module in net.features.modules():
        parameters = list(module.parameters())
        if parameters and not any(value.requires_grad for value in parameters):
            frozen |= dict.fromkeys(module.modules())
    return list(frozen)


def fix_frozen_modules(net: Network, batches: Iterable[torch.Tensor]) -> None:
    """Put the frozen modules into evaluation mode, so that training applies them as evaluation does.

    Their running batch norms keep their statistics. Those that still have the initial statistics are measured first.

    Args:
        net: The network, in training mode, which is changed in place.
        batches: Batches of training inputs.
    """
    frozen = frozen_modules(net)
    norms = [norm for norm in running_batch_norms(net) if norm in frozen]
    measured = [norm for norm in norms if _is_measured(norm)]
    if len(measured) < len(norms):
        estimate_statistics(net.features, batches, fixed=measured)
    for module in frozen:
        module.training = False


def _is_measured(norm: BatchNorm) -> bool:
    return bool((norm.mean != 0).any() or (norm.variance != 1).any())
