"""Folders of trained models in the layout of the Hugging Face hub: config.json, model.safetensors and README.md.

Reading such a folder never executes code: the configuration is JSON, and the tensors are safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from metabridge.decode_options import as_decode_options
from metabridge.device import as_device
from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import json_bytes, make_folder, read_regular_file, write_atomically
from metabridge.learners.method import method_name
from metabridge.models.network import Params
from metabridge.training.checkpoint import check_match, copy_into, damage_error, read_method, read_network, write_method
from metabridge.training.evaluation import Model, check_finite
from metabridge.training.model_images import model_decode_options

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
LIBRARY = "metabridge"
FORMAT_VERSION = 1


def save_pretrained(model: Model, folder: str | Path, *, card: str | None = None, half: bool = False) -> Path:
    """Save a model in a folder with the layout of the Hugging Face hub.

    The folder can be uploaded as it is, and `from_pretrained` reads it. It contains config.json (network, method and
    how images are decoded), model.safetensors (the weights, without the head rows of the training classes) and
    README.md (a model card).

    Args:
        model: A run, or a model from `load_model`.
        folder: Folder to write to; it is created if needed.
        card: Text of the model card. Default: a card that describes the network, the method and how to use it.
        half: Whether to store the weights in float16, which halves the size of the file.

    Returns:
        The folder.

    Raises:
        InputError: If the network was not built by `metabridge.models`, a weight is not finite or, with `half`, too
            large for float16, or the folder cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> import metabridge as mb
    >>> mtl, net = mb.method("mtl"), mb.models.conv4(1, 28)
    >>> model = mb.Model(mtl, net, mb.parameters(mtl, net, classes=9))
    >>> with TemporaryDirectory() as folder:
    ...     mb.from_pretrained(mb.save_pretrained(model, folder))
    Model(mtl, conv4)
    """
    from safetensors.torch import save

    if model.net.recipe is None:
        raise InputError(
            "this model's network was not built by metabridge.models, so a folder cannot describe it. Use a network "
            "of metabridge.models."
        )
    buffers = dict(model.net.named_buffers())
    params = {name: value for name, value in model.params.items() if not name.startswith("heads.")}
    check_finite(params, buffers)
    tensors = {
        name: (value.half() if half and value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in (params | buffers).items()
    }
    for name, value in tensors.items():
        if half and not value.isfinite().all():
            raise InputError(f"the weight {name!r} has values that are too large for float16. Use half=False.")
    recipe = dict(model.net.recipe)
    config = {
        "library_name": LIBRARY,
        "format_version": FORMAT_VERSION,
        "model": recipe | ({"pretrained": False} if "pretrained" in recipe else {}),
        "method": write_method(model.method),
        "decode_options": model_decode_options(model).to_json(),
    }
    folder = make_folder(folder)
    write_atomically(folder / WEIGHTS_FILE, save(tensors, {"format": "pt"}))
    write_atomically(folder / CARD_FILE, (model_card(model) if card is None else card).encode())
    write_atomically(folder / CONFIG_FILE, json_bytes(config, indent=2))
    return folder


def from_pretrained(folder: str | Path, *, device: torch.device | str = "cpu") -> Model:
    """Load a model from a folder that `save_pretrained` or `metabridge export --format hub` wrote.

    Args:
        folder: The folder, such as a downloaded repository of the Hugging Face hub.
        device: Device of the weights.

    Returns:
        The model.

    Raises:
        InputError: If the folder contains no model of metabridge, or a file is damaged.

    >>> import metabridge as mb
    >>> mb.from_pretrained("nowhere")
    Traceback (most recent call last):
    metabridge.errors.InputError: nowhere is not the folder of a model: config.json cannot be read (No such file or \
directory). Pass a folder that metabridge export --format hub wrote.
    """
    folder, device = Path(folder), as_device(device)
    config_file, weights_file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    config = _read_config(config_file)
    tensors = _read_tensors(weights_file)
    try:
        net = read_network({"model": config["model"]}, None, tensors)
        method = read_method(config["method"])
        net.decode_options = as_decode_options(config["decode_options"])
    except PARSING_ERRORS as error:
        raise damage_error(config_file, str(error).rstrip(".")) from error
    buffers = dict(net.named_buffers())
    check_match({**dict(net.named_parameters()), **buffers}, tensors, folder)
    copy_into(net, tensors, tensors)
    params = {name: value for name, value in tensors.items() if name not in buffers}
    check_finite(params, buffers)
    return Model(method, net.eval(), params).to(device)


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder has a configuration file in the layout of `save_pretrained`."""
    return (folder / CONFIG_FILE).is_file()


def model_card(model: Model, *, details: str = "") -> str:
    """Return the text of a model card: YAML metadata of the hub, a description, and how to use the model.

    Args:
        model: The model.
        details: Markdown text on data, license, accuracy and limits, which follows the description.

    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import conv4
    >>> mtl, net = method("mtl"), conv4(1, 28)
    >>> model_card(Model(mtl, net, parameters(mtl, net, classes=9))).splitlines()[1]
    'library_name: metabridge'
    """
    options = model_decode_options(model)
    colors = "gray" if options.channels == 1 else "RGB"
    return f"""---
library_name: {LIBRARY}
pipeline_tag: image-feature-extraction
tags:
- few-shot-learning
- image-classification
---

# {model.model_name}, trained with {method_name(model.method)}

A feature extractor for few-shot image classification with {model.net.num_feature_parameters:,} parameters. Its inputs
are {colors} images of {options.size}×{options.size} pixels, to which metabridge converts images of any size and format.

{details.strip() or _NO_DETAILS}

## Use

```python
import metabridge as mb

classifier = mb.FewShotClassifier("PATH_OF_THIS_FOLDER").fit(images, labels)  # a few images of each class
classifier.predict(new_images)
```

```
metabridge adapt --model PATH_OF_THIS_FOLDER --support labeled --query unlabeled --out predictions.csv
```
"""


_NO_DETAILS = "Add here: the training data and its license, the accuracy on new classes, and known limits."


def _read_config(file: Path) -> Mapping[str, Any]:
    """Return the content of config.json."""
    try:
        config = json.loads(read_regular_file(file))
    except OSError as error:
        raise InputError(
            f"{file.parent} is not the folder of a model: {file.name} cannot be read ({error.strerror}). Pass a folder "
            "that metabridge export --format hub wrote."
        ) from error
    except PARSING_ERRORS as error:
        raise damage_error(file, f"it is not JSON ({error})") from error
    if not isinstance(config, dict) or config.get("library_name") != LIBRARY:
        raise InputError(
            f"{file.parent} is not a model of metabridge: its config.json does not name this library. To load a "
            f"backbone of transformers, use hf:{file.parent}."
        )
    if config.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{file.parent} was written in format {config.get('format_version')}, but this version of metabridge reads "
            f"format {FORMAT_VERSION}. Use the version that wrote it."
        )
    return config


def _read_tensors(file: Path) -> Params:
    """Return the tensors of model.safetensors, with float16 converted to float32."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(read_regular_file(file))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}). Restore it from a copy.") from error
    except (SafetensorError, *PARSING_ERRORS) as error:
        raise damage_error(file, error) from error
    return {name: value.float() if value.dtype == torch.float16 else value for name, value in tensors.items()}
