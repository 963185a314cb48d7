"""All that `import metabridge` gives, imported when the first of it is asked for."""

from typing import TYPE_CHECKING

from metabridge import datasets, heads, kernels, models, nas, schedules, solvers, theory
from metabridge.diagnosis import Diagnosis, diagnose
from metabridge.environments import (
    FixedNeurons,
    GaussianNeurons,
    HardEasy,
    ImageBatches,
    ImageTasks,
    LabelledImages,
    Landscape,
    LinearTasks,
    LogisticTasks,
    Mixture,
    Quadratic,
    SharedRepresentation,
    Sinusoid,
    TaskGroup,
    TeacherTasks,
)
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.heads import SVM, LogisticRegression, NearestCentroid, RidgeClassifier
from metabridge.learners import (
    PRESETS,
    Adapted,
    Engine,
    MetaGradient,
    Method,
    adapt,
    meta_gradient,
    method,
    parameters,
    predict,
)
from metabridge.nas import Architecture, SearchConfig, search
from metabridge.solvers import GradientDescent, Proximal, RidgeSolver, SVMSolver, task_loss
from metabridge.training import (
    Augment,
    ImageTrainingConfig,
    Model,
    Run,
    Score,
    SoftTargets,
    TestTimeAugmentation,
    TrainingConfig,
    evaluate,
    fit,
    load,
    train_on_images,
)

if TYPE_CHECKING:
    from metabridge.use import FewShotClassifier

__all__ = [
    "PRESETS",
    "SVM",
    "Adapted",
    "Architecture",
    "Augment",
    "Diagnosis",
    "Engine",
    "Episodes",
    "FewShotClassifier",
    "FixedNeurons",
    "GaussianNeurons",
    "GradientDescent",
    "HardEasy",
    "ImageBatches",
    "ImageTasks",
    "ImageTrainingConfig",
    "InputError",
    "LabelledImages",
    "Landscape",
    "LinearTasks",
    "LogisticRegression",
    "LogisticTasks",
    "MetaGradient",
    "Method",
    "Mixture",
    "Model",
    "NearestCentroid",
    "Proximal",
    "Quadratic",
    "RidgeClassifier",
    "RidgeSolver",
    "Run",
    "SVMSolver",
    "Score",
    "SearchConfig",
    "SharedRepresentation",
    "Sinusoid",
    "SoftTargets",
    "TaskGroup",
    "TeacherTasks",
    "TestTimeAugmentation",
    "TrainingConfig",
    "adapt",
    "datasets",
    "diagnose",
    "evaluate",
    "fit",
    "heads",
    "kernels",
    "load",
    "meta_gradient",
    "method",
    "models",
    "nas",
    "parameters",
    "predict",
    "schedules",
    "search",
    "solvers",
    "task_loss",
    "theory",
    "train_on_images",
]


def __getattr__(name: str) -> object:
    if name == "FewShotClassifier":  # scikit-learn takes a while to import, and training does without
        from metabridge.use import FewShotClassifier

        return FewShotClassifier
    raise AttributeError(f"module 'metabridge' has no attribute {name!r}")
