"""A scikit-learn classifier that adapts a trained model to labeled images (`fit`) and classifies images (`predict`)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor
from torch.nn.functional import normalize

from metabridge.decode_options import DecodeOptions
from metabridge.device import as_device
from metabridge.errors import InputError
from metabridge.heads import Head, create_head
from metabridge.heads.outliers import OutlierDetector
from metabridge.inference.calibration import head_penalty, with_penalty
from metabridge.inference.confusion import Confusion
from metabridge.inference.predictions import Predictions
from metabridge.inference.rejection import fit_detector, fit_rejection, outlier_label
from metabridge.inference.saved_classifier import SavedClassifier, read_classifier, write_classifier
from metabridge.inference.support_adaptation import (
    adapt_to_support,
    check_lengths,
    chunk_size,
    image_chunks,
    image_features,
    predict_left_out_support,
    read_support,
    to_inputs,
)
from metabridge.inference.support_set import SupportSet
from metabridge.learners.adapt import Adapted, can_predict_from_features
from metabridge.learners.method import Method
from metabridge.models.batch_norm import uses_batch_statistics
from metabridge.training.evaluation import Model, check_finite
from metabridge.training.model_images import model_decode_options
from metabridge.training.model_loading import load_model

NO_SUPPORT_IMAGES = (
    "this classifier was loaded from a file that does not contain its support images or its method. Fit it again with "
    "all images."
)
BATCH_STATISTICS_WARNING = (
    "the batch norm of this network uses batch statistics, so the prediction for an image depends on the other images "
    "of the call, and a single image is normalized with its own statistics. Pass all query images of a task together, "
    "or train with statistics='running' to predict each image independently."
)


class FewShotClassifier(ClassifierMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A scikit-learn classifier that learns new classes from a few images per class.

    Images are paths, Pillow images, arrays of shape (height, width) or (height, width, channels), or tensors of shape
    (height, width) or (channels, height, width). Arrays and tensors have dtype uint8, or a floating-point dtype and
    values from 0 to 1. Images are resized to the input size of the network, converted to its number of channels, and
    preprocessed like the training images. All methods also accept a single image, as a list with one image. An array of
    three dimensions is a single image if its last dimension is 1, 3 or 4, and a tensor if its first is 1 or 3.

    If the batch norm of the network uses batch statistics (`statistics="batch"`), all images of a call are predicted
    together, and a warning is issued. With running statistics, each image is predicted independently.

    Args:
        model: The folder of a training run, "photos" or "characters" (built-in models), "timm:NAME" or "hf:NAME", or a
            trained model, such as the `Run` that `mb.fit` or `mb.load` returned.
        head: The name of a test-time head, such as "logistic" (`mb.heads.Head.registry` contains all names). The head
            is fitted on the features of the model, for any number of classes. Default: adapt with the model's method.
        penalty: The L2 penalty of the head (1/C for "svm"). Default: the head's; that of a logistic regression is
            increased or decreased tenfold if this predicts left-out support images better.
        reject: Fraction of the images of known classes that may be rejected wrongly, such as 0.05. Images that look
            unlike all classes are then predicted as "none of these" (if labels are strings) or −1. Default: reject
            no images.
        weights: File of the weights of a pretrained model. Default: from the local cache of the model hub.
        device: The device to compute on, such as "cpu" or "cuda"; "auto" uses a GPU if there is one.

    Attributes:
        classes_: The sorted class labels, in the order of the columns of `predict_proba`.
        adapted_: The adapted model.
        penalty_: The penalty of the fitted head; None if the method has no test-time head, or the head no penalty.
        temperature_: The number by which outputs are divided before the softmax, so that probabilities fit left-out
            support images. It is 1 if every class has one image, and for methods that adapt the whole network.
        outlier_label_: The label of rejected images: "none of these" or −1.
        threshold_: The outlier score above which an image is rejected; None if `reject` is None.

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
    penalty_: float | None
    temperature_: float
    outlier_label_: Any
    threshold_: float | None
    model_: Model | None  # the model before adaptation; None if the file of a saved classifier does not contain it
    support_: SupportSet | None  # None if the file of a saved classifier does not contain it
    outlier_detector_: OutlierDetector | None

    def __init__(
        self,
        model: str | Path | Model | None = "photos",
        *,
        head: str | None = None,
        penalty: float | None = None,
        reject: float | None = None,
        weights: str | Path | None = None,
        device: torch.device | str = "auto",
    ) -> None:
        self.model = model
        self.head = head
        self.penalty = penalty
        self.reject = reject
        self.weights = weights
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
                read, adaptation diverged, the method has no test-time head and the number of classes differs from the
                network's outputs, or `reject` is given and every class has one image.
        """
        labels = _check_labels(y)
        model = self._load_model()
        classes = np.unique(labels)
        if len(classes) < 2:
            raise InputError(
                f"y has {len(classes)} class, but a classifier needs at least 2. Add images of another class."
            )
        _check_outputs(model, len(classes))
        decode_options = model_decode_options(model)
        self._adapt(model, decode_options, read_support(model, decode_options, X, labels))
        return self

    def partial_fit(self, X: Iterable[Any], y: Iterable[Any], classes: Iterable[Any] | None = None) -> Self:
        """Add images to the support set, of known classes or new ones, without the images that were passed before.

        The result is that of `fit` on all images, in any order. The classifier can predict as soon as there are two
        classes; if the method adapts a head of fixed size, as soon as there are as many classes as it has outputs.

        Args:
            X: The new support images.
            y: The label of each new image.
            classes: All labels that may occur; another label in `y` raises an error. Default: any label may occur.

        Returns:
            The classifier itself.

        Raises:
            InputError: As for `fit`; if a label is not in `classes`; or if the classifier was loaded from a file that
                does not contain its support set.

        >>> import numpy as np
        >>> import metabridge as mb
        >>> images = np.random.default_rng(0).random((6, 28, 28))
        >>> classifier = mb.FewShotClassifier("characters").fit(images[:4], ["a", "a", "b", "b"])
        >>> classifier.partial_fit(images[4:], ["new", "new"]).classes_.tolist()
        ['a', 'b', 'new']
        """
        labels = _check_labels(y)
        if classes is not None:
            unknown = sorted(set(labels.tolist()) - set(np.asarray(list(classes)).tolist()), key=str)
            if unknown:
                raise InputError(f"y has the label {unknown[0]!r}, which is not in classes. Add it there.")
        if not hasattr(self, "support_"):
            model, support = self._load_model(), None
            decode_options = model_decode_options(model)
        elif self.model_ is None or self.support_ is None:
            raise InputError(NO_SUPPORT_IMAGES)
        else:
            model, support, decode_options = self.model_, self.support_, self.decode_options_
        new_support = read_support(model, decode_options, X, labels)
        support = new_support if support is None else support.add(new_support)
        num_classes = len(support.classes()[0])
        if num_classes < _min_classes(model):
            self.model_, self.support_, self.decode_options_ = model, support, decode_options
            return self
        _check_outputs(model, num_classes)
        self._adapt(model, decode_options, support, is_complete=False)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the predicted label of each image.

        Args:
            X: The query images, or a single image.

        Returns:
            The labels, of shape (n,). `outlier_label_` for rejected images.
        """
        outputs, scores = self._map_features(X, self._outputs_and_scores)
        return self._labels(outputs, self._is_rejected(scores))

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the softmax of the outputs, divided by `temperature_`.

        The values estimate the class probabilities if the temperature was fitted on left-out support images, or if the
        head is trained with the cross-entropy loss, such as "logistic". Otherwise, they only rank the classes. They do
        not depend on `reject`.

        Args:
            X: The query images, or a single image.

        Returns:
            An array of shape (n, classes), in the order of `classes_`.
        """
        return self._probabilities(self._map_features(X, self._outputs_and_scores)[0])

    def predict_details(self, X: Any, *, skip_unreadable: bool = False) -> Predictions:
        """Return labels, probabilities, outlier scores and the most similar support image of each image.

        Args:
            X: The query images, or a single image.
            skip_unreadable: Whether to skip images that cannot be read and to report them in `Predictions.unreadable`,
                instead of raising an error for the first of them.

        Returns:
            The predictions.

        Raises:
            InputError: If an image cannot be read, or if all of them are skipped.
        """
        unreadable: dict[int, tuple[str, str]] = {}
        outputs, scores, nearest, similarities = self._map_features(
            X, self._outputs_scores_and_nearest, unreadable if skip_unreadable else None
        )
        rejected = self._is_rejected(scores)
        indices = np.setdiff1d(np.arange(len(outputs) + len(unreadable)), list(unreadable))
        has_support = self.support_ is not None
        return Predictions(
            indices,
            self._labels(outputs, rejected),
            self._probabilities(outputs),
            rejected,
            None if self.reject is None else scores.double().numpy(),
            nearest.numpy() if has_support else None,
            self.support_.labels[nearest.numpy()] if self.support_ is not None else None,
            similarities.double().numpy() if has_support else None,
            unreadable,
        )

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return the outputs of the head.

        Args:
            X: The query images, or a single image.

        Returns:
            An array of shape (n, classes); with two classes, the second output minus the first, of shape (n,).
        """
        outputs = self._map_features(X, self._outputs_and_scores)[0].double().numpy()
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return the features of images, as the adapted network computes them, without L2 normalization.

        Args:
            X: The images, or a single image.

        Returns:
            An array of shape (n, dimension).
        """
        (features,) = self._map_features(X, lambda features: (features,))
        return features.numpy()

    def outlier_score(self, X: Any) -> NDArray[np.float64]:
        """Return how unlike the support images of all classes each image is.

        Args:
            X: The query images, or a single image.

        Returns:
            The scores, of shape (n,). With `reject`, images whose score exceeds `threshold_` are rejected.

        Raises:
            InputError: If the classifier was loaded from a file without support images.
        """
        self._check_fitted()
        detector = self._detector()
        (scores,) = self._map_features(X, lambda features: (detector.scores(features[None])[0],))
        return scores.double().numpy()

    def confusion(self, X: Any = None, y: Iterable[Any] | None = None) -> Confusion:
        """Count which classes are predicted for the images of which classes.

        Args:
            X: Labeled images. Default: the support images, each predicted by a head that was fitted without it. Images
                that are the only ones of their classes are omitted.
            y: The label of each image. With `reject`, images with labels that are no class count as `outlier_label_`.

        Returns:
            The confusion matrix. With `X` and `reject`, its last class is `outlier_label_`.

        Raises:
            InputError: If the numbers of images and labels differ, a label is unknown, or `X` is omitted and the method
                adapts the whole network or the support images are not known.
        """
        self._check_fitted()
        names = [str(name) for name in self.classes_]
        if X is None:
            if self.model_ is None or self.support_ is None or self.adapted_.method is None:
                raise InputError(NO_SUPPORT_IMAGES)
            left_out = predict_left_out_support(self.model_, self.adapted_.method, self.support_)
            return Confusion.of(left_out.labels.cpu().numpy(), left_out.outputs.argmax(1).cpu().numpy(), names)
        outputs, scores = self._map_features(X, self._outputs_and_scores)
        labels = _check_labels(() if y is None else y)
        check_lengths(len(outputs), len(labels))
        index_of = {label: index for index, label in enumerate(self.classes_.tolist())}
        true = np.array([index_of.get(label, -1) for label in labels.tolist()])
        predicted = np.where(self._is_rejected(scores), len(names), outputs.argmax(1).numpy())
        if self.reject is None and (true < 0).any():
            raise InputError(
                f"y has the label {labels[true < 0].tolist()[0]!r}, which is not a class of this classifier. Omit its "
                "images, or set reject."
            )
        if self.reject is not None:
            names, true = [*names, str(self.outlier_label_)], np.where(true < 0, len(names), true)
        return Confusion.of(true, predicted, names)

    def save(self, folder: str | Path) -> Path:
        """Save the fitted classifier, so that it can be loaded without the model.

        The file has the safetensors format with JSON metadata, so loading it cannot execute code. It contains the
        features of the support images and, if the method adapts the whole network or the network uses batch statistics,
        the decoded support images.

        Args:
            folder: The folder to write to; it is created if needed.

        Returns:
            The path of the file.
        """
        self._check_fitted()
        model = self.model if isinstance(self.model, str | Path) else None
        arguments = {
            "model": model if model is None or not Path(model).exists() else str(Path(model).resolve()),
            "head": self.head,
            "penalty": None if self.penalty is None else float(self.penalty),
            "reject": None if self.reject is None else float(self.reject),
            "weights": None if self.weights is None else str(Path(self.weights).resolve()),
        }
        saved = SavedClassifier(
            self.adapted_,
            self.classes_,
            self.decode_options_,
            arguments,
            self.temperature_,
            self.penalty_,
            self.model_,
            self.support_,
        )
        return write_classifier(folder, saved)

    @classmethod
    def load(cls, folder: str | Path, *, reject: float | None = None, device: torch.device | str = "auto") -> Self:
        """Load a classifier that was saved with `save`.

        Predicting and `partial_fit` do not need the model that was adapted. Fitting again needs the model at the same
        path as before.

        Args:
            folder: The folder that was passed to `save`.
            reject: The parameter `reject` of the classifier. Default: as saved.
            device: The device to compute on.

        Returns:
            The fitted classifier.

        Raises:
            InputError: If the folder contains no saved classifier, the file is corrupted, or `reject` is given and the
                file contains no support images or one of each class.
        """
        saved = read_classifier(folder, as_device(device))
        classifier = cls(**saved.arguments, device=device)
        if reject is not None:
            classifier.reject = reject
        classifier.model_, classifier.support_ = saved.model, saved.support
        classifier.adapted_, classifier.classes_ = saved.adapted, saved.classes
        classifier.decode_options_ = saved.decode_options
        classifier.temperature_, classifier.penalty_ = saved.temperature, saved.penalty
        label, rejection = outlier_label(saved.classes, classifier.reject), None
        if classifier.reject is not None:
            if saved.support is None:
                raise InputError(NO_SUPPORT_IMAGES)
            rejection = fit_rejection(saved.support, classifier.reject)
        classifier._set_rejection(rejection, label)
        return classifier

    def _load_model(self) -> Model:
        """Return the model on `self.device`, with the test-time head and the penalty of the parameters, if given."""
        if self.model is None:
            raise InputError(
                "model is None, because this classifier was saved without its model. Set the parameter model to fit it "
                "again."
            )
        model = load_model(self.model, weights=self.weights, device=as_device(self.device))
        check_finite(model.params, dict(model.net.named_buffers()))
        if self.head is not None:
            head = create_head(self.head, self.penalty)
        elif self.penalty is None:
            return model
        elif isinstance(model.method.test_solver, Head):
            head = with_penalty(model.method.test_solver, self.penalty)
        else:
            raise InputError(
                f"penalty is {self.penalty}, but the method of this model fits no test-time head. Choose one, such as "
                "head='logistic' (--head logistic), or omit the penalty."
            )
        return replace(model, method=replace(model.method, test_solver=head))

    def _adapt(
        self, model: Model, decode_options: DecodeOptions, support: SupportSet, *, is_complete: bool = True
    ) -> None:
        """Adapt the model to the support set and set all attributes of the fitted classifier.

        If more images may follow, too few images for a threshold of the outlier score are no error yet.
        """
        classes = support.classes()[0]
        label = outlier_label(classes, self.reject)
        result = adapt_to_support(model, support, selects_penalty=self.penalty is None)
        rejection = None
        if self.reject is not None:
            with contextlib.nullcontext() if is_complete else contextlib.suppress(InputError):
                rejection = fit_rejection(result.support, self.reject)
        self.model_, self.support_, self.decode_options_ = model, result.support, decode_options
        self.adapted_, self.classes_, self.temperature_ = result.adapted, classes, result.temperature
        self.penalty_ = _penalty(result.adapted.method)
        self._set_rejection(rejection, label)

    def _set_rejection(self, rejection: tuple[OutlierDetector, float] | None, label: str | int) -> None:
        self.outlier_label_ = label
        self.outlier_detector_, self.threshold_ = (None, None) if rejection is None else rejection

    def _check_fitted(self) -> None:
        """Raise an error if the classifier cannot predict yet."""
        if hasattr(self, "support_") and not hasattr(self, "adapted_"):
            assert self.support_ is not None
            assert self.model_ is not None
            count = len(self.support_.classes()[0])
            raise InputError(
                f"the classifier has images of {count} {'class' if count == 1 else 'classes'} so far, but needs "
                f"{_min_classes(self.model_)}. Call partial_fit with images of other classes."
            )
        check_is_fitted(self, "adapted_")

    def _detector(self) -> OutlierDetector:
        if self.outlier_detector_ is not None:
            return self.outlier_detector_
        if self.support_ is None:
            raise InputError(NO_SUPPORT_IMAGES)
        return fit_detector(self.support_)

    def _map_features(
        self,
        X: Any,
        function: Callable[[Tensor], tuple[Tensor, ...]],
        unreadable: dict[int, tuple[str, str]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Apply a function to the features of images, in chunks, and return the concatenated results on the CPU.

        Public methods call this method directly, so that the warning names the line that calls the public method.
        """
        self._check_fitted()
        predict_together = uses_batch_statistics(self.adapted_.net)
        if predict_together:
            warnings.warn(BATCH_STATISTICS_WARNING, stacklevel=3)
        device = self.adapted_.params["head.weight"].device
        size = None if predict_together else chunk_size(self.decode_options_)
        model = None if predict_together else self.model_
        fixed_model = model if model is not None and can_predict_from_features(model.method) else None
        results = []
        for _, images in image_chunks(X, self.decode_options_, size, unreadable):
            if fixed_model is not None:
                features = image_features(fixed_model, images)
            else:
                features = self.adapted_.features(to_inputs(images, device))
            results.append([result.cpu() for result in function(features)])
        return tuple(torch.cat(parts) for parts in zip(*results))

    def _outputs_and_scores(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs for features, (n, classes), and their outlier scores; zeros if no image is rejected."""
        outputs = self.adapted_.outputs(features)
        if not outputs.isfinite().all():
            raise InputError(
                "the outputs for these images are NaN or infinite: the weights are too large. Train again with a "
                "smaller learning rate, or use another run."
            )
        detector = self.outlier_detector_
        return outputs, outputs.new_zeros(len(outputs)) if detector is None else detector.scores(features[None])[0]

    def _outputs_scores_and_nearest(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return outputs and outlier scores, and the indices and cosine similarities of the nearest support images."""
        outputs, scores = self._outputs_and_scores(features)
        if self.support_ is None:
            return outputs, scores, scores, scores
        assert self.support_.features is not None
        cosines = normalize(features, dim=1) @ normalize(self.support_.features, dim=1).mT
        similarities, nearest = cosines.max(1)
        return outputs, scores, nearest, similarities

    def _is_rejected(self, scores: Tensor) -> NDArray[np.bool_]:
        if self.reject is None:
            return np.zeros(len(scores), dtype=bool)
        if self.threshold_ is None:
            if self.support_ is not None:
                fit_rejection(self.support_, self.reject)  # raises the error that `partial_fit` suppressed
            raise InputError(f"reject was set to {self.reject} after fitting. Fit again.")
        return scores.double().numpy() > self.threshold_

    def _labels(self, outputs: Tensor, is_rejected: NDArray[np.bool_]) -> NDArray[Any]:
        labels: NDArray[Any] = self.classes_[outputs.argmax(1).numpy()]
        return labels if self.reject is None else np.where(is_rejected, self.outlier_label_, labels)

    def _probabilities(self, outputs: Tensor) -> NDArray[np.float64]:
        return (outputs.double() / self.temperature_).softmax(1).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        return tags


def _check_labels(y: Iterable[Any]) -> NDArray[Any]:
    labels: NDArray[Any] = column_or_1d(y)
    check_classification_targets(labels)
    return labels


def _min_classes(model: Model) -> int:
    """Return the number of classes with which a model can be adapted, or the smallest if there are several."""
    return 2 if isinstance(model.method.test_solver, Head) else len(model.params["head.weight"])


def _check_outputs(model: Model, num_classes: int) -> None:
    num_outputs = len(model.params["head.weight"])
    if not isinstance(model.method.test_solver, Head) and num_classes != num_outputs:
        raise InputError(
            f"y has {num_classes} classes, but the run was trained for {num_outputs}, and its method adapts a head "
            f"with {num_outputs} outputs. Train with --ways {num_classes}, or use head='logistic' (--head logistic), "
            "which fits a new head for any number of classes."
        )


def _penalty(method: Method | None) -> float | None:
    return head_penalty(method.test_solver) if method is not None and isinstance(method.test_solver, Head) else None
