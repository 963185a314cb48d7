"""Export a feature extractor as an ONNX model and an adapted head as JSON, for programs without PyTorch."""

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
from metabridge.inference.classifier import FewShotClassifier
from metabridge.learners.adapt import Adapted
from metabridge.training.evaluation import Model, check_finite
from metabridge.training.model_images import image_shape

TOLERANCE = 1e-4  # maximum difference from PyTorch, relative to the largest absolute feature if that exceeds 1


def export_onnx(model: Model | Adapted, file: str | Path) -> float | None:
    """Export the feature extractor of a model as an ONNX model.

    The input of the ONNX model is `images`, float32 of shape (n, channels, size, size) with values from 0 to 1; its
    output is `features`. If onnxruntime is installed, the features of random images are compared with PyTorch, and the
    file is written only if they differ by at most 1e-4 (relative to the largest absolute feature if that exceeds 1).

    If batch norm uses batch statistics, it also does so in the ONNX model: the features of an image then depend on the
    other images of the batch. The export needs `pip install 'metabridge[onnx]'`.

    Args:
        model: A run loaded with `mb.load`, or `classifier.adapted_` of a fitted `FewShotClassifier`.
        file: The file to write, or "-" for standard output.

    Returns:
        The largest absolute difference from PyTorch's features, or None if onnxruntime is not installed.

    Raises:
        InputError: If onnx or onnxscript is not installed, a weight is not finite, or the features differ from those in
            PyTorch.

    >>> from tempfile import TemporaryDirectory
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import conv4
    >>> mtl, net = method("mtl"), conv4(1, 28, filters=4)
    >>> model = Model(mtl, net, parameters(mtl, net, classes=9))
    >>> with TemporaryDirectory() as folder:
    ...     difference = export_onnx(model, Path(folder, "features.onnx"))
    >>> difference is None or difference < 1e-4
    True
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise InputError(f"export needs {missing[0]}, which is not installed. Run pip install 'metabridge[onnx]'.")
    check_finite(model.params, dict(model.net.named_buffers()))
    channels, size = image_shape(model.net)
    backbone = _backbone_on_cpu(model)
    generator = torch.Generator().manual_seed(0)
    example_images, test_images = (torch.rand(n, channels, size, size, generator=generator) for n in (2, 5))
    with _silent_exporter():
        program = torch.onnx.export(
            backbone,
            (example_images,),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    onnx_model = program.model_proto.SerializeToString()
    difference = None
    if find_spec("onnxruntime") is not None:
        difference, largest_feature = _difference_from_pytorch(onnx_model, backbone, test_images)
        tolerance = TOLERANCE * max(1, largest_feature)
        if not difference <= tolerance:
            raise InputError(
                f"the features of the ONNX model differ from PyTorch by up to {difference:.1g}, but at most "
                f"{tolerance:.1g} is allowed, so {file} is not written. Try another version of onnxruntime or "
                "onnxscript."
            )
    make_parent_folder(Path(file))
    write_output(file, onnx_model)
    return difference


def write_head(classifier: FewShotClassifier, file: str | Path) -> Path:
    """Write the head of a fitted classifier as JSON.

    The scores of an image with features φ are `weight` φ + `bias`; if `normalize` is true, L2-normalize φ first. If
    `kind` is "linear", there is one score per class, and the class with the largest score is predicted. If `kind` is
    "pairwise", there is one score per pair of classes, (0, 1), (0, 2), ...; a positive score is a vote for the first
    class of the pair, and the class with the most votes is predicted.

    Args:
        classifier: A fitted classifier.
        file: The JSON file to write.

    Returns:
        The path of the file.

    Raises:
        InputError: If a weight is not finite.

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
        head = type(adapted.head)(adapted.head.weight[0], adapted.head.bias[0], adapted.head.normalize)
    check_finite({"head.weight": head.weight, "head.bias": head.bias}, {})
    content = {
        "kind": head.kind,
        "classes": classifier.classes_.tolist(),
        "normalize": head.normalize,
        "weight": head.weight.tolist(),
        "bias": head.bias.tolist(),
    }
    return write_atomically(Path(file), json_bytes(content))


def _backbone_on_cpu(model: Model | Adapted) -> nn.Module:
    """Return a copy of the feature extractor on the CPU, with the parameters of the model."""
    net = copy.deepcopy(model.net).cpu().eval()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(model.params[name])
    return net.features


def _difference_from_pytorch(onnx_model: bytes, backbone: nn.Module, images: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference between features in ONNX and PyTorch, and the largest absolute feature."""
    from onnxruntime import InferenceSession

    session = InferenceSession(onnx_model, providers=["CPUExecutionProvider"])
    (onnx_features,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        expected = backbone(images)
    return float((torch.from_numpy(onnx_features) - expected).abs().max()), float(expected.abs().max())


@contextlib.contextmanager
def _silent_exporter() -> Iterator[None]:
    """Suppress the exporter's log messages and warnings, which are about optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
