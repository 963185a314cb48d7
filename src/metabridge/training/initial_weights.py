"""Start training from the weights of a trained model: the network with a new head, and the weights that fit."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metabridge.errors import InputError
from metabridge.learners.method import Method
from metabridge.models import BatchNorm, Network, Params, build
from metabridge.models.batch_norm import Statistics, replace_layers
from metabridge.models.freezing import has_prefix
from metabridge.models.network import seeded
from metabridge.training.checkpoint import copy_into
from metabridge.training.evaluation import Model

# What each group of parameters is; a group is the first component of the names.
GROUPS = {
    "features": "features",
    "head": "initial head",
    "heads": "head rows of the training classes",
    "rates": "inner learning rates",
    "solver": "parameters of the solver",
}


@dataclass(frozen=True)
class InitialWeights:
    """Which parameters of a trained model training started from.

    Args:
        copied: Groups of parameters that were copied, such as "features".
        new: Groups of parameters that were not copied.
        checksum: Checksum of the copied values.

    >>> InitialWeights(("features",), ("heads",), 0).summary()
    'features; new: head rows of the training classes'
    """

    copied: tuple[str, ...]
    new: tuple[str, ...]
    checksum: int

    def summary(self) -> str:
        """Return a text that names both kinds of groups."""
        copied, new = (", ".join(GROUPS[group] for group in groups) for groups in (self.copied, self.new))
        return f"{copied}; new: {new}" if new else copied

    def to_json(self) -> dict[str, object]:
        """Return the entry in the settings of a run."""
        return {"copied": list(self.copied), "crc32": self.checksum}


def network_like(source: Model, *, outputs: int, statistics: Statistics | None = None, seed: int = 0) -> Network:
    """Return a copy of a model's network with a new head.

    Parameters that the model's run froze with the option `freeze` are not frozen in the copy.

    Args:
        source: The trained model.
        outputs: Number of outputs of the head.
        statistics: Statistics of the batch norms. Default: as in the model.
        seed: Seed of the head's initial weights.

    Returns:
        The network.

    >>> import metabridge as mb
    >>> anil, net = mb.method("anil"), mb.models.conv4(1, 28)
    >>> network_like(mb.Model(anil, net, mb.parameters(anil, net)), outputs=3)
    Network(conv4, 28,291 parameters, 3 outputs)
    """
    net = copy.deepcopy(source.net)
    copy_into(net, source.params, dict(net.named_buffers()))
    freeze = _settings(source, "training").get("freeze")
    prefixes = [prefix for prefix in freeze if isinstance(prefix, str)] if isinstance(freeze, list | tuple) else []
    for name, value in net.named_parameters():
        if has_prefix(name, prefixes):
            value.requires_grad_()
    if net.recipe is not None:
        net.recipe = net.recipe | {"outputs": outputs, "seed": seed}
    if statistics is not None:
        replace_layers(net.features, BatchNorm, lambda layer: _with_statistics(layer, statistics))
        if net.recipe is not None and "statistics" in net.recipe:
            net.recipe = net.recipe | {"statistics": statistics}
    net.head = _new_head(net, outputs, seed)
    return net


def copy_weights(
    source: Model, method: Method, net: Network, params: Params, class_names: tuple[str, ...]
) -> InitialWeights:
    """Copy the weights of a trained model that fit into a network and the parameters of a method.

    The features are always copied, with their running statistics. The initial head is copied if both methods start
    from one, the head rows of training classes if both models have the same training classes, and learned inner
    learning rates and other parameters of the solver if both methods have the same.

    Args:
        source: The trained model.
        method: The method that trains the network.
        net: The network, which is changed in place.
        params: The method's parameters, from `parameters`, which are changed in place.
        class_names: Names of the training classes.

    Returns:
        Which parameters were copied.

    Raises:
        InputError: If the features of the model and of the network differ.
    """
    groups: dict[str, list[str]] = {}
    for name in params:
        groups.setdefault(name.partition(".")[0], []).append(name)
    same_classes = bool(class_names) and list(class_names) == _settings(source, "tasks").get("class_names")
    allowed = {
        "head": _has_initial_head(source.method) and _has_initial_head(method),
        "heads": same_classes,
    }
    copied = [
        group
        for group, names in groups.items()
        if allowed.get(group, True) and all(_same_shape(source.params.get(name), params[name]) for name in names)
    ]
    if "features" in groups and "features" not in copied:
        name = next(name for name in groups["features"] if not _same_shape(source.params.get(name), params[name]))
        value = source.params.get(name)
        shape = "no such parameter" if value is None else f"shape {tuple(value.shape)}"
        raise InputError(
            f"init is a model with other features: {name} has shape {tuple(params[name].shape)} in the network, but "
            f"{shape} in init. Use the network of that model."
        )
    source_buffers = dict(source.net.named_buffers())
    values = {name: source.params[name] for group in copied for name in groups[group]}
    buffers = {
        name: source_buffers[name]
        for name, buffer in net.named_buffers()
        if _same_shape(source_buffers.get(name), buffer)
    }
    with torch.no_grad():
        for name, value in values.items():
            params[name].copy_(value)
    copy_into(net, params, dict(net.named_buffers()) | buffers)
    new = [group for group in groups if group not in copied and (group != "head" or _has_initial_head(method))]
    return InitialWeights(tuple(copied), tuple(new), _checksum(values | buffers))


def _settings(model: Model, section: str) -> Mapping[str, Any]:
    """Return a section of the settings of a run; no settings if the model is not a saved run."""
    settings = getattr(model, "settings", {}).get(section)
    return settings if isinstance(settings, dict) else {}


def _has_initial_head(method: Method) -> bool:
    """Return whether training with this method leads to features that fit an initial head shared by all tasks."""
    return method.trains and method.training_head in ("learned", "frozen")


def _same_shape(value: Tensor | None, other: Tensor) -> bool:
    return value is not None and value.shape == other.shape


def _new_head(net: Network, outputs: int, seed: int) -> nn.Linear:
    """Return a head with new weights. If it does not need pretrained weights, the builder of the network makes it."""
    if net.recipe is not None and "pretrained" not in net.recipe:
        return build(**net.recipe).head.to(net.head.weight)  # type: ignore[arg-type]
    with seeded(seed):
        return nn.Linear(net.head.in_features, outputs, bias=net.head.bias is not None).to(net.head.weight)


def _with_statistics(layer: BatchNorm, statistics: Statistics) -> BatchNorm:
    """Return a batch norm with the same parameters and, if both use fixed statistics, the same statistics."""
    if layer.statistics == statistics:
        return layer
    norm = BatchNorm(layer.channels, statistics, layer.eps)
    norm.weight, norm.bias = layer.weight, layer.bias
    if layer.weight is not None:
        norm.to(layer.weight)
    return norm.train(layer.training)


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    checksum = 0
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(values.numpy().tobytes(), zlib.crc32(name.encode(), checksum))
    return checksum
