"""Where tasks come from."""

from metabridge.environments.environment import Environment
from metabridge.environments.functions import Quadratic, Sinusoid
from metabridge.environments.images import ImageBatches, ImageTasks, LabelledImages
from metabridge.environments.linear import HardEasy, Landscape, LinearTasks, LogisticTasks, TaskGroup
from metabridge.environments.mixture import Mixture
from metabridge.environments.representation import SharedRepresentation
from metabridge.environments.teachers import GivenNeurons, NormalNeurons, Teachers

__all__ = [
    "Environment",
    "GivenNeurons",
    "HardEasy",
    "ImageBatches",
    "ImageTasks",
    "LabelledImages",
    "Landscape",
    "LinearTasks",
    "LogisticTasks",
    "Mixture",
    "NormalNeurons",
    "Quadratic",
    "SharedRepresentation",
    "Sinusoid",
    "TaskGroup",
    "Teachers",
]
