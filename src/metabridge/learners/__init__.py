"""Every learner of the taxonomy: methods as data, and the functions that run them."""

from metabridge.learners.adapt import Adapted, adapt, predict
from metabridge.learners.engine import Engine, MetaGradient, meta_gradient
from metabridge.learners.heads import SVM, LogisticRegression, NearestCentroid
from metabridge.learners.heads import Ridge as RidgeHead
from metabridge.learners.inner_solvers import GradientDescent, Proximal, Ridge, SupportVectors, task_loss
from metabridge.learners.method import PRESETS, Method, method
from metabridge.learners.parameters import parameters

__all__ = [
    "PRESETS",
    "SVM",
    "Adapted",
    "Engine",
    "GradientDescent",
    "LogisticRegression",
    "MetaGradient",
    "Method",
    "NearestCentroid",
    "Proximal",
    "Ridge",
    "RidgeHead",
    "SupportVectors",
    "adapt",
    "meta_gradient",
    "method",
    "parameters",
    "predict",
    "task_loss",
]
