"""Task environments: distributions from which tasks are sampled."""

from metabridge.environments.environment import Environment
from metabridge.environments.image_tasks import ImageBatches, ImageTasks, LabeledImages
from metabridge.environments.linear_tasks import HardEasy, Landscape, LinearTasks, LogisticTasks, TaskGroup
from metabridge.environments.mixture import Mixture
from metabridge.environments.regression_functions import Quadratic, Sinusoid
from metabridge.environments.shared_representation import SharedRepresentation
from metabridge.environments.teacher_networks import FixedNeurons, GaussianNeurons, TeacherTasks

__all__ = [
    "Environment",
    "FixedNeurons",
    "GaussianNeurons",
    "HardEasy",
    "ImageBatches",
    "ImageTasks",
    "LabeledImages",
    "Landscape",
    "LinearTasks",
    "LogisticTasks",
    "Mixture",
    "Quadratic",
    "SharedRepresentation",
    "Sinusoid",
    "TaskGroup",
    "TeacherTasks",
]
