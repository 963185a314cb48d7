"""metabridge: few-shot learning with gradient-based meta-learning and multi-task learning."""

from typing import TYPE_CHECKING

from metabridge import kernels, models
from metabridge.environments import ImageBatches, ImageTasks, LabelledImages, Quadratic, Sinusoid, datasets
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
from metabridge.training import Augment, Constant, Cosine, Model, Plateau, Run, Score, Step, Views, evaluate, fit, load

if TYPE_CHECKING:
    from metabridge.use import FewShotClassifier

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "SVM",
    "Adapted",
    "Augment",
    "Constant",
    "Cosine",
    "Engine",
    "Episodes",
    "FewShotClassifier",
    "GradientDescent",
    "ImageBatches",
    "ImageTasks",
    "InputError",
    "LabelledImages",
    "LogisticRegression",
    "MetaGradient",
    "Method",
    "Model",
    "NearestCentroid",
    "Plateau",
    "Proximal",
    "Quadratic",
    "Ridge",
    "RidgeHead",
    "Run",
    "Score",
    "Sinusoid",
    "Step",
    "SupportVectors",
    "Views",
    "adapt",
    "datasets",
    "evaluate",
    "fit",
    "kernels",
    "load",
    "meta_gradient",
    "method",
    "models",
    "parameters",
    "predict",
    "task_loss",
]


def __getattr__(name: str) -> object:
    if name == "FewShotClassifier":  # scikit-learn takes a while to import, and training does without
        from metabridge.use import FewShotClassifier

        return FewShotClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
