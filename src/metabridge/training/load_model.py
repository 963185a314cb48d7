"""`load_model` returns a trained model: a run, a model folder, a built-in model, or a pretrained backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from metabridge.device import as_device
from metabridge.errors import InputError
from metabridge.learners.method import method
from metabridge.learners.parameters import parameters
from metabridge.models import build
from metabridge.training.evaluation import Model
from metabridge.training.fitting import load


def load_model(
    source: str | Path | Model,
    *,
    device: torch.device | str = "cpu",
    weights: str | Path | None = None,
    **options: Any,
) -> Model:
    """Return a trained model on a device.

    Args:
        source: The folder of a run, or the name of a pretrained model: "timm:NAME", "hf:NAME" or
            "package.module:function". A model is returned as it is, on the device.
        device: Device of the weights.
        weights: File of the weights of a pretrained model: safetensors, or a PyTorch file without code. Default: the
            weights that belong to the name, from the local cache of the model hub.
        **options: Options of a pretrained model, such as `size`.

    Returns:
        The model. Pretrained models have the method "frozen": at test time, a logistic regression is fitted on their
        features.

    Raises:
        InputError: If there is no such model, or its weights cannot be loaded.

    >>> from metabridge.learners import parameters
    >>> from metabridge.models import mlp
    >>> learner, net = method("anil"), mlp(4, 5)
    >>> load_model(Model(learner, net, parameters(learner, net)))
    Model(anil, mlp)
    """
    device = as_device(device)
    if isinstance(source, Model):
        return source.to(device)
    if ":" not in str(source) or Path(source).is_dir():
        if weights is not None or options:
            raise InputError(f"{source} is the folder of a run, which contains its weights and options. Omit weights.")
        return load(source, device=device)
    net = build(str(source), pretrained=weights is None, weights=weights, **options).to(device).eval()
    frozen = method("frozen")
    return Model(frozen, net, parameters(frozen, net))
