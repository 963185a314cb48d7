"""`load_model` returns a trained model: a run, a model folder, a built-in model, or a pretrained backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from metabridge.choices import BUILTIN_MODELS, BUILTIN_MODELS_FOLDER, alternatives
from metabridge.device import as_device
from metabridge.errors import InputError
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import build
from metabridge.training.evaluation import Model
from metabridge.training.fitting import load
from metabridge.training.model_folder import from_pretrained, is_model_folder


def load_model(
    source: str | Path | Model,
    *,
    device: torch.device | str = "cpu",
    weights: str | Path | None = None,
    **options: Any,
) -> Model:
    """Return a trained model on a device.

    Args:
        source: The folder of a run or of `save_pretrained`; "photos" or "characters", the models that are built in; or
            the name of a pretrained model: "timm:NAME", "hf:NAME" or "package.module:function". A `Model` is copied to
            the device.
        device: Device of the weights.
        weights: File of the weights of a pretrained model: safetensors, or a PyTorch file without code. Default: the
            weights that belong to the name, from the local cache of the model hub.
        **options: Options of a pretrained model, such as `size`.

    Returns:
        The model. Pretrained models have the method "frozen": at test time, a logistic regression is fitted on their
        features.

    Raises:
        InputError: If there is no such model, or its weights cannot be loaded.

    >>> import metabridge as mb
    >>> mb.load_model("characters")
    Model(frozen, resnet12)
    """
    device = as_device(device)
    if isinstance(source, Model):
        return source.to(device)
    folder = Path(source)
    if not folder.is_dir() and ":" in str(source):
        net = build(str(source), pretrained=weights is None, weights=weights, **options).eval()
        frozen = method("frozen")
        dtype = torch.bfloat16 if device.type == "cuda" else None
        return Model(frozen, net, parameters(frozen, net), dtype).to(device)
    if weights is not None or options:
        names = ", ".join((["weights"] if weights is not None else []) + list(options))
        raise InputError(f"model is {source}, which contains its weights and options. Omit {names}.")
    if not folder.is_dir() and str(source) in BUILTIN_MODELS:
        return from_pretrained(BUILTIN_MODELS_FOLDER / str(source), device=device)
    is_name = isinstance(source, str) and folder.name == source
    if not folder.is_dir() and is_name:
        raise InputError(
            f"model is {source}, which is neither a folder nor the name of a model. Pass the folder of a run, "
            f"{alternatives([*BUILTIN_MODELS, 'timm:NAME', 'hf:NAME'])}."
        )
    if is_model_folder(folder):
        return from_pretrained(folder, device=device)
    if (folder / "adapted.safetensors").is_file() and not (folder / "settings.json").exists():
        raise InputError(
            f"{folder} contains an adapted model, which knows its classes already. Use it with metabridge predict or "
            "FewShotClassifier.load, or pass the model that was adapted."
        )
    return load(folder, device=device)
