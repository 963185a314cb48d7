"""Test-time heads: classical classifiers on fixed features, solved for all tasks at once.

All modules of this package are imported, and each head registers itself in `Head.registry`. A new head is a new
module; `metabridge.heads` exports its class without further changes. Heads agree with scikit-learn's estimators on
features of any scale, near 0 or far from it.
"""

from metabridge.heads.fitted_heads import FITTED_HEADS, FittedHead, LinearHead, PairwiseHead
from metabridge.heads.head import Head, create_head
from metabridge.heads.logistic_regression import LogisticRegression
from metabridge.heads.nearest_centroid import NearestCentroid
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
    "PairwiseHead",
    "RidgeClassifier",
    "create_head",
]

import_modules(__name__, __path__)
globals().update({kind.__name__: kind for kind in Head.registry.values()})
__all__ += [kind.__name__ for kind in Head.registry.values() if kind.__name__ not in __all__]
