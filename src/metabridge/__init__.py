"""metabridge: few-shot learning with gradient-based meta-learning and multi-task learning."""

from metabridge import models
from metabridge.environments import ImageTasks, LabelledImages, Quadratic, Sinusoid, datasets
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners import (
    PRESETS,
    SVM,
    Adapted,
    Engine,
    GradientDescent,
    LogisticRegression,
    MetaGradient,
    Method,
    NearestCentroid,
    Proximal,
    Ridge,
    RidgeHead,
    SupportVectors,
    adapt,
    meta_gradient,
    method,
    parameters,
    predict,
    task_loss,
)
from metabridge.training import Model, Run, Score, evaluate, fit

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "SVM",
    "Adapted",
    "Engine",
    "Episodes",
    "GradientDescent",
    "ImageTasks",
    "InputError",
    "LabelledImages",
    "LogisticRegression",
    "MetaGradient",
    "Method",
    "Model",
    "NearestCentroid",
    "Proximal",
    "Quadratic",
    "Ridge",
    "RidgeHead",
    "Run",
    "Score",
    "Sinusoid",
    "SupportVectors",
    "adapt",
    "datasets",
    "evaluate",
    "fit",
    "meta_gradient",
    "method",
    "models",
    "parameters",
    "predict",
    "task_loss",
]
