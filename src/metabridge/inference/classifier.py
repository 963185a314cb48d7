"""A scikit-learn classifier that adapts a trained run to labeled images (`fit`) and classifies images (`predict`)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from metabridge.decode_options import DecodeOptions
from metabridge.device import as_device
from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import make_folder
from metabridge.heads import FITTED_HEADS, FittedHead, Head, create_head
from metabridge.inference.image_input import convert_images, image_shape, model_decode_options
from metabridge.learners.adapt import Adapted, adapt
from metabridge.models.batch_norm import uses_batch_statistics
from metabridge.training.checkpoint import (
    RunFolder,
    check_match,
    copy_into,
    damage_error,
    merge_groups,
    read_network,
    select_group,
)
from metabridge.training.evaluation import Model, check_finite
from metabridge.training.fitting import load

FORMAT_VERSION = 1  # file format of saved classifiers
CHUNK_SIZE = 256  # images per forward pass if images are predicted independently

BATCH_STATISTICS_WARNING = (
    "the batch norm of this network uses batch statistics, so the prediction for an image depends on the other images "
    "of the call, and a single image is normalized with its own statistics. Pass all query images of a task together, "
    "or train with statistics='running' to predict each image independently."
)


class FewShotClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A scikit-learn classifier that learns new classes from a few images per class.

    Images are paths, Pillow images or arrays of shape (height, width) or (height, width, channels). Arrays have dtype
    uint8, or a floating-point dtype and values from 0 to 1. Images are resized to the input size of the run's network,
    converted to its number of channels, and preprocessed like the training images.

    If the batch norm of the network uses batch statistics (`statistics="batch"`), all images of a call are predicted
    together, and a warning is issued. With running statistics, each image is predicted independently.

    Args:
        run: The folder of a training run (`out` in `mb.fit`), or a trained model, such as the `Run` that `mb.fit` or
            `mb.load` returned.
        head: The name of a test-time head, such as "logistic" (`mb.heads.Head.registry` contains all names). The head
            is fitted on the features of the run, for any number of classes. Default: adapt with the run's method.
        device: The device to compute on, such as "cpu" or "cuda".

    Attributes:
        classes_: The sorted class labels, in the order of the columns of `predict_proba`.
        adapted_: The adapted model.

    >>> import metabridge as mb
    >>> glyphs, net = mb.datasets.load("glyphs"), mb.models.conv4(1, 28, statistics="running")
    >>> run = mb.fit(net, mb.method("mtl"), glyphs.tasks("train"), iterations=2, progress=False)
    >>> X, y = glyphs.images[:60, 0].numpy(), [glyphs.class_names[label] for label in glyphs.labels[:60]]
    >>> classifier = mb.FewShotClassifier(run).fit(X, y)
    >>> classifier.predict(X[:2]).shape, classifier.predict_proba(X[:2]).shape[1] == len(classifier.classes_)
    ((2,), True)

    A fitted classifier can be saved and later loaded without the run:

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = classifier.save(folder)
    ...     (mb.FewShotClassifier.load(folder).predict(X) == classifier.predict(X)).all()
    np.True_
    """

    classes_: NDArray[Any]
    adapted_: Adapted
    decode_options_: DecodeOptions  # size, channels and preprocessing of the input images

    def __init__(
        self, run: str | Path | Model | None, *, head: str | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.run = run
        self.head = head
        self.device = device

    def fit(self, X: Iterable[Any], y: Iterable[Any]) -> Self:
        """Adapt the model to a support set.

        Args:
            X: The support images.
            y: The label of each image, a number or a string.

        Returns:
            The classifier itself.

        Raises:
            InputError: If there are fewer than two classes, the numbers of images and labels differ, an image cannot be
                read, adaptation diverged, or the method has no test-time head and the number of classes differs from
                the network's outputs.
        """
        model = self._model()
        check_finite(model.params, dict(model.net.named_buffers()))
        y_array = column_or_1d(y)
        check_classification_targets(y_array)
        classes, labels = np.unique(y_array, return_inverse=True)
        if len(classes) < 2:
            raise InputError(
                f"y has {len(classes)} class, but a classifier needs at least 2. Add images of another class."
            )
        if not isinstance(model.method.test_solver, Head):
            _check_outputs(len(classes), len(model.params["head.weight"]))
        decode_options = model_decode_options(model)
        images = convert_images(X, decode_options)
        if len(images) != len(labels):
            raise InputError(f"X has {len(images)} images, but y has {len(labels)} labels. Pass one label per image.")
        x, targets = _inputs(images, model.device), torch.from_numpy(labels).to(model.device)
        adapted = adapt(model.method, model.net, model.params, x, targets)
        head_tensors = {} if adapted.head is None else {"weight": adapted.head.weight, "bias": adapted.head.bias}
        if not all(tensor.isfinite().all() for tensor in (*adapted.params.values(), *head_tensors.values())):
            raise InputError(
                "adaptation to these images diverged: the adapted weights are NaN or infinite. Use head='logistic' "
                "(--head logistic), or a run trained with a smaller inner learning rate."
            )
        self.adapted_, self.classes_, self.decode_options_ = adapted, classes, decode_options
        return self

    def predict(self, X: Iterable[Any]) -> NDArray[Any]:
        """Return the predicted label of each image.

        Args:
            X: The query images.

        Returns:
            The labels, of shape (n,).
        """
        indices = self._outputs(X).argmax(1).numpy()
        return self.classes_[indices]  # type: ignore[no-any-return]

    def predict_proba(self, X: Iterable[Any]) -> NDArray[np.float64]:
        """Return the softmax of the outputs.

        With heads trained with the cross-entropy loss, such as "logistic", these values estimate the class
        probabilities. With heads without probabilities (ridge, svm, centroid), they only rank the classes.

        Args:
            X: The query images.

        Returns:
            An array of shape (n, classes), in the order of `classes_`.
        """
        return self._outputs(X).double().softmax(1).numpy()

    def decision_function(self, X: Iterable[Any]) -> NDArray[np.float64]:
        """Return the outputs of the head.

        Args:
            X: The query images.

        Returns:
            An array of shape (n, classes); with two classes, the second output minus the first, of shape (n,).
        """
        outputs = self._outputs(X).double().numpy()
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs

    def save(self, folder: str | Path) -> Path:
        """Save the fitted classifier, so that it can be loaded without the run.

        The file has the safetensors format with JSON metadata, so loading it cannot execute code.

        Args:
            folder: The folder to write to; it is created if needed.

        Returns:
            The path of the file.
        """
        check_is_fitted(self)
        adapted, head = self.adapted_, self.adapted_.head
        recipe = dict(adapted.net.recipe or {})  # the model name and options from which the network was built
        metadata = {
            "version": FORMAT_VERSION,
            "model": recipe | ({"pretrained": False} if "pretrained" in recipe else {}),  # the weights are in this file
            "form": self.decode_options_.to_json(),
            "classes": self.classes_.tolist(),
            # keys and class names as in version 0.1.0
            "head": None if head is None else {"kind": type(head).__name__, "normalise": head.normalize},
            "arguments": {
                "run": str(Path(self.run).resolve()) if isinstance(self.run, str | Path) else None,
                "head": self.head,
            },
        }
        head_tensors = {} if head is None else {"weight": head.weight, "bias": head.bias}
        params = {name: value for name, value in adapted.params.items() if name.startswith(("features.", "head."))}
        run_folder = RunFolder(make_folder(folder))
        buffers = dict(adapted.net.named_buffers())
        run_folder.write("adapted", merge_groups(params=params, buffers=buffers, head=head_tensors), metadata)
        return run_folder.path / "adapted.safetensors"

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> Self:
        """Load a classifier that was saved with `save`.

        Predicting does not need the run. Fitting again needs the run at the same path as before.

        Args:
            folder: The folder that was passed to `save`.
            device: The device to compute on.

        Returns:
            The fitted classifier.

        Raises:
            InputError: If the folder contains no saved classifier, or the file is corrupted.
        """
        run_folder, device = RunFolder(Path(folder)), as_device(device)
        saved_classifier = run_folder.read("adapted")
        if saved_classifier is None:
            raise InputError(
                f"{folder} contains no adapted model. Create one with metabridge adapt --save or "
                "FewShotClassifier.save."
            )
        tensors, metadata = saved_classifier
        if metadata.get("version") != FORMAT_VERSION:
            raise InputError(
                f"the adapted model in {folder} has file format {metadata.get('version')}, but this version of "
                f"metabridge reads format {FORMAT_VERSION}. Adapt again, or use the version that wrote it."
            )
        params, buffers = select_group(tensors, "params"), select_group(tensors, "buffers")
        try:
            net = read_network(metadata, None, tensors)
            check_match(
                {**dict(net.named_parameters()), **dict(net.named_buffers())}, params | buffers, run_folder.path
            )
            classes, decode_options = _read_classes(metadata["classes"]), DecodeOptions(**metadata["form"])
            if image_shape(net) != (decode_options.channels, decode_options.size):
                raise InputError(f"its network does not accept images decoded with {decode_options}")
            head = _read_head(metadata["head"], select_group(tensors, "head"), params["head.weight"], len(classes))
            classifier = cls(**metadata["arguments"], device=device)
        except PARSING_ERRORS as error:
            raise damage_error(run_folder.path / "adapted.safetensors", str(error).rstrip(".")) from error
        check_finite(params | select_group(tensors, "head"), buffers)
        copy_into(net, params, buffers)
        params = {name: value.to(device) for name, value in params.items()}
        if head is not None:
            head = head._replace(weight=head.weight.to(device), bias=head.bias.to(device))
        classifier.adapted_ = Adapted(net.to(device).eval(), params, head)
        classifier.classes_, classifier.decode_options_ = classes, decode_options
        return classifier

    def _model(self) -> Model:
        """Return the run on `self.device`, with `self.head` as test-time head if given."""
        device = as_device(self.device)
        if self.run is None:
            raise InputError(
                "run is None, because this classifier was saved without its run. Set the parameter run to fit it again."
            )
        if isinstance(self.run, Model):  # copy it, so that further training does not change the classifier
            net = copy.deepcopy(self.run.net).to(device).eval()
            params = {name: value.detach().to(device) for name, value in self.run.params.items()}
            model = replace(self.run, net=net, params=params)
        else:
            model = load(self.run, device=device)
        if self.head is None:
            return model
        return replace(model, method=replace(model.method, test_solver=create_head(self.head)))

    def _outputs(self, X: Iterable[Any]) -> Tensor:
        check_is_fitted(self)
        images, device = convert_images(X, self.decode_options_), self.adapted_.params["head.weight"].device
        predict_together = uses_batch_statistics(self.adapted_.net)
        if predict_together:
            warnings.warn(BATCH_STATISTICS_WARNING, stacklevel=3)
        chunk_size = len(images) if predict_together else CHUNK_SIZE
        chunks = (images[start : start + chunk_size] for start in range(0, len(images), chunk_size))
        outputs = torch.cat([self.adapted_(_inputs(chunk, device)).cpu() for chunk in chunks])
        if not outputs.isfinite().all():
            raise InputError(
                "the outputs for these images are NaN or infinite: the weights are too large. Train again with a "
                "smaller learning rate, or use another run."
            )
        return outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        return tags


def _inputs(images: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Return the inputs of the network for 8-bit images: the same images with values from 0 to 1, on the device."""
    return torch.from_numpy(images).to(device).float() / 255


def _check_outputs(num_classes: int, num_outputs: int) -> None:
    if num_classes != num_outputs:
        raise InputError(
            f"y has {num_classes} classes, but the run was trained for {num_outputs}, and its method adapts a head "
            f"with {num_outputs} outputs. Train with --ways {num_classes}, or use head='logistic' (--head logistic), "
            "which fits a new head for any number of classes."
        )


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
