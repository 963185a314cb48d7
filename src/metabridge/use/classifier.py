"""A trained run as an estimator: `fit` adapts it to a few labelled images, `predict` tells new ones."""

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

from metabridge.datasets.image_decoding import Form
from metabridge.device import as_device
from metabridge.errors import PARSING_ERRORS, InputError
from metabridge.files import make_folder
from metabridge.heads import FITTED_HEADS, FittedHead, Head, create_head
from metabridge.learners.adapt import Adapted, adapt
from metabridge.models.batch_norm import normalises_each_set
from metabridge.training.checkpoint import RunFolder, check_match, damaged, fill, merge, part, read_network
from metabridge.training.evaluate import Model, check_finite
from metabridge.training.fit import load
from metabridge.use.image_input import form_of, image_shape, pixels

VERSION = 1  # of the form in which an adapted model is saved
CHUNK = 256  # images whose features are computed at once, where they do not depend on each other

TRANSDUCTIVE = (
    "this network normalises each set of images by the set's own statistics: what is predicted for an image depends "
    "on the others given with it, and a single one is normalised by itself alone. Give all queries of a task "
    "together, or train with statistics='running' to have every image predicted by itself."
)


class FewShotClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Tell new classes apart from a few images of each, with the habits of scikit-learn.

    - `run`: the folder of a run, or the run itself.
    - `head`: None adapts as the run's method does at test time. "logistic", "svm", "ridge" or
      "centroid" solves that head on the run's features instead, for any number of classes.
    - `device`: where to compute.

    `X` is a list of paths, of Pillow images or of arrays (height, width[, channels]), or one array of
    such images; arrays are uint8, or floats from 0 to 1. They are brought to the run's size and
    channels as its training images were. `y` holds a label for each, numbers or strings.

    A network whose batch norms use the statistics of the set (`statistics="batch"`) predicts all images
    of a call together, and warns of it. With running statistics every image is predicted by itself.

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

    An adapted model can be kept, and used where the run is not:

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = classifier.save(folder)
    ...     (FewShotClassifier.load(folder).predict(X) == classifier.predict(X)).all()
    np.True_
    """

    classes_: NDArray[Any]  # the labels, sorted: what the columns of probabilities stand for
    adapted_: Adapted
    form_: Form  # of the images that the network takes

    def __init__(
        self, run: str | Path | Model | None, *, head: str | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.run = run
        self.head = head
        self.device = device

    def fit(self, X: Iterable[Any], y: Iterable[Any]) -> Self:
        """Adapt to the support set `X` with the labels `y`."""
        model = self._model()
        check_finite(model.params, dict(model.net.named_buffers()))
        given = column_or_1d(y)
        check_classification_targets(given)
        classes, labels = np.unique(given, return_inverse=True)
        if len(classes) < 2:
            raise InputError(f"y holds {len(classes)} class, but classes can be told apart only from 2 on.")
        if not isinstance(model.method.test, Head):
            _check_outputs(len(classes), len(model.params["head.weight"]))
        form = form_of(model)
        images = pixels(X, form)
        if len(images) != len(labels):
            raise InputError(f"X holds {len(images)} images, but y {len(labels)} labels. Give a label for each image.")
        x, targets = _inputs(images, model.device), torch.from_numpy(labels).to(model.device)
        adapted = adapt(model.method, model.net, model.params, x, targets)
        solved = {} if adapted.head is None else {"weight": adapted.head.weight, "bias": adapted.head.bias}
        if not all(value.isfinite().all() for value in (*adapted.params.values(), *solved.values())):
            raise InputError(
                "adaptation to these images diverged: adapted weights are NaN or infinite. Use head='logistic' "
                "(--head logistic), or a run whose method takes smaller steps."
            )
        self.adapted_, self.classes_, self.form_ = adapted, classes, form
        return self

    def predict(self, X: Iterable[Any]) -> NDArray[Any]:
        """Return the label of each image."""
        best = self._outputs(X).argmax(1).numpy()
        return self.classes_[best]  # type: ignore[no-any-return]

    def predict_proba(self, X: Iterable[Any]) -> NDArray[np.float64]:
        """Return the softmax of the outputs, (n, classes), in the order of `classes_`.

        With the heads "logistic" and those trained by cross-entropy these are estimates of
        probabilities; with "svm", "ridge" and "centroid" they only rank the classes.
        """
        return self._outputs(X).double().softmax(1).numpy()

    def decision_function(self, X: Iterable[Any]) -> NDArray[np.float64]:
        """Return the outputs, (n, classes); of two classes the second's less the first's, (n,)."""
        outputs = self._outputs(X).double().numpy()
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs

    def save(self, folder: str | Path) -> Path:
        """Keep the adapted model in a folder, to be used without the run, and return the file.

        It is one safetensors file whose metadata is JSON, so that loading it never runs code.
        """
        check_is_fitted(self)
        adapted, head = self.adapted_, self.adapted_.head
        recipe = dict(adapted.net.recipe or {})
        notes = {
            "version": VERSION,
            "model": recipe | ({"pretrained": False} if "pretrained" in recipe else {}),  # the weights are here
            "form": asdict(self.form_),
            "classes": self.classes_.tolist(),
            "head": None if head is None else {"kind": type(head).__name__, "normalise": head.normalise},
            "arguments": {
                "run": str(Path(self.run).resolve()) if isinstance(self.run, str | Path) else None,
                "head": self.head,
            },
        }
        solved = {} if head is None else {"weight": head.weight, "bias": head.bias}
        params = {name: value for name, value in adapted.params.items() if name.startswith(("features.", "head."))}
        kept = RunFolder(make_folder(folder))
        kept.write("adapted", merge(params=params, buffers=dict(adapted.net.named_buffers()), head=solved), notes)
        return kept.path / "adapted.safetensors"

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> Self:
        """Return the fitted classifier that `save` kept.

        It predicts without the run; only to fit it again takes the run, where it was.
        """
        kept, device = RunFolder(Path(folder)), as_device(device)
        held = kept.read("adapted")
        if held is None:
            raise InputError(
                f"{folder} holds no adapted model. Make one with metabridge adapt --save, or FewShotClassifier.save."
            )
        tensors, notes = held
        if notes.get("version") != VERSION:
            raise InputError(
                f"the adapted model in {folder} was written in form {notes.get('version')}, but this version of "
                f"metabridge reads form {VERSION}. Adapt again, or use the version that wrote it."
            )
        params, buffers = part(tensors, "params"), part(tensors, "buffers")
        try:
            net = read_network(notes, None, tensors)
            check_match({**dict(net.named_parameters()), **dict(net.named_buffers())}, params | buffers, kept.path)
            classes, form = _read_classes(notes["classes"]), Form(**notes["form"])
            if image_shape(net) != (form.channels, form.size):
                raise InputError(f"its network does not take images of {form}")
            head = _read_head(notes["head"], part(tensors, "head"), params["head.weight"], len(classes))
            classifier = cls(**notes["arguments"], device=device)
        except PARSING_ERRORS as error:
            raise damaged(kept.path / "adapted.safetensors", str(error).rstrip(".")) from error
        check_finite(params | part(tensors, "head"), buffers)
        fill(net, params, buffers)
        params = {name: value.to(device) for name, value in params.items()}
        if head is not None:
            head = head._replace(weight=head.weight.to(device), bias=head.bias.to(device))
        classifier.adapted_ = Adapted(net.to(device).eval(), params, head)
        classifier.classes_, classifier.form_ = classes, form
        return classifier

    def _model(self) -> Model:
        """Return the run on the device, with the head that was asked for."""
        device = as_device(self.device)
        if self.run is None:
            raise InputError("run is None: this classifier was saved without its run. Set one to fit it again.")
        if isinstance(self.run, Model):  # a copy, so that training the run on does not change what is adapted
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
        together = normalises_each_set(self.adapted_.net)
        if together:
            warnings.warn(TRANSDUCTIVE, stacklevel=3)
        size = len(images) if together else CHUNK
        chunks = (images[first : first + size] for first in range(0, len(images), size))
        outputs = torch.cat([self.adapted_(_inputs(chunk, device)).cpu() for chunk in chunks])
        if not outputs.isfinite().all():
            raise InputError(
                "the outputs for these images are NaN or infinite: the weights are too large. Train again with a lower "
                "learning rate, or adapt another run."
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
            f"Train with --ways {classes}, or use head='logistic' (--head logistic), which solves a new head for any "
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
    head = kind(**solved, normalise=bool(notes["normalise"]))
    shapes = head.weight.shape, head.bias.shape
    if shapes != ((1, rows, learned.shape[1]), (1, rows)) or not head.weight.dtype == head.bias.dtype == learned.dtype:
        raise InputError(f"the head of its {classes} classes is of another shape or kind")
    return head
