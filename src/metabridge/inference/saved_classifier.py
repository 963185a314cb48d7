"""Files of fitted classifiers: safetensors with JSON metadata, so that loading them cannot execute code.

Format 2 adds to format 1 the temperature, the penalty and, if they are known, the support set and the model before
adaptation, which adding images needs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metabridge.decode_options import DecodeOptions, as_decode_options
from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import make_folder
from metabridge.heads import FITTED_HEADS, FittedHead
from metabridge.inference.support_set import SupportSet
from metabridge.learners.adapt import Adapted
from metabridge.models import Params
from metabridge.training.checkpoint import (
    RunFolder,
    check_match,
    copy_into,
    damage_error,
    merge_groups,
    read_method,
    read_network,
    select_group,
    write_method,
)
from metabridge.training.evaluation import Model, check_finite
from metabridge.training.model_images import image_shape

FORMAT_VERSION = 2
PARAMETER_TYPES = {"model": str, "head": str, "penalty": int | float, "reject": int | float, "weights": str}


@dataclass(frozen=True, eq=False)
class SavedClassifier:
    """The content of the file of a fitted classifier.

    Args:
        adapted: The adapted model.
        classes: The class labels.
        decode_options: Options for decoding images.
        arguments: Parameters of the classifier, by name.
        temperature: The number by which outputs are divided before the softmax.
        penalty: The penalty of the fitted head.
        model: The model before adaptation, if known.
        support: The support set with its features, if known.
    """

    adapted: Adapted
    classes: NDArray[Any]
    decode_options: DecodeOptions
    arguments: dict[str, Any]
    temperature: float = 1.0
    penalty: float | None = None
    model: Model | None = None
    support: SupportSet | None = None


def write_classifier(folder: str | Path, saved: SavedClassifier) -> Path:
    """Write a fitted classifier and return the path of the file."""
    adapted, head, support = saved.adapted, saved.adapted.head, saved.support
    recipe = dict(adapted.net.recipe or {})  # the model name and options from which the network was built
    params = {name: value for name, value in adapted.params.items() if name.startswith(("features.", "head."))}
    methods = None
    if saved.model is not None and adapted.method is not None:
        with contextlib.suppress(InputError):  # a method with a custom loss cannot be saved
            methods = [write_method(saved.model.method), write_method(adapted.method)]
    metadata = {
        "version": FORMAT_VERSION,
        "model": recipe | ({"pretrained": False} if "pretrained" in recipe else {}),  # the weights are in this file
        "form": saved.decode_options.to_json(),
        "classes": saved.classes.tolist(),
        # keys and class names as in version 0.1.0
        "head": None if head is None else {"kind": type(head).__name__, "normalise": head.normalize},
        "arguments": saved.arguments,
        "temperature": saved.temperature,
        "penalty": saved.penalty,
        "methods": methods,  # before and after the penalty was chosen
        "support": None if support is None else list(support.names),
    }
    groups: dict[str, Mapping[str, Tensor]] = {
        "params": params,
        "buffers": dict(adapted.net.named_buffers()),
        "head": {} if head is None else {"weight": head.weight, "bias": head.bias},
    }
    if methods is not None and saved.model is not None:
        groups["initial"] = {
            name: value
            for name, value in saved.model.params.items()
            if name not in params or not torch.equal(value, params[name])
        }
    if support is not None:
        groups["support"] = _support_tensors(support)
    run_folder = RunFolder(make_folder(folder))
    run_folder.write("adapted", merge_groups(**groups), metadata)
    return run_folder.path / "adapted.safetensors"


def read_classifier(folder: str | Path, device: torch.device) -> SavedClassifier:
    """Read a fitted classifier.

    Raises:
        InputError: If the folder contains none, or the file is corrupted.
    """
    run_folder = RunFolder(Path(folder))
    content = run_folder.read("adapted")
    if content is None:
        raise InputError(
            f"{folder} contains no adapted model. Create one with metabridge adapt --save or FewShotClassifier.save."
        )
    tensors, metadata = content
    if metadata.get("version") not in (1, FORMAT_VERSION):
        raise InputError(
            f"the adapted model in {folder} has file format {metadata.get('version')}, but this version of "
            f"metabridge reads format {FORMAT_VERSION}. Adapt again, or use the version that wrote it."
        )
    if metadata["version"] == 1:
        metadata = _upgrade_from_version_1(metadata)
    params, buffers = select_group(tensors, "params"), select_group(tensors, "buffers")
    try:
        net = read_network(metadata, None, tensors)
        check_match({**dict(net.named_parameters()), **dict(net.named_buffers())}, params | buffers, run_folder.path)
        classes, decode_options = _read_classes(metadata["classes"]), as_decode_options(metadata["form"])
        if image_shape(net) != (decode_options.channels, decode_options.size):
            raise InputError(f"its network does not accept images decoded with {decode_options}")
        head_weight = params["head.weight"]
        head = _read_head(metadata["head"], select_group(tensors, "head"), head_weight, len(classes))
        support = _read_support(metadata["support"], select_group(tensors, "support"), classes)
        if support is not None:
            _check_support(support, decode_options, head_weight)
        before, after = (None, None) if metadata["methods"] is None else map(read_method, metadata["methods"])
        initial = params | select_group(tensors, "initial")
        check_match(dict(net.named_parameters()), initial, run_folder.path)
        arguments = _read_arguments(metadata["arguments"])
        temperature, penalty = float(metadata["temperature"]), metadata["penalty"]
        if not 0 < temperature < math.inf or not isinstance(penalty, int | float | None):
            raise InputError(f"its temperature is {temperature}, and its penalty {penalty!r}")
    except PARSING_ERRORS as error:
        raise damage_error(run_folder.path / "adapted.safetensors", str(error).rstrip(".")) from error
    check_finite(params | select_group(tensors, "head"), buffers)
    check_finite(initial, {})
    copy_into(net, params, buffers)
    net = net.to(device).eval()
    params, initial = ({name: value.to(device) for name, value in group.items()} for group in (params, initial))
    if head is not None:
        head = head._replace(weight=head.weight.to(device), bias=head.bias.to(device))
    model = None if before is None else Model(before, net, initial)
    return SavedClassifier(
        Adapted(net, params, head, after),
        classes,
        decode_options,
        arguments,
        temperature,
        penalty,
        model,
        None if support is None else support.to(device),
    )


def _upgrade_from_version_1(metadata: dict[str, Any]) -> dict[str, Any]:
    arguments = metadata.get("arguments")
    if isinstance(arguments, dict) and "run" in arguments:
        arguments = {"model": arguments["run"]} | {key: value for key, value in arguments.items() if key != "run"}
    new = {"temperature": 1.0, "penalty": None, "methods": None, "support": None}
    return metadata | new | {"arguments": arguments}


def _support_tensors(support: SupportSet) -> Params:
    assert support.features is not None
    tensors = {
        "features": support.features,
        "classes": torch.from_numpy(support.classes()[1]),
        "digests": torch.from_numpy(support.digests),
    }
    return tensors if support.images is None else tensors | {"images": torch.from_numpy(support.images)}


def _read_support(names: Any, tensors: Params, classes: NDArray[Any]) -> SupportSet | None:
    """Return the support set; None if the file contains none."""
    if names is None:
        return None
    indices, images = tensors["classes"], tensors.get("images")
    if not isinstance(names, list) or indices.unique().tolist() != list(range(len(classes))):
        raise InputError(f"its support set does not have {len(classes)} classes")
    pixels = None if images is None else images.numpy()
    labels = classes[indices.numpy()]
    return SupportSet(labels, tensors["digests"].numpy(), tuple(names), tensors["features"], pixels)


def _check_support(support: SupportSet, decode_options: DecodeOptions, head_weight: Tensor) -> None:
    """Raise `InputError` if an array of the support set has the wrong shape or dtype."""
    n, features, images = len(support.labels), support.features, support.images
    pixels = (n, decode_options.channels, decode_options.size, decode_options.size)
    is_valid = (
        len(support.names) == n
        and all(isinstance(name, str) for name in support.names)
        and support.digests.shape == (n,)
        and support.digests.dtype == np.int64
        and features is not None
        and (features.shape, features.dtype) == ((n, head_weight.shape[1]), head_weight.dtype)
        and bool(features.isfinite().all())
        and (images is None or (images.shape == pixels and images.dtype == np.uint8))
    )
    if not is_valid:
        raise InputError("an array of its support set has the wrong shape or dtype, or is not finite")


def _read_arguments(arguments: Any) -> dict[str, Any]:
    for name, value in arguments.items():
        if name not in PARAMETER_TYPES or not isinstance(value, PARAMETER_TYPES[name] | None):
            raise InputError(f"its parameter {name!r} is {value!r}")
    return dict(arguments)


def _read_classes(names: Any) -> NDArray[Any]:
    classes = np.array(names)
    if classes.ndim != 1 or len(classes) < 2 or classes.dtype.kind not in "bifuU":
        raise InputError("its classes are not a list of strings or numbers")
    return classes


def _read_head(
    metadata: Any, tensors: Mapping[str, Tensor], head_weight: Tensor, num_classes: int
) -> FittedHead | None:
    """Return the fitted test-time head; None if the classifier uses the network's head, whose weight is `head_weight`.

    Raise `InputError` if the head that the classifier uses does not have `num_classes` classes.
    """
    if metadata is None:
        if len(head_weight) != num_classes:
            raise InputError(f"it has {num_classes} classes, but {len(head_weight)} outputs")
        return None
    head_class = FITTED_HEADS[metadata["kind"]]
    num_rows, num_features = head_class.rows(num_classes), head_weight.shape[1]
    head = head_class(**tensors, normalize=bool(metadata["normalise"]))
    shapes_match = head.weight.shape == (1, num_rows, num_features) and head.bias.shape == (1, num_rows)
    if not shapes_match or not head.weight.dtype == head.bias.dtype == head_weight.dtype:
        raise InputError(f"its head has the wrong shape or dtype for {num_classes} classes and {num_features} features")
    return head
