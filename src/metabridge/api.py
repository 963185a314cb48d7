"""The public names of `metabridge`. `metabridge/__init__.py` imports this module when the first of them is used."""

from importlib import import_module
from typing import TYPE_CHECKING

from metabridge import (
    datasets,
    diagnosis,
    environments,
    heads,
    kernels,
    learners,
    models,
    nas,
    schedules,
    solvers,
    theory,
    training,
)
from metabridge.diagnosis import Diagnosis, diagnose
from metabridge.environments import LabeledImages
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners import Adapted, Engine, Method, adapt, meta_gradient, method, parameters, predict
from metabridge.nas import Architecture, search
from metabridge.solvers import task_loss
from metabridge.training import (
    Model,
    Run,
    Score,
    TrainingConfig,
    evaluate,
    fit,
    from_pretrained,
    load,
    load_model,
    save_pretrained,
)

if TYPE_CHECKING:
    from metabridge import inference
    from metabridge.inference import FewShotClassifier

__all__ = [
    "Adapted",
    "Architecture",
    "Diagnosis",
    "Engine",
    "Episodes",
    "FewShotClassifier",
    "InputError",
    "LabeledImages",
    "Method",
    "Model",
    "Run",
    "Score",
    "TrainingConfig",
    "adapt",
    "datasets",
    "diagnose",
    "diagnosis",
    "environments",
    "evaluate",
    "fit",
    "from_pretrained",
    "heads",
    "inference",
    "kernels",
    "learners",
    "load",
    "load_model",
    "meta_gradient",
    "method",
    "models",
    "nas",
    "parameters",
    "predict",
    "save_pretrained",
    "schedules",
    "search",
    "solvers",
    "task_loss",
    "theory",
    "training",
]


def __getattr__(name: str) -> object:
    if name in ("FewShotClassifier", "inference"):  # imports scikit-learn, which is slow
        inference = import_module("metabridge.inference")
        return inference if name == "inference" else inference.FewShotClassifier
    raise AttributeError(f"module 'metabridge' has no attribute {name!r}")
