"""Few-shot learning methods, and the functions that compute their meta-gradients and adapt with them."""

from metabridge.learners.adapt import Adapted, adapt, predict
from metabridge.learners.engine import Engine, MetaGradient, meta_gradient
from metabridge.learners.method import PRESETS, Method, method
from metabridge.learners.outer_gradients import OUTER_RULES
from metabridge.learners.parameters import parameters

__all__ = [
    "OUTER_RULES",
    "PRESETS",
    "Adapted",
    "Engine",
    "MetaGradient",
    "Method",
    "adapt",
    "meta_gradient",
    "method",
    "parameters",
    "predict",
]
