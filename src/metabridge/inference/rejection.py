"""Reject images of none of the classes: the outlier detector of a support set, its threshold and the label."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from metabridge.errors import InputError
from metabridge.heads.outliers import OutlierDetector, fit_outlier_detector
from metabridge.inference.support_set import SupportSet

OUTLIER_NAME, OUTLIER_NUMBER = "none of these", -1


def outlier_label(classes: NDArray[Any], reject: float | None) -> str | int:
    """Return the label of rejected images: "none of these", or −1 if classes are numbers.

    Args:
        classes: The class labels.
        reject: Fraction of the images of known classes that may be rejected. None: no images are rejected.

    Raises:
        InputError: If `reject` is not between 0 and 1, or images are rejected and a class has this label.

    >>> import numpy as np
    >>> outlier_label(np.array(["cat", "dog"]), reject=0.05), outlier_label(np.array([3, 5]), reject=None)
    ('none of these', -1)
    """
    if reject is not None and not 0 < reject < 1:
        raise InputError(f"reject is {reject}, but must be between 0 and 1, such as 0.05.")
    label = OUTLIER_NUMBER if classes.dtype.kind in "biuf" else OUTLIER_NAME
    if reject is not None and label in classes.tolist():
        raise InputError(f"y has the label {label!r}, which stands for rejected images. Rename this class.")
    return label


def fit_detector(support: SupportSet) -> OutlierDetector:
    """Return an outlier detector fitted to the features of a support set."""
    assert support.features is not None
    order, y = (tensor.to(support.features.device) for tensor in support.canonical_order())
    return fit_outlier_detector(support.features[order][None], y[None], int(y.max()) + 1)


def fit_rejection(support: SupportSet, rate: float) -> tuple[OutlierDetector, float]:
    """Return an outlier detector and the score above which images are rejected.

    Args:
        support: The support set, with features.
        rate: Fraction of the images of known classes that may be rejected.

    Raises:
        InputError: If there are too few images.
    """
    detector = fit_detector(support)
    return detector, float(detector.threshold(rate)[0])
