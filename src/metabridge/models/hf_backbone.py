"""Image models of the transformers library, which are selected by model names that start with `hf:`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metabridge.decode_options import DecodeOptions
from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import read_regular_file
from metabridge.models.backbone_inputs import Normalize, check_multiple, check_one_source, input_options, shape_error
from metabridge.models.backbone_weights import first_names, hub_file, read_weights, without_wrappers
from metabridge.models.batch_norm import Statistics
from metabridge.models.network import Network, seeded, stores_build_arguments
from metabridge.models.torchvision_import import import_torchvision


@dataclass(frozen=True)
class _Family:
    """How models of one type are called, and which of their outputs are the features."""

    class_name: str
    class_token: bool = False  # whether the features are the class token instead of the pooled output
    patches: bool = True  # whether it divides images into patches
    interpolates: bool = False  # whether interpolating position embeddings must be requested


# By the type in config.json. The features are those for which the documentation of the models reports linear
# classifiers and nearest neighbors: the pooled output, which is the normalized class token in DINOv2, DINOv3 and CLIP,
# the attention pooling in SigLIP, and the average over positions in convolutional networks. The pooling layer of ViT
# is not trained in most checkpoints, and its classifiers use the class token.
_FAMILIES = {
    "vit": _Family("ViTModel", class_token=True, interpolates=True),
    "deit": _Family("DeiTModel", class_token=True, interpolates=True),
    "dinov2": _Family("Dinov2Model"),
    "dinov2_with_registers": _Family("Dinov2WithRegistersModel"),
    "dinov3_vit": _Family("DINOv3ViTModel"),
    "dinov3_convnext": _Family("DINOv3ConvNextModel", patches=False),
    "siglip_vision_model": _Family("SiglipVisionModel", interpolates=True),
    "clip_vision_model": _Family("CLIPVisionModel", interpolates=True),
    "convnext": _Family("ConvNextModel", patches=False),
    "convnextv2": _Family("ConvNextV2Model", patches=False),
    "resnet": _Family("ResNetModel", patches=False),
}
_VISION_TYPES = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}  # of models that also encode texts
# parts of a configuration that do not describe the network, or that would load code or other models
_IGNORED_KEYS = frozenset(
    {
        *("architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation", "id2label"),
        *("label2id", "model_type", "name_or_path", "num_labels", "problem_type", "quantization_config"),
        *("torch_dtype", "transformers_version"),
    }
)
_MAX_CONFIG_NUMBER = 2**20  # no model has so many layers or channels, and larger numbers could use up the memory
_DEFAULT_SIZE = 224  # of models whose configuration contains no size
_RESCALE_FACTOR = 1 / 255  # inputs have values from 0 to 1


@stores_build_arguments
def hf(
    name: str,
    channels: int = 3,
    size: int | None = None,
    outputs: int = 5,
    *,
    pretrained: bool = False,
    weights: str | Path | None = None,
    download: bool = False,
    config: Mapping[str, Any] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    decode_options: DecodeOptions | Mapping[str, Any] | None = None,
    statistics: Statistics = "running",
    seed: int = 0,
) -> Network:
    """Build an image model of transformers with a new linear head.

    Supported are ViT, DeiT, DINOv2, DINOv3, SigLIP (also SigLIP 2 with a fixed image size), CLIP, ConvNeXt and ResNet;
    of models that also encode texts, the image encoder. The features are the pooled output, or the class token of ViT
    and DeiT. The inputs of the network are images with values from 0 to 1, which its first layer normalizes as the
    model's image processor does. With pretrained weights, `decode_options` of the network are the resizing and cropping
    of that processor. Image processors that resize floating-point numbers (DINOv3) are followed up to rounding to 8
    bits. No code from the model hub is run.

    This needs the optional dependency transformers: `pip install 'metabridge[hf]'`.

    Args:
        name: Name of the model on the hub, such as "facebook/dinov2-small", or path of a folder that contains
            config.json, preprocessor_config.json and model.safetensors.
        channels: Number of channels of the images: 3 (RGB), or 1 (gray), which is repeated for the three colors.
        size: Height and width of the images in pixels. Default: the size of the image processor. Vision transformers
            interpolate their position embeddings to other sizes.
        outputs: Number of outputs of the head.
        pretrained: Whether to load the weights from the folder or from the local cache of the model hub.
        weights: File of pretrained weights instead: safetensors, or a PyTorch file without code.
        download: Whether files may be downloaded if they are not in the cache.
        config: Content of config.json. With it, no other files of the model are read except weights.
        mean: Mean of each channel, instead of that of the image processor.
        std: Standard deviation of each channel, instead of that of the image processor.
        decode_options: How image files become inputs, instead of the image processor's way.
        statistics: Statistics of the batch norms, see `BatchNorm`. "running" keeps the statistics of the weights.
        seed: Seed of the initial weights.

    Returns:
        The network. Its `recipe` contains the configuration, so it can be built again without other files.

    Raises:
        InputError: If transformers is not installed, the model is not in the cache or is not supported, it does not
            accept images of this size, or the weights cannot be read or do not belong to it.

    >>> hf("facebook/dinov2-small", pretrained=True).head  # doctest: +SKIP
    Linear(in_features=384, out_features=5, bias=True)
    """
    source = f"hf:{name}"
    check_one_source(pretrained, weights)
    if channels not in (1, 3):
        raise InputError(f"channels is {channels}, but {source!r} takes images with 1 (gray) or 3 (RGB) channels.")
    transformers = _import_transformers(source)
    folder = None if config is not None and not pretrained else _model_folder(source, name, download=download)
    if config is None:
        assert folder is not None
        config = _read_json(folder / "config.json")
    config = _image_config(source, config)
    family = _FAMILIES[config["model_type"]]
    model_config = _build_config(source, transformers, config)
    image_size = _side(getattr(model_config, "image_size", _DEFAULT_SIZE))
    options, used_size = input_options(decode_options, channels, size, image_size)
    needs_processor = folder is not None and (options is None or mean is None or std is None)
    if folder is not None and needs_processor:
        processor = _read_processor(source, name, folder, transformers, download=download)
        mean, std = (processor.mean if mean is None else mean), (processor.std if std is None else std)
        if options is None:
            used_size = processor.size if size is None else size
            if pretrained or weights is not None:
                options = processor.decode_options(used_size, channels)
    if family.patches:
        check_multiple(source, used_size, _side(model_config.patch_size))
    model_class = getattr(transformers, family.class_name)
    arguments = {"add_pooling_layer": False} if family.class_token else {}
    with seeded(seed), _quiet(transformers):
        model = model_class(model_config, **arguments)
    if pretrained or weights is not None:
        tensors = _hub_weights(source, name, folder, download=download) if weights is None else read_weights(weights)
        model = _load(source, model, model_class, model_config, arguments, tensors, transformers)
    interpolate = family.interpolates and used_size != image_size
    tower = _ImageEncoder(model, class_token=family.class_token, interpolate=interpolate)
    normalize = [] if mean is None or std is None else [Normalize(mean, std)]
    backbone = nn.Sequential(*normalize, tower)
    try:
        # two images, because batch norms in training mode cannot normalize a single 1×1 map
        example = torch.zeros(2, channels, used_size, used_size)
        net = Network.around(backbone, example, outputs, statistics=statistics, seed=seed)
    except InputError as error:
        raise shape_error(source, channels, used_size, error) from error
    net.decode_options = options
    net.recipe = {
        "size": used_size,
        "config": config,
        "mean": None if mean is None else list(mean),
        "std": None if std is None else list(std),
        "decode_options": None if options is None else options.to_json(),
    }
    return net


class _ImageEncoder(nn.Module):
    """A model of transformers that returns only its features."""

    def __init__(self, model: nn.Module, *, class_token: bool, interpolate: bool) -> None:
        super().__init__()
        self.model, self.class_token = model, class_token
        self.options: dict[str, bool] = {"interpolate_pos_encoding": True} if interpolate else {}

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(pixel_values=images, **self.options)
        features: Tensor = output.last_hidden_state[:, 0] if self.class_token else output.pooler_output.flatten(1)
        return features


@dataclass(frozen=True)
class _Processor:
    """What an image processor of transformers does: resize, cut out the central square, and normalize."""

    source: str
    mean: Sequence[float]
    std: Sequence[float]
    size: int
    resize: int
    crop: bool  # whether the proportions of images are kept
    interpolation: Any

    def decode_options(self, size: int, channels: int) -> DecodeOptions:
        """Return the options that convert images in this way, with the same proportion of resizing and cropping."""
        try:
            return DecodeOptions(
                size=size,
                channels=channels,
                crop=self.crop,
                resize=self.resize if size == self.size else math.floor(self.resize * size / self.size),
                interpolation=self.interpolation,
                round_crop=False,
            )
        except InputError as error:
            raise _unsupported_processor(self.source, str(error).rstrip(".")) from error


def _import_transformers(source: str) -> Any:
    import_torchvision(source)
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise InputError(
            f"model is {source!r}, but transformers is not installed. Install it with: pip install 'metabridge[hf]'"
        ) from error
    return transformers


def _model_folder(source: str, name: str, *, download: bool) -> Path:
    """Return the folder with the files of a model: a local folder, or the model's folder in the cache of the hub."""
    if Path(name).is_dir():
        return Path(name)
    return hub_file(source, name, ["config.json"], download=download).parent


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular_file(file))
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}). Pass a folder with the files of a model of transformers."
        ) from error
    except PARSING_ERRORS as error:
        raise InputError(f"{file} is damaged: it is not JSON ({error}). Restore it from a copy.") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} is not the configuration of a model of transformers. Use another folder.")
    return content


def _image_config(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the image encoder."""
    model_type = config.get("model_type")
    if model_type in _VISION_TYPES:
        nested = config.get("vision_config")
        config = nested if isinstance(nested, Mapping) else {}
        model_type = _VISION_TYPES[model_type]
    if model_type not in _FAMILIES:
        supported = ", ".join(family.class_name for family in _FAMILIES.values())
        raise InputError(
            f"model is {source!r}, whose type {model_type!r} is not supported. Use one of {supported}, or a function "
            "that returns the network: --model package.module:function."
        )
    plain = {name: value for name, value in config.items() if name not in _IGNORED_KEYS and not name.startswith("_")}
    _check_numbers(source, plain)
    return {"model_type": model_type, **plain}


def _check_numbers(source: str, value: Any) -> None:
    """Raise an `InputError` for numbers so large that building the network could use up the memory."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_numbers(source, item)
    elif isinstance(value, int | float) and not abs(value) <= _MAX_CONFIG_NUMBER:
        raise InputError(f"model is {source!r}, whose configuration contains {value}, which is too large to build.")


def _build_config(source: str, transformers: Any, config: Mapping[str, Any]) -> Any:
    options = {name: value for name, value in config.items() if name != "model_type"}
    try:
        return transformers.AutoConfig.for_model(config["model_type"], **options)
    except Exception as error:  # the library checks values with exceptions of several packages
        reason = " ".join(str(error).split())
        raise InputError(f"model is {source!r}, whose configuration is invalid ({reason}).") from error


def _side(size: int | Sequence[int]) -> int:
    """Return the length of a square, whose size may be stored twice."""
    return size if isinstance(size, int) else int(size[0])


def _read_processor(source: str, name: str, folder: Path, transformers: Any, *, download: bool) -> _Processor:
    """Read preprocessor_config.json."""
    if not Path(name).is_dir():
        hub_file(source, name, ["preprocessor_config.json", "processor_config.json"], download=download)
    try:
        with _quiet(transformers):
            processor = transformers.AutoImageProcessor.from_pretrained(
                str(folder), backend="pil", local_files_only=True, trust_remote_code=False
            )
    except (OSError, ImportError, *PARSING_ERRORS) as error:
        raise _unsupported_processor(source, " ".join(str(error).split())[:200]) from error
    return _as_processor(source, processor)


def _as_processor(source: str, processor: Any) -> _Processor:
    from PIL.Image import Resampling

    size: Any = processor.size
    crop_size: Any = getattr(processor, "crop_size", None)
    crops = bool(getattr(processor, "do_center_crop", None))
    if not processor.do_resize or not processor.do_rescale or getattr(processor, "do_pad", None):
        raise _unsupported_processor(source, "it pads images, or does not resize or rescale them")
    if not math.isclose(processor.rescale_factor, _RESCALE_FACTOR, rel_tol=1e-6):
        raise _unsupported_processor(source, f"rescale_factor is {processor.rescale_factor}")
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
    height, width = size.get("height"), size.get("width")
    is_convnext = "ConvNextImageProcessor" in type(processor).__name__
    if is_convnext and shortest:
        # small images are resized and cropped, large ones resized to a square
        keeps_proportions = shortest < 384
        resize = int(shortest / processor.crop_pct) if keeps_proportions else shortest
        result = shortest, resize, keeps_proportions
    elif height and height == width:
        result = (crop_size["height"] if crops else height), height, False
    elif shortest and not longest and crops and crop_size["height"] == crop_size["width"]:
        result = crop_size["height"], shortest, True
    else:
        raise _unsupported_processor(source, f"size is {size} and crop_size is {crop_size}")
    if not processor.do_normalize:
        mean, std = [0.0], [1.0]
    else:
        mean, std = list(processor.image_mean), list(processor.image_std)
    interpolation = Resampling(int(processor.resample)).name.lower()
    return _Processor(source, mean, std, *result, interpolation)


def _unsupported_processor(source: str, reason: str) -> InputError:
    return InputError(
        f"model is {source!r}, whose image processor is not supported ({reason}). Pass mean, std and decode_options, "
        "such as decode_options={'size': 224, 'channels': 3, 'crop': True}."
    )


def _hub_weights(source: str, name: str, folder: Path | None, *, download: bool) -> dict[str, Tensor]:
    """Read the weights of a model from its folder or from the cache, in one file or in several."""
    assert folder is not None
    is_local = Path(name).is_dir()
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    if is_local:
        files = [folder / file_name for file_name in names if (folder / file_name).is_file()]
        if not files:
            raise InputError(f"model is {source!r}, but the folder has no model.safetensors. Pass weights=FILE.")
        file = files[0]
    else:
        file = hub_file(source, name, names, download=download)
    if file.suffix != ".json":
        return read_weights(file)
    weight_map = _read_json(file).get("weight_map")
    parts = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
    if not parts or not all(isinstance(part, str) and Path(part).name == part for part in parts):
        raise InputError(f"{file} is damaged: it does not name the files of the weights. Restore it from a copy.")
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= read_weights(folder / part if is_local else hub_file(source, name, [part], download=download))
    return tensors


def _load(
    source: str,
    model: nn.Module,
    model_class: Any,
    model_config: Any,
    arguments: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    transformers: Any,
) -> nn.Module:
    """Return a model with pretrained weights. Weights that it lacks, such as classifiers, are ignored."""
    tensors = without_wrappers(tensors, model.state_dict().keys)
    try:
        with _quiet(transformers):
            loaded, report = model_class.from_pretrained(
                None,
                config=model_config,
                state_dict=tensors,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
                **arguments,
            )
    except (OSError, *PARSING_ERRORS) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"weights do not belong to {source!r} ({reason}). Use those of this model.") from error
    mismatched = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in report["mismatched_keys"]]
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"weights do not belong to {source!r}: they lack {first_names(missing)}. Use those of this model."
        )
    if mismatched:
        raise InputError(
            f"weights do not belong to {source!r}: {first_names(sorted(mismatched))} has another shape. Use those of "
            "this model."
        )
    return loaded.eval()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hide progress bars, and messages that are not errors."""
    log = transformers.utils.logging
    verbosity, shows_progress = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if shows_progress:
            log.enable_progress_bar()
