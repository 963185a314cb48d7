"""What a classifier predicts for images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Predictions:
    """Everything that a classifier predicts for some images. All arrays have one entry per image.

    Args:
        indices: Position of each image in the input; some positions are missing if unreadable images were skipped.
        labels: Predicted label, as `FewShotClassifier.predict` returns it.
        probabilities: Probabilities of the classes, (n, classes), in the order of `classes_`.
        rejected: Whether the image was rejected as an image of none of the classes.
        outlier_scores: Outlier scores. None if the classifier never rejects images.
        nearest: Index of the most similar support image. None if the classifier has no support images.
        nearest_labels: Label of the most similar support image.
        similarities: Cosine similarity of the features of the image and the most similar support image.
        unreadable: Name and reason of each image that was skipped, by its position in the input.
    """

    indices: NDArray[np.int64]
    labels: NDArray[Any]
    probabilities: NDArray[np.float64]
    rejected: NDArray[np.bool_]
    outlier_scores: NDArray[np.float64] | None
    nearest: NDArray[np.int64] | None
    nearest_labels: NDArray[Any] | None
    similarities: NDArray[np.float64] | None
    unreadable: dict[int, tuple[str, str]]
