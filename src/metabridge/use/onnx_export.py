"""Features as an ONNX graph, and an adapted head as JSON, for programs without PyTorch."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from metabridge.errors import InputError
from metabridge.files import json_bytes, make_parent_folder, write_atomically, write_output
from metabridge.heads import FittedHead, LinearHead
from metabridge.learners.adapt import Adapted
from metabridge.training.evaluate import Model, check_finite
from metabridge.use.classifier import FewShotClassifier
from metabridge.use.image_input import image_shape

TOLERANCE = 1e-4  # by which features may differ from PyTorch's, as a share of the largest if that exceeds 1


def export_onnx(model: Model | Adapted, file: str | Path) -> float | None:
    """Write the features as an ONNX graph from `images` (n, channels, size, size), 0 to 1, to `features`.

    Returns the largest difference from PyTorch that onnxruntime gives on random images, or None if
    that is not installed. A graph that differs by more than 1e-4 (of the largest feature, if that
    exceeds 1) is not written. Batch norms with the statistics of the set keep them: the features of an
    image then depend on the others in its batch.
    Needs the optional dependencies: `pip install 'metabridge[onnx]'`.

    `export_onnx(mb.load("runs/mine"), "mine.onnx")` exports a run, and with `classifier.adapted_` of a
    fitted `FewShotClassifier` come the features that belong to its head. The file "-" is standard output.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise InputError(f"export needs {missing[0]}, which is not installed: pip install 'metabridge[onnx]'")
    check_finite(model.params, dict(model.net.named_buffers()))
    channels, size = image_shape(model.net)
    features = _filled(model)
    generator = torch.Generator().manual_seed(0)
    example, images = (torch.rand(n, channels, size, size, generator=generator) for n in (2, 5))
    with _quiet():
        program = torch.onnx.export(
            features,
            (example,),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    content = program.model_proto.SerializeToString()
    difference = None
    if find_spec("onnxruntime") is not None:
        difference, largest = _difference(content, features, images)
        if not difference <= TOLERANCE * max(1, largest):
            raise InputError(
                f"the ONNX graph's features differ from PyTorch's by {difference:.1g}, more than {TOLERANCE:g} of the "
                f"largest, {largest:.3g}, so {file} is not written. Other versions of onnxruntime or onnxscript may "
                "agree."
            )
    make_parent_folder(Path(file))
    write_output(file, content)
    return difference


def write_head(classifier: FewShotClassifier, file: str | Path) -> Path:
    """Write the head of a fitted classifier as JSON, and return the file.

    Its scores of features φ, which are first scaled to length 1 if `normalise`, are `weight` φ + `bias`:
    one for each of `classes`, the largest wins. With "kind" "pairwise" they are decisions between
    every two classes, (0, 1), (0, 2), ..., positive for the first; the class with most of them wins.

    >>> import json
    >>> from tempfile import TemporaryDirectory
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import conv4
    >>> mtl, net, images = method("mtl"), conv4(1, 28), torch.rand(2, 28, 28).numpy()
    >>> classifier = FewShotClassifier(Model(mtl, net, parameters(mtl, net, classes=9))).fit(images, ["cat", "dog"])
    >>> with TemporaryDirectory() as folder:
    ...     json.loads(write_head(classifier, Path(folder, "head.json")).read_text())["classes"]
    ['cat', 'dog']
    """
    check_is_fitted(classifier)
    adapted = classifier.adapted_
    head: FittedHead
    if adapted.head is None:
        weight = adapted.params["head.weight"]
        head = LinearHead(weight, adapted.params.get("head.bias", weight.new_zeros(len(weight))))
    else:
        head = type(adapted.head)(adapted.head.weight[0], adapted.head.bias[0], adapted.head.normalise)
    check_finite({"head.weight": head.weight, "head.bias": head.bias}, {})
    content = {
        "kind": head.kind,
        "classes": classifier.classes_.tolist(),
        "normalise": head.normalise,
        "weight": head.weight.tolist(),
        "bias": head.bias.tolist(),
    }
    return write_atomically(Path(file), json_bytes(content))


def _filled(model: Model | Adapted) -> nn.Module:
    """Return a copy of the features that holds the model's parameters, on the CPU."""
    net = copy.deepcopy(model.net).cpu().eval()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(model.params[name])
    return net.features


def _difference(content: bytes, features: nn.Module, images: Tensor) -> tuple[float, float]:
    """Return how far onnxruntime's features are from PyTorch's at most, and the largest of these."""
    from onnxruntime import InferenceSession

    (found,) = InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, {"images": images.numpy()})
    with torch.no_grad():
        wanted = features(images)
    return float((torch.from_numpy(found) - wanted).abs().max()), float(wanted.abs().max())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks about packages that are not there, and about itself, from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
