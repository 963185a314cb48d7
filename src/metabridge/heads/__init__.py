"""Test-time heads: classifiers and outlier detectors that are fitted to fixed features, for all tasks at once.

Importing this package imports all its modules, and each head class registers itself in `Head.registry`. To add a head,
add a module: `metabridge.heads` then exports its class. The heads agree with scikit-learn's estimators, whatever the
scale and the mean of the features.
"""

from metabridge.heads.fitted_heads import FITTED_HEADS, FittedHead, LinearHead, PairwiseHead
from metabridge.heads.head import Head, create_head
from metabridge.heads.logistic_regression import LogisticRegression
from metabridge.heads.nearest_centroid import NearestCentroid
from metabridge.heads.outliers import OutlierDetector, fit_outlier_detector
from metabridge.heads.ridge_classifier import RidgeClassifier
from metabridge.heads.svm import SVM
from metabridge.registry import import_modules

__all__ = [
    "FITTED_HEADS",
    "SVM",
    "FittedHead",
    "Head",
    "LinearHead",
    "LogisticRegression",
    "NearestCentroid",
    "OutlierDetector",
    "PairwiseHead",
    "RidgeClassifier",
    "create_head",
    "fit_outlier_detector",
]

import_modules(__name__, __path__)
globals().update({cls.__name__: cls for cls in Head.registry.values()})
__all__ += [cls.__name__ for cls in Head.registry.values() if cls.__name__ not in __all__]
