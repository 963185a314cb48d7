"""Backbones from the timm library, which are selected by model names that start with `timm:`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metabridge.decode_options import DecodeOptions
from metabridge.errors import InputError
from metabridge.models.backbone_inputs import Normalize, check_multiple, check_one_source, input_options, shape_error
from metabridge.models.backbone_weights import first_names, hub_file, read_weights, without_wrappers
from metabridge.models.batch_norm import Statistics, replace_layers
from metabridge.models.network import Network, seeded, stores_build_arguments
from metabridge.models.torchvision_import import import_torchvision

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# names of the layers for the classes of the original data set, besides the one that timm names
_CLASSIFIERS = ("head", "heads", "head_dist", "fc", "classifier", "last_linear", "aux_head", "AuxLogits")
_LOADING_PROBLEM = re.compile(
    r"(Missing|Unexpected) key\(s\) in state_dict: (.*?)\.\s*$|size mismatch for (\S+):", re.MULTILINE
)


@stores_build_arguments
def timm(
    name: str,
    channels: int = 3,
    size: int | None = None,
    outputs: int = 5,
    *,
    pretrained: bool = False,
    weights: str | Path | None = None,
    download: bool = False,
    normalize: bool = True,
    decode_options: DecodeOptions | Mapping[str, Any] | None = None,
    statistics: Statistics = "running",
    seed: int = 0,
) -> Network:
    """Build an image model of timm with a new linear head.

    The inputs of the network are images with values from 0 to 1. Its first layer normalizes them with the mean and the
    standard deviation of timm's data configuration. With pretrained weights, `decode_options` of the network are the
    resizing and cropping of that configuration, so images are converted as in the training of the weights.

    This needs the optional dependency timm: `pip install 'metabridge[timm]'`.

    Args:
        name: Name of the model in timm, such as "resnet18" or "vit_small_patch14_dinov2.lvd142m".
        channels: Number of channels of the images: 3 (RGB) or 1 (gray).
        size: Height and width of the images in pixels. Default: the size in timm's data configuration. Vision
            transformers interpolate their position embeddings to other sizes.
        outputs: Number of outputs of the head.
        pretrained: Whether to load the pretrained weights from the local cache of the model hub.
        weights: File of pretrained weights instead: safetensors, or a PyTorch file without code.
        download: Whether the pretrained weights may be downloaded if they are not in the cache.
        normalize: Whether the first layer normalizes the images. Networks of version 0.2 and older do not.
        decode_options: How image files become inputs, instead of timm's data configuration.
        statistics: Statistics of the batch norms, see `BatchNorm`. "running" keeps the statistics of the weights.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        InputError: If timm is not installed or has no such model, if the model does not accept images of this shape, or
            if the weights cannot be read or do not belong to the model.

    >>> timm("resnet18").head  # doctest: +SKIP
    Linear(in_features=512, out_features=5, bias=True)
    """
    source = f"timm:{name}"
    check_one_source(pretrained, weights)
    source_config, data_config = _configurations(source, name)
    decode_options, size = input_options(decode_options, channels, size, data_config["input_size"][-1])
    has_weights = pretrained or weights is not None
    if decode_options is None and has_weights and normalize:
        decode_options = _decode_options(source, data_config, channels, size)
    tensors = None
    if weights is not None:
        tensors = read_weights(weights)
    elif pretrained:
        tensors = read_weights(_cached_weights(source, source_config, download=download))
    arguments: dict[str, Any] = {"in_chans": channels, "num_classes": 0}
    if source_config.get("fixed_input_size") and tuple(data_config["input_size"][-2:]) != (size, size):
        arguments["img_size"] = size

    def create(**options: Any) -> nn.Module:
        from timm import create_model

        try:
            with seeded(seed):
                return create_model(name, **arguments, **options)  # type: ignore[no-any-return]
        except (TypeError, AssertionError, ZeroDivisionError) as error:
            raise shape_error(source, channels, size, error) from error

    if tensors is None:
        backbone = create()
    else:
        backbone = _create_with_weights(source, create, source_config, tensors, allow_extra=pretrained)
    if isinstance(patch_size := getattr(getattr(backbone, "patch_embed", None), "patch_size", None), tuple):
        check_multiple(source, size, patch_size[0])
    if normalize:
        _separate_activations(backbone)
        mean, std = data_config["mean"], data_config["std"]
        if channels != len(mean):  # timm adds up the weights of the three colors for a gray image
            mean, std = ([sum(values) / len(values)] for values in (mean, std))
        backbone = nn.Sequential(Normalize(mean, std), backbone)
    # two images, because batch norms in training mode cannot normalize a single 1×1 map
    example = torch.zeros(2, channels, size, size)
    try:
        net = Network.around(backbone, example, outputs, statistics=statistics, seed=seed)
    except InputError as error:
        raise shape_error(source, channels, size, error) from error
    net.decode_options = decode_options
    net.recipe = {"size": size, "decode_options": None if decode_options is None else decode_options.to_json()}
    return net


def _configurations(source: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return timm's description of the pretrained weights and its data configuration."""
    try:
        import_torchvision(source)
        from timm.data import resolve_data_config
        from timm.models import get_pretrained_cfg, is_model
    except ModuleNotFoundError as error:
        raise InputError(
            f"model is {source!r}, but timm is not installed. Install it with: pip install 'metabridge[timm]'"
        ) from error
    if not is_model(name):
        raise InputError(f"model is {source!r}, but timm has no model {name!r}. See timm.list_models().")
    try:
        pretrained_config = get_pretrained_cfg(name)
    except RuntimeError as error:
        raise InputError(
            f"model is {source!r}, but timm has no such weights ({error}). See timm.list_pretrained()."
        ) from error
    source_config = {} if pretrained_config is None else pretrained_config.to_dict()
    return source_config, resolve_data_config(pretrained_cfg=source_config)


def _decode_options(source: str, data_config: Mapping[str, Any], channels: int, size: int) -> DecodeOptions:
    """Return the options that convert images as timm's transform for evaluation does."""
    crop_mode, interpolation = data_config["crop_mode"], data_config["interpolation"]
    try:
        if crop_mode not in ("center", "squash"):
            raise InputError(f"crop_mode={crop_mode!r} of timm is not supported")
        return DecodeOptions(
            size=size,
            channels=channels,
            crop=crop_mode == "center",
            resize=math.floor(size / data_config["crop_pct"]),
            interpolation=interpolation,
            round_crop=True,
        )
    except InputError as error:
        raise InputError(
            f"model is {source!r}, for which images cannot be converted as in timm ({str(error).rstrip('.')}). Pass "
            "decode_options, such as decode_options={'size': 224, 'channels': 3, 'crop': True}."
        ) from error


def _cached_weights(source: str, source_config: Mapping[str, Any], *, download: bool) -> Path:
    repository = source_config.get("hf_hub_id")
    if not repository:
        raise InputError(
            f"model is {source!r}, for which the model hub has no weights. Pass the file of the weights: weights=FILE."
        )
    file_name = source_config.get("hf_hub_filename")
    return hub_file(source, repository, [file_name] if file_name else _WEIGHT_FILES, download=download)


def _create_with_weights(
    source: str,
    create: Callable[..., nn.Module],
    source_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    allow_extra: bool,
) -> nn.Module:
    """Create a model, and load weights with timm, which converts formats of other libraries and position embeddings.

    The classifier of the original model is ignored. With `allow_extra`, so are other weights that the model lacks.
    """
    tensors = without_wrappers(tensors, lambda: create().state_dict().keys())
    classifiers = source_config.get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    tensors = {
        name: value for name, value in tensors.items() if not name.startswith(tuple(f"{part}." for part in classifiers))
    }
    try:
        try:
            # without the name of a classifier, timm reports missing weights
            backbone = create(pretrained=True, pretrained_cfg_overlay={"state_dict": tensors, "classifier": None})
        except RuntimeError as error:
            extra_names = _unused_names(source, error)
            if not allow_extra and not all(name.partition(".")[0] in _CLASSIFIERS for name in extra_names):
                raise InputError(
                    f"weights do not belong to {source!r}: they contain {first_names(extra_names)}, which it lacks. "
                    "Use the model for which they were saved."
                ) from error
            # with a classifier of another size, timm ignores weights that the model lacks
            overlay = {"state_dict": tensors, "classifier": "head", "num_classes": 1}
            backbone = create(pretrained=True, pretrained_cfg_overlay=overlay)
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"weights do not belong to {source!r} ({type(error).__name__}: {error}). Use the model for which they were "
            "saved."
        ) from error
    backbone.pretrained_cfg.pop("state_dict", None)  # type: ignore[operator, union-attr]  # frees its memory
    return backbone


def _unused_names(source: str, error: RuntimeError) -> list[str]:
    """Return the weights that a model lacks, given PyTorch's error; raise an `InputError` for all other problems."""
    names: dict[str, list[str]] = {"Missing": [], "Unexpected": [], "size": []}
    for kind, key_list, mismatched in _LOADING_PROBLEM.findall(str(error)):
        names[kind or "size"] += [mismatched] if mismatched else re.findall(r'"([^"]+)"', key_list)
    if names["Missing"] or names["size"] or not names["Unexpected"]:
        problems = [f"they lack {first_names(names['Missing'])}"] if names["Missing"] else []
        problems += [f"{first_names(names['size'])} has another shape"] if names["size"] else []
        reason = " and ".join(problems) or str(error).partition("\n")[0]
        raise InputError(
            f"weights do not belong to {source!r}: {reason}. Use the model for which they were saved."
        ) from error
    return names["Unexpected"]


def _separate_activations(backbone: nn.Module) -> None:
    """Split timm's batch norms with an activation into two layers, because `Network.around` replaces batch norms."""
    from timm.layers import BatchNormAct2d

    def separate(layer: Any) -> nn.Module:
        norm = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        norm.weight, norm.bias = layer.weight, layer.bias
        norm.running_mean, norm.running_var = layer.running_mean, layer.running_var
        return nn.Sequential(norm, layer.drop, layer.act)

    replace_layers(backbone, BatchNormAct2d, separate)
