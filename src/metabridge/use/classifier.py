"""A scikit-learn classifier on top of a trained run: `fit` adapts to a few labelled images, `predict` classifies."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from metabridge.datasets.image_decoding import DecodeOptions
from metabridge.device import as_device
from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import make_folder
from metabridge.heads import FITTED_HEADS, FittedHead, Head, create_head
from metabridge.learners.adapt import Adapted, adapt
from metabridge.models.batch_norm import normalizes_each_set
from metabridge.training.checkpoint import RunFolder, check_match, damaged, fill, merge, part, read_network
from metabridge.training.evaluation import Model, check_finite
from metabridge.training.fitting import load
from metabridge.use.image_input import form_of, image_shape, pixels

VERSION = 1  # file format of saved classifiers
CHUNK = 256  # images per forward pass, if images do not depend on each other

TRANSDUCTIVE = (
    "this network's batch norms use the statistics of each batch, so the prediction for an image depends on the other "
    "images of the call, and a single image is normalized by its own statistics. Pass all query images of a task "
    "together, or train with statistics='running' to predict each image independently."
)


class FewShotClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A scikit-learn classifier that learns new classes from a few images of each.

    Images are paths, Pillow images or arrays of shape (height, width) or (height, width, channels); arrays hold uint8,
    or floats from 0 to 1. They are converted to the size and channels of the run as its training images were.

    If the network's batch norms use the statistics of each batch (`statistics="batch"`), all images of a call are
    predicted together, with a warning. With running statistics, each image is predicted independently.

    Args:
        run: The folder of a run, or the run itself.
        head: None adapts as the run's method does at test time. The name of a test-time head, such as "logistic" (all
            are in `mb.heads.Head.registry`), fits that head on the run's features instead, for any number of classes.
        device: The device to compute on, such as "cpu" or "cuda".

    Attributes:
        classes_: The labels, sorted: the columns of `predict_proba`.
        adapted_: The adapted model.

    >>> from metabridge.datasets import load
    >>> from metabridge.learners import method
    >>> from metabridge.models import conv4
    >>> from metabridge.training import fit
    >>> glyphs, net = load("glyphs"), conv4(1, 28, statistics="running")
    >>> run = fit(net, method("mtl"), glyphs.tasks("train"), iterations=2, progress=False)
    >>> X, y = glyphs.images[:60, 0].numpy(), [glyphs.class_names[label] for label in glyphs.labels[:60]]
    >>> classifier = FewShotClassifier(run).fit(X, y)
    >>> classifier.predict(X[:2]).shape, classifier.predict_proba(X[:2]).shape[1] == len(classifier.classes_)
    ((2,), True)

    A fitted classifier can be saved, and loaded where the run is not available:

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = classifier.save(folder)
    ...     (FewShotClassifier.load(folder).predict(X) == classifier.predict(X)).all()
    np.True_
    """

    classes_: NDArray[Any]
    adapted_: Adapted
    form_: DecodeOptions  # size, channels and preprocessing of input images

    def __init__(
        self, run: str | Path | Model | None, *, head: str | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.run = run
        self.head = head
        self.device = device

    def fit(self, X: Iterable[Any], y: Iterable[Any]) -> Self:
        """Adapt to a support set.

        Args:
            X: The support images.
            y: A label for each image: numbers or strings.

        Returns:
            The classifier itself.

        Raises:
            InputError: There are fewer than two classes, the number of labels differs from that of images, an image
                cannot be read, or adaptation diverged.
        """
        model = self._model()
        check_finite(model.params, dict(model.net.named_buffers()))
        y_array = column_or_1d(y)
        check_classification_targets(y_array)
        classes, labels = np.unique(y_array, return_inverse=True)
        if len(classes) < 2:
            raise InputError(
                f"y holds {len(classes)} class, but a classifier needs 2 or more. Add images of another class."
            )
        if not isinstance(model.method.test, Head):
            _check_outputs(len(classes), len(model.params["head.weight"]))
        form = form_of(model)
        images = pixels(X, form)
        if len(images) != len(labels):
            raise InputError(
                f"X holds {len(images)} images, but y holds {len(labels)} labels. Pass one label per image."
            )
        x, targets = _inputs(images, model.device), torch.from_numpy(labels).to(model.device)
        adapted = adapt(model.method, model.net, model.params, x, targets)
        solved = {} if adapted.head is None else {"weight": adapted.head.weight, "bias": adapted.head.bias}
        if not all(value.isfinite().all() for value in (*adapted.params.values(), *solved.values())):
            raise InputError(
                "adaptation to these images diverged: the adapted weights are NaN or infinite. Use head='logistic' "
                "(--head logistic), or a run trained with a smaller inner learning rate."
            )
        self.adapted_, self.classes_, self.form_ = adapted, classes, form
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

        With heads trained by cross-entropy, such as "logistic", these are estimates of probabilities. With test-time
        heads that are not `calibrated`, they only rank the classes.

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
        """Save the fitted classifier, so that it can be used without the run.

        The file is in safetensors format with JSON metadata, so that loading it never runs code.

        Args:
            folder: The folder to write to; it is created if needed.

        Returns:
            The path of the file.
        """
        check_is_fitted(self)
        adapted, head = self.adapted_, self.adapted_.head
        recipe = dict(adapted.net.recipe or {})
        notes = {
            "version": VERSION,
            "model": recipe | ({"pretrained": False} if "pretrained" in recipe else {}),  # the weights are in this file
            "form": asdict(self.form_),
            "classes": self.classes_.tolist(),
            "head": None if head is None else {"kind": type(head).__name__, "normalise": head.normalize},
            "arguments": {
                "run": str(Path(self.run).resolve()) if isinstance(self.run, str | Path) else None,
                "head": self.head,
            },
        }
        solved = {} if head is None else {"weight": head.weight, "bias": head.bias}
        params = {name: value for name, value in adapted.params.items() if name.startswith(("features.", "head."))}
        run_folder = RunFolder(make_folder(folder))
        run_folder.write("adapted", merge(params=params, buffers=dict(adapted.net.named_buffers()), head=solved), notes)
        return run_folder.path / "adapted.safetensors"

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> Self:
        """Load a classifier that `save` wrote.

        It predicts without the run. Only fitting it again needs the run, at the path it had.

        Args:
            folder: The folder that was passed to `save`.
            device: The device to compute on.

        Returns:
            The fitted classifier.

        Raises:
            InputError: The folder holds no saved classifier, or the file is damaged.
        """
        run_folder, device = RunFolder(Path(folder)), as_device(device)
        stored = run_folder.read("adapted")
        if stored is None:
            raise InputError(
                f"{folder} holds no adapted model. Create one with metabridge adapt --save or FewShotClassifier.save."
            )
        tensors, notes = stored
        if notes.get("version") != VERSION:
            raise InputError(
                f"the adapted model in {folder} has file format {notes.get('version')}, but this version of metabridge "
                f"reads format {VERSION}. Adapt again, or use the version that wrote it."
            )
        params, buffers = part(tensors, "params"), part(tensors, "buffers")
        try:
            net = read_network(notes, None, tensors)
            check_match(
                {**dict(net.named_parameters()), **dict(net.named_buffers())}, params | buffers, run_folder.path
            )
            classes, form = _read_classes(notes["classes"]), DecodeOptions(**notes["form"])
            if image_shape(net) != (form.channels, form.size):
                raise InputError(f"its network does not take images of {form}")
            head = _read_head(notes["head"], part(tensors, "head"), params["head.weight"], len(classes))
            classifier = cls(**notes["arguments"], device=device)
        except PARSING_ERRORS as error:
            raise damaged(run_folder.path / "adapted.safetensors", str(error).rstrip(".")) from error
        check_finite(params | part(tensors, "head"), buffers)
        fill(net, params, buffers)
        params = {name: value.to(device) for name, value in params.items()}
        if head is not None:
            head = head._replace(weight=head.weight.to(device), bias=head.bias.to(device))
        classifier.adapted_ = Adapted(net.to(device).eval(), params, head)
        classifier.classes_, classifier.form_ = classes, form
        return classifier

    def _model(self) -> Model:
        """Return the run on the device, with the requested head."""
        device = as_device(self.device)
        if self.run is None:
            raise InputError("run is None: this classifier was saved without its run. Set run to fit it again.")
        if isinstance(self.run, Model):  # a copy, so that further training of the run does not change it
            net = copy.deepcopy(self.run.net).to(device).eval()
            params = {name: value.detach().to(device) for name, value in self.run.params.items()}
            model = replace(self.run, net=net, params=params)
        else:
            model = load(self.run, device=device)
        if self.head is None:
            return model
        return replace(model, method=replace(model.method, test=create_head(self.head)))

    def _outputs(self, X: Iterable[Any]) -> Tensor:
        check_is_fitted(self)
        images, device = pixels(X, self.form_), self.adapted_.params["head.weight"].device
        together = normalizes_each_set(self.adapted_.net)
        if together:
            warnings.warn(TRANSDUCTIVE, stacklevel=3)
        size = len(images) if together else CHUNK
        chunks = (images[first : first + size] for first in range(0, len(images), size))
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
    return torch.from_numpy(images).to(device).float() / 255


def _check_outputs(classes: int, outputs: int) -> None:
    if classes != outputs:
        raise InputError(
            f"y holds {classes} classes, but the run was trained for {outputs} and adapts a head of that size. "
            f"Train with --ways {classes}, or use head='logistic' (--head logistic), which fits a new head for any "
            "number of classes."
        )


def _read_classes(names: Any) -> NDArray[Any]:
    classes = np.array(names)
    if classes.ndim != 1 or len(classes) < 2 or classes.dtype.kind not in "bifuU":
        raise InputError("its classes are not a list of names or numbers")
    return classes


def _read_head(notes: Any, solved: Mapping[str, Tensor], learned: Tensor, classes: int) -> FittedHead | None:
    """Return the head that was solved, if one was, and check that it or the `learned` weight is for the classes."""
    if notes is None:
        if len(learned) != classes:
            raise InputError(f"it has {classes} classes, but outputs for {len(learned)}")
        return None
    kind = FITTED_HEADS[notes["kind"]]
    rows = kind.rows(classes)
    head = kind(**solved, normalize=bool(notes["normalise"]))
    shapes = head.weight.shape, head.bias.shape
    if shapes != ((1, rows, learned.shape[1]), (1, rows)) or not head.weight.dtype == head.bias.dtype == learned.dtype:
        raise InputError(f"the head of its {classes} classes is of another shape or kind")
    return head
